"""Times modules of matmuls.nn, and nn.Linear, that parallelize_module divides among the ranks of the default group."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import matmuls.nn
from matmuls import distributed
from matmuls.distributed.group import even, starts_of
from matmuls_bench.spmm.distributed import relative_error, rounds

OURS, TORCH = "matmuls", "nn.Linear"
PRUNED = 0.95  # share of zeros of SparseLinear's weight
STYLES = {"columns": ColwiseParallel, "inner": RowwiseParallel}
PLACES: dict[str, tuple[Placement, Placement]] = {  # of x and of the result
    "columns": (Replicate(), Shard(-1)),
    "inner": (Shard(-1), Replicate()),
    "rows": (Shard(0), Shard(0)),
}


@dataclass
class Call:
    """A module with the arguments of a call and the gradient of its result. copies: x is copied before, as the module
    writes over it."""

    module: nn.Module
    x: Tensor
    grad: Tensor
    more: tuple[Tensor, ...] = ()
    copies: bool = False
    leaves: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.x = self.x.detach().requires_grad_()
        self.leaves = [self.x, *self.module.parameters()]

    def forward(self) -> Tensor:
        """Without a gradient. A module in place writes over the same x in every call."""
        with torch.no_grad():
            return finished(self.module(self.x, *self.more))

    def both(self) -> list[Tensor]:
        """The result, and the gradients of x and of the parameters."""
        y = self.module(self.x * 1 if self.copies else self.x, *self.more)
        finished(y.detach())
        return [y, *map(finished, torch.autograd.grad(y, self.leaves, self.grad))]


def finished(t: Tensor) -> Tensor:
    """The tensor, summed over the ranks if it is partial, after its collective: else the next call would overlap it."""
    if isinstance(t, DTensor):
        t = t.redistribute(placements=[Replicate() if place.is_partial() else place for place in t.placements])
    local = t.to_local() if isinstance(t, DTensor) else t
    if isinstance(local, AsyncCollectiveTensor):
        local.wait()  # type: ignore[no-untyped-call]
    return t


@dataclass
class Case:
    """A module, and nn.Linear of its sizes, whole. by: as in `matmuls.distributed.Sharded`."""

    by: str
    module: nn.Module
    rival: nn.Linear

    @property
    def name(self) -> str:
        return type(self.module).__name__


def linear(size: int, bias: bool, dtype: torch.dtype, device: str) -> nn.Linear:
    """The same on every rank. Its spectral radius is just below 1, so that products in place can be repeated."""
    made = nn.Linear(size, size, bias, device, dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.98 * 3**0.5)
            dist.broadcast(parameter, 0)
    return made


def cases(size: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Each module in each way that is measured. linear_ is that of InplaceLinear."""
    for by, bias in (("columns", True), ("inner", False)):
        first, second = (linear(size, bias, dtype, device) for _ in range(2))
        yield Case(by, matmuls.nn.MaskedLinear.from_linear(first, second), copy.deepcopy(first))
    dense = linear(size, True, dtype, device)
    threshold = PRUNED * float(dense.weight.detach().abs().max())  # the weights are uniform
    yield Case("columns", matmuls.nn.SparseLinear.from_linear(dense, threshold=threshold), dense)
    dense = linear(size, True, dtype, device)
    yield Case("rows", matmuls.nn.InplaceLinear.from_linear(copy.deepcopy(dense), keep_input=True), dense)


def calls_of(case: Case, rows: int, mesh: DeviceMesh) -> tuple[dict[str, Call], dict[str, Call]]:
    """The calls of the whole modules, and of the divided ones, by name."""
    weight = case.rival.weight
    torch.manual_seed(1)
    x, grad = (torch.randn(rows, weight.shape[0], device=weight.device).to(weight.dtype) for _ in range(2))
    mask = torch.rand(rows, device=weight.device) < 0.5
    for t in (x, grad, mask):
        dist.broadcast(t, 0)
    in_place = case.name == "InplaceLinear"
    mores = {OURS: (mask,) if case.name == "MaskedLinear" else (), TORCH: ()}
    whole = {OURS: copy.deepcopy(case.module), TORCH: copy.deepcopy(case.rival)}
    alone = {name: Call(module, x.clone(), grad, mores[name], in_place) for name, module in whole.items()}
    local = not in_place  # what is written over must not be a view of a DTensor
    ours = distributed.Sharded(case.by, use_local_output=local)  # type: ignore[arg-type]
    divided = {OURS: parallelize_module(case.module, mesh, ours)}
    divided[TORCH] = parallelize_module(case.rival, mesh, STYLES[case.by]()) if local else _replicated(case.rival, mesh)
    spread = [distribute_tensor(t, mesh, [place]) for t, place in zip((x, grad), PLACES[case.by], strict=True)]
    own_x, own_grad = (t.to_local().contiguous() if local else t for t in spread)
    return alone, {name: Call(m, own_x.clone(), own_grad, mores[name], in_place) for name, m in divided.items()}


def _replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    return module


def error_of(alone: Call, divided: Call) -> float:
    """The largest relative error of the divided module's result and gradients, from those of the whole one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found, wanted = divided.both(), alone.both()
    pairs = []
    for f, w in zip(found, wanted, strict=True):
        if isinstance(f, DTensor):
            f = f.full_tensor()
        elif w.dim() == 1 and isinstance(alone.module, matmuls.nn.SparseLinear):
            starts = starts_of(even(alone.module.out_features, ranks))[rank : rank + 2]
            is_values = w.shape == alone.module.values.shape
            begin, end = alone.module.offsets[starts].tolist() if is_values else starts
            w = w[begin:end]
        for dim in range(w.dim()):
            if f.shape[dim] != w.shape[dim]:
                w = w.split(even(w.shape[dim], ranks), dim)[rank]
        pairs.append((f.detach(), w.detach()))
    return relative_error([f for f, _ in pairs], [w for _, w in pairs])


def measure(
    case: Case, rows: int, mesh: DeviceMesh, device: str, on_first: Callable[[Callable[[], None]], None]
) -> dict[str, Any]:
    """Errors and seconds: of the divided modules on all ranks, and of the whole ones on rank 0 alone."""
    size, dtype = case.rival.weight.shape[0], case.rival.weight.dtype
    row: dict[str, Any] = {"case": case.name, "by": case.by, "rows": rows, "in": size, "out": size}
    row |= {"dtype": str(dtype).removeprefix("torch."), "ranks": mesh.size(), "seconds": {}, "seconds_backward": {}}
    alone, divided = calls_of(case, rows, mesh)
    row["error"] = {name: error_of(alone[name], divided[name]) for name in alone}
    row["right"] = max(row["error"].values()) < 8 * torch.finfo(dtype).eps + 1e-5

    def time(calls: dict[str, Call], where: str, together: bool) -> None:
        for kind, way in (("seconds", "forward"), ("seconds_backward", "both")):
            runs = {f"{name}, {where}": getattr(call, way) for name, call in calls.items()}
            row[kind] |= rounds(runs, device, together)[0]

    time(divided, "divided", True)
    on_first(lambda: time(alone, "alone", False))
    return row
