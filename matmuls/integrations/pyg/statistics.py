"""Count the products that plans computed for PyG, and list the layers of a model that would use plans."""

from dataclasses import dataclass

import torch
from torch_geometric.nn.conv import MessagePassing

from . import patched_functions
from .supported_layers import recognised


@dataclass(frozen=True)
class Stats:
    """How many products of PyG went through plans since `reset`, and what was left to PyG.

    Attributes:
        products: products by plans, by the class of the layer or the function that was called.
        left: calls that PyG computed, by the same and the reason.

    Examples:
        >>> from matmuls.integrations.pyg import Stats
        >>> print(Stats(products={"GCNConv": 2}, left={("GATConv", "has a message of its own"): 1}))
        GCNConv: 2 products by plans
        GATConv: 1 left to PyG: it has a message of its own
    """

    products: dict[str, int]
    left: dict[tuple[str, str], int]

    def __str__(self) -> str:
        lines = [f"{name}: {n} products by plans" for name, n in self.products.items()]
        lines += [f"{name}: {n} left to PyG: it {reason}" for (name, reason), n in self.left.items()]
        return "\n".join(lines)


def stats(reset: bool = False) -> Stats:
    """Counts the products of PyG that went through plans, and the calls that were left to PyG with the reason.

    Args:
        reset: set the counts to 0 after they were read.

    Returns:
        `Stats`, of the whole process. Compiled code is not counted.

    Examples:
        >>> import torch
        >>> from torch_geometric.nn import GINConv
        >>> from matmuls.integrations import pyg
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> before = pyg.stats(reset=True)
        >>> with pyg.enabled(patience=0):
        ...     y = GINConv(torch.nn.Linear(4, 2))(torch.randn(3, 4), edges)
        >>> print(pyg.stats())
        GINConv: 1 products by plans
    """
    found = Stats(dict(patched_functions.products), dict(patched_functions.left))
    if reset:
        patched_functions.products.clear()
        patched_functions.left.clear()
    return found


def explain(model: torch.nn.Module) -> dict[str, str]:
    """Lists which message-passing layers of a model would use plans, and which are left to PyG.

    Args:
        model: a module with layers of PyG.

    Returns:
        The layers by name: "GCNConv: plan (sum)", or the class and why PyG computes it. A call may have further
        reasons, such as features in another dtype; `stats` counts these.

    Examples:
        >>> from torch_geometric.nn import GATConv, GCNConv, Sequential
        >>> from matmuls.integrations.pyg import explain
        >>> explain(Sequential("x, e", [(GCNConv(4, 4), "x, e -> x"), (GATConv(4, 2), "x, e -> x")]))
        {'module_0': 'GCNConv: plan (sum)', 'module_1': 'GATConv: PyG, because it has a message of its own'}
    """
    return {name: _told(part) for name, part in model.named_modules() if isinstance(part, MessagePassing)}


def _told(layer: MessagePassing) -> str:
    found, name = recognised(layer), type(layer).__name__
    return f"{name}: PyG, because it {found}" if isinstance(found, str) else f"{name}: plan ({found[1]})"
