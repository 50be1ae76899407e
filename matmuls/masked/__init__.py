"""masked_linear and masked_ffn: a mask selects one of two experts for each row."""

from .ffn import MaskedFFN, masked_ffn
from .linear import MaskedLinear, masked_linear
from .plan import MaskPlan, mask_plan

__all__ = ["MaskPlan", "MaskedFFN", "MaskedLinear", "mask_plan", "masked_ffn", "masked_linear"]
