"""Modules: parameters plus one operation."""

import torch

from . import inplace


class InplaceLinear(torch.nn.Linear):
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
        cls, linear: torch.nn.Linear, *, keep_input: bool = False, workspace: int = inplace.WORKSPACE
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return inplace.linear_(x, self.weight, self.bias, keep_input=self.keep_input, workspace=self.workspace)
