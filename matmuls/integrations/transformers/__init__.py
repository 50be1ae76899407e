"""Hugging Face models on the products of matmuls. Importing this imports transformers (5.17 or later)."""

from .optimized import Difference, Optimized, VerificationError, optimize, verify
from .registered import attention, attention_mask, register
from .taken import Taken, takes

__all__ = [
    "Difference",
    "Optimized",
    "Taken",
    "VerificationError",
    "attention",
    "attention_mask",
    "optimize",
    "register",
    "takes",
    "verify",
]
