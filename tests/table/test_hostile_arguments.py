"""Registered operators reject invalid arguments: no call crashes the process.

Exported programs may pass any arguments to them. MATMULS_HOSTILE_CALLS: the number of random calls, default 2000.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import hostile_calls
import pytest
import torch

CALLS = int(os.environ.get("MATMULS_HOSTILE_CALLS", "2000"))
PART = 1000  # calls per process, which takes three seconds to start
SCRIPT = Path(__file__).with_name("hostile_calls.py")


def test_every_operator_has_a_valid_call():
    """Invalid calls are derived from it: a new operator needs one in hostile_calls.py or in the table."""
    found = {str(base.operator) for bases in hostile_calls.recorded(1).values() for base in bases}
    names = [n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith("custom_mm::")]
    expected = {name if name.count(".") == 2 else f"{name}.default" for name in names}
    assert expected == found


@pytest.mark.exhaustive(keep=1)
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
    """Offsets, columns and values of a valid matrix."""
    counts = torch.full((rows,), nonzeros // rows, dtype=dtype)
    counts[: nonzeros % rows] += 1
    crow = torch.cat([torch.zeros(1, dtype=dtype), counts.cumsum(0).to(dtype)])
    return crow, torch.arange(nonzeros, dtype=dtype) % columns, torch.randn(nonzeros)


def named_calls():
    ops = torch.ops.custom_mm
    crow, col, values = csr()
    bad = col.clone()
    bad[3] = 2**40
    longer, dense = torch.cat([crow, crow[-1:] + 5]), torch.randn(10, 4)
    rows, counts = ops.mask_plan(torch.tensor([True, False, True]))
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    plan_twice = torch.zeros(3, dtype=torch.int32), counts
    blocks = torch.tensor([0, 2]), torch.tensor([0, 1])
    meta = functools.partial(torch.empty, device="meta")
    meta_plan = rows.to("meta"), counts.to("meta")
    needs = [True] * 9
    return {
        "csr_transpose of fewer columns": lambda: ops.csr_transpose(crow, col, 2),
        "csr_transpose of an index beyond": lambda: ops.csr_transpose(crow, bad, 10),
        "csr_sddmm of longer indices": lambda: ops.csr_sddmm(crow, torch.cat([col, col]), dense, dense, 10),
        "cusparse_sddmm of an index beyond": lambda: ops.cusparse_sddmm(crow, bad, dense, dense.mT.contiguous()),
        "csr_spmm_arg of an index beyond": lambda: ops.csr_spmm_arg(crow, bad, values, dense, 10, "max"),
        "csr_spmm of a negative index": lambda: ops.csr_spmm(crow, -col, values, dense, 10),
        "csr_spmm of an order beyond": lambda: ops.csr_spmm(crow, col, values, dense, 10, order=bad),
        "csr_solve_triangular of empty transposed offsets": lambda: ops.csr_solve_triangular(
            crow, col, values, dense, False, True, t_crow=crow[:0], t_col=col, t_order=col
        ),
        "csr_softmax of longer offsets": lambda: ops.csr_softmax(longer, values),
        "masked_ffn_backward of a longer list": lambda: ops.masked_ffn_backward(
            x, x, w, w.mT, w, w, w.mT, w, rows, counts, None, needs
        ),
        "masked_ffn_backward of another gradient, traced": lambda: ops.masked_ffn_backward(
            meta(3, 9), meta(3, 4), *[meta(5, 4), meta(4, 5), meta(5, 4)] * 2, *meta_plan, None, [True] * 7
        ),
        "masked_linear of rows twice": lambda: ops.masked_linear(x, w, w, *plan_twice),
        "masked_linear of a negative row": lambda: ops.masked_linear(x, w, w, rows.neg(), counts),
        "masked_linear of a row beyond": lambda: ops.masked_linear(x, w, w, rows + 1, counts),
        "masked_weights of rows twice": lambda: ops.masked_weights(x, x, *plan_twice),
        "masked_linear of rows apart": lambda: ops.masked_linear(x, w, w, rows[:1].expand(3), counts),
        "masked_linear of another known": lambda: ops.masked_linear(x, w, w, rows, counts, known=0),
        "masked_linear of known beyond": lambda: ops.masked_linear(x, w, w, rows, counts, known=4),
        "masked_linear_backward of other ordered rows": lambda: ops.masked_linear_backward(
            torch.randn(3, 5), x, w, w, rows, counts, True, True, -1, torch.zeros(1, dtype=torch.int64)
        ),
        "masked_linear_forward of few rows kept, traced": lambda: ops.masked_linear_forward(
            meta(3, 4), meta(5, 4), meta(5, 4), *meta_plan, None, None, -1, 2
        ),
        "matmul_backward of other sizes": lambda: ops.matmul_backward(x, w, w, [1, 1, 3, 4], [9], False, False),
        "matmul_backward of another gradient": lambda: ops.matmul_backward(x, x, w, [3, 4], [5, 4], False, True),
        "matmul_ of a small workspace, traced": lambda: ops.matmul_(meta(3, 4), meta(4, 4), workspace=1),
        "feed_forward_ of eps below 0, traced": lambda: ops.feed_forward_(
            meta(3, 4), meta(5, 4), None, meta(4, 5), None, eps=-1.0
        ),
        "bsr_sddmm of an order twice": lambda: ops.bsr_sddmm(
            *blocks, torch.randn(2, 3), dense[:4, :3], 4, 2, 2, torch.tensor([0, 0])
        ),
        "bsr_spmm of a negative order": lambda: ops.bsr_spmm(
            *blocks, torch.randn(2, 2, 2), dense[:4], 4, torch.tensor([-1, 0])
        ),
        "bsr_spmm of other transposed indices": lambda: ops.bsr_spmm(
            *blocks, torch.randn(2, 2, 2), dense[:4], 4, t_crow=torch.zeros(3), t_col=blocks[1]
        ),
        "bsr_sddmm of a negative height": lambda: ops.bsr_sddmm(
            torch.zeros(1, dtype=torch.int64), blocks[1][:0], torch.randn(0, 3), dense[:4, :3], 4, -2, 2
        ),
        "masked_linear of another count": lambda: ops.masked_linear(x, w, w, rows, counts + 7),
        "bsr_spmm of an index beyond": lambda: ops.bsr_spmm(crow, bad, torch.randn(12, 2, 2), torch.randn(20, 4), 20),
    }


@pytest.mark.parametrize("name", named_calls())
def test_calls_that_once_crashed_raise(name):
    call = named_calls()[name]
    with pytest.raises((RuntimeError, ValueError), match=r"expected|out of range|out of bounds"):
        call()


def test_layouts_of_a_gpu_are_refused_on_a_cpu():
    with hostile_calls.Recorder(1) as recorder:
        hostile_calls.of_a_gpu(*hostile_calls.meta_matrix())
    assert len(recorder.bases) == 15
    for (base,) in recorder.bases.values():
        on_cpu = [torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x for x in base.args]
        name = base.operator.name().removeprefix("custom_mm::")
        with pytest.raises(NotImplementedError, match=f"^{name}: expected tensors on a GPU, got them on a CPU"):
            base.operator(*on_cpu)


def test_the_largest_piece_sizes_give_one_piece():
    """A rounded-up quotient overflowed: feed_forward_ divided by 0, attention_forward did not terminate."""
    ops, most = torch.ops.custom_mm, 2**63 - 1
    x = torch.randn(8, 4)
    expected = torch.nn.functional.layer_norm(x, (4,))
    ops.feed_forward_(x, torch.randn(0, 4), None, torch.randn(4, 0), None, chunk_bytes=most)
    torch.testing.assert_close(x, expected)
    for batch in 2, 5:
        q, k = torch.randn(batch, 1, 3, 4), torch.randn(batch, 1, 0, 4)
        context = ops.attention_forward(q, k, k, None, 1.0, False, most, None)
        assert torch.equal(context, torch.zeros(batch, 3, 1, 4))


def test_row_indices_need_not_be_contiguous(device):
    """torch's conversion of row indices to offsets assumes contiguous memory and would read other data."""
    dense = torch.randn(6, 5) * (torch.rand(6, 5) < 0.5)
    rows, columns = dense.nonzero().to(device).unbind(1)  # stride 2
    values = dense[rows.cpu(), columns.cpu()].to(device).requires_grad_()
    b = torch.randn(5, 3, device=device, requires_grad=True)
    c = torch.ops.custom_mm.cusparse_spmm(rows, columns, values, b, 6, 5, "coo")
    torch.testing.assert_close(c, dense.to(device) @ b)
    c.sum().backward()
    torch.testing.assert_close(b.grad, dense.to(device).sum(0)[:, None].expand(5, 3))
    torch.testing.assert_close(values.grad, b.detach().sum(1)[columns])
