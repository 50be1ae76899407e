from collections.abc import Sequence
from typing import Any, TypedDict

from torch import Tensor

class Workspace(TypedDict):
    stream: int
    nbytes: int

class Handle(TypedDict):
    library: str
    device: int
    thread: str
    workspaces: list[Workspace]

def init_cublas() -> int: ...
def init_cublaslt() -> int: ...
def init_cusparse() -> int: ...
def destroy_cublas() -> int: ...
def destroy_cublaslt() -> int: ...
def destroy_cusparse() -> int: ...
def handle_info() -> list[Handle]: ...
def set_workspace_size(nbytes: int) -> None: ...
def workspace_size() -> int: ...
def is_capturing(device: int) -> bool:
    """Whether a GPU's current stream captures a graph. False without CUDA."""

def current_stream(device: int) -> int:
    """The id of a GPU's current stream, which no later stream gets; 0: the default one. Not for one that captures."""

def synchronize_stream(device: int) -> None:
    """Wait for a GPU's current stream, also while another thread captures a graph."""

def synchronize_device(device: int) -> None:
    """Wait for all streams of a GPU. RuntimeError where one of them captures a graph."""

class RelaxedCapture:
    """A context in which this thread may make calls that a capture in another thread forbids (allocations, events).

    Without CUDA it does nothing.
    """

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

class BoundCalls:
    """Calls of operators of which every argument but one tensor is known, the last 16."""

    def bind(self, name: str, arguments: Sequence[Any], at: int, watched: Sequence[Tensor]) -> None:
        """A call as it has just been made; its argument `at` is the open one. Forgotten at once where it recorded a
        gradient, under autocast and in a capture. watched: what it was made of beside its arguments; it is made again
        unless one of either was written to or wants a gradient."""

    def __call__(self, x: object, first: Tensor) -> Tensor | None:
        """The result for x, or None where no call was bound for a tensor like it: of its shape, strides, dtype and
        device, in a thread in the same modes, without a gradient or a capture. first: the first of the watched."""

def look_at_offsets(name: str, offsets: Tensor, nonzeros: int, what: str) -> None:
    """ValueError where they do not begin with 0, end with `nonzeros`, of `what`, or decrease. Does nothing on a GPU."""

def look_at_indices(name: str, what: str, indices: Tensor, size: int) -> None:
    """ValueError where an index is not from 0 to size - 1. Does nothing on a GPU."""

def trust_indices(crow: Tensor, col: Tensor, order: Tensor | None, columns: int) -> None:
    """Look at indices that a plan alone holds and keep the result with them: operators on the CPU do not look again
    until a write moves their version. ValueError where they do not fit. Does nothing on a GPU."""

def check_no_overlap(op: str, out: Tensor, values: Tensor, dense: Tensor) -> None:
    """RuntimeError where out shares an element with itself or with one of the others."""

def build_info() -> dict[str, Any]: ...
def simulate_device(
    *,
    shared_memory: int | None = None,
    multiprocessors: int | None = None,
    cooperative_multiprocessors: int | None = None,
    capability: tuple[int, int] | None = None,
    hopper_code: bool | None = None,
) -> None:
    """Launches are chosen as for such a GPU, and refused where it could not run them; without arguments no longer. For
    tests of a build with CUDA."""
