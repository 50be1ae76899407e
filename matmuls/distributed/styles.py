"""Sharded: how `parallelize_module` of torch shards the modules of matmuls.nn over a mesh."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..masked import MaskPlan
from ..nn import InplaceLinear, MaskedFFN, MaskedLinear, SparseLinear
from .group import even, starts_of

NAME = "distributed.Sharded"
By = Literal["rows", "columns", "inner"]
_DOWN = ("w2", "u2")  # of MaskedFFN, whose other weights go up

# How x and the result of a module are placed, and what each module takes.
_INPUT: dict[str, Placement] = {"rows": Shard(0), "columns": Replicate(), "inner": Shard(-1)}
_OUTPUT: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(-1), "inner": Replicate()}
_TAKES: dict[type[nn.Module], tuple[str, ...]] = {
    InplaceLinear: ("rows",),
    MaskedLinear: ("rows", "columns", "inner"),
    MaskedFFN: ("rows", "inner"),
    SparseLinear: ("rows", "columns"),
}


class Sharded(ParallelStyle):
    """A style for `torch.distributed.tensor.parallel.parallelize_module` that shards a module of `matmuls.nn`.

    torch's ColwiseParallel and RowwiseParallel take modules whose only parameters are `weight` and `bias` and whose
    only argument is x. Use this one for `MaskedLinear`, `MaskedFFN`, `SparseLinear` and `InplaceLinear`.

    A tensor that is no DTensor is taken for this process's part. A mask is sharded as the rows of x.

    Args:
        by: "rows" shards dimension 0 of x, of the mask and of the result, and every process has all parameters.
            "columns" shards the output features of MaskedLinear and SparseLinear; x is the same on every process.
            "inner" shards the input features of MaskedLinear, which must have no bias, or the intermediate size of
            MaskedFFN, whose x is the same on every process; the results of the processes are added up.
        output: placement of the result; None for Shard(0), Shard(-1) and Replicate() respectively.
        use_local_output: return this process's part of the result as a tensor instead of a DTensor.

    Raises:
        ValueError: on another `by`.
        TypeError: in parallelize_module, if the module cannot be sharded so.

    Examples:
        >>> import torch, matmuls.distributed
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> plan = {"expert": matmuls.distributed.Sharded("columns")}  # for parallelize_module(model, mesh, plan)
        >>> plan
        {'expert': Sharded(by='columns')}
    """

    def __init__(self, by: By, *, output: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        if by not in _INPUT:
            raise ValueError(f'{NAME}: expected by to be "rows", "columns" or "inner", got {by!r}')
        self.by, self.output, self.use_local_output = by, output, use_local_output

    def __repr__(self) -> str:
        return f"Sharded(by={self.by!r})"

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        kind = next((kind for kind in _TAKES if isinstance(module, kind)), None)
        if kind is None or self.by not in _TAKES[kind]:
            takes = "; ".join(f"{kind.__name__} by {' or '.join(by)}" for kind, by in _TAKES.items())
            raise TypeError(f"{NAME}: expected {takes}, got {type(module).__name__} by {self.by}")
        if isinstance(module, MaskedLinear) and self.by == "inner" and module.first.bias is not None:
            raise TypeError(f"{NAME}: expected MaskedLinear without a bias by inner: each process would add it")
        if mesh.ndim != 1:
            raise ValueError(f"{NAME}: expected a mesh of one dimension, got {mesh.ndim}; take one of it by name")
        rows = self.by == "rows"
        source = Replicate() if kind is MaskedFFN and not rows else _INPUT[self.by]
        if isinstance(module, SparseLinear):
            leave = _shard_sparse(module, mesh, rows)
        else:
            _shard_parameters(module, mesh, self.by)
            leave = _unchanged
        mask, output = Shard(0) if rows else Replicate(), self.output or _OUTPUT[self.by]
        hooks = _Hooks(mesh, source, mask, output, isinstance(module, SparseLinear))
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(lambda _, args, y: hooks.leave(leave(y), self.use_local_output))
        return module


class _Hooks:
    """The hooks that place the arguments and the result of a module. source, mask, output: placements."""

    def __init__(self, mesh: DeviceMesh, source: Placement, mask: Placement, output: Placement, to_local: bool) -> None:
        self.mesh, self.source, self.mask, self.output, self.to_local = mesh, source, mask, output, to_local

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = [self.source, self.mask]
        made = tuple(self._placed(given, place) for given, place in zip(args, places, strict=False))
        named = {name: self._placed(given, places[name == "mask"]) for name, given in kwargs.items()}
        return made, named

    def _placed(self, given: Tensor | MaskPlan, place: Placement) -> Any:
        """A DTensor; with to_local, this process's part of it."""
        if isinstance(given, MaskPlan):
            shared = place == Replicate()
            counts = self._placed(given.counts, Replicate() if shared else Partial())
            return MaskPlan(self._placed(given.rows, place), counts, given.known if shared else -1)
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, self.mesh, [place], run_check=False)
        if not self.to_local:
            return given
        given = given.redistribute(placements=[place])
        # Each process computes a part of the gradient of what all have.
        return given.to_local(grad_placements=[Partial()] if place == Replicate() else [place])

    def leave(self, y: Tensor, to_local: bool) -> Tensor:
        assert isinstance(y, DTensor)
        y = y.redistribute(placements=[self.output])
        return y.to_local() if to_local else y


def _unchanged(y: Tensor) -> Tensor:
    return y


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, by: str) -> None:
    for path, layer in module.named_modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            place: Placement = Replicate()
            if by != "rows":
                up = by == "columns" or (isinstance(module, MaskedFFN) and path not in _DOWN)
                place = Shard(0 if up else 1)
            whole = parameter if isinstance(parameter, DTensor) else distribute_tensor(parameter, mesh, [place])
            layer.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _shard_sparse(module: SparseLinear, mesh: DeviceMesh, rows: bool) -> Callable[[Tensor], Tensor]:
    """The parameters stay tensors of this process: all of them, with gradients that are added up over the processes, or
    those of its output features. Returns what makes a DTensor of its result."""
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    if rows:

        def added_up(grad: Tensor) -> Tensor:
            whole = grad.clone()
            dist.all_reduce(whole, group=group)
            return whole

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(added_up)
        return lambda y: DTensor.from_local(y, mesh, [Shard(0)], run_check=False)
    sizes = even(module.out_features, size)
    begin, end = starts_of(sizes)[rank : rank + 2]
    first, last = module.offsets[[begin, end]].tolist()
    with torch.no_grad():
        module.values = nn.Parameter(module.values[first:last].clone(), module.values.requires_grad)
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias[begin:end].clone(), module.bias.requires_grad)
        module.columns = module.columns[first:last].clone()
        module.offsets = module.offsets[begin : end + 1] - first
    whole, module.out_features = module.out_features, end - begin

    def leave(y: Tensor) -> Tensor:
        shape = torch.Size((*y.shape[:-1], whole))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)

    return leave
