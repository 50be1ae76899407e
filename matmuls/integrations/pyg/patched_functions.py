"""The functions that PyG calls instead of its own: by a plan where that gives the same, else PyG's."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing

from matmuls.sparse.csr_pattern import is_capturing, is_transformed

from .adjacency import adjacency_of, is_known, is_known_sparse, left_to_pyg, pays, product_of_sparse, takes
from .supported_layers import Form, recognised

LAYOUTS = torch.sparse_csr, torch.sparse_csc, torch.sparse_coo
REDUCE = {"add": "sum", "amin": "min", "amax": "max"} | {name: name for name in ("sum", "mean", "min", "max")}
FEW = "got new edges with few sums"
Original = Callable[..., Any]


@dataclass
class Switch:
    """What `enable` was called with."""

    on: bool = False  # what PyG holds of ours after `disable` calls PyG's own
    patience: int = 0


switch = Switch()
products: Counter[str] = Counter()  # by plans, by the class of the layer or the function
left: Counter[tuple[str, str]] = Counter()  # to PyG, by the same and the reason


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """PyG's sums do not take part in autocast."""
    active = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if active else nullcontext()


def is_traced() -> bool:
    """True where results must not be kept: a trace, a functorch transform, forward-mode gradients."""
    return torch._C._is_tracing() or is_transformed() or forward_ad._current_level >= 0


def _counted(name: str, result: Tensor | str, edges: Any, original: Original, *args: Any, **kwargs: Any) -> Any:
    """The result, or PyG's if it is a reason. edges: of the call."""
    if isinstance(result, str):
        left[name, result] += 1
        y = original(*args, **kwargs)
        if result == FEW and isinstance(y, Tensor):
            left_to_pyg(_plain(edges), y)
        return y
    products[name] += 1
    return result


def propagate(original: Original, layer: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """MessagePassing.propagate."""
    if torch.compiler.is_compiling() or not switch.on:
        return original(layer, *args, **kwargs)
    edges = args[0] if args else kwargs.get("edge_index")
    if isinstance(edges, Tensor) and edges.layout in LAYOUTS:
        return original(layer, *args, **kwargs)  # which calls spmm
    found = recognised(layer)
    result = found if isinstance(found, str) else _propagated(layer, *found, args, kwargs)
    return _counted(type(layer).__name__, result, edges, original, layer, *args, **kwargs)


def _propagated(
    layer: MessagePassing, form: Form, reduce: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | str:
    if len(args) != 1 or type(args[0]) not in (Tensor, EdgeIndex):
        return "got no tensor of edges as its only positional argument"
    if form.absent is not None and kwargs.get(form.absent) is not None:
        return f"got {form.absent}"
    edges, x, size = args[0], kwargs.get("x"), kwargs.get("size")
    i, j = (1, 0) if layer.flow == "source_to_target" else (0, 1)
    sizes: list[Any] = [None, None] if size is None else list(size)
    if isinstance(edges, EdgeIndex):
        sizes = [edges.num_rows, edges.num_cols]
    if len(sizes) != 2:
        return "got sizes that do not fit"
    if isinstance(x, tuple | list):
        if len(x) != 2 or j == 1:  # PyG's generated code takes x[0] there, its base class x[1]
            return "got x that is no pair, or one with flow target_to_source"
        if isinstance(x[i], Tensor):
            sizes[i] = _agreed(sizes[i], x[i].shape[0] if x[i].dim() == 2 else -1)
        x = x[j]
    if not isinstance(x, Tensor) or not takes(x) or layer.node_dim not in (-2, 0):
        return "got x that is no dense floating-point matrix with a row for each node"
    sizes[j] = _agreed(sizes[j], x.shape[0])
    if -1 in sizes:
        return "got sizes that do not fit"
    weight = None
    if form.weight is not None:
        weight = kwargs.get(form.weight)
        if weight is None and not form.optional:
            return "got no weights"
    rows: int = x.shape[0] if sizes[i] is None else sizes[i]
    return product_of_edges(edges, (rows, x.shape[0]), i, x, weight, reduce)


def _agreed(size: int | None, found: int) -> int:
    """The size that was found; -1 if another was given."""
    return found if size is None or size == found else -1


def _plain(edges: Tensor) -> Tensor:
    data: Tensor = edges._data if isinstance(edges, EdgeIndex) else edges
    return data


def product_of_edges(
    edges: Tensor, shape: tuple[int, int], target: int, x: Tensor, weight: Tensor | None, reduce: str
) -> Tensor | str:
    """The reduction of x over the edges by the matrix that is kept with them; a reason if PyG must compute it."""
    edges = _plain(edges)
    if edges.dim() != 2 or edges.shape[0] != 2 or edges.dtype not in (torch.int64, torch.int32) or not edges.numel():
        return "got edges that are not [2, E] of int32 or int64, or none"
    if edges.device != x.device or edges.is_inference():
        return "got edges on another device or made under inference_mode"
    if weight is not None and (
        type(weight) not in (Tensor, torch.nn.Parameter)
        or weight.layout != torch.strided
        or weight.numel() != edges.shape[1]
        or weight.device != x.device
        or weight.is_complex()
    ):
        return "got weights that are not one number for each edge"
    known = not is_traced() and is_known(edges, shape, target)
    if not known and (is_traced() or is_capturing(x.device)):
        return "is traced, transformed or captured"
    if not known and not pays(edges, x.shape[1], switch.patience):
        return FEW
    try:
        adjacency = adjacency_of(edges, shape, target)
    except ValueError:  # an index is out of range, which PyG says in its own words
        return "got edges out of range"
    with _without_autocast(x.device):
        return adjacency.product(x, weight, reduce)


def spmm(original: Original, src: Any, other: Tensor, reduce: str = "sum") -> Any:
    """torch_geometric.utils.spmm."""
    if torch.compiler.is_compiling() or not switch.on or isinstance(src, EdgeIndex):
        return original(src, other, reduce)  # of an EdgeIndex: its matmul, which is routed too
    return _counted("spmm", _spmm(src, other, reduce), None, original, src, other, reduce)


def _spmm(a: Any, x: Tensor, reduce: str) -> Tensor | str:
    if not isinstance(a, Tensor):
        return "got an adjacency that is no tensor"
    if type(a) not in (Tensor, torch.nn.Parameter) or a.layout not in LAYOUTS or a.dim() != 2 or a.dense_dim():
        return "got an adjacency that is no matrix in CSR, CSC or COO"
    if not isinstance(x, Tensor) or not takes(x) or x.dtype != a.dtype or x.device != a.device:
        return "got a dense side that is no matrix in the adjacency's dtype and on its device"
    if reduce not in REDUCE or reduce in ("amin", "amax"):
        return "got another reduction"
    if a.shape[1] != x.shape[0] or not a._nnz():
        return "got sizes that do not fit, or no nonzeros"
    if is_traced() or (is_capturing(x.device) and not is_known_sparse(a)):
        return "is traced, transformed or captured"
    with _without_autocast(x.device):
        return product_of_sparse(a, x, REDUCE[reduce])


def edge_index_spmm(
    original: Original,
    input: Any,
    other: Tensor,
    value: Tensor | None = None,
    reduce: str = "sum",
    transpose: bool = False,
) -> Any:
    """EdgeIndex.matmul with a dense matrix."""
    args = input, other, value, reduce, transpose
    if torch.compiler.is_compiling() or not switch.on:
        return original(*args)
    return _counted("EdgeIndex.matmul", _edge_index_spmm(*args), input, original, *args)


def _edge_index_spmm(edges: EdgeIndex, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor | str:
    if type(edges) is not EdgeIndex or not (edges.is_sorted_by_col if transpose else edges.is_sorted_by_row):
        return "got edges in another order"
    if not isinstance(x, Tensor) or not takes(x) or reduce not in REDUCE:
        return "got a dense side that is no matrix, or another reduction"
    if weight is not None and weight.dtype != x.dtype:
        return "got weights in another dtype"
    target = 1 if transpose else 0
    shape = edges.get_sparse_size(target), edges.get_sparse_size(1 - target)
    if shape[1] != x.shape[0]:
        return "got sizes that do not fit"
    return product_of_edges(edges, shape, target, x, weight, REDUCE[reduce])
