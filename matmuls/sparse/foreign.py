"""Sparse matrices of other libraries, scipy.sparse and CuPy, as sparse tensors that share their memory."""

import warnings
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.dlpack

from custom_mm.arguments import type_name

LAYOUTS = {"csr": torch.sparse_csr, "csc": torch.sparse_csc, "bsr": torch.sparse_bsr}


@runtime_checkable
class SparseMatrix(Protocol):
    """A matrix of scipy.sparse or cupyx.scipy.sparse, recognized by its attributes: neither library is imported."""

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tocsr(self) -> Any: ...


def is_foreign(a: object) -> bool:
    """True for a sparse matrix of another library."""
    return not isinstance(a, torch.Tensor) and isinstance(a, SparseMatrix) and isinstance(a.format, str)


def native(name: str, a: Any) -> Any:
    """a, or a sparse tensor in the memory of a matrix in CSR, CSC or BSR; other formats are converted to CSR."""
    return _tensor_of(name, a) if is_foreign(a) else a


def _tensor_of(name: str, a: Any) -> torch.Tensor:
    if len(a.shape) != 2:
        raise ValueError(f"{name}: expected a sparse matrix, got {type_name(a)} of shape {list(a.shape)}")
    if a.format not in LAYOUTS:
        a = a.tocsr()
    offsets, indices, values = (_shared(name, a, what) for what in ("indptr", "indices", "data"))
    if offsets.dtype != indices.dtype or offsets.dtype not in (torch.int32, torch.int64):
        offsets, indices = offsets.long(), indices.long()
    nonzeros = int(offsets[-1]) if offsets.numel() else 0
    if 0 <= nonzeros < min(indices.shape[0], values.shape[0]):  # arrays of these libraries may have room for more
        indices, values = indices[:nonzeros], values[:nonzeros]
    with warnings.catch_warnings():  # torch warns once per process that the layout is in beta
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_compressed_tensor(
            offsets, indices, values, a.shape, layout=LAYOUTS[a.format], device=values.device, check_invariants=False
        )


def _shared(name: str, a: Any, what: str) -> torch.Tensor:
    """An array of the matrix as a tensor in the same memory."""
    array = getattr(a, what)
    try:
        if type(array).__module__.partition(".")[0] == "numpy":
            with warnings.catch_warnings():  # of memory that may not be written to: nothing here does
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(array)
        if hasattr(array, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return torch.as_tensor(array, device="cuda")
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        dtype = getattr(array, "dtype", None)
        raise TypeError(
            f"{name}: expected {what} of {type_name(a)} in a dtype and strides of torch, got {dtype}: {error}"
        ) from None
    expected = "of numpy or with __dlpack__ or __cuda_array_interface__"
    raise TypeError(f"{name}: expected {what} of {type_name(a)} {expected}, got {type_name(array)}")
