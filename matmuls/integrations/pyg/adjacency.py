"""The matrices of graphs: checked indices and plans, kept for as long as the tensor of edges or the adjacency lives."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from custom_mm.indices import check_entries, place_of, version_of
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


def is_backward() -> bool:
    """True in a backward pass: what runs there again is a checkpoint's forward pass."""
    return torch._C._current_graph_task_id() != -1


class _Pass:
    """A forward pass in a checkpoint."""

    is_over = False

    def end(self, grad: Tensor) -> None:
        self.is_over = True


class Checkpoints:
    """The forward passes in checkpoints (torch.utils.checkpoint) whose backward pass is to come. It runs them again,
    and must find what they found: until then nothing may change that decides what autograd saves."""

    def __init__(self) -> None:
        self._passes: WeakSet[_Pass] = WeakSet()  # each lives as long as its graph

    def add(self, y: Tensor) -> None:
        """Note the result of a forward pass. Reentrant checkpoints are not noted: they compare nothing."""
        if y.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            made = _Pass()
            self._passes.add(made)
            y.register_hook(made.end)

    def are_open(self) -> bool:
        if not is_backward():  # in which a gradient comes before what it is computed of runs again
            for made in [made for made in self._passes if made.is_over]:
                self._passes.discard(made)
        return len(self._passes) > 0


class _Kept:
    """A plan of values that stay as they are. After some products it is replaced by one that may measure kernels."""

    def __init__(self, made: SparsePlan, state: object = None) -> None:
        self.state, self._plan = state, made
        self._products, self._is_settled = 0, False
        self._checkpoints = Checkpoints()

    def product(self, x: Tensor, reduce: Any, settled: Callable[[SparsePlan], SparsePlan]) -> Tensor:
        if not self._is_settled and not is_backward():
            self._products += 1
            if self._products >= SETTLED and not self._checkpoints.are_open():
                self._plan, self._is_settled = settled(self._plan), True
        y = spmm(self._plan, x, reduce=reduce)
        if not self._is_settled:
            self._checkpoints.add(y)
        return y


def _constant(made: SparsePlan) -> SparsePlan:
    return SparsePlan(made._pattern, made.values, made.shape, Selector(made._pattern, constant=True))


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
        x = x.to(dtype)
        return spmm(made, x, reduce=reduce) if isinstance(made, SparsePlan) else made.product(x, reduce, _constant)

    def _of_ones(self, dtype: torch.dtype, averages: bool) -> _Kept:
        """The plan of ones or, with `averages`, of 1 / (edges of the target)."""
        kept = self._plain.get((dtype, averages))
        if kept is None:
            s = self._by_rows
            with torch.inference_mode(False), untransformed():
                values = torch.ones(s.nonzeros, dtype=dtype, device=s.crow.device)
                if averages:
                    values /= s.crow.diff()[s.row.long()]
            for_every_stream(values)
            kept = self._plain[dtype, averages] = _Kept(SparsePlan(s, values, (s.rows, s.columns)))
        return kept

    def _of_weights(self, weight: Tensor, dtype: torch.dtype) -> _Kept | SparsePlan:
        """The plan of weights in the order of the edges, with gradients to them."""
        s, version = self._by_edges, version_of(weight)
        state = version, place_of(weight)
        if weight.requires_grad or weight.dtype != dtype or version < 0:
            return SparsePlan(s, weight.reshape(-1).to(dtype), (s.rows, s.columns))
        kept: _Kept | None = self._weighted.get(weight)
        if kept is None or kept.state != state:
            with torch.inference_mode(False), untransformed():
                values = s.by_rows(weight.detach().reshape(-1)).contiguous()
            for_every_stream(values)
            kept = _Kept(SparsePlan(self._by_rows, values, (s.rows, s.columns)), state)
            self._weighted[weight] = kept
        return kept


def state_of_edges(edges: Tensor) -> tuple[object, ...]:
    """Changes when edges are written to or replaced, as far as torch counts it."""
    return version_of(edges), place_of(edges)


def kept_with(kept: WeakIdKeyDictionary, edges: Tensor) -> Any:
    """What is kept with a tensor of edges. In a backward pass a reentrant checkpoint passes on detached tensors: what
    is kept with those that they were detached from."""
    found = kept.get(edges)
    if found is None and is_backward():
        state, others = state_of_edges(edges), list(kept.items())
        found = next((x for t, x in others if t.layout == torch.strided and state_of_edges(t) == state), None)
    return found


class _Graph:
    """The matrices of one tensor of edges, by (targets, sources, row of the targets), how often it was asked for one,
    and the forward passes that ran without one."""

    def __init__(self, state: object) -> None:
        self.state, self.asked = state, 0
        self.adjacencies: dict[tuple[int, int, int], Adjacency] = {}
        self.checkpoints = Checkpoints()
        self.was_forward = not is_backward()


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # edges -> _Graph


def _graph_of(edges: Tensor) -> _Graph:
    state = state_of_edges(edges)
    kept: _Graph | None = kept_with(_known, edges)
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
    more than `patience` times. A checkpoint's backward pass counts nothing and decides as its forward pass did."""
    graph = _graph_of(edges)
    if graph.was_forward and is_backward():
        return False
    graph.asked += 1
    if graph.checkpoints.are_open():
        return False
    return graph.asked > patience or edges.shape[1] * columns >= LARGE.get(edges.device.type, 0)


def left_to_pyg(edges: Tensor, y: Tensor) -> None:
    """Note the result y of a sum over edges for which a matrix did not pay."""
    _graph_of(edges).checkpoints.add(y)


_sparse: WeakIdKeyDictionary = WeakIdKeyDictionary()  # sparse tensor -> _Kept


def product_of_sparse(a: Tensor, x: Tensor, reduce: Any) -> Tensor:
    """reduce(a @ x) for a sparse tensor. Its plan is kept with it, but for one that requires a gradient or must be
    coalesced."""
    if a.requires_grad or (a.layout == torch.sparse_coo and not a.is_coalesced()):
        return spmm(a, x, reduce=reduce)
    state = state_of(a)
    kept: _Kept | None = _sparse.get(a)
    if kept is None or kept.state != state:
        kept = _sparse[a] = _Kept(plan(a, tune=False), state)
    return kept.product(x, reduce, lambda _: plan(a, constant=True))


def is_known_sparse(a: Tensor) -> bool:
    """True if the plan of a sparse tensor is made already."""
    kept = _sparse.get(a)
    return kept is not None and kept.state == state_of(a)


def takes(x: Tensor) -> bool:
    """True for a dense matrix that products take."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 2 and x.dtype in REAL and x.numel() > 0
