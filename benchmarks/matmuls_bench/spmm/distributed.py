"""Times distributed products and what a user would do without them, in one run, on every rank of the default group.

Rivals: an all-gather of x, then the product of this rank's rows by a plan of matmuls or by torch.sparse (cuSPARSE on a
GPU); and one process alone with the whole matrix. All get the same rows, values and x, in turns. Forward + backward is
that of torch.autograd.grad for all alike: the all-gathers have no gradient in torch, so that they are in a
torch.autograd.Function, as a user has to write it. Seconds are those of the slowest rank, the median over the rounds,
by wall clock as called and by CUDA events.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from matmuls.distributed.group import Group, even, starts_of
from matmuls.distributed.plans import DistributedPlan
from matmuls.distributed.plans import plan as plan_distributed
from matmuls.distributed.splits import Order, Split, balanced, csr_tensor, local_rows, split
from matmuls.sparse.plan import SparsePlan
from matmuls.sparse.plan import plan as plan_alone

from ..matrices import Matrix, load
from .time_model import Load, Measured

Run = Callable[[], object]

OURS, GATHERED, TORCH, ALONE = "distributed plan", "all-gather + plan", "all-gather + torch.sparse", "one process, plan"
EXCHANGE, OWN, HALO = "exchange alone", "own columns alone", "halo alone"
ROUNDS, ROUND_SECONDS = 9, 0.02


@dataclass
class Case:
    """The measurements of one matrix, dtype and number of columns.

    sent, halo: bytes of each rank, sent and at least received. gathered: bytes that an all-gather sends from each.
    wall, gpu: seconds by name, forward; wall_backward, gpu_backward: forward + backward, with a gradient to x. gpu is
    empty on a CPU. refused: why a name has no time. error: relative difference of the distributed plan's product and
    gradient from those of torch.sparse, or of the gathering plan in dtypes that torch.sparse lacks.
    """

    matrix: str
    rows: int
    nnz: int
    ranks: int
    n: int
    dtype: str
    gathers: bool
    sent: list[int]
    halo: list[int]
    gathered: int
    load: Load
    wall: dict[str, float] = field(default_factory=dict)
    gpu: dict[str, float] = field(default_factory=dict)
    wall_backward: dict[str, float] = field(default_factory=dict)
    gpu_backward: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    error: float = 0.0
    weak: bool = False

    @property
    def tolerance(self) -> float:
        """The largest `error` that counts as rounding."""
        return 8 * torch.finfo(getattr(torch, self.dtype)).eps + 1e-5

    def efficiency(self, wall: dict[str, float]) -> float | None:
        """One process's seconds over those of the distributed plan: per rank, or as such where the matrix grew."""
        if ALONE not in wall:
            return None
        return wall[ALONE] / wall[OURS] / (1 if self.weak else self.ranks)

    def as_measured(self) -> Measured:
        """The case as the model takes it."""
        itemsize = getattr(torch, self.dtype).itemsize
        products = self.wall[OWN] + self.wall.get(HALO, 0.0)
        return Measured(self.n, itemsize, self.load, self.wall.get(EXCHANGE, 0.0), products, self.wall[OURS])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        both = {"efficiency": self.efficiency(self.wall), "efficiency_backward": None}
        if self.wall_backward:
            both["efficiency_backward"] = self.efficiency(self.wall_backward)
        return asdict(self) | both


def grown(source: str, ranks: int) -> str:
    """The name of a drawn matrix with `ranks` times the rows; ValueError for others."""
    if found := re.fullmatch(r"rmat:(\d+):(\d+)", source):
        if ranks & (ranks - 1):
            raise ValueError(f"expected a power of 2 of ranks to grow {source}, got {ranks}")
        return f"rmat:{int(found[1]) + ranks.bit_length() - 1}:{found[2]}"
    if found := re.fullmatch(r"grid:(\d+)", source):
        return f"grid:{round(int(found[1]) * ranks**0.5)}"
    raise ValueError(f"expected rmat:SCALE:EDGES or grid:SIDE, which can grow with the ranks, got {source}")


def _values(matrix: Matrix) -> torch.Tensor:
    """The matrix's values, or drawn ones, in float64."""
    if matrix.values is not None:
        return matrix.values
    return torch.rand(matrix.nnz, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5


def reordered(matrix: Matrix, parts: int, by: str, order: Order | None) -> tuple[Matrix, tuple[int, ...]]:
    """The matrix in the order that sends less, and the rows of each part."""
    if order is None:
        return matrix, tuple(balanced(matrix.crow, parts) if by == "nonzeros" else even(matrix.shape[0], parts))
    a = csr_tensor(matrix.crow, matrix.col, _values(matrix), matrix.shape)
    cut = split(a, parts, "rows" if by == "rows" else "nonzeros", order)
    a = local_rows(a, 0, Split(matrix.shape[:1], cut.permutation))
    name, shape = f"{matrix.name} ({order})", matrix.shape
    return Matrix(name, a.crow_indices(), a.col_indices(), a.values(), shape), cut.sizes


def _loaded(
    source: str, weak: bool, by: str, order: Order | None
) -> tuple[Matrix | None, Matrix | None, tuple[int, ...]]:
    """On rank 0 the matrix to share, that of one process, and the rows of each rank; ValueError on every rank if there
    is none."""
    whole = small = None
    sizes: tuple[int, ...] = ()
    failure: list[Any] = [""]
    if dist.get_rank() == 0:
        try:
            whole = load(grown(source, dist.get_world_size()) if weak else source)
            if whole.shape[0] != whole.shape[1]:
                raise ValueError(f"{source}: expected a square matrix, as x is split like its rows, got {whole.shape}")
            whole, sizes = reordered(whole, dist.get_world_size(), by, order)
            small = reordered(load(source), 1, by, order)[0] if weak else whole
        except (ImportError, ValueError, OSError) as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, 0)
    if failure[0]:
        raise ValueError(failure[0])
    return whole, small, sizes


def _send(tensors: Sequence[torch.Tensor], rank: int, device: str) -> None:
    for t in tensors:
        if t.numel():
            dist.send(t.to(device), rank)


def _received(shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    t = torch.empty(shape, dtype=dtype, device=device)
    if shape:
        dist.recv(t, 0)
    return t


def scattered(matrix: Matrix | None, sizes: Sequence[int], device: str) -> tuple[torch.Tensor, list[int], str, int]:
    """This rank's rows of the matrix that rank 0 has, in float64; the rows of every rank; name and nonzeros. sizes: the
    rows of every rank, on rank 0."""
    facts: list[Any] = [None]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if matrix is not None:
        counts = matrix.crow[torch.tensor(starts_of(sizes))].diff().tolist()
        facts = [(list(sizes), counts, matrix.name, matrix.nnz, matrix.col.dtype)]
    dist.broadcast_object_list(facts, 0)
    rows, counts, name, nnz, index = facts[0]
    if matrix is not None:
        values, starts = _values(matrix), starts_of(rows)
        pieces = []
        for begin, end in pairwise(starts):
            first, last = int(matrix.crow[begin]), int(matrix.crow[end])
            crow = matrix.crow[begin : end + 1] - first
            pieces.append((crow.to(index), matrix.col[first:last], values[first:last]))
        for other in range(1, ranks):
            _send(pieces[other], other, device)
        crow, col, own = (t.to(device) for t in pieces[0])
    else:
        crow = _received(rows[rank] + 1, index, device)
        col, own = _received(counts[rank], index, device), _received(counts[rank], torch.float64, device)
    shape = rows[rank], sum(rows)
    return torch.sparse_csr_tensor(crow, col, own, shape, check_invariants=False), rows, name, nnz


class Gathering:
    """The rivals that gather all rows of x: forward, and the gradient to x by a reduce-scatter of A^T @ grad."""

    def __init__(self, rows: torch.Tensor, sizes: list[int], ours: bool, backward: bool) -> None:
        self._most, self._own, parts = max(sizes), sizes[dist.get_rank()], len(sizes)
        starts = torch.tensor(starts_of(sizes), device=rows.device)
        col = rows.col_indices().long()
        owner = torch.searchsorted(starts, col, right=True) - 1
        padded = (col + owner * self._most - starts[owner]).to(rows.col_indices().dtype)
        shape = rows.shape[0], parts * self._most
        a = torch.sparse_csr_tensor(rows.crow_indices(), padded, rows.values(), shape, check_invariants=False)
        self._a: torch.Tensor | SparsePlan = a
        self._t: torch.Tensor | SparsePlan | None = None
        if ours:
            self._a = plan_alone(a, constant=True)
            self._t = self._a.mT if backward else None
        elif backward:
            self._t = a.t().to_sparse_csr()
        self._parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A @ x."""
        sent = x
        if self._own < self._most:
            sent = x.new_zeros(self._most, x.shape[1])
            sent[: self._own].copy_(x)
        gathered = x.new_empty(self._parts * self._most, x.shape[1])
        _all_gather(gathered, sent)
        product: torch.Tensor = self._a @ gathered
        return product

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient to x of the product."""
        assert self._t is not None
        received = grad.new_empty(self._most, grad.shape[1])
        _reduce_scatter(received, self._t @ grad)
        return received[: self._own]

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """A @ x, with a gradient to x."""
        product: torch.Tensor = _Gathered.apply(x, self)  # type: ignore[no-untyped-call]
        return product


class _Gathered(torch.autograd.Function):
    """The product of a rival, for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rival: Gathering) -> torch.Tensor:
        ctx.rival = rival
        return rival.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        rival: Gathering = ctx.rival
        return rival.gradient(grad), None


# torch 2.13 renamed them
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _both(
    plan: DistributedPlan | SparsePlan | Gathering, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = plan @ x
    (to_x,) = torch.autograd.grad(y, x, grad)
    return y.detach(), to_x


def rounds(runs: dict[str, Run], device: str, together: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a call by wall clock and by events. together: on all ranks, of the slowest."""
    calls = {name: _calls(run, device, together) for name, run in runs.items()}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    gpu: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(ROUNDS):
        for name in list(runs) if n % 2 == 0 else reversed(list(runs)):
            seconds = _slowest(_time(runs[name], calls[name], device, together), device, together)
            wall[name].append(seconds[0])
            gpu[name].append(seconds[1])
    medians = ({name: statistics.median(times) for name, times in found.items()} for found in (wall, gpu))
    first, second = medians
    return first, second if device == "cuda" else {}


def _calls(run: Run, device: str, together: bool) -> int:
    """How many calls fill a round, the same on every rank. Warms up first."""
    for _ in range(3):
        run()
    seconds = _slowest(_time(run, 1, device, together), device, together)[0]
    return max(1, min(200, int(ROUND_SECONDS / max(seconds, 1e-6))))


def _time(run: Run, calls: int, device: str, together: bool) -> tuple[float, float]:
    if together:
        dist.barrier()
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        seconds = (time.perf_counter() - begin) / calls
        return seconds, seconds
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first.record()
    for _ in range(calls):
        run()
    last.record()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls, float(first.elapsed_time(last)) * 1e-3 / calls


def _slowest(seconds: tuple[float, float], device: str, together: bool) -> tuple[float, float]:
    if not together:
        return seconds
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    wall, gpu = most.tolist()
    return wall, gpu


def _alone(matrix: Matrix, dtype: torch.dtype, device: str) -> SparsePlan:
    """The whole matrix on one process."""
    crow, col, values = (t.to(device) for t in (matrix.crow, matrix.col, _values(matrix).to(dtype)))
    return plan_alone(torch.sparse_csr_tensor(crow, col, values, matrix.shape, check_invariants=False), constant=True)


def _time_alone(case: Case, plan: SparsePlan | None, device: str, backward: bool) -> None:
    """The whole matrix on rank 0, while the other ranks wait; if it does not fit, the case says so."""
    if plan is not None:
        try:
            x = torch.randn(plan.shape[1], case.n, dtype=plan.dtype, device=device)
            for run, wall, gpu in (
                (partial(plan.__matmul__, x), case.wall, case.gpu),
                (partial(_both, plan, x, x), case.wall_backward, case.gpu_backward),
            )[: 2 if backward else 1]:
                found = rounds({ALONE: run}, device, together=False)
                wall.update(found[0])
                gpu.update(found[1])
        except torch.OutOfMemoryError as error:
            case.refused[ALONE] = str(error).partition("\n")[0]
    told: list[Any] = [(case.wall, case.gpu, case.wall_backward, case.gpu_backward, case.refused)]
    dist.broadcast_object_list(told, 0)
    case.wall, case.gpu, case.wall_backward, case.gpu_backward, case.refused = told[0]


def relative_error(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The largest relative error of the tensors, over all ranks."""
    worst = 0.0
    for x, t in zip(found, truth, strict=True):
        sums = torch.stack([(x.double() - t.double()).square().sum(), t.double().square().sum()])
        dist.all_reduce(sums)
        worst = max(worst, float((sums[0] / sums[1].clamp(min=1e-300)).sqrt()))
    return worst


def _check(
    case: Case, plan: DistributedPlan, rivals: dict[str, Gathering], x: torch.Tensor, grad: torch.Tensor | None
) -> dict[str, Gathering]:
    """Set the case's error; the rivals that have a product in this dtype."""
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, rival in rivals.items():
        try:  # on every rank alike, after the same collectives
            found[name] = (rival.forward(x),) if grad is None else _both(rival, x, grad)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            case.refused[name] = str(error).partition("\n")[0]
    truth = found.get(TORCH, found[GATHERED])
    case.error = relative_error((plan @ x,) if grad is None else _both(plan, x, grad), truth)
    return {name: rivals[name] for name in found}


def _parts_of(plan: DistributedPlan, x: torch.Tensor) -> dict[str, Run]:
    """The exchange and the products of a product, each for itself."""
    runs: dict[str, Run] = {OWN: partial(plan._own.plan.__matmul__, x)}
    exchange = plan._exchange
    if exchange is not None:
        y, received = plan._own.plan @ x, exchange.start(x).wait()
        runs[EXCHANGE] = lambda: exchange.start(x).wait()
        runs[HALO] = partial(plan._halo.add_to, y, received)
    return runs


def _load(plan: DistributedPlan) -> Load:
    facts = Group("bench", None, plan.device).all_gather([plan.peers, plan._own.plan.nnz, plan._halo.plan.nnz])
    peers, own, halo = (max(column) for column in zip(*facts, strict=True))
    return Load(peers, max(*plan._sent, *plan._halos), own, halo)


def measure(
    source: str,
    dtypes: Sequence[torch.dtype],
    widths: Sequence[int],
    device: str,
    *,
    backward: bool = False,
    weak: bool = False,
    by: str = "nonzeros",
    order: Order | None = None,
    news: Callable[[str], object] = lambda what: None,
) -> Iterator[tuple[Case, Matrix | None]]:
    """Measure the matrix that `source` names; on every rank of the default group, which all give the same arguments.

    weak: the matrix has as many times the rows as there are ranks, and one process has the given one. order: how its
    rows and columns are reordered first, for every way alike. The second of each pair is the whole matrix, on rank 0.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    news(f"{source}: loading")
    whole, small, ranges = _loaded(source, weak, by, order)
    rows64, sizes, name, nnz = scattered(whole, ranges, device)
    for dtype in dtypes:
        rows = rows64.to(dtype)
        plan = plan_distributed(rows, constant=True)
        rivals = {GATHERED: Gathering(rows, sizes, True, backward), TORCH: Gathering(rows, sizes, False, backward)}
        alone = None
        if small is not None:
            try:
                alone = _alone(small, dtype, device)
            except torch.OutOfMemoryError:
                news(f"{source}: too large for one process")
        for n in widths:
            news(f"{name}: {n} columns")
            x, grad = (torch.randn(sizes[rank], n, device=device).to(dtype) for _ in range(2))
            each = n * dtype.itemsize
            sent, halo = plan.bytes_sent(n), [count * each for count in plan._halos]
            gathered = (ranks - 1) * max(sizes) * each
            facts = name, sum(sizes), nnz, ranks, n, str(dtype).removeprefix("torch.")
            case = Case(*facts, plan.gathers, sent, halo, gathered, _load(plan), weak=weak)
            taken = _check(case, plan, rivals, x, grad if backward else None)
            runs: dict[str, Run] = {OURS: partial(plan.__matmul__, x)}
            runs |= {key: partial(rival.forward, x) for key, rival in taken.items()}
            case.wall, case.gpu = rounds(runs | _parts_of(plan, x), device, together=True)
            if backward:
                runs = {OURS: partial(_both, plan, x, grad)}
                runs |= {key: partial(_both, rival, x, grad) for key, rival in taken.items()}
                case.wall_backward, case.gpu_backward = rounds(runs, device, together=True)
            _time_alone(case, alone, device, backward)
            if alone is None and rank == 0:
                case.refused.setdefault(ALONE, "it does not fit in memory")
            yield case, whole
