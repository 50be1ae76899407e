"""Tests the Triton kernels of the masked products in Triton's interpreter; test_interpreter.py starts this process.

TRITON_INTERPRET=1 must be set when triton is imported. The operators then run the kernels on CPU tensors as well: the
forward, backward and double backward are those of a GPU.
"""

import os
from dataclasses import replace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

import matmuls
from matmuls import mask_plan, masked_ffn, masked_linear
from matmuls.masked import checks
from matmuls.triton import configs, few, last_wave, launch
from matmuls.triton import masked_gradients as kernels

ROWS = (1, 7, 64, 127, 129)


def masks(m):
    r = torch.arange(m)
    yield from (r < 0, r >= 0, r == m // 2, (r >= m // 5) & (r < m // 5 + m // 2), r * 8 // m % 2 == 1)
    yield torch.rand(m, generator=torch.Generator().manual_seed(m)) < 0.5


@pytest.fixture(autouse=True)
def through_the_kernels(monkeypatch):
    monkeypatch.setattr(
        checks, "by_triton", lambda x, *sizes: x.dtype != torch.float64 and all(sizes) and x.numel() > 0
    )
    ran = []

    def counted(kernel, *args, **options):
        ran.append(kernel.__name__)
        launch.launch(kernel, *args, **options)

    for module in ("mask_plan", "few", "masked_linear", "masked_weights", "masked_gradients", "masked_ffn"):
        monkeypatch.setattr(f"matmuls.triton.{module}.launch", counted)
    monkeypatch.setattr(few, "ORDERED", (16, 256))  # one program per row would be slow in the interpreter
    real = torch.Tensor.new_empty, torch.empty

    def poisoned(t):
        return t.fill_(float("nan")) if t.is_floating_point() and t.device.type == "cpu" else t

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(real[0](*a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(real[1](*a, **k)))
    yield ran
    assert ran


def on_hopper(monkeypatch):
    """Choose as on a GPU of capability 9.0 with four multiprocessors."""
    for module in ("masked_linear", "masked_gradients"):
        monkeypatch.setattr(f"matmuls.triton.{module}.gpu", lambda index: configs.Gpu("interpreter", (9, 0), 4))


def error(x, truth):
    assert x.isfinite().all()
    scale = truth.norm().item()
    return (x.double() - truth).norm().item() / scale if scale else x.double().norm().item()


def compare(function, *tensors):
    """Compare results and gradients of the kernels with the plain path in float64; return the gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y, truth = function(*leaves), function(*wide)
    dy = torch.randn(y.shape).to(y.dtype)
    found, expected = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(truth, wide, dy.double())
    for x, t in zip((y, *found), (truth, *expected), strict=True):
        assert x.dtype == y.dtype
        assert error(x, t) < (1e-6 if y.dtype == torch.float32 else 1e-3)
    return found


def test_every_tf32_setting_of_torch_is_respected(through_the_kernels):
    through_the_kernels.append("none to run")
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    assert kernels.precision_of(torch.float32) == "ieee"
    try:
        products.fp32_precision = "tf32"
        assert [kernels.precision_of(dtype) for dtype in (torch.float32, torch.float16)] == ["tf32", "ieee"]
    finally:
        products.fp32_precision = before


@pytest.mark.parametrize("m", [*ROWS, 3000])
def test_plan(m):
    for mask in masks(m):
        rows, counts, _ = mask_plan(mask)
        expected = torch.cat([mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1)])
        assert torch.equal(rows.long(), expected)
        assert counts.tolist() == [mask.sum().item(), m - mask.sum().item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_linear(m, dtype):
    torch.manual_seed(m)
    k, n = 40, 33
    tensors = [t.to(dtype) for t in (torch.randn(m, k), *torch.randn(2, n, k) / k**0.5, *torch.randn(2, n))]
    for mask in masks(m):
        _, d1, d2, e1, e2 = compare(lambda x, w1, w2, b1, b2, p=mask: masked_linear(x, w1, w2, p, b1, b2), *tensors)
        if mask.all():  # an expert without rows: its gradient is exactly 0
            assert d2.count_nonzero() == e2.count_nonzero() == 0
        if not mask.any():
            assert d1.count_nonzero() == e1.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_ffn(m, dtype):
    torch.manual_seed(m)
    d, h = 24, 40
    weights = [torch.randn(*s) / s[1] ** 0.5 for s in ((h, d), (d, h), (h, d)) * 2]
    tensors = [t.to(dtype) for t in (torch.randn(m, d), *weights)]
    for n, mask in enumerate(masks(m)):
        plan = mask_plan(mask)
        compare(lambda *args, p=plan, again=n % 2 == 1: masked_ffn(*args, p, again), *tensors)


TILES = [
    configs.Tiles(16, 16, 16, stages=2, warps=4),
    configs.Tiles(32, 64, 32, persistent=True),
    configs.Tiles(32, 64, 32, persistent=True, flatten=True, pieces=4, group=1),
    configs.Tiles(64, 32, 16, pieces=2, tma=True),
    configs.Tiles(32, 32, 32, persistent=True, flatten=True, tma=True, split=3),
    configs.Tiles(64, 64, 64, split=4),
    configs.Tiles(32, 16, 32, split=2, pieces=2),
    configs.Tiles(16, 32, 16, tma=True, split=2),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_field_of_a_configuration(tiles, monkeypatch):
    """Sizes that are multiples of the tiles and sizes that are not, with TMA as well, which the interpreter
    supports.
    """
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.OPERATORS, tiles))
    on_hopper(monkeypatch)
    even = 2 * min(tiles.depth, 32), 2 * tiles.columns  # a few small tiles only: the interpreter is slow
    for m, k, n in ((100, *even), (75, 40, 24), (33, 19, 50)):
        x, w1, w2 = torch.randn(m, k), torch.randn(n, k), torch.randn(n, k)
        weights = [torch.randn(*s) / s[1] ** 0.5 for s in ((n, k), (k, n), (n, k)) * 2]
        for mask in (torch.rand(m) < 0.3, torch.arange(m) % 2 == 0):  # in the second, a tile spans both experts
            compare(lambda x, w1, w2, p=mask: masked_linear(x, w1, w2, p), x, w1, w2)
            compare(lambda *args, p=mask: masked_ffn(*args, p), x, *weights)


@pytest.mark.parametrize("tiles", TILES[1:3] + TILES[4:5], ids=str)
def test_last_wave_split_along_k(tiles, through_the_kernels, monkeypatch):
    """Tiles left for the last wave of four programs, of which some masks have one or two: split along K, with tails."""
    monkeypatch.setattr(last_wave, "WORTH", 0)
    tiles = replace(tiles, split=1)
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.OPERATORS, tiles))
    on_hopper(monkeypatch)
    counts = []
    wide = tiles.columns
    for m, k, n in ((40, 96, 2 * wide), (33, 75, 3 * wide - 8), (10, 200, 40), (100, 64, 2 * wide)):
        x, w1, w2 = torch.randn(m, k), torch.randn(n, k), torch.randn(n, k)
        weights = [torch.randn(*s) / s[1] ** 0.5 for s in ((n, k), (k, n), (n, k)) * 2]
        b1, b2 = torch.randn(2, n)
        for mask in masks(m):
            compare(lambda x, w1, w2, b1, b2, p=mask: masked_linear(x, w1, w2, p, b1, b2), x, w1, w2, b1, b2)
        compare(lambda *args, p=mask: masked_ffn(*args, p), x, *weights)
        counts.append(through_the_kernels.count("add_parts_kernel"))
        assert torch.equal(masked_linear(x, w1, w2, mask), masked_linear(x, w1, w2, mask))
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]
    before = through_the_kernels.count("add_parts_kernel")
    with matmuls.handles(batch_invariant=True):
        masked_linear(x, w1, w2, mask)
    assert through_the_kernels.count("add_parts_kernel") == before


def test_strides():
    """Row and element strides of x, weights in both orientations."""
    x, w1, w2 = torch.randn(50, 20), torch.randn(30, 20), torch.randn(30, 20)
    mask = torch.rand(50) < 0.5
    truth = masked_linear(x.double(), w1.double(), w2.double(), mask)
    apart = torch.randn(50, 26)
    apart[:, 3:23] = x
    for x_ in (x, apart[:, 3:23], x.T.contiguous().T):
        for a, b in ((w1, w2), (w1.T.contiguous().T, w2.T.contiguous().T), (w1, w2.T.contiguous().T)):
            assert error(masked_linear(x_, a, b, mask), truth) < 1e-6
    row = torch.randn(20)
    y = masked_linear(row.expand(50, 20), w1, w2, mask)
    assert error(y, masked_linear(row.double().expand(50, 20), w1.double(), w2.double(), mask)) < 1e-6


@pytest.mark.parametrize(
    "tiles", [None, configs.Tiles(16, 16, 16, tma=True), configs.Tiles(16, 16, 16, tma=True, split=2)]
)
def test_nan_stays_with_its_expert(tiles, monkeypatch):
    x, w1, w2 = torch.randn(40, 16), torch.randn(24, 16), torch.randn(24, 16)
    mask = torch.arange(40) % 2 == 0
    x[0] = float("nan")  # the row that out-of-range positions of a tile read
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.OPERATORS, tiles) if tiles else {})
    on_hopper(monkeypatch)
    leaves = [t.requires_grad_() for t in (x, w1, w2)]
    y = masked_linear(*leaves, mask)
    y.sum().backward()
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    assert w1.grad.isnan().all()
    assert w2.grad.isfinite().all()


def test_gradients_of_sorted_copies(through_the_kernels, monkeypatch):
    """The path of many rows on sm_90: the product for x's gradient also copies both operands in the plan's order."""
    monkeypatch.setattr(kernels, "LITTLE", 0)
    monkeypatch.setattr(configs, "forced", {"masked_ffn_weights": configs.Tiles(64, 128, 32, tma=True, split=2)})
    on_hopper(monkeypatch)
    tensors = [t.half() for t in (torch.randn(70, 256), *torch.randn(2, 256, 256) / 16)]
    for mask in masks(70):
        compare(lambda x, w1, w2, p=mask: masked_linear(x, w1, w2, p), *tensors)
    assert through_the_kernels.count("sort_kernel") == 2 * len(list(masks(70)))
    assert "sorted_weights_kernel" in through_the_kernels


@pytest.mark.parametrize("m", [33, 64, 100, 128])
def test_gradients_of_few_rows(m, through_the_kernels, monkeypatch):
    """One wave of tiles for any mask, remaining rows in strips; weight gradients from sorted copies."""
    monkeypatch.setattr(kernels, "FEW", 0)
    monkeypatch.setattr(kernels, "WIDE", 0)
    tiles = configs.Tiles(32, 128, 64, tma=True, pieces=2, split=2)
    larger = configs.Tiles(128, 128, 64, tma=True, pieces=2)
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.OPERATORS, tiles) | {"masked_few_weights": larger})
    on_hopper(monkeypatch)
    g, x = torch.randn(m, 256).half(), torch.randn(m, 512).half()
    w1, w2 = (torch.randn(2, 256, 512) / 22).half()
    for mask in masks(m):
        rows, counts, _ = mask_plan(mask)
        y = kernels.product(x, w1, w2, rows, counts)
        assert error(y, torch.where(mask[:, None], x.double() @ w1.double().T, x.double() @ w2.double().T)) < 1e-3
        found = kernels.gradients(g, x, w1, w2, rows, counts)
        truth = torch.where(mask[:, None], g.double() @ w1.double(), g.double() @ w2.double())
        for ours, expected in zip(
            found, (truth, *(g[mine].double().T @ x[mine].double() for mine in (mask, ~mask))), strict=True
        ):
            assert error(ours, expected) < 1e-3
    assert set(through_the_kernels) == {"plan_kernel", "order_kernel", "few_product_kernel", "few_weights_kernel"}


@pytest.mark.parametrize("frozen", ["w1", "w2"])
def test_a_frozen_expert_is_not_computed(frozen, through_the_kernels, monkeypatch):
    x, w1, w2 = torch.randn(40, 16), torch.randn(24, 16), torch.randn(24, 16)
    mask = torch.rand(40) < 0.5
    (w2 if frozen == "w1" else w1).requires_grad_()
    masked_linear(x, w1, w2, mask).sum().backward()
    assert through_the_kernels.count("product_kernel") == 1  # no gradient of x either
    d1, d2 = torch.ops.custom_mm.masked_weights(
        torch.randn(40, 24), x, *mask_plan(mask)[:2], frozen != "w1", frozen != "w2"
    )
    for split in (1, 2, 3):
        monkeypatch.setattr(configs, "forced", {"masked_weights": configs.Tiles(16, 16, 16, tma=True, split=split)})
        on_hopper(monkeypatch)
        g, plan = torch.randn(40, 32), mask_plan(mask)[:2]
        both = torch.ops.custom_mm.masked_weights(g, x, *plan)
        one = torch.ops.custom_mm.masked_weights(g, x, *plan, frozen != "w1", frozen != "w2")
        assert torch.equal(one[frozen == "w1"], both[frozen == "w1"])
        assert one[frozen != "w1"].numel() == 0
    assert "sorted_weights_kernel" in through_the_kernels
    assert (d1.numel() == 0) == (frozen == "w1")
    assert (d2.numel() == 0) == (frozen == "w2")


def test_double_backward():
    x, w1, w2 = (torch.randn(*s, requires_grad=True) for s in ((20, 16), (24, 16), (24, 16)))
    mask = torch.rand(20) < 0.5

    def twice(*leaves):
        (dx,) = torch.autograd.grad(masked_linear(*leaves, mask).square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves)

    wide = twice(*(t.detach().double().requires_grad_() for t in (x, w1, w2)))
    for ours, truth in zip(twice(x, w1, w2), wide, strict=True):
        assert error(ours, truth) < 1e-5


@pytest.mark.parametrize("operator", configs.OPERATORS)
def test_the_reference_of_the_tuner(operator):
    from matmuls import tune

    problem = tune.Problem(operator, 70, 24, 40, "float32")
    ours, truth = tune._call(problem, 0, "cpu")
    tune.check(problem, configs.SMALLEST, ours(), truth())
    with pytest.raises(tune.Failed, match="is off by"):
        tune.check(problem, configs.SMALLEST, ours(), tuple(t * 1.001 for t in truth()))


@pytest.mark.parametrize("operator", configs.OPERATORS)
def test_the_tuner_accepts_an_expert_without_rows(operator):
    from matmuls import tune

    problem = tune.Problem(operator, 1, 24, 40, "float32")
    for seed in range(2):
        ours, truth = tune._call(problem, seed, "cpu")
        assert any(not t.any() for t in truth()) == (operator in configs.WEIGHTS)
        tune.check(problem, configs.SMALLEST, ours(), truth())
