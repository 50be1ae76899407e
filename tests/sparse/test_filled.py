"""Products with densified matrices: float32 as two float16 (fp16x2), 2:4 parts, and the fallback to the row kernel."""

import pytest
import torch

from matmuls import plan, spmm, timing
from matmuls.device import has_hopper_kernels
from matmuls.sparse import costs, race, select, selector

_ops = torch.ops.custom_mm


def draw(rows, columns, density, dtype=torch.float32, device="cuda", index=torch.int32):
    generator = torch.Generator().manual_seed(rows + columns)
    dense = torch.randn(rows, columns, generator=generator)
    dense *= torch.rand(rows, columns, generator=generator) < density
    a = dense.to(dtype).to(device).to_sparse_csr()
    return a.crow_indices().to(index), a.col_indices().to(index), a.values()


two_of_four_or_all = pytest.mark.parametrize("two_of_four", [False, True], ids=["all", "two of four"])


def in_halves(crow, col, values, b, two_of_four, order=None):
    kept = _ops.csr_halves(crow, col, values, b.shape[0], order, two_of_four)
    return kept, _ops.csr_spmm_halves(*kept, crow, col, values, b, b.shape[0], order)


def full(crow, col, values, columns):
    return torch.sparse_csr_tensor(crow, col, values, (crow.shape[0] - 1, columns)).to_dense()


def worst_element(result, a, b):
    """The largest error of an element, relative to the sum of the magnitudes of its terms."""
    a, b = a.double(), b.double()
    scale = a.abs() @ b.abs()
    error = (result.double() - a @ b).abs()
    assert not error[scale == 0].any()
    error = (error - 2**-149).clamp_min(0)  # one subnormal step
    return (error / scale.clamp_min(1e-300)).max().item() if error.numel() else 0


def assert_as_exact_as_torch(result, crow, col, values, b):
    """Every element's error: at most twice torch's worst, plus one rounding."""
    a = full(crow, col, values, b.shape[0])
    theirs = worst_element(torch.sparse_csr_tensor(crow, col, values, a.shape) @ b, a, b)
    assert worst_element(result, a, b) <= 2 * theirs + torch.finfo(torch.float32).eps


SHAPES = [
    (130, 70, 8),
    (1, 9, 16),
    (1, 70, 16),
    (513, 1000, 72),
    (300, 9000, 40),
    (128, 64, 128),
    (2048, 4096, 256),
    (64, 40, 0),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "columns", "n"), SHAPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("density", [0.5, 0.1])
@two_of_four_or_all
def test_as_accurate_as_float32_sums(rows, columns, n, index, density, two_of_four):
    crow, col, values = draw(rows, columns, density, device="cuda", index=index)
    for spread in (0, 60):  # range of the columns' scales, in powers of two
        b = torch.randn(columns, n, device="cuda") * torch.exp2(torch.linspace(-spread, spread, n, device="cuda"))
        kept, result = in_halves(crow, col, values, b, two_of_four)
        assert kept[2][0].item() == 0
        assert_as_exact_as_torch(result, crow, col, values, b)
        assert all(torch.equal(in_halves(crow, col, values, b, two_of_four)[1], result) for _ in range(10))


@pytest.mark.cuda
@pytest.mark.parametrize("of_a_row", [costs.MIN_MEAN_FP16X2 - 1, costs.MIN_MEAN_FP16X2])
def test_rows_of_few_nonzeros_are_not_multiplied_in_halves(of_a_row):
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("Hopper's")
    dense = torch.zeros(20000, 64, device="cuda")
    dense[:, torch.randperm(64)[:of_a_row]] = torch.randn(20000, of_a_row, device="cuda")
    a, b = dense.to_sparse_csr(), torch.randn(64, 512, device="cuda")
    halves = of_a_row == costs.MIN_MEAN_FP16X2
    made = plan(a, constant=True)._selector
    names = made._copies(made._facts(torch.float32, b.shape[1], b.device))
    assert bool({select.FP16X2, select.SPARSE24} & set(names)) == halves
    exact, scale = dense.double() @ b.double(), dense.double().abs() @ b.double().abs()
    assert ((spmm(a, b) - exact).abs() / scale).max() <= (2**-21 if halves else of_a_row * 2**-24)


@pytest.mark.cuda
def test_fp16x2_parts_sum_to_the_matrix():
    crow, col, values = draw(50, 30, 0.5, device="cuda")
    values = values * torch.exp2(torch.randint(-3, 3, values.shape, device="cuda").float())
    order = torch.randperm(values.numel(), device="cuda").int()
    (high, low), exponents, *_ = _ops.csr_halves(crow, col, values, 30, order)
    sums = torch.ldexp(high.double() + low.double() / 4096, -exponents.double().unsqueeze(1))
    expected = full(crow, col, values[order.long()].double(), 30)
    assert not sums[:, 30:].any()
    assert ((sums[:, :30] - expected).abs() <= 2**-22 * expected.abs()).all()
    assert (high.abs().amax(1) >= 2**14 - 4).all()
    assert (high.abs().amax(1) <= 2**15).all()


@pytest.mark.cuda
def test_two_of_four_plus_the_rest_are_the_matrix():
    crow, col, values = draw(150, 203, 0.4)
    values = values * torch.exp2(torch.randint(-3, 3, values.shape, device="cuda").float())
    order = torch.randperm(values.numel(), device="cuda").int()
    parts, exponents, _, rest = _ops.csr_halves(crow, col, values, 203, order, True)
    assert parts.shape == (2, 4, 8704)
    expected = full(crow, col, values[order.long()].double(), 203)
    found, tiles = torch.zeros(256, 256, dtype=torch.float64), parts.cpu()
    for row in range(256):
        for step in range(4):
            tile = tiles[row // 128, step]
            pieces = tile[:8192].view(128, 8, 8)[row % 128]
            # high and low parts of 16 groups of four
            numbers = pieces[torch.arange(8) ^ row % 8].double().view(2, 16, 2)
            places = tile[8192:].view(torch.uint8).view(8, 8, 4, 2, 2)[row % 128 // 16, row % 8, :, row // 8 % 2]
            for four in range(16):
                bits = int(places.reshape(8)[four // 2]) >> four % 2 * 4
                first, second = bits & 3, bits >> 2 & 3
                assert first < second
                found[row, 64 * step + 4 * four + torch.tensor([first, second])] = (
                    numbers[0, four] + numbers[1, four] / 4096
                )
    assert not found[150:].any()
    assert not found[:, 203:].any()
    found = torch.ldexp(found[:150, :203], -exponents.cpu().double().unsqueeze(1))
    beyond = torch.zeros(150, 203, dtype=torch.float64)
    for row, (begin, end) in enumerate(rest[:150].tolist()):
        columns, numbers = rest[begin:end].cpu().unbind(1)
        assert (columns.diff() > 0).all()
        beyond[row, columns.long()] = numbers.view(torch.float32).double()
    assert not (found * beyond).any()
    assert beyond.any()
    error = (found + beyond - expected.cpu()).abs()
    assert (error <= 2**-22 * expected.cpu().abs()).all()


NARROW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def two_of_each_four(rows, columns, dtype):
    four = torch.rand(rows, columns // 4, 4, device="cuda").argsort(-1)[..., :2]
    kept = torch.zeros(rows, columns // 4, 4, device="cuda").scatter_(-1, four, 1).view(rows, columns)
    return (torch.randn(rows, columns, device="cuda") * kept).to(dtype)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "columns", "n"),
    [
        *SHAPES,
        *((1000, 14336, 64), (4097, 776, 32), (77, 20001, 136), (11008, 512, 32), (5120, 512, 24)),
        *((300, 200, 520), (4097, 776, 264), (257, 4096, 1032), (4096, 4096, 128), (1, 64, 136), (3000, 9000, 512)),
    ],
)
@pytest.mark.parametrize("density", [0.5, 0.1, "2:4"])
@NARROW
def test_two_of_four_products_in_16_bits(rows, columns, n, density, dtype):
    if density == "2:4":
        a = two_of_each_four(rows, columns - columns % 4, dtype).to_sparse_csr()
        crow, col, values = a.crow_indices().int(), a.col_indices().int(), a.values()
    else:
        crow, col, values = draw(rows, columns, density, dtype)
    dense, b = full(crow, col, values, columns), torch.randn(columns, n, device="cuda").to(dtype)
    stored = torch.nn.functional.pad((dense != 0).int(), (0, -columns % 4)).view(rows, -1, 4).sum(-1)
    beyond = int((stored - 2).clamp_min(0).sum())
    order = torch.randperm(values.numel(), device="cuda").int()
    shuffled = torch.empty_like(values).scatter_(0, order.long(), values)
    kept = _ops.csr_halves(crow, col, shuffled, columns, order, True, beyond)
    assert kept[3].shape == (rows + beyond, 2)
    result = _ops.csr_spmm_halves(*kept, crow, col, shuffled, b, columns, order)
    truth = dense.double() @ b.double()
    errors = [torch.linalg.vector_norm(x.double() - truth).item() for x in (result, dense @ b)]
    assert errors[0] <= 2 * errors[1]
    # The size of the rest changes the time, but not the result.
    for _ in range(5):
        _, again = in_halves(crow, col, values, b, True)
        assert torch.equal(again, result)
    strided = torch.randn(columns, n + 8, device="cuda").to(dtype)[:, 8:]
    strided.copy_(b)
    assert torch.equal(_ops.csr_spmm_halves(*kept, crow, col, shuffled, strided, columns, order), result)
    if n > 0:  # rows of B that are not 16-byte aligned use the row kernel
        odd = torch.randn(columns, n + 1, device="cuda").to(dtype)[:, 1:]
        odd.copy_(b)
        by_rows = _ops.csr_spmm_halves(*kept, crow, col, shuffled, odd, columns, order)
        assert torch.linalg.vector_norm(by_rows.double() - truth).item() <= 2 * errors[1]


@pytest.mark.cuda
@NARROW
def test_two_of_four_plus_the_rest_are_the_matrix_in_16_bits(dtype):
    crow, col, values = draw(150, 203, 0.4, dtype)
    parts, _, _, rest = _ops.csr_halves(crow, col, values, 203, None, True)
    assert parts.shape == (2, 4, 4608)
    found, tiles = torch.zeros(256, 256, dtype=torch.float64), parts.cpu()
    for row in range(256):
        for step in range(4):
            tile = tiles[row // 128, step]
            pieces = tile[:4096].view(128, 4, 8)[row % 128]
            numbers = pieces[torch.arange(4) ^ row // 2 % 4].double().view(16, 2)
            places = tile[4096:].view(torch.uint8).view(8, 8, 4, 2, 2)[row % 128 // 16, row % 8, :, row // 8 % 2]
            for four in range(16):
                bits = int(places.reshape(8)[four // 2]) >> four % 2 * 4
                first, second = bits & 3, bits >> 2 & 3
                assert first < second
                found[row, 64 * step + 4 * four + torch.tensor([first, second])] = numbers[four]
    for row, (begin, end) in enumerate(rest[:150].tolist()):
        columns, numbers = rest[begin:end].cpu().unbind(1)
        assert (columns.diff() > 0).all()
        assert not found[row, columns.long()].any()
        found[row, columns.long()] = numbers.view(torch.float32).double()
    assert torch.equal(found[:150, :203], full(crow, col, values, 203).double().cpu())
    assert not found[150:].any()
    assert not found[:, 203:].any()


@pytest.mark.cuda
@NARROW
def test_a_plan_uses_two_of_four_for_2_4_sparsity(dtype):
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("Hopper's")
    dense = two_of_each_four(14336, 4096, dtype)
    made, b = plan(dense.to_sparse_csr(), constant=True), torch.randn(4096, 32, device="cuda").to(dtype)
    before, truth = made.nbytes, dense.double() @ b.double()
    result = made @ b
    assert select.SPARSE24 in made.explain()
    assert made.nbytes - before <= 0.6 * dense.nbytes
    error = torch.linalg.vector_norm(result.double() - truth)
    assert error <= 2 * torch.linalg.vector_norm((dense @ b).double() - truth)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made @ b
    made.update(made.values * 2)
    graph.replay()
    doubled = (
        plan((2 * dense).to_sparse_csr(), constant=True) @ b
    )  # not 2 * result, whose subnormal numbers are already rounded
    assert torch.equal(captured, doubled)
    assert torch.equal(made @ b, doubled)
    right = b.clone().requires_grad_()
    (made @ right).backward(torch.ones_like(result))  # by the dense product, which is differentiable
    expected = 2 * dense.double().sum(0).unsqueeze(1).expand(-1, 32)
    torch.testing.assert_close(right.grad.double(), expected, atol=0.5, rtol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(50, 30), (3, 9000), (300, 64), (4, 0)])
def test_densified_is_the_dense_matrix(rows, columns, dtype):
    crow, col, values = draw(rows, columns, 0.3, dtype, device="cuda")
    order = torch.randperm(values.numel(), device="cuda").int()
    filled = _ops.csr_filled(crow, col, values, columns, order)
    assert filled.shape == (rows, -(-columns // 8) * 8)
    assert torch.equal(filled[:, :columns], full(crow, col, values[order.long()], columns))
    assert not filled[:, columns:].any()


HARD = [
    "columns",
    "rows",
    "one in b",
    "one in a",
    "small ones in b",
    "small ones in a",
    "subnormal",
    "cancelling",
    "zeros",
]


@pytest.mark.cuda
@pytest.mark.parametrize("what", HARD)
@two_of_four_or_all
def test_every_element_is_as_accurate_as_in_float32(what, two_of_four):
    crow, col, values = draw(200, 304, 0.5, device="cuda")
    b = torch.randn(304, 64, device="cuda")
    if what == "columns":
        b *= torch.exp2(torch.linspace(-100, 100, 64, device="cuda"))
    elif what == "rows":
        rows = torch.repeat_interleave(torch.linspace(-100, 100, 200, device="cuda"), crow.diff().long())
        values = values * torch.exp2(rows)
    elif what == "one in b":
        b[3, 5], b[9, 11] = 1e30, 1e-30
    elif what == "one in a":
        values[7], values[5000] = 1e30, 1e-30
    elif what == "small ones in b":
        b[::2] *= 1e-12
        b[:, 7] *= torch.arange(304, device="cuda") == 6
    elif what == "small ones in a":
        values[::2] *= 1e-12
        b *= torch.rand(304, 64, device="cuda") < 0.02
    elif what == "subnormal":
        b *= 1e-40
    elif what == "cancelling":
        b[152:] = -b[:152]
    else:
        b[:, ::3] = 0
        b *= torch.rand(304, 64, device="cuda") < 0.5
    _, result = in_halves(crow, col, values, b, two_of_four)
    assert_as_exact_as_torch(result, crow, col, values, b)


@pytest.mark.cuda
@pytest.mark.parametrize("what", ["inf", "nan", "inf in a", "twice", "graded", "unsorted"])
@pytest.mark.parametrize(("rows", "columns", "n"), [(200, 304, 64), (140, 4100, 24), (300, 1700, 200)])
@two_of_four_or_all
def test_inputs_beyond_fp16x2_fall_back_to_the_row_kernel(what, rows, columns, n, two_of_four):
    crow, col, values = draw(rows, columns, 0.5, device="cuda")
    b = torch.randn(columns, n, device="cuda")
    if what in ("inf", "nan"):
        b[3, 5] = float(what)
    elif what == "inf in a":
        values[7] = float("inf")
    elif what == "twice":
        col[1] = col[0]
    else:
        b[: columns // 2] *= 1e10
    if what == "unsorted":
        places = torch.cat([torch.randperm(int(m)) + int(first) for first, m in zip(crow, crow.diff(), strict=False)])
        col, values = col[places.to("cuda")], values[places.to("cuda")]
    _, result = in_halves(crow, col, values, b, two_of_four)
    by_rows = _ops.csr_spmm(crow, col, values, b, columns)
    assert torch.equal(result.isnan(), by_rows.isnan())
    assert torch.equal(result.isfinite(), by_rows.isfinite())
    there = by_rows.isfinite()
    assert torch.equal(result[~there].nan_to_num(), by_rows[~there].nan_to_num())  # infinities of the same sign

    def exact(values, b):  # infinities of b do not meet elements that are not stored
        a = torch.sparse_csr_tensor(crow.cpu(), col.cpu(), values.cpu().double(), (rows, columns))
        return (a @ b.cpu().double()).to("cuda")

    error = (result - exact(values, b)).abs()
    assert (error[there] <= 2**-21 * exact(values.abs(), b.abs())[there]).all()
    assert all(torch.equal(in_halves(crow, col, values, b, two_of_four)[1][there], result[there]) for _ in range(10))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_without_a_plan_a_dense_enough_matrix_is_densified(dtype, layout):
    crow, col, values = draw(2048, 2048, 0.6, dtype)
    dense = full(crow, col, values, 2048)
    a = getattr(dense, f"to_sparse_{layout}")()
    b = torch.randn(2048, 512, device="cuda").to(dtype)
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    result = spmm(a, b)
    assert torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before > dense.nbytes
    truth = dense.double() @ b.double()
    error = torch.linalg.vector_norm(result.double() - truth) / torch.linalg.vector_norm(truth)
    assert error < 2 * torch.finfo(dtype).eps
    assert all(torch.equal(spmm(a, b), result) for _ in range(20))
    scaled = spmm(a, b, alpha=-0.5)
    error = torch.linalg.vector_norm(scaled.double() + 0.5 * truth) / torch.linalg.vector_norm(0.5 * truth)
    assert error < 2 * torch.finfo(dtype).eps
    b[3, 5] = float("inf")
    stored = dense[:, 3] != 0
    assert torch.equal(spmm(a, b)[:, 5].isfinite(), ~stored)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = spmm(a, b)
    b[3, 5] = 0
    graph.replay()
    assert torch.equal(captured, spmm(a, b))


@pytest.mark.cuda
def test_a_wide_b_is_split_in_pieces():
    """fp16x2 needs at most 128 MiB for parts of B at a time, also if B has NaN."""
    crow, col, values = draw(256, 64, 0.6)
    dense, n = full(crow, col, values, 64), 3 * 2**18
    a, b = dense.to_sparse_csr(), torch.randn(64, n, device="cuda")
    b[5, 2**19 + 3] = float("nan")
    spmm(a, b[:, :8192])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = spmm(a, b)
    assert torch.cuda.max_memory_allocated() - before <= result.nbytes + 2**27 + 2**25
    assert torch.equal(result[:, 2**19 + 3].isfinite(), dense[:, 5] == 0)
    for columns in (slice(0, 99), slice(2**19 - 99, 2**19 + 3), slice(2**19 + 4, 2**19 + 99), slice(n - 99, n)):
        assert_as_exact_as_torch(result[:, columns], crow, col, values, b[:, columns])


@pytest.mark.cuda
def test_more_entries_beyond_two_of_four_than_announced():
    """None of them is lost: the product falls back to the row kernel."""
    crow, col, values = draw(150, 200, 0.6)
    b = torch.randn(200, 64, device="cuda")
    kept = _ops.csr_halves(crow, col, values, 200, None, True, 5)
    assert_as_exact_as_torch(_ops.csr_spmm_halves(*kept, crow, col, values, b, 200, None), crow, col, values, b)


@pytest.mark.cuda
def test_gradients_of_a_densified_product():
    crow, col, values = draw(2048, 2048, 0.6)
    a = torch.sparse_csr_tensor(crow, col, values, (2048, 2048)).requires_grad_()
    b = torch.randn(2048, 256, device="cuda", requires_grad=True)
    grad = torch.randn(2048, 256, device="cuda")
    to_a, to_b = torch.autograd.grad(spmm(a, b), (a, b), grad)
    dense = full(crow, col, values, 2048).double()
    torch.testing.assert_close(to_b.double(), dense.T @ grad.double(), atol=1e-3, rtol=1e-5)
    sampled = (grad.double() @ b.detach().double().T)[dense != 0]
    torch.testing.assert_close(to_a.values().double(), sampled, atol=1e-3, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [select.FP16X2, select.SPARSE24])
def test_a_plan_of_halves_follows_its_values(name, monkeypatch):
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("halves are Hopper's")

    def last_is_fastest(runs, device, rounds):
        return [timing.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))]

    monkeypatch.setattr(race, "time_warm", last_is_fastest)
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *args: {})
    monkeypatch.setattr(select, "us_fp16x2", lambda *args: {name: 1.0})
    crow, col, values = draw(256, 320, 0.1)
    made = plan(torch.sparse_csr_tensor(crow, col, values, (256, 320)), constant=True)
    b = torch.randn(320, 128, device="cuda")
    truth = full(crow, col, values, 320).double() @ b.double()
    torch.testing.assert_close((made @ b).double(), truth, atol=1e-4, rtol=1e-5)
    assert name in made.explain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made @ b
    made.update(values * 3)
    graph.replay()
    torch.testing.assert_close(captured.double(), 3 * truth, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close((made @ b).double(), 3 * truth, atol=1e-3, rtol=1e-5)
