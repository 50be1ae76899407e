"""The table of operations, one Spec per operation; source of tests, gradcheck, opcheck, benchmarks, docs/support.md."""

import torch

from . import attention, cusparse, dense, fused_softmax, inplace, masked, rowwise, sparse
from .rowwise import QUACK
from .spec import ALL, REAL, Bad, Call, Case, Draw, Spec

__all__ = ["ALL", "QUACK", "REAL", "TABLE", "Bad", "Call", "Case", "Draw", "Spec", "operators"]

TABLE: tuple[Spec, ...] = (
    *dense.TABLE,
    *inplace.TABLE,
    *rowwise.TABLE,
    *fused_softmax.TABLE,
    *attention.TABLE,
    *masked.TABLE,
    *sparse.TABLE,
    *cusparse.TABLE,
)


def operators() -> list[torch._ops.OpOverload]:
    """Every operator of the table, without duplicates."""
    return list(dict.fromkeys(op for spec in TABLE for op in spec.operators))
