"""The product of a plan, whose matrix every process has, and a DTensor."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .plan import SparsePlan


def product_of_dtensor(plan: "SparsePlan", b: Any) -> torch.Tensor:
    """A @ b as a DTensor. Columns of b may be sharded; other dimensions are replicated first. Gradients to the values
    are added up over the processes."""
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # it is there, as b is one

    mesh = b.device_mesh
    is_sharded = [b.dim() > 1 and p == Shard(b.dim() - 1) for p in b.placements]

    def placements(sharded: Placement) -> list[Placement]:
        return [sharded if yes else Replicate() for yes in is_sharded]

    columns, values = placements(Shard(b.dim() - 1)), plan.values
    own = b.redistribute(placements=columns).to_local(grad_placements=columns)
    if values.requires_grad and torch.is_grad_enabled():
        shared = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        plan = plan.with_values(shared.to_local(grad_placements=placements(Partial())))
    y = plan @ own
    shape = torch.Size((*y.shape[:-1], b.shape[-1])) if b.dim() > 1 else y.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, placements(Shard(y.dim() - 1)), run_check=False, shape=shape, stride=stride)
