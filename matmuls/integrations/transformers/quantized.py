"""Products of a layer with weights in int8 on a CPU, for `optimize(model, int8=True)`.

x [T, K] float32                    weights [N, K] float32
  -> per row: scale = max |x| / 127   -> once, per row: scale = max |w| / 127
  -> int8 [T, K]                      -> int8 [N, K]
               int8 x int8 -> int32 [T, N], times both scales, plus bias
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from custom_mm.indices import place_of, version_of

LARGEST = 127  # of a quantized number


class Int8:
    """The quantized weights of a layer. They are quantized again when a parameter has changed."""

    def __init__(self) -> None:
        self._kept: dict[tuple[nn.Linear, ...], tuple[Any, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copied or unpickled model quantizes its own

    def __call__(self, x: Tensor, linears: tuple[nn.Linear, ...]) -> Tensor:
        """The results of these linears for x [..., K], side by side, [..., N]."""
        parameters = [p for m in linears for p in (m.weight, m.bias) if p is not None]
        state = [(place_of(p), version_of(p)) for p in parameters]
        found = self._kept.get(linears)
        # another parameter may get the address of one that is gone
        same = found is not None and all(one() is p for one, p in zip(found[1], parameters, strict=False))
        if found is None or not same or found[0] != state:
            found = self._kept[linears] = (state, [ref(p) for p in parameters], *_quantized(linears))
        _, _, weight, scales, bias = found
        rows = x.reshape(-1, x.size(-1))
        by_row = rows.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny * LARGEST).div_(LARGEST)
        y = torch._int_mm(rows.div(by_row).round_().to(torch.int8), weight).float().mul_(by_row)
        y = y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales, out=y)
        return y.view(*x.shape[:-1], y.size(-1))


def _quantized(linears: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Their weights as one [K, N] int8, the scales [N], and the biases [N] or None."""
    weight = torch.cat([m.weight.detach() for m in linears])
    scales = weight.abs().amax(1).clamp(min=torch.finfo(weight.dtype).tiny * LARGEST) / LARGEST
    quantized = (weight / scales[:, None]).round().to(torch.int8).t().contiguous()
    if all(m.bias is None for m in linears):
        return quantized, scales, None
    biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in linears]
    return quantized, scales, torch.cat(biases)


def takes(x: Tensor) -> bool:
    """True for what is multiplied in int8; in other dtypes and on a GPU the products are computed as they come."""
    return x.dtype == torch.float32 and x.device.type == "cpu"


def why_not(linears: list[nn.Linear]) -> str | None:
    """Why the weights of a model are not quantized, or None."""
    if not all(takes(m.weight) for m in linears):
        return "a model in float32 on a CPU"
    if not torch.cpu._is_vnni_supported():  # without, int8 products are slower than those in float32
        return "a CPU with VNNI instructions"
    return None
