"""What layers compute from the edges in every forward pass, computed once: the same tensors find the same plans."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from custom_mm.indices import version_of
from matmuls.sparse.csr_pattern import is_capturing
from matmuls.sparse.prepared import state_of

from .adjacency import kept_with, state_of_edges
from .patched_functions import LAYOUTS, is_traced, switch

Original = Callable[..., Any]
MOST_BYTES = 2**30  # of the masks that are kept with a tensor of edges


class _Norm(NamedTuple):
    """A result of gcn_norm.

    edges: with self-loops, or a normalized adjacency; None: the given ones, which must not be kept alive.
    weights: of edges without weights.
    """

    edges: Tensor | None
    weights: Tensor | None
    versions: tuple[int, ...]


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(version_of(t) for t in tensors if t is not None)


# edges -> (their state, arguments -> _Norm)
_norms: WeakIdKeyDictionary = WeakIdKeyDictionary()


def gcn_norm(
    original: Original,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> Any:
    """gcn_norm of PyG, which layers call in every forward pass: the same edges or adjacency again for one that was not
    written to, so that its plan is found, and the same weights where none were given."""
    args = edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype
    if torch.compiler.is_compiling() or not switch.on or type(edge_index) is not Tensor or is_traced():
        return original(*args)
    is_sparse = edge_index.layout in LAYOUTS
    if not (is_sparse or edge_index.layout == torch.strided) or edge_index.requires_grad or version_of(edge_index) < 0:
        return original(*args)
    state, key = state_of(edge_index) if is_sparse else state_of_edges(edge_index), args[2:]
    kept = _norms.get(edge_index) if is_sparse else kept_with(_norms, edge_index)
    if kept is None or kept[0] != state:
        kept = _norms[edge_index] = state, {}
    known = kept[1].get(key)
    if known is not None and known.versions != _versions(known.edges, known.weights):
        known = None  # written to since
    if known is not None and (is_sparse or (edge_weight is None and known.weights is not None)):
        return edge_index if known.edges is None else known.edges, known.weights
    edges, weights = original(*args)
    if known is not None and known.edges is not None:
        edges = known.edges
    if known is None or edge_weight is None:
        own, plain = None if edges is edge_index else edges, weights if edge_weight is None else None
        versions = _versions(own, plain)
        if all(version >= 0 for version in versions):
            kept[1][key] = _Norm(own, plain, versions)
    return edges, weights


class _Masks:
    """Parts of edges, in the order in which a layer takes them, one for each relation."""

    def __init__(self, state: object) -> None:
        self.state = state
        self._next = 0
        self._parts: list[tuple[Tensor, Tensor, int]] = []  # mask, edges, their version

    def find(self, mask: Tensor) -> Tensor | None:
        """The edges of the next mask or the first, if it is this one."""
        for place in (self._next, 0):
            if place < len(self._parts):
                known, edges, version = self._parts[place]
                if version_of(edges) == version and torch.equal(known, mask):
                    self._next = place + 1
                    return edges
        return None

    def keep(self, mask: Tensor, edges: Tensor) -> None:
        if edges.shape[1] + sum(part.shape[1] for _, part, _ in self._parts[: self._next]) > mask.numel():
            self._next, self._parts = 0, []  # more than all of the edges: other relations than before
        if self._next * mask.numel() > MOST_BYTES or version_of(edges) < 0:
            return
        self._parts[self._next : self._next + 1] = [(mask.clone(), edges, version_of(edges))]
        self._next += 1


# edges -> _Masks
_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def masked_edge_index(original: Original, edge_index: Any, edge_mask: Tensor) -> Any:
    """masked_edge_index of PyG, the edges of one relation: the same again for the mask that came there before."""
    if torch.compiler.is_compiling() or not switch.on or type(edge_index) is not Tensor or is_traced():
        return original(edge_index, edge_mask)
    fits = edge_mask.dtype == torch.bool and edge_mask.device == edge_index.device and not edge_mask.is_inference()
    if edge_index.layout != torch.strided or version_of(edge_index) < 0 or not fits or is_capturing(edge_index.device):
        return original(edge_index, edge_mask)
    state = state_of_edges(edge_index)
    kept = kept_with(_masks, edge_index)
    if kept is None or kept.state != state:
        kept = _masks[edge_index] = _Masks(state)
    edges = kept.find(edge_mask)
    if edges is None:
        edges = original(edge_index, edge_mask)
        kept.keep(edge_mask, edges)
    return edges
