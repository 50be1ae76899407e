"""Products read a matrix's current values, however they were written, unless the values were declared constant."""

import copy
import pickle

import pytest
import torch
from torch import nn

from matmuls import plan, timing
from matmuls.nn import SparseLinear
from matmuls.sparse import layouts, race, selector

ROWS, COLUMNS, WIDTH = 96, 80, 128


@pytest.fixture(autouse=True)
def copies_win(monkeypatch):
    """Layouts that keep a copy of the values are chosen whenever allowed."""
    monkeypatch.setattr(
        race, "time_warm", lambda runs, *_: [timing.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))]
    )
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {})
    monkeypatch.setattr(selector, "SMALLEST", 0)


def draw(device, dtype=torch.float32):
    dense = torch.randn(ROWS, COLUMNS) * (torch.rand(ROWS, COLUMNS) < 0.5)
    return dense.to(dtype).to(device), torch.randn(COLUMNS, WIDTH, dtype=dtype, device=device)


def uncoalesced(dense):
    """Two entries per position, which sum to the matrix."""
    half = (0.5 * dense).to_sparse()
    indices, values = half.indices(), half.values()
    return torch.sparse_coo_tensor(torch.cat([indices, indices], 1), torch.cat([values, values]), dense.shape)


def strided_blocks(dense):
    """BSR with non-contiguous values."""
    a = dense.to_sparse_bsr((16, 16))
    values = a.values().mT.contiguous().mT
    return torch.sparse_bsr_tensor(a.crow_indices(), a.col_indices(), values, a.shape)


def copies(made):
    """What a plan keeps in layouts of its own, values included."""
    return [
        t for form in made._selector._products.values() if isinstance(form, layouts.CachedLayout) for t in form.tensors
    ]


LAYOUTS = {
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "coo": lambda dense: dense.to_sparse(),
    "uncoalesced coo": uncoalesced,
    "bsr": lambda dense: dense.to_sparse_bsr((16, 16)),
    "bsr with strides": strided_blocks,
}


def values_in(a):
    return a._values() if a.layout == torch.sparse_coo else a.detach().values()


def preserving_the_version(values):
    """Write without a version change, as FSDP2 does when it gathers a parameter."""
    with torch.autograd._unsafe_preserve_version_counter(values):
        values.mul_(3)


WRITES = {
    "counted": lambda values: values.mul_(3),
    "through .data": lambda values: values.data.mul_(3),
    "with the version preserved": preserving_the_version,
    "through the memory": lambda values: (
        torch.empty(0, dtype=values.dtype, device=values.device)
        .set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
        .mul_(3)
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_after_a_write_to_its_matrix(layout, write, device):
    dense, b = draw(device)
    a = LAYOUTS[layout](dense)
    made = plan(a)
    for _ in range(2):
        torch.testing.assert_close(made @ b, dense @ b, atol=1e-4, rtol=1e-4)
    WRITES[write](values_in(a))
    for _ in range(2):
        torch.testing.assert_close(made @ b, 3 * dense @ b, atol=3e-4, rtol=1e-4)


def test_a_plan_after_its_matrix_was_replaced(device):
    dense, b = draw(device)
    a = dense.to_sparse()
    made = plan(a)
    made @ b
    made @ b
    a.data = (3 * dense).to_sparse()
    for _ in range(2):
        torch.testing.assert_close(made @ b, 3 * dense @ b, atol=3e-4, rtol=1e-4)
    a.data = dense.flip(0).to_sparse()
    with pytest.raises(ValueError, match="expected the indices that the plan was made of"):
        made @ b


@pytest.mark.parametrize("write", [*WRITES, "another tensor in .data"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_after_a_write_to_its_values(write, dtype, device):
    """As trainers do to evaluate with averaged weights: p.data.copy_(ema), and back."""
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(COLUMNS, ROWS, device=device, dtype=dtype), sparsity=0.5)
    x = torch.randn(WIDTH, COLUMNS, device=device).to(dtype)
    if write == "another tensor in .data":

        def change(values):
            values.data = 3 * values.data
    else:
        change = WRITES[write]
    with torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                truth = nn.functional.linear(x.double(), layer.weight.to_dense().double(), layer.bias.double())
                torch.testing.assert_close(
                    layer(x).double(), truth, atol=0.5 if dtype.itemsize == 2 else 1e-4, rtol=1e-2
                )
            change(layer.values)


@pytest.mark.parametrize("kind", ["plan", "layer"])
def test_a_fused_optimizer_between_products_without_a_gradient(kind, device):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(COLUMNS, ROWS, device=device), sparsity=0.5)
    x = torch.randn(WIDTH, COLUMNS, device=device)
    matrix = plan(layer.weight).update(layer.values)
    product = layer if kind == "layer" else lambda x: (matrix @ x.mT).mT + layer.bias
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    for _ in range(3):
        with torch.no_grad():
            for _ in range(2):
                truth = nn.functional.linear(x, layer.weight.to_dense(), layer.bias)
                torch.testing.assert_close(product(x), truth, atol=1e-4, rtol=1e-4)
        optimizer.zero_grad()
        product(x).square().mean().backward()
        with torch.no_grad():
            product(x)
        optimizer.step()


def test_a_constant_plan_sees_version_changes_and_update(device):
    for layout in ("csr", "csc", "coo", "uncoalesced coo", "bsr with strides"):
        dense, b = draw(device)
        a = LAYOUTS[layout](dense)
        made = plan(a, constant=True)
        for _ in range(2):
            torch.testing.assert_close(made @ b, dense @ b, atol=1e-4, rtol=1e-4)
        assert copies(made), "a copy is kept"
        a.mul_(2) if layout == "uncoalesced coo" else values_in(a).mul_(2)
        for _ in range(2):
            torch.testing.assert_close(made @ b, 2 * dense @ b, atol=3e-4, rtol=1e-4)
        values = made.values.clone()
        made.update(values)
        values.data.mul_(2)
        made.update(values)
        for _ in range(2):
            torch.testing.assert_close(made @ b, 4 * dense @ b, atol=5e-4, rtol=1e-4)


def test_the_meaning_of_constant(device):
    dense, b = draw(device)
    a = dense.to_sparse_csr()
    with pytest.raises(TypeError, match="expected constant to be True or False, got 1"):
        plan(a, constant=1)
    with pytest.raises(ValueError, match="plan: expected values without a gradient for constant=True"):
        plan(dense.to_sparse_csr().requires_grad_(), constant=True)
    made = plan(a)
    made @ b
    assert not copies(made)
    assert plan(made, constant=True) is made
    torch.testing.assert_close(made @ b, dense @ b, atol=1e-4, rtol=1e-4)
    assert copies(made)
    with pytest.raises(ValueError, match="expected constant=True for a constant plan, got False"):
        plan(made, constant=False)
    with pytest.raises(ValueError, match="expected values without a gradient in a constant plan"):
        made.update(made.values.clone().requires_grad_())
    assert plan(made)._selector.constant
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied._selector.constant
        torch.testing.assert_close(copied @ b, dense @ b, atol=1e-4, rtol=1e-4)
    passing = made.with_values((2 * made.values).requires_grad_())
    assert not passing._selector.constant
    torch.testing.assert_close((passing @ b).detach(), 2 * dense @ b, atol=2e-4, rtol=1e-4)
    assert made.with_values(made.values)._selector is passing._selector


def test_replaced_copies_live_until_the_next_change(device):
    """Another thread's product may still read the copy of the old values."""
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    sizes = []
    for factor in (2, 4, 8):
        made @ b
        sizes.append(made.nbytes)
        made.update(factor * made.values)
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_frozen_layer(device):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(COLUMNS, ROWS, device=device), sparsity=0.5)
    x = torch.randn(WIDTH, COLUMNS, device=device)

    def expect():
        truth = nn.functional.linear(x, layer.weight.to_dense(), layer.bias)
        torch.testing.assert_close(layer(x), truth, atol=1e-4, rtol=1e-4)

    with torch.no_grad():
        expect()
    assert not copies(layer.plan())
    assert layer.freeze() is layer
    assert not layer.values.requires_grad
    assert not layer.bias.requires_grad
    assert "frozen" in repr(layer)
    expect()
    assert copies(layer.plan())
    layer.values.mul_(2)  # increases the version
    expect()
    layer.load_state_dict({name: 2 * t if t.is_floating_point() else t for name, t in layer.state_dict().items()})
    expect()
    layer.values.data.mul_(2)
    layer.freeze()
    expect()
    loaded = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(loaded(x), layer(x))
    assert loaded.plan()._selector.constant
    layer.values.requires_grad_()  # about to be trained
    layer(x).sum().backward()
    assert not layer.plan()._selector.constant
    with torch.no_grad():
        layer.values.data.mul_(2)
        expect()
    assert layer.freeze().unfreeze().values.requires_grad
    assert "frozen" not in repr(layer)
    layer(x).sum().backward()


@pytest.mark.cuda
def test_a_graph_that_replays_an_optimizer():
    """Eager products after each replay read the new values, though the version counter did not change."""
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(COLUMNS, ROWS, device="cuda"), sparsity=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(WIDTH, COLUMNS, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        layer(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
            graph.replay()
            truth = nn.functional.linear(x, layer.weight.to_dense(), layer.bias)
            torch.testing.assert_close(layer(x), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_a_graph_keeps_the_memory_that_a_layer_drops():
    """A captured product of a frozen layer reads memory that stays allocated after unfreeze()."""
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(COLUMNS, ROWS, device="cuda"), sparsity=0.5).freeze()
    x = torch.randn(WIDTH, COLUMNS, device="cuda")
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer.unfreeze()
    torch.cuda.empty_cache()
    garbage = [torch.full((ROWS, COLUMNS), torch.nan, device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(y, expected)
    del garbage


@pytest.mark.cuda
@pytest.mark.parametrize("constant", [False, True])
def test_plans_while_another_thread_captures(constant):
    """torch's default capture mode forbids event queries and allocations in other threads."""
    import threading

    dense, b = draw("cuda")
    a = dense.to_sparse_csr()
    plan(a, constant=constant) @ b
    began, may_end, failures = threading.Event(), threading.Event(), []
    x = torch.ones(8, device="cuda")

    def capture():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
                y = x + 1
                began.set()
                may_end.wait(60)
                y += 1
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, x + 2)
        except Exception as error:
            failures.append(error)
        finally:
            began.set()

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait(60)
    try:
        made = plan(a, constant=constant)
        y = made @ b
        made.update(2 * made.values)
        z = made @ b
    finally:
        may_end.set()
        thread.join()
    assert not failures
    torch.testing.assert_close(y, dense @ b, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(z, 2 * dense @ b, atol=2e-4, rtol=1e-4)
