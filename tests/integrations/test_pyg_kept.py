"""What matmuls.integrations.pyg keeps and for how long, what it leaves to PyG, and what enable and disable replace."""

import copy
import gc
import io
import threading
import weakref
from functools import partial

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric
from torch_geometric import nn
from torch_geometric.nn.conv import gcn_conv

from matmuls.integrations import pyg
from matmuls.integrations.pyg import adjacency, edge_cache

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:.*torch.jit")
enabled = partial(pyg.enabled, patience=0)  # plans of small graphs at once


def drawn(device="cpu", nodes=30, edges=100):
    g = torch.Generator().manual_seed(0)
    return torch.randn(nodes, 4, generator=g).to(device), torch.randint(nodes, (2, edges), generator=g).to(device)


def the_adjacency(edges):
    (made,) = adjacency._known[edges].adjacencies.values()
    return made


@pytest.mark.parametrize(("nodes", "edges", "plans"), [(30, 100, [0, 0, 0, 0, 1, 1]), (2000, 300000, [1] * 6)])
def test_new_edges_get_a_plan_if_they_are_large_or_stay(nodes, edges, plans):
    x, edges = drawn(nodes=nodes, edges=edges)
    layer = nn.SimpleConv()
    with pyg.enabled():
        for expected in plans:
            layer(x, edges)
            found = pyg.stats(reset=True)
            assert found.products == ({"SimpleConv": 1} if expected else {})
            assert found.left == ({} if expected else {("SimpleConv", "got new edges with few sums"): 1})


@pytest.mark.parametrize("patience", [-1, 0.5, None])
def test_a_patience_that_is_no_number_is_an_error(patience):
    with pytest.raises(ValueError, match="expected patience to be a whole number of 0 or more, got"):
        pyg.enable(patience)


def test_the_plan_goes_with_the_edges(device):
    x, edges = drawn(device)
    x.requires_grad_()
    weight = torch.rand(edges.shape[1], device=device)
    with enabled():
        layer = nn.GraphConv(4, 4).to(device)
        for _ in range(adjacency.SETTLED + 1):
            y = layer(x, edges, weight)
            y.sum().backward()
    made = weakref.ref(the_adjacency(edges))
    assert len(made()._weighted) == 1
    del weight, y
    gc.collect()
    assert len(made()._weighted) == 0
    del edges
    gc.collect()
    assert made() is None


def test_what_gcn_norm_made_goes_with_the_edges(device):
    x, edges = drawn(device)
    with enabled():
        nn.GCNConv(4, 4).to(device)(x, edges)
        nn.GCNConv(4, 4, add_self_loops=False).to(device)(x, edges)
    with_loops = next(norm.edges for norm in edge_cache._norms[edges][1].values() if norm.edges is not None)
    made = weakref.ref(the_adjacency(with_loops))
    del with_loops, edges
    gc.collect()
    assert made() is None


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_the_plan_goes_with_the_adjacency(layout, device):
    x, _ = drawn(device)
    a = torch.eye(30, device=device).to_sparse(layout=layout)
    with enabled():
        for _ in range(adjacency.SETTLED + 1):
            torch_geometric.utils.spmm(a, x)
    made = weakref.ref(adjacency._sparse[a]._plan)
    del a
    gc.collect()
    assert made() is None


def test_edges_are_looked_at_once(device, monkeypatch):
    made = []
    kind = adjacency.Adjacency
    monkeypatch.setattr(adjacency, "Adjacency", lambda *args: made.append(args) or kind(*args))
    x, edges = drawn(device)
    model = nn.Sequential("x, e", [(nn.GCNConv(4, 4), "x, e -> x"), (nn.SAGEConv(4, 4), "x, e -> x")]).to(device)
    with enabled():
        for _ in range(3):
            model(x, edges)
    assert len(made) == 2  # with and without self-loops


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(4, 4), lambda: nn.SAGEConv(4, 4), lambda: nn.GraphConv(4, 4)])
def test_a_write_to_the_edges_is_seen(make, device):
    x, edges = drawn(device)
    layer = make().to(device)
    with enabled():
        layer(x, edges)
        edges[1, :50] = 3
        found = layer(x, edges)
    torch.testing.assert_close(found, layer(x, edges))


def test_a_write_to_constant_weights_is_seen(device):
    x, edges = drawn(device)
    layer, weight = nn.GraphConv(4, 4).to(device), torch.rand(edges.shape[1], device=device)
    with enabled():
        for round in range(2 * adjacency.SETTLED):
            if round % 5 == 0:
                weight *= 1.5
            found = layer(x, edges, weight)
    torch.testing.assert_close(found, layer(x, edges, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounds", [1, adjacency.SETTLED + 1])
def test_a_write_to_an_adjacency_is_seen(rounds, device):
    x, _ = drawn(device)
    a = torch.rand(30, 30, device=device).to_sparse_csr()
    with enabled():
        for _ in range(rounds):
            torch_geometric.utils.spmm(a, x)
        a.values()[:] = 2
        found = torch_geometric.utils.spmm(a, x)
    torch.testing.assert_close(found, torch.full((30, 30), 2.0, device=device) @ x)


def test_a_write_to_what_gcn_norm_returned_is_seen():
    _, edges = drawn()
    with enabled():
        first = gcn_conv.gcn_norm(edges, num_nodes=30)
        again = gcn_conv.gcn_norm(edges, num_nodes=30)
        assert first[0] is again[0]
        assert first[1] is again[1]
        first[1].zero_()
        fresh = gcn_conv.gcn_norm(edges, num_nodes=30)
        weighted = gcn_conv.gcn_norm(edges, torch.rand(100), num_nodes=30)
        assert weighted[0] is fresh[0]
        assert weighted[1] is not fresh[1]
    torch.testing.assert_close(fresh, gcn_conv.gcn_norm(edges, num_nodes=30))


def test_a_normalized_adjacency_is_kept_and_made_again(device):
    x, edges = drawn(device)
    a = torch_geometric.utils.to_torch_csr_tensor(edges, size=(30, 30))
    layer = nn.GCNConv(4, 4).to(device)
    with enabled():
        first = gcn_conv.gcn_norm(a, num_nodes=30)[0]
        assert gcn_conv.gcn_norm(a, num_nodes=30)[0] is first
        layer(x, a)
        a.values()[:] = torch.rand(a._nnz(), device=device)
        found = layer(x, a)
    torch.testing.assert_close(found, layer(x, a))
    made = weakref.ref(first)
    del a, first
    gc.collect()
    assert made() is None


@pytest.mark.parametrize("relations", [1, 3])
def test_the_edges_of_a_relation_are_kept(relations, device, monkeypatch):
    made = []
    kind = adjacency.Adjacency
    monkeypatch.setattr(adjacency, "Adjacency", lambda *args: made.append(args) or kind(*args))
    x, edges = drawn(device)
    relation = torch.arange(100, device=device) % relations
    layers = nn.RGCNConv(4, 4, relations).to(device), nn.RGCNConv(4, 4, relations).to(device)
    with enabled():
        for _ in range(3):
            layers[1](layers[0](x, edges, relation), edges, relation)
        assert len(made) == relations
        relation = relation.flip(0)
        found = layers[0](x, edges, relation), layers[0](x, edges, relation)
        for _ in range(5):
            layers[0](x, edges, torch.randint(relations, (100,), device=device))
        assert len(edge_cache._masks[edges]._parts) <= relations
        edges[1, :50] = 3
        written = layers[0](x, edges, relation)
    made.clear()
    torch.testing.assert_close(written, layers[0](x, edges, relation))
    torch.testing.assert_close(found[0], found[1])
    gone = weakref.ref(edge_cache._masks[edges])
    del edges
    gc.collect()
    assert gone() is None


def test_inference_mode_then_training(device):
    x, edges = drawn(device)
    layer = nn.GCNConv(4, 4).to(device)
    with enabled():
        with torch.inference_mode():
            layer(x, edges)
        x.requires_grad_()
        layer(x, edges).sum().backward()
        with torch.inference_mode():
            made_there = edges.clone()
            layer(x, made_there)
    assert x.grad is not None
    assert ("GCNConv", "got edges on another device or made under inference_mode") in pyg.stats().left


class Doubled(nn.SAGEConv):
    def update(self, inputs):
        return 2 * inputs


class Shifted(nn.SAGEConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return super().aggregate(inputs + 1, index, ptr, dim_size)


def with_hook():
    layer = nn.SAGEConv(4, 4)
    layer.register_message_forward_hook(lambda layer, inputs, output: 2 * output)
    return layer


def with_attribute(name, value):
    layer = nn.SAGEConv(4, 4)
    setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(4, 4), "has an update of its own"),
        (lambda: Shifted(4, 4), "aggregates in its own way"),
        (with_hook, "has hooks"),
        (lambda: with_attribute("fuse", False), "has fuse set to False"),
        (lambda: with_attribute("message", lambda x_j: x_j + 1), "has a method replaced"),
        (lambda: nn.SAGEConv(4, 4, aggr="median"), "aggregates by MedianAggregation"),
        (lambda: nn.SAGEConv(4, 4, aggr=["mean", "max"]), "aggregates by MultiAggregation"),
        (lambda: nn.GCNConv(4, 4, decomposed_layers=2), "is explained or decomposed"),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_what_is_left_to_pyg_is_pygs(make, reason):
    x, edges = drawn()
    layer = make()
    expected = layer(x, edges)
    with enabled():
        torch.testing.assert_close(layer(x, edges), expected, rtol=0, atol=0)
    name = type(layer).__name__
    assert pyg.stats().left == ({} if "decomposed" in reason else {(name, reason): 1})  # as its instances' propagate
    assert pyg.explain(layer) == {"": f"{name}: PyG, because it {reason}"}


def test_calls_that_do_not_fit_are_pygs():
    x, edges = drawn()
    layer, pair = nn.SimpleConv(), (x, None)
    calls = [
        (x[None].expand(2, -1, -1), edges),  # graphs that share their edges
        (x.long(), edges),
        (x, edges[:, :0]),
        (pair, edges),
    ]
    for args in calls[:3]:
        expected = layer(*args)
        with enabled():
            torch.testing.assert_close(layer(*args), expected)
    assert not pyg.stats().products
    expected = layer(*calls[3])
    with enabled():
        torch.testing.assert_close(layer(*calls[3]), expected)
    assert pyg.stats().products == {"SimpleConv": 1}


@pytest.mark.parametrize("bad", [-1, 30])
def test_errors_are_pygs(bad):
    x, edges = drawn()
    edges[0, 7] = bad
    layer = nn.SAGEConv(4, 4)
    with enabled(), pytest.raises(IndexError, match="Found"):
        layer(x, edges)
    with enabled(), pytest.raises(ValueError, match="Encountered tensor with size 30"):
        layer(x, edges.clamp(0, 29), size=(31, 30))
    with enabled(), pytest.raises(ValueError, match="not supported"):
        torch_geometric.utils.spmm(torch.eye(30).to_sparse_csr(), x, "prod")


def test_explainers_run():
    x, edges = drawn()
    model = nn.GCN(4, 4, 2, 2)
    explainer = torch_geometric.explain.Explainer(
        model,
        torch_geometric.explain.GNNExplainer(epochs=2),
        "model",
        {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        edge_mask_type="object",
    )
    torch.manual_seed(0)
    expected = explainer(x, edges).edge_mask
    with enabled():
        torch.manual_seed(0)
        torch.testing.assert_close(explainer(x, edges).edge_mask, expected)
        model(x, edges)
    assert ("GCNConv", "is explained or decomposed") not in pyg.stats().products
    assert pyg.stats().products["GCNConv"] >= 2


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(4, 4), lambda: nn.SAGEConv(4, 4)])
def test_compiled_scripted_and_traced(make):
    x, edges = drawn()
    layer = make()
    expected = layer(x, edges)
    with enabled():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges), expected)
        torch.testing.assert_close(torch.jit.script(layer)(x, edges), expected)
        torch.testing.assert_close(
            torch.func.functional_call(layer, dict(layer.named_parameters()), (x, edges)), expected
        )
        by_vmap = torch.vmap(lambda features: layer(features, edges))(x[None])
        torch.testing.assert_close(by_vmap[0], expected)


def test_copies_and_pickles():
    x, edges = drawn()
    with enabled():
        layer = nn.GCNConv(4, 4)
        expected = layer(x, edges)
        file = io.BytesIO()
        torch.save(layer, file)
        twin = copy.deepcopy(layer)
        torch.testing.assert_close(twin(x, edges), expected)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x, edges), expected)
    torch.testing.assert_close(twin(x, edges), expected)


def test_threads(device):
    x, edges = drawn(device)
    layer = nn.SAGEConv(4, 4).to(device)
    expected, found = layer(x, edges), []

    def work():
        found.extend(layer(x, edges) for _ in range(20))

    with enabled():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(found) == 80
    for y in found:
        torch.testing.assert_close(y, expected)


def test_enabling_is_undone():
    x, edges = drawn()
    names = [
        (nn.MessagePassing, "propagate"),
        (nn.GCNConv, "propagate"),
        (nn.MessagePassing, "_set_jittable_templates"),
    ]
    names += [(torch_geometric.utils, "spmm"), (gcn_conv, "spmm"), (gcn_conv, "gcn_norm")]
    nn.GCNConv(4, 4)
    before = [getattr(*name) for name in names]
    with enabled():
        assert all(getattr(*name) is not was for name, was in zip(names, before, strict=True))
        with enabled():
            pass
        assert pyg.is_enabled()
        pyg.enable()

        class Made(nn.MessagePassing):
            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=x)

        layer = Made()
        layer(x, edges)
    assert [getattr(*name) for name in names] == before
    pyg.disable()
    expected = layer(x, edges)
    assert pyg.stats().products == {"Made": 1}
    with enabled():
        torch.testing.assert_close(layer(x, edges), expected)
    assert pyg.stats().products == {"Made": 2}


@pytest.mark.cuda
def test_a_captured_graph_replays():
    x, edges = drawn("cuda")
    layer = nn.SAGEConv(4, 4).cuda()
    with enabled(), torch.no_grad():
        layer(x, edges)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, edges)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(y, layer(x, edges))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [nn.GCN, nn.GraphSAGE, nn.GIN], ids=lambda kind: kind.__name__)
def test_a_whole_training_step_is_captured(kind):
    x, edges = drawn("cuda")
    torch.manual_seed(0)
    model = kind(4, 8, num_layers=2, out_channels=3, norm=None).cuda()
    labels = torch.randint(3, (x.shape[0],), device="cuda")

    def training(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=True)

        def step():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x, edges), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    eager, step = training(copy.deepcopy(model)), training(model)
    expected = [eager().item() for _ in range(15)]
    with enabled():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses = [step() for _ in range(10)]  # after which the plans have chosen their kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(5):
            graph.replay()
            losses.append(loss.clone())
    torch.testing.assert_close([x.item() for x in losses], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_another_stream():
    x, edges = drawn("cuda")
    layer = nn.GraphConv(4, 4).cuda()
    expected = layer(x, edges)
    torch.cuda.synchronize()
    with enabled(), torch.cuda.stream(torch.cuda.Stream()):
        layer(x, edges)
    with enabled():
        torch.testing.assert_close(layer(x, edges), expected)
