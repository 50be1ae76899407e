"""Products with part of B in shared memory ("tiles"): the layout of the matrix, and results."""

import pytest
import torch

from matmuls import plan
from matmuls.device import has_hopper_kernels
from matmuls.sparse import select, selector

_ops = torch.ops.custom_mm
# Rows, columns, density; then tiles, panels, lanes.
LAID_OUT = [
    (50, 64, 0.3, (2, 3, 4)),
    (33, 60, 0.2, (1, 5, 16)),
    (70, 100, 0.1, (4, 1, 2)),
    (40, 40, 0.01, (1, 1, 8)),
    (7, 9, 0.5, (2, 7, 2)),
    (300, 500, 0.05, (3, 7, 4)),
]


def draw(rows, columns, density, device):
    """A random matrix with an empty row and a full one: dense, offsets, columns and values."""
    dense = torch.randn(rows, columns) * (torch.rand(rows, columns) < density)
    dense[rows // 3] = 0
    dense[rows // 2] = torch.randn(columns)
    a = dense.to(device).to_sparse_csr()
    return dense.to(device), a.crow_indices().int(), a.col_indices().int(), a.values()


def lay_out(crow, col, values, columns, layout, order=None):
    """heads, slots, places and values, as csr_spmm_tiles takes them."""
    tiles, panels, lanes = layout
    heads, slots = _ops.csr_tiles(crow, col, columns, tiles, panels, lanes)
    first, _, until, _ = heads.view(-1, 4)[-1].tolist()
    steps = first + (until >> 16)
    entries = _ops.csr_tile_entries(heads, slots, crow, col, values, columns, lanes, steps, order)
    return heads, slots, *entries


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "columns", "density", "layout"), LAID_OUT, ids=str)
def test_every_nonzero_lies_where_its_step_reads_it(rows, columns, density, layout):
    dense, crow, col, values = draw(rows, columns, density, "cuda")
    tiles, panels, lanes = layout
    heads, slots, places, packed = (t.cpu() for t in lay_out(crow, col, values, columns, layout))
    of_slice, tile_rows, panel_rows = 32 // lanes, -(-columns // (4 * tiles)) * 4, -(-rows // panels)
    found = torch.zeros(rows, tiles * tile_rows)
    step, nonzeros = 0, 0
    for tile, panel, slice_ in torch.cartesian_prod(*(torch.arange(n) for n in heads.shape[:3])).tolist():
        first, low, high, _ = heads[tile, panel, slice_].tolist()
        until = [low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16]
        assert first == step
        assert until == sorted(until)
        step += until[3]
        own = slice(first * 64, step * 64)
        place = places[own].view(-1, of_slice, lanes * 2)
        value = packed[own].view(-1, of_slice, lanes * 2)
        for quarter, last in enumerate(until):
            there = place[:last][place[:last] < tile_rows]
            assert (there < (quarter + 1) * tile_rows // 4).all()
        assert (value[place == tile_rows] == 0).all()
        row = slots[tile, panel, slice_ * of_slice :][:of_slice, 0]
        for r in range(of_slice):
            is_there = place[:, r] < tile_rows
            nonzeros += int(is_there.sum())
            if row[r] < 0:
                assert not is_there.any()
            else:
                at = panel * panel_rows + int(row[r])
                found[at, tile * tile_rows + place[:, r][is_there].long()] = value[:, r][is_there]
    assert torch.equal(found[:, :columns], dense.cpu())
    assert nonzeros == values.numel()
    assert places.numel() == packed.numel() == (step + 1) * 64


@pytest.mark.cuda
def test_values_with_a_permutation():
    _, crow, col, values = draw(50, 64, 0.3, "cuda")
    order = torch.randperm(values.numel()).int().to("cuda")
    straight = lay_out(crow, col, values[order], 64, (2, 3, 4))
    assert all(
        torch.equal(x, y) for x, y in zip(straight, lay_out(crow, col, values, 64, (2, 3, 4), order), strict=True)
    )


@pytest.mark.cuda
def test_mismatched_operands_raise():
    _, crow, col, values = draw(50, 64, 0.3, "cuda")
    for bad in ((0, 3, 4), (9, 3, 4), (2, 51, 4), (2, 3, 5)):
        with pytest.raises(ValueError, match="csr_tiles: expected rows, columns, 1 to 8 tiles"):
            _ops.csr_tiles(crow, col, 64, *bad)
    with pytest.raises(ValueError, match="csr_tiles: expected tiles of 1024 columns"):
        _ops.csr_tiles(crow, col, 4097, 4, 3, 4)
    with pytest.raises(ValueError, match="crow and col in Int"):
        _ops.csr_tiles(crow.long(), col.long(), 64, 2, 3, 4)
    heads, slots = _ops.csr_tiles(crow, col, 64, 2, 3, 4)
    with pytest.raises(ValueError, match="expected what csr_tiles made of this matrix"):
        _ops.csr_tile_entries(heads, slots[:, :, 1:], crow, col, values, 64, 4, 100)


def multiply(parts, crow, col, values, b, layout):
    return _ops.csr_spmm_tiles(*parts, crow, col, values, b, b.shape[0], layout[2])


def assert_right(result, dense, b):
    """Each element within four roundings of the sum of its terms' magnitudes."""
    truth, size = dense.double() @ b.double(), dense.double().abs() @ b.double().abs()
    assert ((result.double() - truth).abs() <= 2**-21 * size).all()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "columns", "density", "layout"),
    [
        *LAID_OUT,
        (1000, 4000, 0.1, (4, 7, 4)),
        (1000, 4000, 0.02, (8, 3, 2)),
        (900, 700, 0.1, (1, 132, 16)),
        (900, 700, 0.3, (2, 30, 8)),
        (2000, 3000, 0.02, (3, 20, 2)),
    ],
    ids=str,
)
def test_products(rows, columns, density, layout):
    dense, crow, col, values = draw(rows, columns, density, "cuda")
    parts = lay_out(crow, col, values, columns, layout)
    for n in (4, 8, 24, 32, 40, 64, 100, 128, 512):
        b = torch.randn(columns, n, device="cuda")
        torch.empty(rows * n, device="cuda").fill_(torch.nan)  # memory that the result may reuse
        result = multiply(parts, crow, col, values, b, layout)
        assert_right(result, dense, b)
        assert all(torch.equal(multiply(parts, crow, col, values, b, layout), result) for _ in range(3))
    wide = torch.randn(columns, 200, device="cuda")
    for b in (wide[:, 8:72], wide[:, 1:65], wide[:, :7]):  # the last two are not 16-byte aligned: row kernel
        assert_right(multiply(parts, crow, col, values, b, layout), dense, b)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [(1, 3, 4), (2, 5, 2), (3, 1, 8)], ids=str)
def test_non_finite_values_stay_in_their_rows(layout):
    dense, crow, col, values = draw(200, 100, 0.05, "cuda")
    b = torch.randn(100, 32, device="cuda")
    b[7, 3], b[50, 4], b[0, 9], b[99, 10] = torch.nan, torch.inf, torch.nan, torch.inf
    result = multiply(lay_out(crow, col, values, 100, layout), crow, col, values, b, layout)
    for row, column in ((7, 3), (50, 4), (0, 9), (99, 10)):
        assert torch.equal(~result[:, column].isfinite(), dense[:, row] != 0)
    assert result.isfinite().sum() == result.numel() - sum(int((dense[:, r] != 0).sum()) for r in (7, 50, 0, 99))


@pytest.mark.cuda
def test_gradients_equal_the_row_kernels():
    dense, crow, col, values = draw(50, 64, 0.3, "cuda")
    parts = lay_out(crow, col, values, 64, (2, 3, 4))
    values, b = values.clone().requires_grad_(), torch.randn(64, 32, device="cuda", requires_grad=True)
    grad = torch.randn(50, 32, device="cuda")
    to_values, to_b = torch.autograd.grad(multiply(parts, crow, col, values, b, (2, 3, 4)), (values, b), grad)
    torch.testing.assert_close(to_b, dense.mT @ grad)
    torch.testing.assert_close(to_values, (grad @ b.detach().mT)[dense != 0])


@pytest.fixture
def tiles_win(monkeypatch):
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("tiles are Hopper's")
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *args: {select.DEFAULT: 1.0, select.SMEM_TILES: 1e-6})


@pytest.mark.cuda
def test_a_plan_follows_its_values(tiles_win):
    dense, crow, col, values = draw(1500, 800, 0.1, "cuda")
    made = plan(torch.sparse_csr_tensor(crow, col, values, dense.shape), constant=True)
    before = made.nbytes
    for n in (32, 128):
        b = torch.randn(800, n, device="cuda")
        first = made @ b
        assert_right(first, dense, b)
        assert select.SMEM_TILES in made.explain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = made @ b
        graph.replay()
        assert torch.equal(captured, first)
        made.update(values * 3)
        graph.replay()
        assert_right(captured, 3 * dense, b)
        assert_right(made @ b, 3 * dense, b)
        made.update(values)
    assert made.nbytes > before + 6 * values.numel()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):  # new values, not yet laid out in tiles
        captured = made.with_values(values * 2) @ b
    again.replay()
    assert_right(captured, 2 * dense, b)


@pytest.mark.cuda
def test_a_gradient_uses_the_row_kernel(tiles_win):
    dense, crow, col, values = draw(1500, 800, 0.1, "cuda")
    made = plan(torch.sparse_csr_tensor(crow, col, values, dense.shape), constant=True)
    b = torch.randn(800, 64, device="cuda", requires_grad=True)
    made @ b.detach()
    (made @ b).sum().backward()
    torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand_as(b), atol=1e-3, rtol=1e-4)
