"""Modules: parameters and one call of an operation."""

import torch
from torch import Tensor, nn

from .masked import MaskPlan, masked_ffn, masked_linear

__all__ = ["MaskedFFN", "MaskedLinear"]


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
