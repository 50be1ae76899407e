"""enable and disable: what of PyG's functions is replaced."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

import torch_geometric
from torch_geometric import edge_index
from torch_geometric.nn.conv import MessagePassing, gcn_conv, rgcn_conv

from . import edge_cache, patched_functions

_lock = RLock()
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, what it was
# Functions that modules import by name, and what replaces them.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch_geometric.utils.spmm: patched_functions.spmm,
    gcn_conv.gcn_norm: edge_cache.gcn_norm,
    rgcn_conv.masked_edge_index: edge_cache.masked_edge_index,
}
_users: dict[Callable[..., Any], list[ModuleType]] = {}  # the modules that have a function, as last searched
_searched: list[int] = []  # what `_references` was when nothing was replaced


def _in_place_of(original: Callable[..., Any], route: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls route(original, ...), made once. It has the original's globals and source, which
    torch.jit.script compiles."""
    known: Any = vars(original).get("_matmuls_replacement")
    if known is not None and known._matmuls_original is original:  # else a function copied the attributes
        return known  # type: ignore[no-any-return]
    _matmuls_original, _matmuls_route = original, route

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return _matmuls_route(_matmuls_original, *args, **kwargs)

    made = FunctionType(
        replacement.__code__,
        getattr(original, "__globals__", {}),
        original.__name__,
        closure=replacement.__closure__,
    )
    wrapped: Any = wraps(original)(made)
    wrapped._matmuls_original = original
    original._matmuls_replacement = wrapped  # type: ignore[attr-defined]
    return wrapped  # type: ignore[no-any-return]


def _replace(owner: Any, name: str, route: Callable[..., Any]) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "_matmuls_original"):
        _replaced.append((owner, name, original))
        setattr(owner, name, _in_place_of(original, route))


def _replace_propagate(kind: Any) -> None:
    """Replaces propagate of a class and of those that inherit from it; PyG generates one for each. A user's own stays;
    it may call one of these."""
    for name in ("propagate", "_jinja_propagate"):
        found = vars(kind).get(name)
        if found is not None and (
            kind is MessagePassing or found.__module__.startswith(f"{kind.__module__}_{kind.__name__}")
        ):
            _replace(kind, name, patched_functions.propagate)
    for below in kind.__subclasses__():
        _replace_propagate(below)


def _references() -> list[int]:
    """Changes when a module imports one of the functions, and at times without that."""
    return [len(sys.modules), *map(sys.getrefcount, _FUNCTIONS)]


def _replace_functions() -> None:
    """Replaces the functions in every module that has them by their names. To search all modules takes 10 ms or more:
    as long as several steps of training on a small graph."""
    if _searched != _references():
        for original in _FUNCTIONS:
            name = original.__name__
            modules = list(sys.modules.values())
            _users[original] = [m for m in modules if getattr(m, "__dict__", {}).get(name) is original]
    for original, modules in _users.items():
        name = original.__name__
        for module in modules:
            if vars(module).get(name) is original:
                _replace(module, name, _FUNCTIONS[original])


def _set_templates(original: Callable[..., Any], layer: MessagePassing, *args: Any, **kwargs: Any) -> None:
    """MessagePassing._set_jittable_templates, which gives a class its propagate when the first layer is made."""
    original(layer, *args, **kwargs)
    own = vars(type(layer)).get("_orig_propagate")
    if hasattr(own, "_matmuls_original"):  # for layers that are explained or decomposed
        type(layer)._orig_propagate = own._matmuls_original
    with _lock:
        if patched_functions.switch.on:
            _replace_propagate(type(layer))


def enable(patience: int = 4) -> None:
    """Routes the sums of PyTorch Geometric over edges to plans of matmuls, in the whole process, until `disable`.

    These go through plans:

    - layers whose message is x_j, or a weight of the edge times x_j, with the reductions sum, mean, max and min, called
      with a tensor of edges or an `EdgeIndex`;
    - `torch_geometric.utils.spmm`, by which layers multiply by a sparse adjacency;
    - `EdgeIndex.matmul`.

    PyG computes everything else, also in compiled and scripted code. Checked indices, plans, the results of `gcn_norm`
    and the edges of each relation are kept as long as the tensor of edges or the adjacency lives. They are made again
    after a write to it. A write through `.data` is not noticed.

    Args:
        patience: how many sums over a new tensor of edges PyG computes before a plan is made. Making a plan costs as
            much as a few sums. Large graphs get their plan at the first sum. Mini-batches of small graphs, whose edges
            are used in one step only, may get no plan. 0 makes every plan at the first sum. patience has no effect if
            plans are enabled already.

    Raises:
        ValueError: if patience is not a whole number of 0 or more.

    Examples:
        >>> import torch
        >>> from torch_geometric.nn import GCNConv
        >>> from matmuls.integrations import pyg
        >>> conv, x, edges = GCNConv(4, 2), torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> before = conv(x, edges)
        >>> pyg.enable()
        >>> torch.allclose(conv(x, edges), before, atol=1e-6)
        True
        >>> pyg.disable()
    """
    if not isinstance(patience, int) or patience < 0:
        raise ValueError(f"pyg.enable: expected patience to be a whole number of 0 or more, got {patience!r}")
    with _lock:
        if patched_functions.switch.on:
            return
        _replace_propagate(MessagePassing)
        _replace(MessagePassing, "_set_jittable_templates", _set_templates)
        _replace_functions()
        _replace(edge_index, "_spmm", patched_functions.edge_index_spmm)
        patched_functions.switch.patience, patched_functions.switch.on = patience, True


def disable() -> None:
    """Gives PyG its own functions back. Plans stay as long as their edges, for the next `enable`.

    Examples:
        >>> from matmuls.integrations import pyg
        >>> pyg.enable()
        >>> pyg.disable()
        >>> pyg.is_enabled()
        False
    """
    with _lock:
        patched_functions.switch.on = False
        while _replaced:
            setattr(*_replaced.pop())
        _searched[:] = _references()


def is_enabled() -> bool:
    """Tells whether `enable` is in effect.

    Returns:
        True between `enable` and `disable`.

    Examples:
        >>> from matmuls.integrations import pyg
        >>> with pyg.enabled():
        ...     pyg.is_enabled()
        True
    """
    return patched_functions.switch.on


@contextmanager
def enabled(patience: int = 4) -> Iterator[None]:
    """Makes a context in which `enable` is in effect, in the whole process; it leaves an earlier `enable` as it was.

    Args:
        patience: as in `enable`.

    Raises:
        ValueError: if patience is not a whole number of 0 or more.

    Returns:
        A context manager.

    Examples:
        >>> import torch
        >>> from torch_geometric.nn import SAGEConv
        >>> from matmuls.integrations import pyg
        >>> with pyg.enabled():
        ...     y = SAGEConv(4, 2, aggr="max")(torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> y.shape
        torch.Size([3, 2])
    """
    before = is_enabled()
    enable(patience)
    try:
        yield
    finally:
        if not before:
            disable()
