"""Block-sparse matrices: the operators against float64, gradients, plans of BSR and BSC tensors."""

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from matmuls import plan, spmm, timing
from matmuls.blocks import KERNEL_SIZES, bsr_sddmm, bsr_spmm
from matmuls.sparse import layouts, race, select
from matmuls.sparse.tensor_pattern import pattern_of

SIZES = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32), (3, 5)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(h, w, dtype=torch.float64, device="cpu", index=torch.int64):
    """Four block rows with 3, 0, 1 and 40 blocks in 6 block columns: unsorted, with duplicates."""
    generator = torch.Generator().manual_seed(h * w)
    crow, col = torch.tensor([0, 3, 3, 4, 44]), torch.randint(6, (44,), generator=generator)
    values = torch.randn(44, h, w, generator=generator).to(dtype)
    return crow.to(index).to(device), col.to(index).to(device), values.to(device)


def dense_of(crow, col, values, across=6):
    """The dense matrix; differentiable."""
    (_, h, w), rows = values.shape, len(crow) - 1
    row = torch.repeat_interleave(torch.arange(rows, device=crow.device), crow.diff())
    full = values.new_zeros(rows, across, h, w).index_put((row, col.long()), values, accumulate=True)
    return full.transpose(1, 2).reshape(rows * h, across * w)


def assert_close(x, truth, scale, roundings):
    """Errors of at most `roundings` roundings of `scale`."""
    assert x.isfinite().all()
    error = torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(scale).clamp_min(1e-30)
    assert error <= roundings


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


# ----------------------------------------------------------------------------------------------------------- operators


@every_dtype
@pytest.mark.parametrize(("h", "w"), SIZES)
def test_product_and_gradients(h, w, dtype, device):
    crow, col, values = draw(h, w, dtype, device, torch.int32 if h == w else torch.int64)
    for n in (1, 7, 16, 33, 128, 200):
        b = torch.randn(6 * w, n, device=device).to(dtype)
        leaves = [t.clone().requires_grad_() for t in (values, b)]
        wide = [t.double().requires_grad_() for t in (values, b)]
        y, truth = bsr_spmm(crow, col, leaves[0], leaves[1], 6 * w), dense_of(crow, col, wide[0]) @ wide[1]
        g = torch.randn(y.shape, device=device).to(dtype)
        ours = torch.autograd.grad(y, leaves, g)
        theirs = torch.autograd.grad(truth, wide, g.double())
        magnitudes = [t.detach().double().abs().requires_grad_() for t in leaves]
        scale = dense_of(crow, col, magnitudes[0]) @ magnitudes[1]
        scales = scale, *torch.autograd.grad(scale, magnitudes, g.double().abs())
        for x, t, s in zip((y, *ours), (truth, *theirs), scales, strict=True):
            assert x.dtype == dtype
            assert_close(x, t, s, 2 * torch.finfo(dtype).eps)
        assert torch.equal(y, bsr_spmm(crow, col, values, b, 6 * w))  # bitwise reproducible


@pytest.mark.cuda
@pytest.mark.parametrize(("h", "w"), SIZES[:-1])
def test_tf32(h, w, tf32):
    crow, col, values = draw(h, w, torch.float32, "cuda")
    for n in (1, 33, 128, 200):
        b = torch.randn(6 * w, n, device="cuda")
        leaves = [t.clone().requires_grad_() for t in (values, b)]
        wide = [t.double().requires_grad_() for t in (values, b)]
        y, truth = bsr_spmm(crow, col, *leaves, 6 * w), dense_of(crow, col, wide[0]) @ wide[1]
        g = torch.randn_like(y)
        for x, t in zip(
            (y, *torch.autograd.grad(y, leaves, g)), (truth, *torch.autograd.grad(truth, wide, g.double())), strict=True
        ):
            assert_close(x, t, t, 2e-3)  # 11-bit significands


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_gradcheck(ordered, given, device):
    """First and second order, of both operators, also transposed, with and without the blocks by columns."""
    h, w = 2, 3
    crow, col = torch.tensor([0, 2, 2, 5], device=device), torch.tensor([1, 0, 3, 1, 1], device=device)
    order = torch.tensor([3, 1, 0, 4, 2], device=device) if ordered else None
    t_crow, t_col, t_order = torch.ops.custom_mm.csr_transpose(crow, col, 4)
    t_order = t_order if order is None else order[t_order]
    reverse = (t_crow, t_col, t_order) if given else ()
    values, tall, wide = (
        torch.randn(*s, dtype=torch.float64, device=device, requires_grad=True) for s in ((5, h, w), (6, 2), (12, 2))
    )
    for function, leaves in (
        (lambda v, b: bsr_spmm(crow, col, v, b, 12, order, False, *reverse), (values, wide)),
        (
            lambda v, a: bsr_spmm(t_crow, t_col, v, a, 6, t_order, True, *((crow, col, order) if given else ())),
            (values, tall),
        ),
        (lambda a, b: bsr_sddmm(crow, col, a, b, 12, h, w, order, *reverse), (tall, wide)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_empty(device):
    crow, none = torch.zeros(4, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    values = torch.zeros(0, 16, 32, device=device, requires_grad=True)
    for n in (0, 5):
        b = torch.randn(64, n, device=device, requires_grad=True)
        y = bsr_spmm(crow, none, values, b, 64)
        assert torch.equal(y, torch.zeros(48, n, device=device))
        y.sum().backward()
        assert torch.equal(b.grad, torch.zeros_like(b))
        assert bsr_sddmm(crow, none, y.detach(), b, 64, 16, 32).shape == (0, 16, 32)
    crow, col, values = draw(16, 32, torch.float32, device)
    a, b = torch.zeros(64, 0, device=device), torch.zeros(192, 0, device=device)
    assert torch.equal(bsr_sddmm(crow, col, a, b, 192, 16, 32), torch.zeros_like(values))


def test_mismatched_operands_raise(device):
    crow, col, values = draw(16, 32, torch.float32, device)
    a, b = torch.randn(64, 5, device=device), torch.randn(192, 5, device=device)
    for call, message in (
        (lambda: bsr_spmm(crow, col, values[1:], b, 192), r"bsr_spmm: expected values to be .* \[44, height, width\]"),
        (lambda: bsr_spmm(crow, col, values, b[1:], 192), r"bsr_spmm: expected dense to be .* \[192, n\], got"),
        (lambda: bsr_spmm(crow, col, values, b.double(), 192), "bsr_spmm: expected dense in one .*torch.float64"),
        (lambda: bsr_spmm(crow, col, values, b[:190], 190), "bsr_spmm: expected columns in whole blocks, got 190"),
        (lambda: bsr_spmm(crow, col.int(), values, b, 192), "bsr_spmm: expected indices in int32 or in int64"),
        (lambda: bsr_spmm(crow, col, values, b, 192, col[1:]), "bsr_spmm: expected order to be whole numbers"),
        (lambda: bsr_spmm(crow, col, values, b, 192, None, False, crow), "bsr_spmm: expected both t_crow and t_col"),
        (lambda: bsr_spmm(crow, col, values, b, 192, None, False, crow, col), r"expected t_crow of shape \[7\]"),
        (lambda: bsr_sddmm(crow, col, a[1:], b, 192, 16, 32), r"bsr_sddmm: expected a to be .* \[64, n\], got"),
        (lambda: bsr_sddmm(crow, col, a, b[:, 1:], 192, 16, 32), "bsr_sddmm: expected b of 5 columns as a has, got 4"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()


def test_compiled_and_counted(device):
    crow, col, values = draw(16, 32, torch.float32, device)
    a, b = torch.randn(64, 5, device=device), torch.randn(192, 5, device=device)

    def step(values, a, b):
        return bsr_spmm(crow, col, values, b, 192).square().sum() + bsr_sddmm(crow, col, a, b, 192, 16, 32).sum()

    torch._dynamo.reset()
    leaves = [[t.clone().requires_grad_() for t in (values, a, b)] for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for function, given in ((compiled, leaves[0]), (step, leaves[1])):
        function(*given).backward()
    for x, y in zip(*leaves, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    with FlopCounterMode(display=False) as counter:
        step(values, a, b)
    assert counter.get_total_flops() == 2 * 2 * values.numel() * 5


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.fixture
def blocks_win(monkeypatch):
    """The last candidate is the fastest, and the blocks are the last; on the CPU too, by torch's products."""
    real = select.takes_blocks
    monkeypatch.setattr(select, "takes_blocks", lambda s, dtype, device: real(s, dtype, device) or device.type == "cpu")
    monkeypatch.setattr(
        race,
        "time_warm",
        lambda runs, device, rounds: [timing.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))],
    )


def draw_plan(layout, device, dtype=torch.float16, h=32, w=16):
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(7 * h, 9 * w, generator=generator)
    full.view(7, h, 9, w).mul_(torch.rand(7, 1, 9, 1, generator=generator) < 0.6)
    full[h : 2 * h] = 0
    full = full.to(dtype).to(device)
    a = getattr(full, f"to_sparse_{layout}")((h, w))
    return full, plan(a), torch.randn(9 * w, 128, device=device).to(dtype)


def assert_blocks_chosen(made):
    assert f"{select.BLOCKS} " in made.explain().splitlines()[-1]  # other lines count its blocks
    assert all(m.fastest(True) == select.BLOCKS for m in made._selector.measured.values())


@pytest.mark.parametrize("layout", ["bsr", "bsc"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_a_plan_that_chooses_blocks(layout, dtype, device, blocks_win):
    full, made, b = draw_plan(layout, device, dtype)
    eps = 2 * torch.finfo(dtype).eps
    scale = full.double().abs() @ b.double().abs()
    before = made.nbytes
    y = made @ b
    assert_blocks_chosen(made)
    assert_close(y, full.double() @ b.double(), scale, eps)
    assert made.nbytes == before
    assert torch.equal(made @ b, y)
    assert_close(made @ b[:, :101], full.double() @ b[:, :101].double(), scale[:, :101], eps)
    # other values, permanently or for one product
    assert_close(made.with_values(2 * made.values) @ b, 2 * full.double() @ b.double(), 2 * scale, eps)
    assert torch.equal(made @ b, y)
    y = made.update(4 * made.values) @ b
    assert_close(y, 4 * full.double() @ b.double(), 4 * scale, eps)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other @ b, y)
        assert_blocks_chosen(other)
    kept = made._pattern.blocks
    assert f"in {kept.pattern.nonzeros} blocks of 32 x 16" in made.explain()
    assert kept.pattern.crow.dtype == torch.int32


@pytest.mark.cuda
@pytest.mark.parametrize(("h", "w"), SIZES[:-1])
def test_a_plan_with_blocks_of_every_size_in_tf32(h, w, tf32, blocks_win):
    full, made, b = draw_plan("bsr", "cuda", torch.float32, h, w)
    y = made @ b
    assert_blocks_chosen(made)
    truth = full.double() @ b.double()
    assert_close(y, truth, truth, 2e-3)


@pytest.mark.parametrize("layout", ["bsr", "bsc"])
def test_gradients_of_a_plan(layout, device, blocks_win):
    """For b, also of second order, by the block kernels; for the values by the row kernel."""
    full, made, b = draw_plan(layout, device)
    b = (b / 16).requires_grad_()
    y = made @ b
    assert_blocks_chosen(made)
    g = (torch.randn_like(y) / 16).requires_grad_()
    (found,) = torch.autograd.grad(y, b, g, create_graph=True)
    truth = full.double().mT @ g.detach().double()
    assert_close(found, truth, full.double().abs().mT @ g.detach().double().abs(), 2e-3)
    (again,) = torch.autograd.grad(found.float().square().sum(), g)
    assert_close(again, 2 * full.double() @ truth, 2 * full.double() @ truth, 5e-3)
    values = made.values.clone().requires_grad_()
    with torch.profiler.profile() as profile:
        (made.with_values(values) @ b).float().square().sum().backward()
    names = {e.name for e in profile.events()}
    assert "custom_mm::csr_spmm" in names
    assert "custom_mm::bsr_spmm" not in names
    assert values.grad.shape == values.shape


def test_cases_in_which_blocks_are_not_chosen(device, blocks_win, monkeypatch):
    full, made, b = draw_plan("bsr", device)
    untuned = plan(full.to_sparse_bsr((32, 16)), tune=False)
    expected = untuned @ b
    made @ b
    assert_blocks_chosen(made)
    monkeypatch.setattr(layouts, "_bsr_spmm", None)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(made @ b, expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(spmm(full.to_sparse_bsr((32, 16)), b), expected)  # without a plan
    for other in (full.to_sparse_bsr((8, 16)), full.to_sparse_csr()):
        assert pattern_of("test", other)[0].blocks is None


@pytest.mark.cuda
def test_tf32_settings_decide_in_float32(blocks_win):
    _, made, b = draw_plan("bsr", "cuda", torch.float32)
    made @ b
    assert select.BLOCKS not in made.explain().splitlines()[-1]


def test_autocast_of_a_plan(device, blocks_win):
    full, made, b = draw_plan("bsr", device, torch.float32)
    b.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = made @ b
    assert_blocks_chosen(made)
    assert y.dtype == torch.bfloat16
    assert_close(y, full.double() @ b.double(), full.double() @ b.double(), 2e-2)
    y.sum().backward()
    assert b.grad.dtype == torch.float32


def test_a_kernel_that_does_not_compile_is_refused(device, blocks_win, monkeypatch):
    class CompilationError(Exception):
        pass

    def refuse(*args):
        raise CompilationError("no such instruction")

    monkeypatch.setattr(layouts, "_bsr_spmm", refuse)
    full, made, b = draw_plan("bsr", device)
    assert_close(made @ b, full.double() @ b.double(), full.double().abs() @ b.double().abs(), 2e-3)
    assert f"{select.BLOCKS} refused" in made.explain()


def test_overwritten_block_indices_raise(device, blocks_win):
    """Also if the matrix has int32 indices."""
    full, _, b = draw_plan("bsr", device)
    a = full.to_sparse_bsr((32, 16))
    a = torch.sparse_bsr_tensor(a.crow_indices().int(), a.col_indices().int(), a.values(), a.shape)
    made = plan(a)
    made @ b
    made @ b.clone().requires_grad_()  # creates the blocks by columns, which is no change of the indices
    made @ b
    a.detach().col_indices()[0] = 77
    with pytest.raises(ValueError, match="spmm: expected columns from 0 to 8 at nonzero 0, got 77"):
        made @ b


@pytest.mark.cuda
def test_capture(blocks_win):
    _, made, b = draw_plan("bsr", "cuda")
    made @ b
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made @ b
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, made @ b)
        b.mul_(2)


def test_tiles_fit_in_shared_memory():
    """At least three stages in 96 KB at every size; at least two programs per multiprocessor while tiles can be
    narrowed.
    """
    pytest.importorskip("triton")
    from matmuls.triton import blocks as kernels

    for itemsize, precision in ((2, "ieee"), (4, "tf32"), (4, "ieee")):
        for rows in (1, 8, 100, 5000):
            for h in KERNEL_SIZES:
                for n in (1, 7, 16, 33, 128, 200, 4096):
                    t = kernels.product_tile(rows, h, n, itemsize, precision, 132)
                    assert 16 <= t.width <= 128
                    assert t.stages >= 3
                    assert t.stages * (t.height + t.width) * t.depth * itemsize <= 98304
                    assert t.width <= 32 or rows * -(-n // t.width) >= 264
                for w in KERNEL_SIZES:
                    t = kernels.sampled_tile(rows, h, w, itemsize, precision, 132)
                    assert h % t.height == w % t.width == 0
                    assert t.stages >= 3
                    assert t.stages * (t.height + t.width) * t.depth * itemsize <= 98304
