"""`matmuls spmm`: times every way to compute A @ B for the sparse matrices that the user names, in one run.

Candidates: matmuls with and without a plan, each cuSPARSE algorithm (with preprocessing where it exists), torch.sparse,
scipy (CPU), the dense product if A fits in memory, and torch's semi-structured product if A has 2:4 sparsity. All get
the same int32 indices, values and B, and run with warm caches, as in repeated products of one matrix. Each result is
compared with torch.sparse in float64.

Floor: the time of a copy of the bytes that must move: indices, values, the rows of B that meet a nonzero, and the
result, each once.
"""

from .candidates import CUSPARSE, RIVALS, Operands, rivals_named
from .cases import DENSE, NOT_INSTALLED, PLAN, PLANLESS, SCIPY, SEMI, TORCH, Case, Result, load, save
from .measured import measure_all, measure_case
from .summary import crossovers, plot, summary, wrong

__all__ = [
    "CUSPARSE",
    "DENSE",
    "NOT_INSTALLED",
    "PLAN",
    "PLANLESS",
    "RIVALS",
    "SCIPY",
    "SEMI",
    "TORCH",
    "Case",
    "Operands",
    "Result",
    "crossovers",
    "load",
    "measure_all",
    "measure_case",
    "plot",
    "rivals_named",
    "save",
    "summary",
    "wrong",
]
