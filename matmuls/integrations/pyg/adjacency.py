"""The matrices of graphs: checked indices and plans, kept for as long as the tensor of edges or the adjacency lives."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from custom_mm.indices import check_entries, version_of
from matmuls.sparse import plan, spmm
from matmuls.sparse.csr_pattern import INT32_MAX, CsrPattern, for_every_stream, untransformed
from matmuls.sparse.plan import REAL, SparsePlan
from matmuls.sparse.prepared import state_of
from matmuls.sparse.selector import Selector
from matmuls.sparse.tensor_pattern import from_entries

NAME = "matmuls.integrations.pyg"
# Edges times columns of x for which one use pays for the matrix: a GPU waits several times while it is made.
LARGE = {"cpu": 2**20, "cuda": 2**25}
SETTLED = 8  # products with the same values, after which a plan may measure kernels and keep copies in other layouts


class _Kept:
    """A plan of values that stay as they are, and how often it was taken."""

    def __init__(self, pattern: CsrPattern, values: Tensor, version: int = 0) -> None:
        self.version, self._taken = version, 0
        self._plan = SparsePlan(pattern, values, (pattern.rows, pattern.columns))

    def plan(self) -> SparsePlan:
        self._taken += 1
        if self._taken == SETTLED:
            p = self._plan
            self._plan = SparsePlan(p._pattern, p.values, p.shape, Selector(p._pattern, constant=True))
        return self._plan


class Adjacency:
    """The matrix [targets, sources] with a nonzero for each edge, duplicates included.

    edges: [2, E] integers, of which a copy is kept: by it, nothing here keeps the tensor alive.
    shape: targets and sources.
    target: the row of `edges` that has the targets.
    """

    def __init__(self, edges: Tensor, shape: tuple[int, int], target: int) -> None:
        narrow = max(*shape, edges.shape[1]) < INT32_MAX
        with torch.inference_mode(False), torch.no_grad(), untransformed():
            own = edges.detach().to(torch.int32 if narrow else torch.int64, copy=True)
            row, col = own[target], own[1 - target]
            check_entries(NAME, row, col, shape)
            self._by_edges = from_entries(NAME, row, col, shape)
            s = self._by_edges
            self._by_rows = s if s.order is None else CsrPattern(NAME, s.crow, s.col, shape)
        for_every_stream(own)
        self._plain: dict[tuple[torch.dtype, bool], _Kept] = {}
        self._weighted: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def product(self, x: Tensor, weight: Tensor | None, reduce: Any) -> Tensor:
        """The reduction over each target's edges of x [sources, n], times `weight` [E] if there is one."""
        dtype = x.dtype if weight is None else torch.promote_types(weight.dtype, x.dtype)
        if weight is not None:
            made = self._of_weights(weight, dtype)
        else:
            averages = reduce == "mean" and dtype.itemsize > 2  # 1 / 3 in 16 bits is too far from a third
            made, reduce = self._of_ones(dtype, averages), "sum" if averages else reduce
        return spmm(made, x.to(dtype), reduce=reduce)

    def _of_ones(self, dtype: torch.dtype, averages: bool) -> SparsePlan:
        """The plan of ones or, with `averages`, of 1 / (edges of the target)."""
        kept = self._plain.get((dtype, averages))
        if kept is None:
            s = self._by_rows
            with torch.inference_mode(False), untransformed():
                values = torch.ones(s.nonzeros, dtype=dtype, device=s.crow.device)
                if averages:
                    values /= s.crow.diff()[s.row.long()]
            for_every_stream(values)
            kept = self._plain[dtype, averages] = _Kept(s, values)
        return kept.plan()

    def _of_weights(self, weight: Tensor, dtype: torch.dtype) -> SparsePlan:
        """The plan of weights in the order of the edges, with gradients to them."""
        s, version = self._by_edges, version_of(weight)
        if weight.requires_grad or weight.dtype != dtype or version < 0:
            return SparsePlan(s, weight.reshape(-1).to(dtype), (s.rows, s.columns))
        kept = self._weighted.get(weight)  # type: ignore[no-untyped-call]
        if kept is None or kept.version != version:
            with torch.inference_mode(False), untransformed():
                values = s.by_rows(weight.detach().reshape(-1)).contiguous()
            for_every_stream(values)
            kept = self._weighted[weight] = _Kept(self._by_rows, values, version)
        made: SparsePlan = kept.plan()
        return made


def state_of_edges(edges: Tensor) -> tuple[int, int, torch.Size]:
    """Changes when edges are written to or replaced, as far as torch counts it."""
    return version_of(edges), edges.data_ptr(), edges.shape


class _Graph:
    """The matrices of one tensor of edges, by (targets, sources, row of the targets), and how often it was asked for
    one."""

    def __init__(self, state: object) -> None:
        self.state, self.asked = state, 0
        self.adjacencies: dict[tuple[int, int, int], Adjacency] = {}


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # edges -> _Graph


def _graph_of(edges: Tensor) -> _Graph:
    state = state_of_edges(edges)
    kept: _Graph | None = _known.get(edges)  # type: ignore[no-untyped-call]
    if kept is None or kept.state != state:
        kept = _known[edges] = _Graph(state)
    return kept


def adjacency_of(edges: Tensor, shape: tuple[int, int], target: int) -> Adjacency:
    """The matrix of these edges, made once. Raises ValueError on an index that does not fit. Waits for the GPU when it
    is made."""
    graph, key = _graph_of(edges), (*shape, target)
    made = graph.adjacencies.get(key)
    if made is None:
        made = graph.adjacencies[key] = Adjacency(edges, shape, target)
    return made


def is_known(edges: Tensor, shape: tuple[int, int], target: int) -> bool:
    """True if the matrix of these edges is made already."""
    return (*shape, target) in _graph_of(edges).adjacencies


def pays(edges: Tensor, columns: int, patience: int) -> bool:
    """True if a matrix of new edges soon gains back the time that making it takes: it is large, or it was asked for
    more than `patience` times."""
    graph = _graph_of(edges)
    graph.asked += 1
    return graph.asked > patience or edges.shape[1] * columns >= LARGE.get(edges.device.type, 0)


# sparse tensor -> [its state, products, plan]
_sparse: WeakIdKeyDictionary = WeakIdKeyDictionary()


def product_of_sparse(a: Tensor, x: Tensor, reduce: Any) -> Tensor:
    """reduce(a @ x) for a sparse tensor. Its plan is kept with it, but for one that requires a gradient or must be
    coalesced."""
    if a.requires_grad or (a.layout == torch.sparse_coo and not a.is_coalesced()):
        return spmm(a, x, reduce=reduce)
    state = state_of(a)
    kept = _sparse.get(a)  # type: ignore[no-untyped-call]
    if kept is None or kept[0] != state:
        kept = _sparse[a] = [state, 0, plan(a, tune=False)]
    kept[1] += 1
    if kept[1] == SETTLED:
        kept[2] = plan(a, constant=True)
    return spmm(kept[2], x, reduce=reduce)


def is_known_sparse(a: Tensor) -> bool:
    """True if the plan of a sparse tensor is made already."""
    kept = _sparse.get(a)  # type: ignore[no-untyped-call]
    return kept is not None and kept[0] == state_of(a)


def takes(x: Tensor) -> bool:
    """True for a dense matrix that products take."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 2 and x.dtype in REAL and x.numel() > 0
