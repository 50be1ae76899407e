"""The functions that call cuSPARSE: layouts, algorithms, orders, preprocessing, errors."""

import gc
import subprocess
import sys

import pytest
import torch

import custom_mm

ALGORITHMS = {
    "csr": ["default", "csr_alg1", "csr_alg2", "csr_alg3"],
    "csc": ["default", "csr_alg1", "csr_alg2"],
    "coo": ["default", "coo_alg1", "coo_alg2", "coo_alg3", "coo_alg4"],
    "bsr": ["default", "bsr_alg1"],
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(layout, dtype, device, rows=64, columns=48, index=torch.int64):
    """A dense matrix and its parts in the layout."""
    torch.manual_seed(0)
    block = (4, 4) if layout == "bsr" else (1, 1)
    stored = torch.rand(rows // block[0], columns // block[1]) < 0.3
    stored = stored.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    dense = (torch.randn(rows, columns) * stored).to(dtype).to(device)
    if layout == "coo":
        sparse = dense.to_sparse().coalesce()
        offsets, indices = sparse.indices()
    else:
        sparse = getattr(dense, f"to_sparse_{layout}")(*((block,) if layout == "bsr" else ()))
        by_rows = layout != "csc"
        offsets = sparse.crow_indices() if by_rows else sparse.ccol_indices()
        indices = sparse.col_indices() if by_rows else sparse.row_indices()
    return dense, (offsets.to(index), indices.to(index), sparse.values())


def supported(call):
    """Skip the test if cuSPARSE reports by name that it does not support the call."""
    try:
        return call()
    except RuntimeError as error:
        if not str(error).startswith("cusparseS") or "NOT_SUPPORTED" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])


def assert_close(ours, truth):
    error = torch.linalg.vector_norm(ours.double() - truth) / torch.linalg.vector_norm(truth)
    assert error < 4 * torch.finfo(ours.dtype).eps


@every_dtype
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("layout", "algorithm"), [(x, y) for x in ALGORITHMS for y in ALGORITHMS[x]])
def test_every_algorithm(layout, algorithm, dtype, index, device):
    dense, parts = draw(layout, dtype, device, index=index)
    for n in (1, 7, 32, 130):
        b = torch.randn(48, n, device=device).to(dtype)
        ours = supported(
            lambda b=b: custom_mm.cusparse_spmm(*parts, b, 64, 48, layout=layout, algorithm=algorithm, alpha=0.5)
        )
        assert_close(ours, 0.5 * dense.double() @ b.double())


@pytest.mark.parametrize("layout", ALGORITHMS)
@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
def test_orders_transposes_and_out(layout, transa, transb, device):
    dense, parts = draw(layout, torch.float32, device)
    a = dense.mT if transa else dense
    b = torch.randn(a.shape[1], 20, device=device)
    given = b.mT.contiguous() if transb else b
    wide = torch.full((given.shape[0], given.shape[1] + 5), float("nan"), device=device)
    wide[:, :-5] = given
    truth = a.double() @ b.double()
    for x in (given, given.mT.contiguous().mT, wide[:, :-5], torch.stack([given, given], -1)[..., 0]):
        options = {"layout": layout, "transa": transa, "transb": transb}
        assert_close(supported(lambda x=x, o=options: custom_mm.cusparse_spmm(*parts, x, 64, 48, **o)), truth)
        c = torch.randn(a.shape[0], 20, device=device)
        for out in (c.clone(), c.mT.contiguous().mT, torch.stack([c, c], -1)[..., 0]):
            version = out._version
            options |= {"alpha": 0.5, "beta": -2.0, "out": out}
            assert supported(lambda x=x, o=options: custom_mm.cusparse_spmm(*parts, x, 64, 48, **o)) is out
            assert_close(out, 0.5 * truth - 2 * c.double())
            assert out._version > version


def test_the_upstream_product(device):
    dense, (offsets, columns, values) = draw("csr", torch.float32, device)
    b, c = torch.randn(48, 5, device=device), torch.empty(64, 5, device=device)
    nnz = values.numel()
    assert_close(custom_mm.cusparse_mmul(values, columns, offsets, nnz, 64, 48, b), dense.double() @ b.double())
    assert custom_mm.cusparse_mmul(values, columns, offsets, nnz, 64, 48, b, c) is c
    assert_close(c, dense.double() @ b.double())
    with pytest.raises(ValueError, match=r"cusparse_mmul: expected values and columns of shape \[1\]"):
        custom_mm.cusparse_mmul(values, columns, offsets, 1, 64, 48, b)


@pytest.mark.parametrize("algorithm", ["default", "csr_alg1", "csr_alg3"])
def test_prepared(algorithm, device):
    dense, (offsets, columns, values) = draw("csr", torch.float32, device)
    b = torch.randn(48, 16, device=device)
    prepared = custom_mm.cusparse_prepare(offsets, columns, values, b, 64, 48, algorithm=algorithm)
    for factor in (1, 2):
        ours = custom_mm.cusparse_spmm(
            offsets, columns, factor * values, b, 64, 48, algorithm=algorithm, prepared=prepared
        )
        assert_close(ours, factor * dense.double() @ b.double())
    with pytest.raises(ValueError, match="cusparse_spmm: expected out= or prepared=, got both"):
        custom_mm.cusparse_spmm(offsets, columns, values, b, 64, 48, out=ours, prepared=prepared)


@pytest.mark.cuda
def test_preprocessing_for_other_arguments_is_refused():
    _, (offsets, columns, values) = draw("csr", torch.float32, "cuda")
    b = torch.randn(48, 16, device="cuda")
    prepared = custom_mm.cusparse_prepare(offsets, columns, values, b, 64, 48)
    for x, indices, given in ((b[:, :8], columns, prepared), (b, columns.clone(), prepared), (b, columns, b)):
        with pytest.raises(ValueError, match="cusparse_spmm: expected prepared"):
            custom_mm.cusparse_spmm(offsets, indices, values, x, 64, 48, prepared=given)
    _, (offsets, columns, values) = draw("csr", torch.float32, "cuda", 48, 48)
    prepared = custom_mm.cusparse_prepare(offsets, columns, values, b, 48, 48)
    with pytest.raises(ValueError, match="cusparse_spmm: expected prepared for this matrix, layout"):
        custom_mm.cusparse_spmm(offsets, columns, values, b, 48, 48, layout="csc", prepared=prepared)


@pytest.mark.cuda
def test_preprocessing_frees_its_memory():
    gc.collect()  # tensors of earlier tests
    offsets, columns, values = draw("csr", torch.float32, "cuda", 4096, 4096)[1]
    b = torch.randn(4096, 64, device="cuda")
    # allocates the handle's workspace
    custom_mm.cusparse_prepare(offsets, columns, values, b, 4096, 4096, algorithm="csr_alg3")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        prepared = custom_mm.cusparse_prepare(offsets, columns, values, b, 4096, 4096, algorithm="csr_alg3")
        assert prepared.untyped_storage().nbytes() <= torch.cuda.memory_allocated() - before
        del prepared
        assert torch.cuda.memory_allocated() == before


@pytest.mark.cuda
def test_preprocessing_may_be_freed_while_another_stream_uses_it():
    """The allocator does not reuse its buffer before that stream is done."""
    _, (offsets, columns, values) = draw("csr", torch.float32, "cuda", 2048, 2048)
    b = torch.randn(2048, 256, device="cuda")
    prepared = custom_mm.cusparse_prepare(offsets, columns, values, b, 2048, 2048, algorithm="csr_alg3")
    size, other = prepared.untyped_storage().nbytes(), torch.cuda.Stream()
    call = offsets, columns, values, b, 2048, 2048
    expected = custom_mm.cusparse_spmm(*call, algorithm="csr_alg3", prepared=prepared)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)  # 50 ms
        result = custom_mm.cusparse_spmm(*call, algorithm="csr_alg3", prepared=prepared)
    del prepared
    over = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    assert len(over) == 4


@every_dtype
def test_sddmm_of_non_contiguous_indices(dtype, device):
    """Their copies live until the product has read them."""
    dense, (offsets, columns, _) = draw("csr", dtype, device, 512, 512, torch.int32)
    a, b = torch.randn(512, 40, device=device).to(dtype), torch.randn(40, 512, device=device).to(dtype)
    together = supported(lambda: custom_mm.cusparse_sddmm(offsets, columns, a, b))
    offsets, columns = torch.stack([offsets, offsets + 1], 1)[:, 0], torch.stack([columns, columns + 1], 1)[:, 0]
    torch.testing.assert_close(custom_mm.cusparse_sddmm(offsets, columns, a, b), together)
    assert_close(together, (a.double() @ b.double())[(dense != 0).nonzero(as_tuple=True)])


@every_dtype
def test_sddmm(dtype, device):
    dense, (offsets, columns, _) = draw("csr", dtype, device)
    a, b = torch.randn(64, 9, device=device).to(dtype), torch.randn(9, 48, device=device).to(dtype)
    where = (dense != 0).nonzero(as_tuple=True)
    for y in (b, b.mT.contiguous().mT):
        ours = supported(lambda y=y: custom_mm.cusparse_sddmm(offsets, columns, a, y, alpha=0.5))
        assert_close(ours, 0.5 * (a.double() @ b.double())[where])


def test_indices_are_checked_once(monkeypatch, device):
    _, (offsets, columns, values) = draw("csr", torch.float32, device)
    b = torch.randn(48, 3, device=device)
    custom_mm.cusparse_spmm(offsets, columns, values, b, 64, 48)
    looked = []
    check = custom_mm.indices._csr_check
    monkeypatch.setattr(custom_mm.indices, "_csr_check", lambda *args: (looked.append(1), check(*args))[1])
    custom_mm.cusparse_spmm(offsets, columns, values, b, 64, 48)
    rows = torch.arange(64, device=device, dtype=columns.dtype).repeat_interleave(offsets.diff())
    # another matrix with the same columns tensor
    custom_mm.cusparse_spmm(rows, columns, values, b, 64, 48, layout="coo")
    custom_mm.cusparse_spmm(offsets, columns, values, b, 64, 48)
    assert not looked
    columns[3] = 48
    with pytest.raises(ValueError, match="cusparse_spmm: expected columns from 0 to 47 at nonzero 3, got 48"):
        custom_mm.cusparse_spmm(offsets, columns, values, b, 64, 48)
    assert looked == [1]


BAD = {
    "csr": (([0, 1, 3], [0, 2]), "the last offset to be 2"),
    "csr column": (([0, 1, 2], [0, 3]), "columns from 0 to 2 at nonzero 1, got 3"),
    "csc": (([0, 1, 2, 2], [0, -1]), "rows from 0 to 1 at nonzero 1, got -1"),
    "coo": (([0, 2], [0, 1]), "rows from 0 to 1, got 2"),
    "coo order": (([1, 0], [0, 1]), "rows that do not decrease"),
    "csr short": (([0, 2], [0, 1]), r"offsets of shape \[3\], got \[2\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_indices_raise(case, device):
    (offsets, indices), message = BAD[case]
    parts = [torch.tensor(t, device=device) for t in (offsets, indices)]
    values, b = torch.ones(2, device=device), torch.ones(3, 4, device=device)
    with pytest.raises(ValueError, match=f"cusparse_spmm: expected {message}"):
        custom_mm.cusparse_spmm(*parts, values, b, 2, 3, layout=case.split()[0])


def test_mismatched_operands_raise(device):
    _, parts = draw("csr", torch.float32, device)
    b, out = torch.ones(48, 3, device=device), torch.ones(64, 3, device=device)
    for options, message in (
        ({"layout": "ell"}, "layout to be csr, csc, coo or bsr, got ell"),
        ({"algorithm": "coo_alg1"}, r"algorithm to be default or one of csr_alg\* for this layout, got coo_alg1"),
        ({"algorithm": "csr_alg9"}, "algorithm to be default or one of"),
        ({"beta": 1.0}, "out= with beta=1.0"),
    ):
        with pytest.raises(ValueError, match=f"cusparse_spmm: expected {message}"):
            custom_mm.cusparse_spmm(*parts, b, 64, 48, **options)
    for options, message in (
        ({"transa": True}, r"dense of shape \[64, n\]"),
        ({"transb": True}, r"dense of shape \[n, 48\]"),
        ({"out": out[:3]}, r"out of shape \[64, 3\]"),
        ({"out": out[:1].expand(64, 3)}, "out to have one memory location"),
    ):
        with pytest.raises(RuntimeError, match=f"cusparse_spmm: expected {message}"):
            custom_mm.cusparse_spmm(*parts, b, 64, 48, **options)
    assert torch.equal(out, torch.ones_like(out))


FUZZ = """
import torch, custom_mm
from hypothesis import given, settings, strategies as st, HealthCheck
number = st.one_of(st.integers(-2, 7), st.sampled_from([2**31 - 1, 2**31, -2**31, 2**62, -2**63]))
seen = {"right": 0, "wrong": 0}

@settings(max_examples=800, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def fuzz(data):
    rows, columns, n = (data.draw(st.integers(0, 5)) for _ in range(3))
    layout = data.draw(st.sampled_from(["csr", "csc", "coo", "bsr"]))
    nonzeros = data.draw(st.integers(0, 6))
    if data.draw(st.booleans()):
        outer, inner = (columns, rows) if layout == "csc" else (rows, columns)
        size = nonzeros if layout == "coo" else outer + 1
        high = max(outer - 1, 0) if layout == "coo" else nonzeros
        offsets = sorted(data.draw(st.lists(st.integers(0, high), min_size=size, max_size=size)))
        if layout != "coo":
            offsets = [0, *offsets[1:-1], nonzeros][-size:]
        indices = data.draw(st.lists(st.integers(0, max(inner - 1, 0)), min_size=nonzeros, max_size=nonzeros))
    else:
        offsets, indices = (data.draw(st.lists(number, max_size=8)) for _ in range(2))
    block = data.draw(st.sampled_from([(1, 1), (2, 1), (0, 3)])) if layout == "bsr" else ()
    values = torch.randn(data.draw(st.sampled_from([len(indices)] * 4 + [nonzeros + 1])), *block)
    transa, transb = data.draw(st.booleans()), data.draw(st.booleans())
    inner = rows if transa else columns
    b = torch.randn(*((n, inner) if transb else (inner, n)))
    o, i = (torch.tensor(t, dtype=torch.int64) for t in (offsets, indices))
    try:
        y = custom_mm.cusparse_spmm(o, i, values, b, rows, columns, layout=layout, transa=transa, transb=transb)
    except (ValueError, RuntimeError) as error:
        assert ": expected " in str(error) and ", got " in str(error), error
        seen["wrong"] += 1
        return
    dense = torch.zeros(rows, columns)
    for p in range(len(indices)):
        first = offsets[p] if layout == "coo" else max(k for k in range(len(offsets) - 1) if offsets[k] <= p)
        r, c = (indices[p], first) if layout == "csc" else (first, indices[p])
        height, width = block or (1, 1)
        for down in range(height):
            for across in range(width):
                dense[r * height + down, c * width + across] += values[p, down, across] if block else values[p]
    torch.testing.assert_close(y, (dense.mT if transa else dense) @ (b.mT if transb else b), atol=1e-4, rtol=1e-4)
    seen["right"] += 1

fuzz()
assert min(seen.values()) > 100, seen
print("survived", seen)
"""


@pytest.mark.exhaustive
def test_hostile_parts_never_crash():
    """Random parts give a correct result or an error that names them; runs in a separate process."""
    run = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "survived" in run.stdout


def test_overwritten_indices_are_checked_again():
    crow, col, values = torch.tensor([0, 1, 2]), torch.tensor([0, 2]), torch.ones(2)
    custom_mm.cusparse_spmm(crow, col, values, torch.ones(3, 2), 2, 3)
    col.data = torch.tensor([0, 5])
    with pytest.raises(ValueError, match="columns from 0 to 2"):
        custom_mm.cusparse_spmm(crow, col, values, torch.ones(3, 2), 2, 3)
