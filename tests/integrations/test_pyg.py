"""Layers of PyTorch Geometric give the same outputs and gradients by plans; what no plan can give is left to PyG."""

from functools import partial

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric
from torch_geometric import EdgeIndex, nn
from torch_geometric.utils import spmm

from matmuls.integrations import pyg
from matmuls.integrations.pyg import adjacency

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:Converting sparse", "ignore:.*torch.jit")

NODES, EDGES, WIDTH = 60, 300, 6
REDUCTIONS = "sum", "mean", "max", "min"
ROUNDS = adjacency.SETTLED + 2  # the last by a settled plan
enabled = partial(pyg.enabled, patience=0)  # plans of small graphs at once


def drawn(device="cpu", dtype=torch.float64, index=torch.int64, seed=0):
    """Edges with duplicates, loops and isolated nodes; a weight for each edge; features."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(NODES - 5, (2, EDGES), generator=g)
    edges[:, :20] = edges[:, 20:40]
    weight = torch.rand(EDGES, generator=g, dtype=torch.float64) + 0.1
    x = torch.randn(NODES, WIDTH, generator=g, dtype=torch.float64)
    return edges.to(device, index), weight.to(device, dtype), x.to(device, dtype)


def run(layer, x, *args, weight=None, **kwargs):
    """Output and the gradients to x, the weight of edges and the parameters."""
    x = x.detach().clone().requires_grad_()
    weight = () if weight is None else (weight.detach().clone().requires_grad_(),)
    layer.zero_grad()
    y = layer(x, *args, *weight, **kwargs)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, *(w.grad for w in weight), *(p.grad.clone() for p in layer.parameters())]


def assert_same(found, expected, tolerance=1e-11):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_agrees(layer, *args, products=1, **kwargs):
    """Ours and PyG's, several times: `products` of each forward pass go through plans, none is left."""
    expected = run(layer, *args, **kwargs)
    with enabled():
        for _ in range(ROUNDS):
            assert_same(run(layer, *args, **kwargs), expected)
    assert pyg.stats().products == {type(layer).__name__: ROUNDS * products}
    assert not pyg.stats().left


def linear():
    return torch.nn.Linear(WIDTH, 4)


UNWEIGHTED = {
    **{f"sage-{aggr}": (lambda aggr=aggr: nn.SAGEConv(WIDTH, 4, aggr=aggr), 1) for aggr in REDUCTIONS},
    "sage-project": (lambda: nn.SAGEConv(WIDTH, 4, project=True, normalize=True), 1),
    "gin": (lambda: nn.GINConv(linear(), train_eps=True), 1),
    "gcn": (lambda: nn.GCNConv(WIDTH, 4), 1),
    "gcn-improved": (lambda: nn.GCNConv(WIDTH, 4, improved=True), 1),
    "gcn-cached": (lambda: nn.GCNConv(WIDTH, 4, cached=True), 1),
    "gcn-without-loops": (lambda: nn.GCNConv(WIDTH, 4, add_self_loops=False), 1),
    "gcn-reversed": (lambda: nn.GCNConv(WIDTH, 4, flow="target_to_source"), 1),
    "sg": (lambda: nn.SGConv(WIDTH, 4, K=2), 2),
    "tag": (lambda: nn.TAGConv(WIDTH, 4, K=3), 3),
    "appnp": (lambda: nn.APPNP(4, 0.1), 4),
    "ssg": (lambda: nn.SSGConv(WIDTH, 4, alpha=0.1, K=2), 2),
    "lg": (lambda: nn.LGConv(), 1),
    "mixhop": (lambda: nn.MixHopConv(WIDTH, 4), 2),
    "cluster": (lambda: nn.ClusterGCNConv(WIDTH, 4), 1),
    "mean": (lambda: nn.SimpleConv(aggr="mean"), 1),
}
WEIGHTED = {
    "gcn": (lambda: nn.GCNConv(WIDTH, 4), 1),
    "gcn-plain": (lambda: nn.GCNConv(WIDTH, 4, normalize=False), 1),
    **{f"graph-{aggr}": (lambda aggr=aggr: nn.GraphConv(WIDTH, 4, aggr=aggr), 1) for aggr in REDUCTIONS},
    "sg": (lambda: nn.SGConv(WIDTH, 4, K=2), 2),
    "appnp": (lambda: nn.APPNP(3, 0.2), 3),
    "tag": (lambda: nn.TAGConv(WIDTH, 4, K=2), 2),
    "gated": (lambda: nn.GatedGraphConv(WIDTH, 2), 2),
}


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_layers_without_weights(name, device):
    make, products = UNWEIGHTED[name]
    edges, _, x = drawn(device)
    assert_agrees(make().double().to(device), x, edges, products=products)


@pytest.mark.parametrize("name", WEIGHTED)
def test_layers_with_weights_that_train(name, device):
    make, products = WEIGHTED[name]
    edges, weight, x = drawn(device)
    assert_agrees(make().double().to(device), x, edges, weight=weight, products=products)


@pytest.mark.parametrize("name", WEIGHTED)
def test_layers_with_constant_weights(name, device):
    make, products = WEIGHTED[name]
    edges, weight, x = drawn(device)
    assert_agrees(make().double().to(device), x, edges, weight, products=products)


def test_weights_in_a_column_and_in_steps(device):
    edges, weight, x = drawn(device)
    layer = nn.GraphConv(WIDTH, 4).double().to(device)
    for w in (weight[:, None], weight.repeat_interleave(2)[::2]):
        pyg.stats(reset=True)
        assert_agrees(layer, x, edges, w)


@pytest.mark.parametrize("kind", [nn.RGCNConv, nn.FastRGCNConv])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}], ids=["plain", "bases", "blocks"])
def test_relations(kind, options, device):
    edges, _, x = drawn(device)
    relation = torch.arange(EDGES, device=device) % 3
    layer = kind(WIDTH, 4, 3, **options).to(device)
    x = x.float()  # its output is float32 whatever the features
    expected = run(layer, x, edges, relation)
    with enabled():
        assert_same(run(layer, x, edges, relation), expected, tolerance=1e-5)
    found = pyg.stats()
    assert found.products == ({"RGCNConv": 3} if kind is nn.RGCNConv else {})
    assert found.left == ({} if kind is nn.RGCNConv else {("FastRGCNConv", "aggregates in its own way"): 1})


@pytest.mark.parametrize("make", [lambda: nn.GATConv(WIDTH, 4), lambda: nn.ResGatedGraphConv(WIDTH, 4)])
def test_attention_and_gates_are_pygs(make, device):
    edges, _, x = drawn(device)
    layer = make().double().to(device)
    expected = run(layer, x, edges)
    with enabled():
        assert_same(run(layer, x, edges), expected)
    assert pyg.stats().left == {(type(layer).__name__, "has a message of its own"): 1}


def test_a_layer_of_a_user_is_recognised_by_what_its_message_does(device):
    class Convolution(nn.MessagePassing):
        def forward(self, x, edge_index, norm):
            return self.propagate(edge_index, x=x, norm=norm)

        def message(self, x_j, norm):
            """As in PyG's tutorial."""
            return norm.view(-1, 1) * x_j

    class Squared(Convolution):
        def message(self, x_j, norm):
            return norm.view(-1, 1) * x_j * x_j

    edges, weight, x = drawn(device)
    assert_agrees(Convolution(aggr="mean"), x, edges, weight=weight)
    assert pyg.explain(Squared()) == {"": "Squared: PyG, because it has a message of its own"}


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_two_kinds_of_nodes(sized, flow, device):
    g = torch.Generator().manual_seed(0)
    edges = torch.stack([torch.randint(n, (200,), generator=g) for n in (50, 40)]).to(device)
    x = tuple(torch.randn(n, WIDTH, generator=g, dtype=torch.float64).to(device) for n in (50, 40))
    layer = nn.SAGEConv((WIDTH, WIDTH), 4, flow=flow, root_weight=flow == "source_to_target").double().to(device)
    expected = layer(x, edges, (50, 40) if sized else None)
    with enabled():
        torch.testing.assert_close(layer(x, edges, (50, 40) if sized else None), expected)
    assert pyg.stats().products == ({"SAGEConv": 1} if flow == "source_to_target" else {})


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_of_adjacencies(layout, reduce, device):
    edges, weight, x = drawn(device)
    a = torch.sparse_coo_tensor(edges.flip(0), weight, (NODES, NODES)).coalesce()
    truth = spmm(a.cpu().to_sparse_csr(), x.cpu(), reduce)
    matrices = [a.to_sparse(layout=layout)]
    if layout == torch.sparse_coo:
        matrices.append(torch.sparse_coo_tensor(edges.flip(0), weight, a.shape))  # with duplicates
    for matrix in matrices:
        with enabled():
            for _ in range(ROUNDS):
                torch.testing.assert_close(torch_geometric.utils.spmm(matrix, x, reduce).cpu(), truth)
    assert not pyg.stats().left


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_of_an_adjacency(reduce, device):
    edges, weight, x = drawn(device)
    a = torch.sparse_coo_tensor(edges, weight, (NODES, NODES)).coalesce().to_sparse_csr()

    def gradients(on):
        matrix, features = (t.detach().to(on).requires_grad_() for t in (a, x))
        y = torch_geometric.utils.spmm(matrix, features, reduce)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=on).view_as(y))
        return [y.detach(), features.grad, matrix.grad.to_dense()]

    truth = gradients("cpu")
    with enabled():
        assert_same([t.cpu() for t in gradients(device)], truth)
    assert pyg.stats().products == {"spmm": 1}


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin"])
def test_layers_with_an_adjacency(name, device):
    edges, _, x = drawn(device)
    a = torch_geometric.utils.to_torch_csr_tensor(edges, size=(NODES, NODES)).to(x.dtype).t().to_sparse_csr()
    layer = UNWEIGHTED[name][0]().double().to(device)
    expected = run(layer, x, a)
    with enabled():
        for _ in range(ROUNDS):
            assert_same(run(layer, x, a), expected)
    assert pyg.stats().products == {"spmm": ROUNDS}


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["row", "col", None])
def test_edge_index(index, order, device):
    edges, weight, x = drawn(device, index=index)
    ready = EdgeIndex(edges, sparse_size=(NODES, NODES))
    ready = ready if order is None else ready.sort_by(order)[0]
    plain = ready.as_tensor().long()  # torch 2.13's gradient of scatter_add_ is wrong for int32
    layers = {nn.GraphConv(WIDTH, 4): weight, nn.SAGEConv(WIDTH, 4): None, nn.GCNConv(WIDTH, 4): None}
    for layer, w in layers.items():
        layer.double().to(device)
        expected = run(layer, x, plain, weight=w)
        with enabled():
            assert_same(run(layer, x, ready, weight=w), expected)
    assert pyg.stats().products == {"GraphConv": 1, "SAGEConv": 1, "GCNConv": 1}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_edge_index_matmul(transpose, reduce, weighted, device):
    edges, weight, x = drawn(device, dtype=torch.float32)
    ready = EdgeIndex(edges, sparse_size=(NODES, NODES)).sort_by("col" if transpose else "row")[0]

    def result():
        value, features = weight.clone().requires_grad_(), x.clone().requires_grad_()
        y = ready.matmul(features, value if weighted else None, reduce=reduce, transpose=transpose)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y))
        return [y.detach(), features.grad, *([value.grad] * weighted)]

    expected = result()
    with enabled():
        assert_same(result(), expected, tolerance=1e-5)
    assert pyg.stats().products == {"EdgeIndex.matmul": 1}


def test_edge_index_at_sign(device):
    edges, _, x = drawn(device, dtype=torch.float32)
    ready = EdgeIndex(edges, sparse_size=(NODES, NODES)).sort_by("row")[0]
    expected = ready @ x
    with enabled():
        torch.testing.assert_close(ready @ x, expected)
        with pytest.raises(ValueError, match="sorted by rows"):
            EdgeIndex(edges, sparse_size=(NODES, NODES)) @ x
    assert pyg.stats().products == {"EdgeIndex.matmul": 1}


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_duplicates_and_nodes_without_edges(reduce, device):
    edges = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 0]], device=device)
    x = torch.tensor([[1.0], [4.0], [-2.0], [7.0], [9.0]], device=device)
    with enabled():
        y = nn.SimpleConv(aggr=reduce)(x, edges)
    expected = {"sum": [-2, 0, 0, 6, 0], "mean": [-2, 0, 0, 2, 0], "max": [-2, 0, 0, 4, 0], "min": [-2, 0, 0, 1, 0]}
    assert y.flatten().tolist() == expected[reduce]
    assert pyg.stats().products == {"SimpleConv": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_as_exact_as_pyg(dtype, reduce, weighted, device):
    edges, weight, x = drawn(device, dtype=dtype)
    layer, given = nn.GraphConv(WIDTH, 4, aggr=reduce), {"weight": weight} if weighted else {}
    layer.lin_rel, layer.lin_root = torch.nn.Identity(), torch.nn.Identity()
    exact = {name: w.double() for name, w in given.items()}
    truth, theirs = run(layer, x.double(), edges, **exact), run(layer, x, edges, **given)
    with enabled():
        ours = run(layer, x, edges, **given)
    outputs_alone = reduce in ("max", "min")  # equal maxima share the gradient in PyG; here the first has it
    for found, other, exactly in list(zip(ours, theirs, truth, strict=True))[: 1 if outputs_alone else None]:
        assert found.dtype == dtype
        error, their_error = ((t.double() - exactly).abs().max() for t in (found, other))
        assert error <= 2 * their_error + torch.finfo(dtype).eps * exactly.abs().max()


def test_autocast(device):
    edges, _, x = drawn(device, dtype=torch.float32)
    for layer in (nn.GCNConv(WIDTH, 4).to(device), nn.SAGEConv(WIDTH, 4).to(device)):
        with torch.autocast(device, dtype=torch.bfloat16):
            expected = run(layer, x, edges)
            with enabled():
                assert_same(run(layer, x, edges), expected, tolerance=4e-2)
    assert pyg.stats().products == {"GCNConv": 1, "SAGEConv": 1}


def test_second_derivatives(device):
    edges, weight, x = drawn(device)
    layer = nn.GraphConv(WIDTH, 2).double().to(device)
    x, weight = x[:, :WIDTH].clone().requires_grad_(), weight.clone().requires_grad_()
    with enabled():
        assert torch.autograd.gradcheck(lambda w: layer(x, edges, w).square(), (weight,), fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda a, w: layer(a, edges, w), (x, weight), fast_mode=True)
