"""Attention and optimized encoder layers for Hugging Face models. Importing it imports transformers, 5.17 or later."""

from .attention_in_use import Taken, in_use, takes, unsupported
from .optimized import Optimized, optimize
from .packed import can_pack, encode_tokens, pool
from .registered import Registered, attention, attention_mask, register
from .verified import Difference, VerificationError, verify

__all__ = [
    "Difference",
    "Optimized",
    "Registered",
    "Taken",
    "VerificationError",
    "attention",
    "attention_mask",
    "can_pack",
    "encode_tokens",
    "in_use",
    "optimize",
    "pool",
    "register",
    "takes",
    "unsupported",
    "verify",
]
