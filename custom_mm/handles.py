"""Library handles of all threads, their workspaces, and what the extension was built with."""

import functools
import warnings
from typing import Any

from . import _C


@functools.cache
def _warn_no_cuda() -> None:
    why = "this build has no CUDA" if _C.build_info()["cuda"] is None else "no CUDA device is visible"
    warnings.warn(f"custom_mm: {why}; CPU tensors need no handle and work as they are", stacklevel=4)


def _init(library: str) -> int:
    devices: int = getattr(_C, f"init_{library}")()
    if devices == 0:
        _warn_no_cuda()
    return devices


def init_cublas() -> int:
    """Creates this thread's cuBLAS handle and workspace on every visible GPU, ahead of the first product.

    You can call it several times. Without CUDA it does nothing and warns once per process, because CPU tensors need no
    handle.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cublas() >= 0
        True
    """
    return _init("cublas")


def init_cublaslt() -> int:
    """Creates this thread's cuBLASLt handle and workspace on every visible GPU, as `init_cublas`.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cublaslt() >= 0
        True
    """
    return _init("cublaslt")


def init_cusparse() -> int:
    """Creates this thread's cuSPARSE handle on every visible GPU, as `init_cublas`.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cusparse() >= 0
        True
    """
    return _init("cusparse")


def destroy_cublas() -> None:
    """Destroys the cuBLAS handles and workspaces of every thread on every GPU; a later product creates new ones.

    You can call it several times.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublas()
        >>> [handle for handle in custom_mm.handle_info() if handle["library"] == "cublas"]
        []
    """
    _C.destroy_cublas()


def destroy_cublaslt() -> None:
    """Destroys the cuBLASLt handles, cached algorithms and workspaces of every thread on every GPU, as
    `destroy_cublas`.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublaslt()
    """
    _C.destroy_cublaslt()


def destroy_cusparse() -> None:
    """Destroys the cuSPARSE handles of every thread on every GPU, as `destroy_cublas`.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cusparse()
    """
    _C.destroy_cusparse()


def handle_info() -> "list[_C.Handle]":
    """Lists the live handles of all threads.

    Returns:
        For each handle a dictionary with its `library`, `device`, `thread` ("free" if its thread has ended) and
        `workspaces`. For each workspace there is the id of its `stream` and its size, `nbytes`.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublas(), custom_mm.destroy_cublaslt(), custom_mm.destroy_cusparse()
        (None, None, None)
        >>> custom_mm.handle_info()
        []
    """
    return _C.handle_info()


def set_workspace_size(nbytes: int) -> None:
    """Sets the size of the workspace of each handle and stream, from the next call on.

    The CUDA driver allocates workspaces, outside torch's caching allocator. During a graph capture they come from the
    memory pool of the capture.

    Args:
        nbytes: the size in bytes. 0 restores the default: 32 MiB on GPUs of compute capability 9.0 or later, 8 MiB on
            earlier ones.

    Raises:
        RuntimeError: if the size is negative.

    Examples:
        >>> import custom_mm
        >>> custom_mm.set_workspace_size(16 << 20)
        >>> custom_mm.workspace_size()
        16777216
        >>> custom_mm.set_workspace_size(0)
    """
    _C.set_workspace_size(nbytes)


def workspace_size() -> int:
    """Returns the value given to `set_workspace_size`.

    Returns:
        The size in bytes; 0 if the default applies.

    Examples:
        >>> import custom_mm
        >>> custom_mm.workspace_size()
        0
    """
    return _C.workspace_size()


def build_info() -> dict[str, Any]:
    """Returns what the extension was built with.

    Returns:
        The versions of torch and of the compiler; with CUDA also its version, the GPU architectures and the versions of
        the libraries.

    Examples:
        >>> import custom_mm
        >>> "torch" in custom_mm.build_info()
        True
    """
    return _C.build_info()
