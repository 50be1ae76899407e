"""A sparse product as the call of an operator."""

from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    operator: Any  # an OpOverload; where it is not lasting, whatever takes the arguments
    arguments: tuple[Any, ...]
    dense: int  # the dense side's place among them
    lasting: bool = True  # nothing was made that is for this call alone

    def run(self) -> torch.Tensor:
        result: torch.Tensor = self.operator(*self.arguments)
        return result
