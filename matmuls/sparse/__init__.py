"""Sparse products: SpMM, SDDMM, the softmax between them, and the plan that makes a matrix ready for many products."""

import torch

from .ops import cusparseMM, sddmm, sparse_attention, sparse_softmax, spmm
from .pickled import SAFE
from .plan import Sparse, SparsePlan, plan, plan_of  # the function `plan` hides the module of that name
from .solve_plan import SolvePlan, plan_solve
from .solve_plan import solve_plan as _solve_plan
from .spgemm import spgemm  # and this one too
from .spgemm_plan import SpgemmPlan, SpgemmSize, plan_spgemm, spgemm_size
from .triangular import solve_triangular

torch.serialization.add_safe_globals([*SAFE, _solve_plan])

__all__ = [
    "SolvePlan",
    "Sparse",
    "SparsePlan",
    "SpgemmPlan",
    "SpgemmSize",
    "cusparseMM",
    "plan",
    "plan_of",
    "plan_solve",
    "plan_spgemm",
    "sddmm",
    "solve_triangular",
    "sparse_attention",
    "sparse_softmax",
    "spgemm",
    "spgemm_size",
    "spmm",
]
