"""Library handles, build facts, and low-level products under their libraries' names; wraps the compiled module.

Importing it loads `custom_mm._C`, which registers every operator under `torch.ops.custom_mm`.
"""

from typing import TYPE_CHECKING

import torch

from .compiled import _C as _C  # registers the operators that the other modules call
from .cublas import bias_act_, cublas_bmm, cublas_mmul, cublaslt_matmul
from .cusparse import cusparse_mmul, cusparse_prepare, cusparse_sddmm, cusparse_spmm
from .explain import explain
from .handles import (
    build_info,
    destroy_cublas,
    destroy_cublaslt,
    destroy_cusparse,
    handle_info,
    init_cublas,
    init_cublaslt,
    init_cusparse,
    set_workspace_size,
    workspace_size,
)
from .kernel_switch import only_kernel, without_kernels

__all__ = [
    "bias_act_",
    "build_info",
    "cublas_bmm",
    "cublas_mmul",
    "cublaslt_matmul",
    "cusparse_mmul",
    "cusparse_prepare",
    "cusparse_sddmm",
    "cusparse_spmm",
    "destroy_cublas",
    "destroy_cublaslt",
    "destroy_cusparse",
    "explain",
    "handle_info",
    "init_cublas",
    "init_cublaslt",
    "init_cusparse",
    "only_kernel",
    "set_workspace_size",
    "without_kernels",
    "workspace_size",
]

_IN_MATMULS = "cublasMM", "cublasTransaMM", "cublasTransabMM", "cublasTransbMM", "cusparseMM"

if not TYPE_CHECKING:  # to type checkers every name would be there

    def __getattr__(name: str) -> object:
        where = f"; its place is matmuls.{name}" if name in _IN_MATMULS else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")


# MKL 2024.2, which CPU builds of torch 2.13 hold, stores the processor's type in two steps in a process's first vector
# call. A thread that reads it in between computes with 11 bits (torch.exp: errors of 1.5e-4). So that call is here.
torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))
