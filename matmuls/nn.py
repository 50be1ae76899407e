"""Modules: parameters and one call of an operation."""

import torch
from torch import Tensor, nn

from . import inplace
from .masked import MaskPlan, masked_ffn, masked_linear

__all__ = ["InplaceLinear", "MaskedFFN", "MaskedLinear"]


class InplaceLinear(nn.Linear):
    """nn.Linear whose result is written over its input: [..., in_features] -> the same memory's [..., out_features].

    out_features <= in_features. As `matmuls.linear_`: the weight's gradient needs the input that is written over, so
    where one would be recorded the call is refused, unless keep_input, which copies the input for it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        keep_input: bool = False,
        workspace: int = inplace.WORKSPACE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        out_features = in_features if out_features is None else out_features
        if out_features > in_features:
            raise ValueError(
                f"InplaceLinear: expected no more output than input features, got {out_features} and {in_features}"
            )
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.keep_input, self.workspace = keep_input, workspace

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, keep_input: bool = False, workspace: int = inplace.WORKSPACE
    ) -> "InplaceLinear":
        """A module with the very parameters of `linear`."""
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            keep_input=keep_input,
            workspace=workspace,
            device="meta",
        )
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return inplace.linear_(x, self.weight, self.bias, keep_input=self.keep_input, workspace=self.workspace)


class MaskedLinear(nn.Module):
    """Two nn.Linear of one shape; a row takes the first where the mask is True, else the second.

    forward(x, mask): x [..., in_features]; mask: bool, an element for each row, or a plan of it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, out_features, bias, device, dtype)
        self.second = nn.Linear(in_features, out_features, bias, device, dtype)

    @classmethod
    def from_linear(cls, first: nn.Linear, second: nn.Linear) -> "MaskedLinear":
        """A module of two layers that are there already, and remain theirs."""
        if first.weight.shape != second.weight.shape or (first.bias is None) != (second.bias is None):
            raise ValueError(f"MaskedLinear: expected two layers of one shape, got {first} and {second}")
        module = cls(1, 1, False, "meta")
        module.first, module.second = first, second
        return module

    def forward(self, x: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        first, second = self.first, self.second
        return masked_linear(x, first.weight, second.weight, mask, first.bias, second.bias)


class MaskedFFN(nn.Module):
    """Two SwiGLU networks, w2(silu(w1 x) * w3 x) and the same of u; a row takes w where the mask is True, else u.

    forward(x, mask): x [..., hidden_size]; mask: bool, an element for each row, or a plan of it. recompute: backward
    computes the products of size intermediate_size again instead of keeping them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        up, down = (hidden_size, intermediate_size, False, device, dtype), (intermediate_size, hidden_size, False)
        self.w1, self.w2, self.w3 = nn.Linear(*up), nn.Linear(*down, device, dtype), nn.Linear(*up)
        self.u1, self.u2, self.u3 = nn.Linear(*up), nn.Linear(*down, device, dtype), nn.Linear(*up)

    def forward(self, x: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        w, u = (self.w1, self.w2, self.w3), (self.u1, self.u2, self.u3)
        (w1, w2, w3), (u1, u2, u3) = ([layer.weight for layer in expert] for expert in (w, u))
        return masked_ffn(x, w1, w2, w3, u1, u2, u3, mask, self.recompute)
