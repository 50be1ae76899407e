"""Checkpoints of PyTorch Geometric's models: a recomputation takes the path that its forward pass took."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, nn

from matmuls.integrations import pyg
from matmuls.integrations.pyg import adjacency

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")
NODES, EDGES, WIDTH = 60, 300, 8
MODELS = {"gcn": nn.GCN, "sage": nn.GraphSAGE, "gin": nn.GIN, "gat": nn.GAT}


def drawn(seed, device):
    """Features and new edges, as a loader yields them."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(NODES, (2, EDGES), generator=g)
    return torch.randn(NODES, WIDTH, generator=g, dtype=torch.float64).to(device), edges.to(device)


def gradients(call, model, x, edges):
    model.zero_grad()
    y = call(x.requires_grad_(), edges)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def made(kind, device):
    torch.manual_seed(0)
    return MODELS[kind](WIDTH, 16, 3, 4).double().to(device)


def whole(model, reentrant):
    return lambda x, edges: checkpoint(model, x, edges, use_reentrant=reentrant)


def by_layers(model, reentrant):
    """A checkpoint for each layer: backward runs the last again first."""

    def call(x, edges):
        for layer in model.convs:
            x = checkpoint(layer, x, edges, use_reentrant=reentrant).relu()
        return x

    return call


def apart(model, reentrant):
    """Edges of their own in every forward pass: the recomputation makes them anew."""
    return lambda x, edges: checkpoint(lambda x, edges: model(x, edges.flip(0)), x, edges, use_reentrant=reentrant)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("where", [whole, by_layers, apart], ids=lambda where: where.__name__)
@pytest.mark.parametrize("patience", [0, 1, 4])
def test_steps_over_new_edges(kind, reentrant, where, patience, device):
    model = made(kind, device)
    twin = copy.deepcopy(model)
    for seed in range(4):
        x, edges = drawn(seed, device)
        for _ in range(2):
            expected = gradients(where(twin, reentrant) if where is not whole else twin, twin, x, edges)
            with pyg.enabled(patience):
                found = gradients(where(model, reentrant), model, x, edges)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_recomputation_is_no_further_sum(reentrant, device):
    model = made("sage", device)
    x, edges = drawn(0, device)
    left, products = {}, {}
    with pyg.enabled(patience=6):
        for step in range(4):
            gradients(whole(model, reentrant), model, x, edges)
            found = pyg.stats(reset=True)
            left[step], products[step] = sum(found.left.values()), sum(found.products.values())
    assert left == {0: 6, 1: 6, 2: 0, 3: 0}
    assert products == {0: 0, 1: 0, 2: 6, 3: 6}


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_a_recomputation_makes_no_plan_of_its_own(kind, reentrant, device, monkeypatch):
    """Also where it gets its edges as a detached tensor."""
    known = []
    adjacency_class = adjacency.Adjacency
    monkeypatch.setattr(adjacency, "Adjacency", lambda *args: known.append(args) or adjacency_class(*args))
    model = made(kind, device)
    x, edges = drawn(0, device)
    with pyg.enabled(patience=0):
        for _ in range(2):
            gradients(whole(model, reentrant), model, x, edges)
    assert len(known) == 1


def test_the_graph_keeps_its_way_until_its_backward_pass(device):
    """Two forward passes in flight: the second is asked for often enough, and must wait for the backward passes."""
    model = made("gcn", device)
    x, edges = drawn(0, device)
    x.requires_grad_()
    losses = []
    with pyg.enabled(patience=4):
        for _ in range(3):
            losses.append(checkpoint(model, x, edges, use_reentrant=False).square().sum())
        model(x, edges)  # not in a checkpoint: it may not change what the others find
        assert not pyg.stats(reset=True).products
        for loss in losses:
            loss.backward()
            assert not pyg.stats(reset=True).products
        checkpoint(model, x, edges, use_reentrant=False)
        assert pyg.stats().products == {"GCNConv": 3}


@pytest.mark.parametrize("trained", [True, False])
def test_a_wide_sum_waits_for_a_narrow_one(trained, device, monkeypatch):
    """A matrix that the wide layer makes would be there when the narrow one runs again. Features without a gradient
    are not saved by either."""
    monkeypatch.setitem(adjacency.LARGE, torch.device(device).type, EDGES * 16)
    x, edges = drawn(0, device)
    narrow, wide = nn.SAGEConv(WIDTH, 16).double().to(device), nn.SAGEConv(16, 4).double().to(device)

    def loss():
        return wide(narrow(x, edges), edges).square().sum()

    loss().backward()
    expected = [layer.lin_l.weight.grad.clone() for layer in (narrow, wide)]
    x.requires_grad_(trained)
    with pyg.enabled():
        for _ in range(2):
            narrow.zero_grad(), wide.zero_grad()
            checkpoint(loss, use_reentrant=False).backward()
    torch.testing.assert_close([layer.lin_l.weight.grad for layer in (narrow, wide)], expected)
    assert pyg.stats().products == ({} if trained else {"SAGEConv": 7})  # all but the first sum


def test_a_dropped_graph_is_not_waited_for(device):
    model = made("gcn", device)
    x, edges = drawn(0, device)
    with pyg.enabled():
        for _ in range(2):
            checkpoint(model, x.requires_grad_(), edges, use_reentrant=False)
        checkpoint(model, x, edges, use_reentrant=False)
    assert pyg.stats().products == {"GCNConv": 3}


@pytest.mark.parametrize("make", [lambda e: e, lambda e: EdgeIndex(e, sparse_size=(NODES, NODES))])
def test_settled_plans_and_edge_index(make, device):
    """Over so many steps that plans settle in the midst of a pass."""
    model = made("sage", device)
    x, edges = drawn(0, device)
    expected, edges = gradients(model, model, x, edges), make(edges)
    with pyg.enabled():
        for _ in range(2 * adjacency.SETTLED):
            found = gradients(whole(model, False), model, x, edges)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    data = edges._data if isinstance(edges, EdgeIndex) else edges
    (kept,) = (kept for made in adjacency._known[data].adjacencies.values() for kept in made._plain.values())
    assert kept._is_settled


def test_settling_waits_for_the_backward_pass(device):
    a = torch.rand(NODES, NODES, dtype=torch.float64, device=device).to_sparse_csr()
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, device=device, requires_grad=True)

    def call(x):
        for _ in range(adjacency.SETTLED + 2):
            x = torch_geometric.utils.spmm(a, x).tanh()
        return x

    with pyg.enabled():
        y = checkpoint(call, x, use_reentrant=False)
        assert not adjacency._sparse[a]._is_settled
        y.sum().backward()
        checkpoint(call, x, use_reentrant=False)
        assert adjacency._sparse[a]._is_settled
