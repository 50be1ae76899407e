"""Registered operators refuse arguments that do not fit: no call ends the process.

Exported programs may hand over any.

MATMULS_HOSTILE_CALLS: how many calls are drawn, 2000 unless set.
"""

import os
import subprocess
import sys
from pathlib import Path

import hostile_calls
import pytest
import torch

CALLS = int(os.environ.get("MATMULS_HOSTILE_CALLS", "2000"))
PART = 1000  # calls of a process, which takes three seconds to start
SCRIPT = Path(__file__).with_name("hostile_calls.py")


def test_every_operator_has_a_valid_call():
    """Of which the hostile ones are made: a new operator needs one in hostile_calls.py, or in the table."""
    found = {str(base.operator) for bases in hostile_calls.recorded(1).values() for base in bases}
    names = [n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith("custom_mm::")]
    expected = {name if name.count(".") == 2 else f"{name}.default" for name in names}
    assert expected == found


@pytest.mark.parametrize("first", range(0, CALLS, PART))
def test_hostile_calls_end_in_an_exception_or_a_result(first, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), str(log), str(first), str(min(PART, CALLS - first))]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    last = log.read_text().splitlines()[-1] if log.exists() and log.stat().st_size else "none"
    assert run.returncode == 0, f"exit status {run.returncode} at the call {last}\n{run.stderr[-3000:]}"
    assert "refused" in run.stdout


def csr(rows=10, columns=10, nonzeros=12, dtype=torch.int64):
    """Offsets, columns and values of a matrix whose indices fit."""
    counts = torch.full((rows,), nonzeros // rows, dtype=dtype)
    counts[: nonzeros % rows] += 1
    crow = torch.cat([torch.zeros(1, dtype=dtype), counts.cumsum(0).to(dtype)])
    return crow, torch.arange(nonzeros, dtype=dtype) % columns, torch.randn(nonzeros)


def named_calls():
    ops = torch.ops.custom_mm
    crow, col, values = csr()
    crow32, col32, _ = csr(dtype=torch.int32)
    bad = col.clone()
    bad[3] = 2**40
    longer, dense = torch.cat([crow, crow[-1:] + 5]), torch.randn(10, 4)
    rows, counts = ops.mask_plan(torch.tensor([True, False, True]))
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    needs = [True] * 9
    return {
        "csr_transpose of fewer columns": lambda: ops.csr_transpose(crow, col, 2),
        "csr_transpose of an index beyond": lambda: ops.csr_transpose(crow, bad, 10),
        "csr_halves of longer offsets": lambda: ops.csr_halves(longer, col, values, 10),
        "csr_packed_units without columns": lambda: ops.csr_packed_units(crow, col, 0),
        "csr_packed without columns": lambda: ops.csr_packed(crow, col, values.half(), 0, 64),
        "csr_reorder of shorter indices": lambda: ops.csr_reorder(crow32, col32[:5], torch.arange(10).int()),
        "csr_reorder without indices": lambda: ops.csr_reorder(crow32, col32[:0], torch.arange(10).int()),
        "csr_reorder of rows twice": lambda: ops.csr_reorder(crow32, col32, torch.zeros(10).int()),
        "csr_sddmm of longer indices": lambda: ops.csr_sddmm(crow, torch.cat([col, col]), dense, dense, 10),
        "cusparse_sddmm of an index beyond": lambda: ops.cusparse_sddmm(crow, bad, dense, dense.mT.contiguous()),
        "csr_spmm_arg of an index beyond": lambda: ops.csr_spmm_arg(crow, bad, values, dense, 10, "max"),
        "csr_spmm of a negative index": lambda: ops.csr_spmm(crow, -col, values, dense, 10),
        "csr_spmm of an order beyond": lambda: ops.csr_spmm(crow, col, values, dense, 10, order=bad),
        "csr_softmax of longer offsets": lambda: ops.csr_softmax(longer, values),
        "csr_tile_entries of other tiles": lambda: ops.csr_tile_entries(
            torch.full((1, 1, 2, 4), -7).int(), torch.zeros(1, 1, 16, 3).int(), crow32, col32, values, 10, 4, 1
        ),
        "masked_ffn_backward of a longer list": lambda: ops.masked_ffn_backward(
            x, x, w, w.mT, w, w, w.mT, w, rows, counts, None, needs
        ),
        "masked_linear of another count": lambda: ops.masked_linear(x, w, w, rows, counts + 7),
        "bsr_spmm of an index beyond": lambda: ops.bsr_spmm(crow, bad, torch.randn(12, 2, 2), torch.randn(20, 4), 20),
    }


@pytest.mark.parametrize("name", named_calls())
def test_what_ended_the_process_is_refused(name):
    call = named_calls()[name]
    with pytest.raises((RuntimeError, ValueError), match=r"expected|out of range|out of bounds"):
        call()
