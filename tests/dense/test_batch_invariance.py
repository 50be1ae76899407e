"""handles(batch_invariant=True): a row has the same bits whatever the number of rows that are computed with it."""

import random
import threading

import pytest
import torch
import torch.nn.functional as F

import custom_mm
import matmuls
from common.row_cases import draw, every_dtype

# Drawn once: the row counts at which libraries change their algorithm are not known.
ROWS = sorted({1, 2, 3, 4, 4096} | set(random.Random(0).sample(range(5, 4096), 195)))
ALONE = 6  # rows that are also computed one by one
SHAPES = [(48, 96), (33, 70), (1, 300), (768, 64)]  # N, K
ON_GPU = [(4096, 4096), (1024, 4096), (50, 8192), (4096, 128), (1000, 999)]


def assert_invariant(function, *by_row, rows=ROWS):
    """function(rows of the tensors) gives each row the bits that it gives the row alone, in every row count."""

    def of(begin, end):
        return function(*(t[begin:end].clone() for t in by_row))

    with matmuls.handles(batch_invariant=True):
        alone = torch.cat([of(i, i + 1) for i in range(ALONE)])
        wrong = [m for m in rows if not torch.equal(of(0, m)[:ALONE], alone[:m])]
        assert not wrong, f"{len(wrong)} of {len(rows)} row counts, the first {wrong[:5]}"
        end = len(by_row[0])
        assert torch.equal(of(0, end)[-1:], of(end - 1, end))


def shapes(device):
    return SHAPES + ON_GPU if device == "cuda" else SHAPES


def operands(n, k, device, dtype):
    """x [4096, K], a weight [N, K] and a bias [N]."""
    x = draw(4096, k, device=device, dtype=dtype)
    w = draw(n, k, device=device, dtype=dtype, seed=1) / k**0.5
    return x, w, draw(n, device=device, dtype=dtype, seed=2)


@every_dtype
def test_products(device, dtype):
    for n, k in shapes(device):
        x, w, _ = operands(n, k, device, dtype)
        assert_invariant(lambda a, w=w: matmuls.matmul(a, w, transb=True), x)


@every_dtype
def test_epilogues_and_layouts(device, dtype):
    few = ROWS[::20]
    for n, k in shapes(device)[:2]:
        x, w, bias = operands(n, k, device, dtype)
        b = w.t().contiguous()
        for activation in (None, "relu", "gelu", "gelu_tanh"):
            assert_invariant(
                lambda a, b=b, c=bias, f=activation: matmuls.matmul(a, b, bias=c, activation=f), x, rows=few
            )
        assert_invariant(lambda a, b=b: matmuls.cublasMM.apply(a, b), x, rows=few)
        assert_invariant(lambda a, b=b: matmuls.matmul(a.t().contiguous(), b, transa=True), x, rows=few)
        # rows with a gap behind them, results in columns, and a batch
        assert_invariant(lambda a, b=b: matmuls.matmul(F.pad(a, (0, 3))[:, :-3], b), x, rows=few)
        assert_invariant(lambda a, b=b: into_columns(a, b), x, rows=few)
        assert_invariant(lambda a, b=b: matmuls.matmul(a[None].expand(3, -1, -1), b.expand(3, -1, -1))[1], x, rows=few)


def into_columns(a, b):
    out = a.new_empty(b.shape[1], a.shape[0]).t()
    return matmuls.matmul(a, b, out=out)


@every_dtype
def test_in_place(device, dtype):
    few = ROWS[::20]
    for n, k in ((64, 64), (30, 70)):
        x, w, bias = operands(n, k, device, dtype)
        assert_invariant(lambda a, w=w, c=bias: matmuls.linear_(a, w, c).contiguous(), x, rows=few)
        assert_invariant(lambda a, w=w: matmuls.matmul_(a, w, transb=True).contiguous(), x, rows=few)


@every_dtype
def test_gradient_of_the_rows(device, dtype):
    x, w, _ = operands(48, 96, device, dtype)
    g = draw(4096, 48, device=device, dtype=dtype, seed=3)

    def gradient(own, rows):
        own.requires_grad_()
        matmuls.matmul(own, w, transb=True).backward(rows)
        return own.grad

    assert_invariant(gradient, x, g, rows=ROWS[::20])


def along_dim_0(a):
    """The softmax of rows that run along dim 0, from two rows on: a single one is contiguous, as along the last."""
    two = torch.cat([a, a[:1]])
    return matmuls.softmax_(two.t().contiguous(), 0).t()[: len(a)].contiguous()


@every_dtype
def test_rows(device, dtype):
    few = ROWS[::10]
    for columns in (1, 5, 64, 100, 777, 1024):
        x = draw(4096, columns, device=device, dtype=dtype)
        w, b = (draw(columns, device=device, dtype=dtype, seed=s) for s in (1, 2))
        assert_invariant(matmuls.softmax_, x, rows=few)
        assert_invariant(along_dim_0, x, rows=few)
        assert_invariant(lambda a, w=w, b=b: matmuls.layer_norm_(a, w, b), x, rows=few)
        assert_invariant(lambda a, w=w: matmuls.rms_norm_(a, w), x, rows=few)
        mask = draw(4096, columns, device=device, dtype=torch.float32, seed=3) < 1

        def masked(a, mask):
            return matmuls.scaled_masked_softmax(a[:, None, None], mask[:, None, None], 0.3)

        assert_invariant(masked, x, mask, rows=few)


@every_dtype
@pytest.mark.parametrize("planned", [False, True])
def test_masked_linear(device, dtype, planned):
    """With a plan of one row, the host knows that all rows belong to one expert."""
    few = ROWS[::20]
    for n, k in shapes(device)[-6:]:
        x, w, bias = operands(n, k, device, dtype)
        mask = torch.arange(4096, device=device) % 3 > 0

        def product(a, mask, w=w, c=bias):
            return matmuls.masked_linear(a, w, -w.flip(0), matmuls.mask_plan(mask) if planned else mask, c, c)

        assert_invariant(product, x, mask, rows=few)


def test_results_are_as_accurate_as_torch(device):
    for n, k in SHAPES:
        x, w, bias = operands(n, k, device, torch.float32)
        exact = F.linear(x.double(), w.double(), bias.double())
        with matmuls.handles(batch_invariant=True):
            y = matmuls.matmul(x, w, transb=True, bias=bias)
        assert (y - exact).abs().max() <= 1e-6 * k**0.5 * exact.abs().max()


def test_the_scope_ends_and_counts_for_all_threads():
    assert not custom_mm._C.is_batch_invariant()
    with matmuls.handles(batch_invariant=True), matmuls.handles(), matmuls.handles(batch_invariant=True):
        found = []
        thread = threading.Thread(target=lambda: found.append(custom_mm._C.is_batch_invariant()))
        thread.start(), thread.join()
        assert found == [True]
    assert not custom_mm._C.is_batch_invariant()
    with pytest.raises(ZeroDivisionError), matmuls.handles(batch_invariant=True):
        raise ZeroDivisionError
    assert not custom_mm._C.is_batch_invariant()


def test_complex_numbers_on_a_cpu_are_refused():
    a = torch.ones(2, 2, dtype=torch.complex64)
    with (
        matmuls.handles(batch_invariant=True),
        pytest.raises(RuntimeError, match=r"matmul: expected a floating-point dtype under handles\(batch_invariant=Tr"),
    ):
        matmuls.matmul(a, a)


@pytest.mark.cuda
def test_the_product_in_place_takes_no_kernel_that_is_chosen_by_the_number_of_rows():
    a = torch.ones(4096, 1024, dtype=torch.bfloat16, device="cuda")
    b = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    with matmuls.handles(batch_invariant=True):
        assert custom_mm.explain("matmul_", a, b).kernel == "workspace"
