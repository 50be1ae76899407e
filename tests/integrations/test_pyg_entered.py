"""Enabled again and again: nothing is searched or made anew, and what was imported meanwhile is replaced too."""

import functools
import sys
import types
from functools import partial

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric
from torch_geometric import nn
from torch_geometric.nn.conv import gcn_conv

from matmuls.integrations import pyg
from matmuls.integrations.pyg import adjacency

enabled = partial(pyg.enabled, patience=0)  # plans of small graphs at once


def drawn(device="cpu"):
    g = torch.Generator().manual_seed(0)
    return torch.randn(30, 4, generator=g).to(device), torch.randint(30, (2, 100), generator=g).to(device)


def test_entering_again_keeps_the_plans_and_what_replaces_pygs_functions(device, monkeypatch):
    made, searched = [], []
    kind = adjacency.Adjacency
    monkeypatch.setattr(adjacency, "Adjacency", lambda *args: made.append(args) or kind(*args))
    x, edges = drawn(device)
    layer, replacements = nn.GCNConv(4, 4).to(device), set()
    with enabled():
        layer(x, edges)

    class Modules(dict):
        def values(self):
            searched.append(len(self))
            return super().values()

    its = types.SimpleNamespace(modules=Modules(sys.modules), getrefcount=sys.getrefcount)
    monkeypatch.setattr(sys.modules["matmuls.integrations.pyg.enabled"], "sys", its)
    for _ in range(5):
        with enabled():
            layer(x, edges)
            replacements.add((nn.MessagePassing.propagate, gcn_conv.gcn_norm, torch_geometric.utils.spmm))
    assert len(made) == len(replacements) == 1
    assert len(searched) == 0


def test_what_was_imported_between_two_entries_is_replaced_too():
    with enabled():
        pass
    module = types.ModuleType("imported_later")
    module.spmm = own = torch_geometric.utils.spmm
    x, a = torch.randn(30, 4), torch.eye(30).to_sparse_csr()
    for name in ("imported_later", "another_name"):
        sys.modules[name] = module
        with enabled():
            module.spmm(a, x)
        assert pyg.stats(reset=True).products == {"spmm": 1}
        assert module.spmm is own
        del sys.modules[name]
    main = sys.modules["__main__"]  # no new module: a name in one that was searched
    with enabled():
        pass
    main.spmm = own
    try:
        with enabled():
            main.spmm(a, x)
    finally:
        del main.spmm
    assert pyg.stats().products == {"spmm": 1}


@pytest.mark.parametrize("wrap", [functools.wraps(nn.MessagePassing.propagate), lambda f: f])
def test_a_propagate_of_a_user_runs(wrap):
    x, edges = drawn()
    with enabled():
        nn.SimpleConv()(x, edges)

    class Twice(nn.SimpleConv):
        @wrap
        def propagate(self, *args, **kwargs):
            return 2 * super().propagate(*args, **kwargs)

    layer = Twice()
    expected = 2 * nn.SimpleConv()(x, edges)
    torch.testing.assert_close(layer(x, edges), expected)
    pyg.stats(reset=True)
    with enabled():
        torch.testing.assert_close(layer(x, edges), expected)
    assert pyg.stats().products == {"Twice": 1}
