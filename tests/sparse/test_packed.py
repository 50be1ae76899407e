"""Packed matrices and their products (layout: src/sparse/spmm/packed_mma/layout.h): positions of the numbers,
results.
"""

from types import SimpleNamespace

import pytest
import torch

from common import layout_references
from matmuls import plan
from matmuls.device import H200, has_hopper_kernels
from matmuls.nn import SparseLinear
from matmuls.sparse import layouts, select, selector
from matmuls.sparse.costs import us_packed_mma
from matmuls.sparse.packed_mma import HEADS, PAIRS, expected_units

_ops = torch.ops.custom_mm
DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [
    (64, 64, 0.5),
    (1, 1, 1.0),
    (1, 8, 1.0),
    (130, 72, 0.3),
    (300, 513, 0.1),  # columns not a multiple of 8: row kernel
    (300, 520, 0.1),
    (70, 904, 0.02),
    (65, 264, 1.0),
    (9, 40, 0.0),
]


def draw(rows, columns, density, device, dtype=torch.float16, index=torch.int32):
    generator = torch.Generator().manual_seed(rows + columns)
    dense = torch.randn(rows, columns, generator=generator)
    dense *= torch.rand(rows, columns, generator=generator) < density
    dense = dense.to(dtype).to(device)
    a = dense.to_sparse_csr()
    return dense, a.crow_indices().to(index), a.col_indices().to(index), a.values()


def pack(crow, col, values, columns, order=None, in_order=False):
    units = int(_ops.csr_packed_units(crow, col, columns, in_order).item())
    assert units == layout_references.packed_units(crow.cpu(), col.cpu(), columns, in_order).item()
    return _ops.csr_packed(crow, col, values, columns, units, order, in_order)


def multiply(packed, crow, col, values, b):
    return _ops.csr_spmm_packed(packed, crow, col, values, b, b.shape[0])


def truth_of(dense, b):
    """The product, and that of the absolute values; on the CPU, because racecheck makes cuBLAS a hundred times
    slower.
    """
    dense, b = dense.cpu().double(), b.cpu().double()
    return torch.stack((dense @ b, dense.abs() @ b.abs()))


def assert_within(result, truth, bias=None):
    """Each element within a rounding of its dtype and four float32 roundings of the sum of its terms' magnitudes. The
    row kernel rounds the product before it adds the bias.
    """
    truth, size = truth
    rounded = truth.abs()
    if bias is not None:
        bias = bias.cpu().double()[:, None]
        truth, size = truth + bias, size + bias.abs()
        rounded += truth.abs()
    error = (result.cpu().double() - truth).abs() - 2.0**-21 * size
    assert (error <= torch.finfo(result.dtype).eps / 2 * rounded + 2.0**-24).all()


def assert_right(result, dense, b):
    assert_within(result, truth_of(dense, b))


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "columns", "density"), SHAPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_order", [False, True])
def test_every_nonzero_lies_where_its_lane_reads_it(rows, columns, density, index, dtype, in_order):
    dense, crow, col, values = draw(rows, columns, density, "cuda", dtype, index)
    packed = pack(crow, col, values, columns, in_order=in_order).cpu()
    down, across = -(-rows // 256) * 4, -(-columns // 256) * 4
    assert packed.shape[0] == down * across
    bits, numbers = packed.view(torch.int32), packed[:, HEADS // 2 :].reshape(down * across, -1, 2)
    found, most = torch.zeros(down * 64, across * 64, dtype=dtype), 0
    for tile in range(down * across):
        first_row, first_column = tile // across * 64, tile % across * 64
        heads = bits[tile, : HEADS // 4].tolist()
        before = 0
        for lane, head in enumerate(heads):
            assert (head >> 16) & 0xFFFF == 4 * before
            row = first_row + lane // 32 * 16 + lane % 32 // 4
            for pair in (pair for pair in range(16) if head >> pair & 1):
                r, step, place = row + pair % 2 * 8, pair // 4, pair // 2 % 2 * 8 + lane % 4 * 2
                for side in range(2):
                    p = place + side
                    c = 16 * step + p if in_order else 8 * (p % 8) + step + p // 8 * 4
                    found[r, first_column + c] = numbers[tile, before, side]
                before += 1
        most = max(most, before)
        assert not numbers[tile, before:].any()
    assert torch.equal(found[:rows, :columns], dense.cpu())
    assert not found[rows:].any()
    assert not found[:, columns:].any()
    assert packed.shape[1] == -(-(HEADS + 4 * most) // 16) * 8


@pytest.mark.cuda
def test_values_with_a_permutation():
    _, crow, col, values = draw(130, 200, 0.3, "cuda")
    order = torch.randperm(values.numel()).int().to("cuda")
    straight, ordered = pack(crow, col, values[order], 200), pack(crow, col, values, 200, order)
    assert torch.equal(straight.view(torch.int32), ordered.view(torch.int32))  # as integers, because headers may be NaN


@pytest.mark.cuda
def test_a_too_small_tile_is_not_overrun():
    _, crow, col, values = draw(64, 64, 1.0, "cuda")
    packed = _ops.csr_packed(crow, col, values, 64, HEADS // 16 + 1)
    assert packed.shape == (16, HEADS // 2 + 8)
    assert torch.equal(packed[0, HEADS // 2 :], pack(crow, col, values, 64)[0, HEADS // 2 : HEADS // 2 + 8])


@pytest.mark.cuda
def test_mismatched_operands_raise():
    _, crow, col, values = draw(64, 64, 0.5, "cuda")
    with pytest.raises(ValueError, match="csr_packed: expected at most 32768 columns"):
        _ops.csr_packed_units(crow, col, 32769)
    with pytest.raises(ValueError, match=r"csr_packed: expected .* values in Half or BFloat16"):
        _ops.csr_packed(crow, col, values.float(), 64, 100)
    with pytest.raises(ValueError, match=r"csr_packed: expected .* values in Half or BFloat16"):
        _ops.csr_packed(crow, col, values[1:], 64, 100)
    for units in (0, 31, 545):
        with pytest.raises(ValueError, match=f"expected tiles of 32 to 544 units, got {units}"):
            _ops.csr_packed(crow, col, values, 64, units)
    if has_hopper_kernels(torch.device("cuda")):
        packed, b = pack(crow, col, values, 64), torch.randn(64, 8, device="cuda").half()
        for bad in (packed[1:], packed.bfloat16(), packed[:, 1:], packed.cpu()):
            with pytest.raises(ValueError, match="spmm: expected what csr_packed made of this matrix"):
                multiply(bad, crow, col, values, b)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "columns", "density"), [*SHAPES, (2048, 4096, 0.2), (700, 136, 0.05), (4096, 768, 0.1), (513, 9000, 0.3)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(rows, columns, density, dtype):
    dense, crow, col, values = draw(rows, columns, density, "cuda", dtype)
    packed = pack(crow, col, values, columns)
    wide = torch.randn(columns, 200, device="cuda").to(dtype)
    truth = truth_of(dense, wide)
    for n in (8, 16, 24, 32, 40, 64, 72, 128, 200):
        b = wide[:, :n].contiguous()
        torch.empty(rows * n, device="cuda", dtype=dtype).fill_(torch.nan)  # memory that the result may reuse
        result = multiply(packed, crow, col, values, b)
        assert_within(result, truth[..., :n])
        assert all(torch.equal(multiply(packed, crow, col, values, b), result) for _ in range(3))
    # the last two are not 16-byte aligned: row kernel
    for begin, end in ((8, 16), (8, 24), (8, 40), (8, 72), (1, 65), (0, 7)):
        assert_within(multiply(packed, crow, col, values, wide[:, begin:end]), truth[..., begin:end])
    assert_within(multiply(packed, crow, col, values, wide[:, :32].mT.contiguous().mT), truth[..., :32])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "columns", "density"),
    [
        (64, 64, 0.5),
        (8, 8, 1.0),
        (136, 72, 0.3),
        (300, 520, 0.1),  # rows not a multiple of 8: row kernel
        (72, 904, 0.02),
        (2048, 4096, 0.2),
        (704, 136, 0.05),
        (4096, 768, 0.1),
        (520, 9000, 0.3),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(rows, columns, density, dtype):
    dense, crow, col, values = draw(rows, columns, density, "cuda", dtype)
    packed, bias = pack(crow, col, values, columns, in_order=True), torch.randn(rows, device="cuda").to(dtype)
    wide = torch.randn(200, 2 * columns, device="cuda").to(dtype)
    for all_of_x in (wide[:, :columns].contiguous(), wide[:, columns:], wide[:, ::2]):  # the last one is copied
        truth = truth_of(dense, all_of_x.mT)
        for n in (1, 3, 8, 13, 16, 32, 40, 64, 72, 128, 200):
            x = all_of_x[:n]
            torch.empty(rows * n, device="cuda", dtype=dtype).fill_(torch.nan)  # memory that the result may reuse
            y = _ops.csr_linear_packed(packed, crow, col, values, x, columns)
            assert y.is_contiguous()
            assert_within(y.mT, truth[..., :n])
            assert all(torch.equal(_ops.csr_linear_packed(packed, crow, col, values, x, columns), y) for _ in range(2))
            y = _ops.csr_linear_packed(packed, crow, col, values, x, columns, None, -1, bias)
            assert_within(y.mT, truth[..., :n], bias)


@pytest.mark.parametrize("fastest", [select.PACKED_MMA_LINEAR, select.DENSE])
@pytest.mark.usefixtures("layouts_on_cpu")
def test_linear_layers_take_it(fastest, monkeypatch, device):
    """A SparseLinear takes what its size says, without a gradient, in a graph too."""
    if device == "cuda" and not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("Hopper's")
    layer = SparseLinear.from_linear(torch.nn.Linear(1024, 768), sparsity=0.9).half().to(device).freeze()
    taken, form = [], layouts.PackedMmaLinear if fastest == select.PACKED_MMA_LINEAR else layouts.Dense
    made = form._call
    monkeypatch.setattr(form, "_call", lambda *args: taken.append(1) or made(*args))
    monkeypatch.setattr(selector.Selector, "_linear_of", lambda *_: fastest)
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [])
    weight = layer.weight.to_dense()
    for n in (1, 8, 33):
        x = torch.randn(2, n, 1024, device=device).half()
        with torch.no_grad():
            y = layer(x)
        truth = torch.nn.functional.linear(x.double(), weight.double(), layer.bias.double())
        torch.testing.assert_close(y.double(), truth, atol=2e-3, rtol=2e-3)
        assert len(taken) == 1
        taken.clear()
        with_gradient = layer(x.clone().requires_grad_())
        torch.testing.assert_close(with_gradient.double(), truth, atol=2e-3, rtol=2e-3)
        assert not taken
    assert f"float16, 65 to 72 rows of a linear layer: {fastest}" in layer.plan().explain()
    with torch.no_grad():
        assert layer(x[:, :0]).shape == (2, 0, 768)
        layer.values.mul_(2)
        torch.testing.assert_close(layer(x).double(), 2 * truth - layer.bias.double(), atol=4e-3, rtol=2e-3)
        assert taken.pop()
        assert torch.equal(layer(x), layer(x))
        assert not taken  # the prepared call of before
        layer.plan().update(layer.values)
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
        assert taken.pop()
        assert not taken
        layer.bias.add_(1)
        torch.testing.assert_close(layer(x).double(), 2 * truth + 2 - layer.bias.double(), atol=4e-3, rtol=2e-3)
        layer.bias = torch.nn.Parameter(layer.bias - 1)
        torch.testing.assert_close(layer(x).double(), 2 * truth - layer.bias.double(), atol=4e-3, rtol=2e-3)
        plan(layer.weight).update(layer.values)
        layer.plan().update(layer.values / 2)
        layer.plan()  # copies its own values again
        torch.testing.assert_close(layer(x).double(), 2 * truth - layer.bias.double(), atol=4e-3, rtol=2e-3)
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            graph.replay()
            assert torch.equal(y, layer(x))


@pytest.mark.cuda
def test_non_finite_values_stay_in_their_column():
    dense, crow, col, values = draw(200, 104, 0.5, "cuda")
    packed = pack(crow, col, values, 104)
    for n in (8, 16, 32, 64):
        b = torch.randn(104, n, device="cuda").half()
        b[7, 3], b[50, 4], b[103, 7] = torch.nan, torch.inf, -torch.inf
        result = multiply(packed, crow, col, values, b)
        for row, column in ((7, 3), (50, 4), (103, 7)):
            assert not result[dense[:, row] != 0, column].isfinite().any()
        others = [c for c in range(n) if c not in (3, 4, 7)]
        assert result[:, others].isfinite().all()


@pytest.mark.cuda
def test_gradients_equal_the_row_kernels():
    dense, crow, col, values = draw(50, 64, 0.3, "cuda")
    packed = pack(crow, col, values, 64)
    values, b = values.clone().requires_grad_(), torch.randn(64, 32, device="cuda").half().requires_grad_()
    grad = torch.randn(50, 32, device="cuda").half()
    to_values, to_b = torch.autograd.grad(multiply(packed, crow, col, values, b), (values, b), grad)
    torch.testing.assert_close(to_b.float(), dense.float().mT @ grad.float(), atol=2e-2, rtol=2e-3)
    expected = (grad.float() @ b.detach().float().mT)[dense != 0]
    torch.testing.assert_close(to_values.float(), expected, atol=2e-2, rtol=2e-3)


def test_estimates():
    """They grow with the nonzeros and the columns of B; tiles of uniformly random matrices have the expected size."""
    sizes = []
    for density in (0.05, 0.2, 0.5, 1.0):
        _, crow, col, values = draw(512, 512, density, "cpu")
        s = plan(torch.sparse_csr_tensor(crow, col, values, (512, 512)))._pattern
        expected = expected_units(s)
        assert 0.95 * expected < int(layout_references.packed_units(crow, col, 512)) <= expected
        assert expected <= (HEADS + 4 * PAIRS) // 16
        times = [us_packed_mma(s, n) for n in (8, 64, 128, 256, 512)]
        assert times == sorted(times)
        sizes.append(times[1])
    assert sizes == sorted(sizes)


@pytest.fixture
def packed_wins(monkeypatch, device):
    if device == "cuda" and not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("Hopper's")
    monkeypatch.setattr(selector, "SMALLEST", 0)
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.PACKED_MMA])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {select.DEFAULT: 1.0, select.PACKED_MMA: 1e-6})


@pytest.mark.usefixtures("layouts_on_cpu")
def test_a_plan_follows_its_values(packed_wins, device):
    dense, crow, col, values = draw(300, 400, 0.2, device)
    made = plan(torch.sparse_csr_tensor(crow, col, values, dense.shape), constant=True)
    b = torch.randn(400, 32, device=device).half()
    assert_right(made @ b, dense, b)
    assert select.PACKED_MMA in made.explain()
    made.update(2 * values)
    assert_right(made @ b, 2 * dense, b)
    assert made.nbytes >= made._selector._made(select.PACKED_MMA).tensors[0].nbytes


@pytest.mark.cuda
def test_graphs_see_changed_values(packed_wins):
    dense, crow, col, values = draw(1500, 800, 0.1, "cuda")
    made = plan(torch.sparse_csr_tensor(crow, col, values, dense.shape), constant=True)
    for n in (32, 128):
        b = torch.randn(800, n, device="cuda").half()
        made.update(values)
        made @ b
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made @ b
        for factor in (1, 2):
            made.update(factor * values)
            graph.replay()
            assert_right(y, factor * dense, b)
            first = y.clone()
            for _ in range(100):
                graph.replay()
                assert torch.equal(y, first)


@pytest.mark.usefixtures("layouts_on_cpu")
def test_uneven_matrices_are_refused(device):
    """With all nonzeros in few tiles, the padding of the others would be loaded for nothing."""
    dense = torch.zeros(1024, 1024, device=device, dtype=torch.float16)
    for i in range(0, 1024, 64):
        dense[i : i + 64, i : i + 64] = 1
    a = dense.to_sparse_csr()
    made = plan(a)
    with pytest.raises(RuntimeError, match="expected nonzeros that lie anywhere"):
        made._selector._made(select.PACKED_MMA).call(
            made.values, torch.ones(1024, 8, device=device).half(), torch.float16
        )


def test_when_packing_is_chosen(monkeypatch):
    """In 16 bits for few columns of B; for many, if reading A limits the product; never without 16-byte alignment."""

    monkeypatch.setattr(select, "memory", lambda device: H200)
    kernels = {select.DEFAULT: select.BY_ROWS} | {k: k for k in (select.DENSE, select.SPARSE24, select.PACKED_MMA)}

    def fastest(rows, columns, share, n):
        nonzeros = int(rows * columns * share)
        s = SimpleNamespace(rows=rows, columns=columns, nonzeros=nonzeros, distinct=True, beyond_two=nonzeros // 10)
        facts = select.Facts(s, n, torch.float16, torch.device("cuda"))
        us = {name: select.BY_NAME[kernel].microseconds(facts) for name, kernel in kernels.items()}
        return min(us, key=us.get)

    for share in (0.05, 0.1, 0.2):
        assert [fastest(4096, 4096, share, n) for n in (8, 32, 128)] == [
            select.PACKED_MMA,
            select.PACKED_MMA,
            select.DENSE,
        ]
        assert fastest(8192, 8192, share, 64) == select.PACKED_MMA
    assert fastest(4096, 4096, 0.01, 32) == select.DEFAULT
    assert fastest(4096, 4100, 0.1, 32) == select.DENSE


def test_what_a_linear_layer_takes(monkeypatch):
    monkeypatch.setattr(select, "has_hopper_kernels", lambda _: True)
    monkeypatch.setattr(select, "memory", lambda _: H200)

    def fastest(rows, columns, share, n):
        nonzeros = int(rows * columns * share)
        s = SimpleNamespace(rows=rows, columns=columns, nonzeros=nonzeros, distinct=True, beyond_two=nonzeros // 10)
        s.longest = nonzeros // rows
        return selector.Selector(s, constant=True)._linear_of(n, torch.device("cuda"))

    for n in (8, 16, 32):
        assert fastest(4096, 4096, 0.1, n) == select.PACKED_MMA_LINEAR
    assert fastest(4096, 4096, 0.1, 128) == select.DENSE
    assert fastest(4100, 4096, 0.1, 8) == select.DENSE
    assert fastest(4096, 4100, 0.1, 8) == select.DENSE
    assert fastest(256, 4096, 0.1, 8) == select.DEFAULT  # of so few rows sizes say little


@pytest.mark.usefixtures("layouts_on_cpu")
def test_dense_if_packing_is_refused(monkeypatch, device):
    """All nonzeros lie in few tiles, which estimates do not know."""
    dense = torch.zeros(1024, 1024, device=device, dtype=torch.float16)
    for i in range(0, 1024, 64):
        dense[i : i + 64, i : i + 64] = 1
    made = plan(dense.to_sparse_csr(), constant=True)
    monkeypatch.setattr(selector, "SMALLEST", 0)
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.PACKED_MMA, select.DENSE])
    estimated = {select.DEFAULT: 3.0, select.PACKED_MMA: 1.0, select.DENSE: 2.0}
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: dict(estimated))
    b = torch.randn(1024, 32, device=device).half()
    assert_right(made @ b, dense, b)
    assert f"{select.DENSE}, by its size alone" in made.explain()
