"""Indices that do not fit, and operands that do not match."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from common.sparse_cases import draw_sparse
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spmm
from matmuls.sparse import tensor_pattern
from matmuls.sparse.default_spmm import takes_chunks
from matmuls.sparse.smem_tiles import layout_of

# -------------------------------------------------------------------------------------------------------- hostile input


def csr(crow, col, values=None, shape=(3, 3)):
    values = torch.ones(len(col)) if values is None else values
    return torch.sparse_csr_tensor(torch.tensor(crow), torch.tensor(col), values, shape, check_invariants=False)


HOSTILE = {
    "column too large": (lambda: csr([0, 1, 2, 3], [0, 1, 3]), "columns from 0 to 2 at nonzero 2, got 3"),
    "column negative": (lambda: csr([0, 1, 2, 3], [0, -1, 2]), "columns from 0 to 2 at nonzero 1, got -1"),
    "offsets decrease": (lambda: csr([0, 2, 1, 3], [0, 1, 2]), "offsets that do not decrease after row 1, got 1"),
    "first offset": (lambda: csr([1, 1, 2, 3], [0, 1, 2]), "the first offset to be 0, got 1"),
    "last offset": (
        lambda: csr([0, 1, 2, 4], [0, 1, 2]),
        "the last offset to be 3, as many as there are columns, got 4",
    ),
    "few offsets": (lambda: csr([0, 1, 3], [0, 1, 2]), "4 offsets of rows, got offsets of shape"),
    "few values": (lambda: csr([0, 1, 2, 3], [0, 1, 2], torch.ones(2)), "as many indices as values"),
    "huge offset": (lambda: csr([0, 2**60, 2**61, 3], [0, 1, 2]), "offsets that do not decrease after row 2"),
    "coo row": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 5], [0, 1]]), torch.ones(2), (3, 3), check_invariants=False),
        "rows from 0 to 2, got 5",
    ),
    "coo column": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2], [0, -1]]), torch.ones(2), (3, 3), check_invariants=False),
        "columns from 0 to 2, got -1",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_invalid_indices_raise(case):
    make, message = HOSTILE[case]
    try:
        a = make()
    except RuntimeError:
        pytest.skip("this torch refuses it by itself")
    for name, call in (
        ("spmm", lambda: spmm(a, torch.ones(3, 2))),
        ("plan", lambda: plan(a)),
        ("sddmm", lambda: sddmm(torch.ones(3, 2), torch.ones(2, 3), a)),
        ("spmm", lambda: cusparseMM.apply(a, torch.ones(3, 2))),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected .*{message}"):
            call()


def test_mismatched_operands_raise(device):
    a = torch.eye(3, device=device).to_sparse_csr()
    b = torch.randn(3, 2, device=device)
    for call, message in (
        (lambda: spmm(a, b[:2]), r"spmm: expected dense of shape \[..., 3, n\]"),
        (lambda: spmm(a, b.double()), "spmm: expected values to be a strided tensor in Double"),
        (lambda: spmm(a, b.long()), "spmm: expected dense of a floating-point or complex dtype, got Long"),
        (lambda: spmm(a, b, out=torch.empty(2, 2, device=device)), r"spmm: expected out of shape \[3, 2\], got"),
        (lambda: spmm(a, b, out=b), "spmm: expected out and dense not to overlap"),
        (lambda: spmm(a, b, out=b[:1].expand(3, 2)), "spmm: expected out to have one memory location"),
        (lambda: sddmm(b, b.mT[:1], a), r"sddmm: expected b, transposed, of shape \[..., 3, 2\]"),
        (lambda: sddmm(b[:2], b.mT, a), r"sddmm: expected a of shape \[..., 3, n\]"),
        (lambda: cusparseMM.apply(b.mT, b[:2]), r"cusparseMM: expected b of shape \[..., 3, n\]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()
    for call, message in (
        (lambda: spmm(a, b, reduce="prod"), "spmm: expected reduce to be sum, mean, max or min, got prod"),
        (lambda: spmm(a, b, beta=1), "spmm: expected out= with beta=1"),
        (lambda: spmm(b, b), "spmm: expected a sparse tensor or a plan"),
        (lambda: sparse_softmax(b[0], a), r"sparse_softmax: expected values of shape \[..., 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: spmm([1], b), "spmm: expected a sparse tensor or a plan, got list"),
        (lambda: plan([1]), "plan: expected a sparse tensor or a plan, got list"),
        (lambda: sddmm(b, b.mT, None), "sddmm: expected a sparse tensor or a plan, got NoneType"),
        (lambda: cusparseMM.apply([1], b), "spmm: expected a sparse tensor or a plan, got list"),
        (lambda: plan(a) @ [1], "spmm: expected b to be a dense tensor, got list"),
        (
            lambda: spmm(a, b.to_sparse()),
            "spmm: expected b to be a dense tensor, got a tensor of layout torch.sparse_coo",
        ),
        (lambda: plan(a).update([1.0]), "SparsePlan: expected values to be a dense tensor, got list"),
        (lambda: sddmm(None, b, a), "sddmm: expected a to be a dense tensor, got NoneType"),
        (lambda: sparse_softmax(None, a), "sparse_softmax: expected values to be a dense tensor, got NoneType"),
        (lambda: sparse_attention(b, b, [1.0], a), "sparse_attention: expected v to be a dense tensor, got list"),
        (lambda: cusparseMM.apply(b, None), "cusparseMM: expected b to be a dense tensor, got NoneType"),
        (lambda: plan(a, tune=5), "plan: expected tune to be True, False or several numbers of columns, got 5"),
        (lambda: plan(a, tune=["5"]), "plan: expected tune to be .* numbers of columns, got .'5'"),
        (lambda: plan(a, tune=[-1]), r"plan: expected tune to be .* numbers of columns, got \[-1\]"),
        (lambda: plan(a, products=0), "plan: expected products to be a whole number of 1 or more, got 0"),
        (lambda: plan(plan(a), products=2.5), "plan: expected products to be a whole number of 1 or more, got 2.5"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_sizes_beyond_int32_raise():
    """Offsets of 8 GB and more, as meta tensors, which need no memory."""
    crow, col = (torch.empty(size, dtype=torch.int32, device="meta") for size in (2**31, 9))
    ops = torch.ops.custom_mm
    for call, message in (
        (lambda: ops.csr_chunks(crow, col, 32, 64), "csr_chunks: expected at most 2147483647 rows and nonzeros"),
        (lambda: ops.csr_regions(crow, col, 2**31 - 1, 2048, 24), "csr_regions: expected a square matrix .* at most"),
        (lambda: ops.csr_reorder(crow, col, crow[1:]), "csr_reorder: expected crow in Int and at most"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    made = SimpleNamespace(rows=2**31 - 8, columns=100, nonzeros=9, longest=9)
    assert not takes_chunks(made, 2**20, 4 * 2**20)
    assert layout_of(made, 32) is None


def test_softmax_of_nonzeros_without_rows_raises(device):
    with pytest.raises(ValueError, match="sparse_softmax: expected no nonzeros without rows"):
        torch.ops.custom_mm.csr_softmax(torch.zeros(1, device=device).int(), torch.ones(5, device=device), 1.0)


def test_a_shared_operand_is_copied_once(device):
    """With non-contiguous rows, together with a batch of 64."""
    pattern = draw_sparse(40, 30, 0.3, device=device).to_sparse_csr()
    crow, col = pattern.crow_indices(), pattern.col_indices()
    a, b = torch.randn(64, 40, 16, device=device), torch.randn(16, 30, device=device)
    with torch.profiler.profile(profile_memory=True) as profile:
        sddmm(a, b, pattern)
    if device == "cpu":
        assert max(abs(e.self_cpu_memory_usage) for e in profile.events()) <= max(a[0].nbytes, 64 * col.numel() * 4)
    values, dense = torch.randn(64, col.numel(), device=device), torch.randn(9, 30, device=device).T
    product = torch.ops.custom_mm.csr_spmm(crow, col, values, dense, 30)
    one = torch.ops.custom_mm.csr_spmm(crow, col, values[7].clone(), dense, 30)
    torch.testing.assert_close(product[7], one)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 300), (torch.float16, 3000)], ids=str)
def test_duplicate_coo_entries_are_not_summed_in_16_bits(dtype, count, device):
    where = torch.zeros(2, count, dtype=torch.long)
    a = torch.sparse_coo_tensor(where, torch.ones(count, dtype=dtype), (1, 1)).to(device).requires_grad_()
    y = spmm(a, torch.ones(1, 1, dtype=dtype, device=device))
    assert y.item() == torch.tensor(float(count)).to(dtype).item()
    (gradient,) = torch.autograd.grad(y.sum(), a)
    assert gradient.to_dense().item() == 1


def test_new_coo_indices_at_the_same_address(device):
    """`.data` set twice: the second tensor may reuse the address of the checked one after that is freed."""
    b = torch.randn(50, 2, device=device)

    def entries():
        place = torch.randperm(2500, device=device)[:400]
        return torch.sparse_coo_tensor(torch.stack([place // 50, place % 50]), torch.ones(400, device=device), (50, 50))

    a = entries()
    for _ in range(20):
        spmm(a, b)
        a.data = entries()
        a.data = entries()
        torch.testing.assert_close(spmm(a, b), a.to_dense() @ b)


def test_cached_facts_die_with_their_tensor():
    for make in (torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc, torch.Tensor.to_sparse):
        a = make(draw_sparse(9, 9, 0.5)).requires_grad_()
        spmm(a, torch.randn(9, 2))
        assert a in tensor_pattern._known
        gone = weakref.ref(a)
        del a
        gc.collect()
        assert gone() is None


FUZZ = """
import torch, warnings
from hypothesis import given, settings, strategies as st, HealthCheck
import matmuls
warnings.simplefilter("ignore")
number = st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, 2**31, -2**31, 2**62, -2**63]))
right = wrong = 0

@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def fuzz(data):
    global right, wrong
    rows, columns, n = (data.draw(st.integers(0, 6)) for _ in range(3))
    kind = data.draw(st.sampled_from(["csr", "csc", "coo", "bsr"]))
    nonzeros = data.draw(st.integers(0, 8))
    sane = data.draw(st.booleans())
    inner = st.integers(0, max(0, (columns if kind != "csc" else rows) - 1)) if sane else number
    col = torch.tensor(data.draw(st.lists(inner, min_size=nonzeros, max_size=nonzeros)), dtype=torch.int64)
    outer = columns if kind == "csc" else rows
    if sane and outer > 0:
        cuts = sorted(data.draw(st.lists(st.integers(0, nonzeros), min_size=outer - 1, max_size=outer - 1)))
        crow = [0, *cuts, nonzeros]
    else:
        crow = data.draw(st.lists(number, min_size=0, max_size=outer + 3))
    crow = torch.tensor(crow, dtype=torch.int64)
    if data.draw(st.booleans()) and all(bool((t == t.int()).all()) for t in (crow, col)):
        crow, col = crow.int(), col.int()
    values = torch.randn(data.draw(st.sampled_from([nonzeros, nonzeros, nonzeros, nonzeros + 1])))
    try:
        if kind == "coo":
            row = torch.tensor(data.draw(st.lists(number, min_size=nonzeros, max_size=nonzeros)), dtype=torch.int64)
            a = torch.sparse_coo_tensor(torch.stack([row, col.long()]), values, (rows, columns), check_invariants=False)
        elif kind == "bsr":
            a = torch.sparse_bsr_tensor(crow, col, values[:, None, None], (rows, columns), check_invariants=False)
        else:
            a = getattr(torch, f"sparse_{kind}_tensor")(crow, col, values, (rows, columns), check_invariants=False)
    except RuntimeError:
        return
    b = torch.randn(columns, n, requires_grad=True)
    try:
        out = matmuls.spmm(a, b, reduce=data.draw(st.sampled_from(["sum", "mean", "max"])))
        out.sum().backward()
        matmuls.sddmm(torch.randn(rows, 3), torch.randn(3, columns), a)
        made = matmuls.plan(a)
        matmuls.sparse_softmax(made.values, made)
        product = made @ b
        dense = torch.zeros(rows, columns)
        s = made._pattern
        r = torch.repeat_interleave(torch.arange(rows), s.crow.diff().long())
        v = made.values if s.order is None else made.values[s.order.long()]
        dense.index_put_((r, s.col.long()), v, accumulate=True)
        torch.testing.assert_close(product, dense @ b, atol=1e-4, rtol=1e-4)
        right += 1
    except ValueError as error:
        assert ": expected " in str(error) and ", got " in str(error), error
        wrong += 1

fuzz()
assert right > 50 and wrong > 50, (right, wrong)
print("survived", right, wrong)
"""


def test_hostile_indices_never_crash():
    """Random indices give a correct result or a ValueError that names them; runs in a separate process."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FUZZ], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "survived" in run.stdout
