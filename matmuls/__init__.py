"""PyTorch users' direct line to cuBLAS and cuSPARSE, and the in-place and fused kernels that PyTorch lacks."""

from .dense import cublasMM, cublasTransabMM, cublasTransaMM, cublasTransbMM, handles, matmul

__all__ = ["cublasMM", "cublasTransaMM", "cublasTransabMM", "cublasTransbMM", "handles", "matmul"]
__version__ = "0.1.0"
