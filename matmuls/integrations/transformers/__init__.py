"""Hugging Face models on our products. Importing this imports transformers (5.17 or later)."""

from .optimized import Difference, Optimized, VerificationError, optimize, verify
from .registered import attention, attention_mask, register

__all__ = [
    "Difference",
    "Optimized",
    "VerificationError",
    "attention",
    "attention_mask",
    "optimize",
    "register",
    "verify",
]
