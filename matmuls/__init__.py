"""cuBLAS and cuSPARSE products called directly on PyTorch tensors; in-place and fused kernels that PyTorch lacks."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import batching  # noqa: F401
from .dense import cublasMM, cublasTransabMM, cublasTransaMM, cublasTransbMM, handles, matmul
from .fused_softmax import (
    FusedSoftmax,
    scaled_masked_softmax,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
)
from .inplace import feed_forward_, linear_, matmul_, square_matmul, square_matmul_T
from .masked import MaskedFFN, MaskedLinear, MaskPlan, mask_plan, masked_ffn, masked_linear
from .rowwise import (
    inplace_softmax,
    inplace_softmax_backward,
    layer_norm_,
    layernorm,
    rms_norm_,
    softmax,
    softmax_,
    softmax_backward,
    softmax_backward_,
)
from .sparse import (
    SolvePlan,
    SparsePlan,
    SpgemmPlan,
    SpgemmSize,
    cusparseMM,
    plan,
    plan_solve,
    plan_spgemm,
    sddmm,
    solve_triangular,
    sparse_attention,
    sparse_softmax,
    spgemm,
    spgemm_size,
    spmm,
)

__all__ = [
    "FusedSoftmax",
    "MaskPlan",
    "MaskedFFN",
    "MaskedLinear",
    "SolvePlan",
    "SparsePlan",
    "SpgemmPlan",
    "SpgemmSize",
    "cublasMM",
    "cublasTransaMM",
    "cublasTransabMM",
    "cublasTransbMM",
    "cusparseMM",
    "feed_forward_",
    "handles",
    "inplace_softmax",
    "inplace_softmax_backward",
    "layer_norm_",
    "layernorm",
    "linear_",
    "mask_plan",
    "masked_ffn",
    "masked_linear",
    "matmul",
    "matmul_",
    "plan",
    "plan_solve",
    "plan_spgemm",
    "rms_norm_",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "sddmm",
    "softmax",
    "softmax_",
    "softmax_backward",
    "softmax_backward_",
    "solve_triangular",
    "sparse_attention",
    "sparse_softmax",
    "spgemm",
    "spgemm_size",
    "spmm",
    "square_matmul",
    "square_matmul_T",
]
__version__ = "0.2.0"
_MODULES = "attention", "blocks", "distributed", "integrations", "nn"  # imported at first access

if TYPE_CHECKING:  # to type checkers they are there; with __getattr__ every name would be
    from . import attention as attention
    from . import blocks as blocks
    from . import distributed as distributed
    from . import integrations as integrations
    from . import nn as nn
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
