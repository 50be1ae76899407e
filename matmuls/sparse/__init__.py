"""Sparse products: SpMM, SDDMM, the softmax between them, and the plan that makes a matrix ready for many products."""

from .ops import cusparseMM, linear, sddmm, sparse_attention, sparse_softmax, spmm
from .plan import Sparse, SparsePlan, plan, plan_of  # the function `plan` hides the module of that name

__all__ = [
    "Sparse",
    "SparsePlan",
    "cusparseMM",
    "linear",
    "plan",
    "plan_of",
    "sddmm",
    "sparse_attention",
    "sparse_softmax",
    "spmm",
]
