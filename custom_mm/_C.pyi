from collections.abc import Callable, Sequence
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
def matmul(a: Tensor, b: Tensor, transa: bool, transb: bool, /) -> Tensor:
    """torch.ops.custom_mm.matmul with less overhead. Not for torch.compile, which does not know this function."""

def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool, /) -> Tensor:
    """torch.ops.custom_mm.scaled_masked_softmax in the same way."""

def is_batch_invariant() -> bool: ...
def open_batch_invariant_scope() -> None: ...
def close_batch_invariant_scope() -> None: ...
def is_capturing(device: int) -> bool:
    """True if the GPU's current stream captures a graph. False without CUDA."""

def current_stream(device: int) -> int:
    """Id of the GPU's current stream, never reused; 0: the default stream. Must not be called during a capture."""

def synchronize_stream(device: int) -> None:
    """Wait for the GPU's current stream; allowed while another thread captures a graph."""

def synchronize_device(device: int) -> None:
    """Wait for all streams of a GPU. Raises RuntimeError if one of them captures a graph."""

class RelaxedCapture:
    """A context in which this thread may make calls that a capture in another thread forbids (allocations, events).

    Does nothing without CUDA.
    """

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

class PreparedCalls:
    """Prepared operator calls: all arguments but one tensor are fixed. Keeps the last 16."""

    def bind(
        self,
        name: str,
        arguments: Sequence[Any],
        at: int,
        passed: Sequence[Tensor | None],
        watched: Sequence[Tensor],
        values: int | None = None,
        rows_of: Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        """Prepares a call that has just been made; argument `at` is the open one. Does nothing under autocast and
        during a capture.

        passed: what is given again with each call, at most 4. watched: tensors that must not be written to. The
        prepared call is valid while these are as they were, while nothing among the arguments changes but its numbers,
        and while the same tensors require a gradient. values: passed[0] is a sparse CSR tensor, which is not kept alive
        and whose values take this place among the arguments. rows_of: x [..., K], if the
        argument is its rows, or with `transposed` those transposed; the call then gives the operator's result, or with
        `transposed` that transposed plus passed[1], in the shape of x."""

    def __call__(
        self,
        x: object,
        first: Tensor | None,
        second: Tensor | None = None,
        third: Tensor | None = None,
        fourth: Tensor | None = None,
    ) -> Tensor | None:
        """The result for x, or None if no prepared call is valid for what is passed, for x's shape, strides, dtype and
        device and for the dispatch modes, or during a capture."""

def validate_offsets(name: str, offsets: Tensor, nonzeros: int, what: str) -> None:
    """Raises ValueError unless offsets begin with 0, do not decrease and end with `nonzeros`, the number of `what`.
    Does nothing on a GPU."""

def validate_indices(name: str, what: str, indices: Tensor, size: int) -> None:
    """Raises ValueError if an index is not from 0 to size - 1. Does nothing on a GPU."""

def trust_indices(crow: Tensor, col: Tensor, order: Tensor | None, columns: int) -> None:
    """Validates indices that only a plan owns and records the result with them: CPU operators do not validate them
    again until a write changes their version. Raises ValueError if they are invalid. Does nothing on a GPU."""

def sparse_of_values(crow: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse CSR tensor of these indices, which are not checked, and values, differentiable any number of times."""

def values_of_sparse(a: Tensor) -> Tensor:
    """The values of a sparse tensor in CSR, CSC, BSR or BSC, differentiable any number of times. Not a view of a."""

def kept_solves(state: Tensor) -> list[tuple[int, str, bool, bool, int]]:
    """The analyses that a state of csr_solve_state keeps on a GPU: the number of columns of b, the dtype, whether it is
    of the transpose, whether a captured graph uses it, its bytes."""

kernel_limits: dict[str, int]
"""Limits that kernels and Python's selection share: fewest_in_fp16x2 (nonzeros per row), hopper_block_bytes (shared
memory of a block)."""

def choose_spmm(
    *,
    rows: int,
    columns: int,
    nonzeros: int,
    longest: int,
    n: int,
    batches: int = 1,
    element_bytes: int = 4,
    vectors: bool = True,
    multiprocessors: int = 132,
    plain: bool = False,
    alpha: float = 1.0,
    fp16x2: bool = False,
    cublas: bool = False,
) -> dict[str, Any]:
    """Choose the GPU kernel and launch parameters of a csr_spmm of these sizes without a plan, and launch nothing.

    Source: src/sparse/spmm/choose.h. plain: a sum onto nothing, for which A may be densified; then fp16x2 and cublas
    say by what.
    """

def switch_off_spmm_kernels(names: list[str]) -> None:
    """Choosers pass these over from now on, in the whole process; all others are on again."""

class RowSums:
    """Sums of few rows of a dense matrix, times values, that one kernel adds to rows of a result or writes."""

    def __init__(
        self,
        *,
        items: Tensor,
        long_rows: int,
        col: Tensor,
        order: Tensor | None,
        values: Tensor | None,
        rows: int,
        columns: int,
    ) -> None:
        """items [count, 4] int32: where the nonzeros of each row of the result begin and end, its number, and 0; the
        first `long_rows` have many nonzeros. col [nonzeros] int32; order [nonzeros] int32 or None: values[p]; values
        None: ones. rows, columns: of the result and of the matrix. The indices are not checked."""

    items: Tensor
    col: Tensor

    def add(self, out: Tensor, b: Tensor) -> None:
        """out <- out + A @ b, in the rows of the items. out [rows, n], b [columns, n], contiguous."""

    def product(self, b: Tensor) -> Tensor:
        """A @ b, [rows, n]. Every row must be an item."""

class Step:
    """One direction of a distributed product: send rows, multiply the own columns, wait, add what the others' rows
    give."""

    def __init__(
        self, *, own: PreparedCalls, values: Tensor, before: Any, sender: Any, received: Tensor | None, after: Any
    ) -> None:
        """own: the product of the own columns, with the values it was prepared with. before: RowSums, or a function of
        the operand, that makes the rows to send; None: the operand is sent. sender: PeerRows that write into
        `received`, or a function of the rows that returns a function which waits for those received; None: nothing is
        sent. after: RowSums, or a function of the product and the rows received that adds to the product."""

class RepeatedProduct:
    """A distributed product and its gradient, for operands of one shape, dtype and device, repeated without Python."""

    def __init__(
        self,
        *,
        x: Tensor,
        recorded: bool,
        forward: Step,
        slow: Callable[[RepeatedProduct, Tensor], Tensor],
        lost: Callable[[str], None],
        valid: list[bool],
    ) -> None:
        """x: an operand. recorded: the operands need a gradient. slow: the gradient to the operand, where no step can
        be repeated. lost: raises an error for the message of one, if a rank does not answer. valid: one element; once
        it is False, backward passes raise `expired`."""

    expired: str
    """The error of a backward pass that is not valid any more."""

    def bind_backward(self, backward: Step) -> None:
        """Compute gradients by this step from now on."""

    def __call__(self, x: Tensor) -> Tensor | None:
        """The product; None if x is not like the operands, or the own product may not be repeated now."""

class PeerRows:
    """Writes rows of a tensor into the memory of other GPUs of the host, and waits for theirs. With CUDA only."""

    header: int
    """Bytes at the start of each buffer, before the rows that are received; zero at first."""
    most: int
    """The largest number of ranks."""

    def __init__(
        self,
        *,
        buffer: Tensor,
        addresses: Sequence[int],
        rank: int,
        index: Tensor | None,
        starts: Sequence[int],
        slots: Sequence[int],
        sources: Sequence[int],
        row_bytes: int,
        seconds: float,
    ) -> None:
        """buffer: of this rank. addresses: where this process has mapped that of each rank. Rows starts[r] to
        starts[r + 1] of x[index] go to place slots[r] of rank r. sources: ranks that send rows here. seconds: until a
        rank that does not answer is given up."""

    def send(self, x: Tensor) -> None:
        """Write rows of x, when all ranks that they go to have called `send` too, after what the current stream has run
        and while it runs what comes next. x must stay as it is until `wait` has been called."""

    def wait(self) -> None:
        """Let the current stream wait for the rows of the other ranks."""

    @property
    def lost(self) -> int:
        """The rank that was given up, or -1. The process can use its GPU no more then."""

def check_no_overlap(op: str, out: Tensor, values: Tensor, dense: Tensor) -> None:
    """Raises RuntimeError if out shares an element with itself or with one of the others."""

def build_info() -> dict[str, Any]: ...
def row_kernels() -> list[str]:
    """Names of the GPU kernels of row operations: files in src/rows/kernels."""

def switch_off_row_kernels(names: list[str]) -> None:
    """Choosers pass these over from now on, in the whole process; all others are on again."""

def product_kernels() -> list[str]:
    """Names of the kernels of cublaslt_matmul on a GPU."""

def switch_off_product_kernels(names: list[str]) -> None:
    """cublaslt_matmul passes these over from now on, in the whole process; all others are on again."""

def choose_product(
    rows: int, columns: int, inner: int, activation: str | None, multiprocessors: int
) -> tuple[str, str]:
    """Returns the kernel of x [rows, inner] times w [columns, inner] on Hopper, and linear_rows' configuration."""

def inplace_kernels() -> list[str]:
    """Names of the kernels of matmul_ on a GPU: files in src/dense/inplace, and workspace."""

def switch_off_inplace_kernels(names: list[str]) -> None:
    """The chooser of matmul_ passes these over from now on, in the whole process; all others are on again."""

def explain_in_place(
    a: Tensor, b: Tensor, transb: bool, bias: Tensor | None, workspace: int
) -> tuple[str, str, dict[str, int | bool | str]]:
    """The kernel of matmul_, why, and its tile of the result. Raises the operator's errors."""

Gpu = tuple[int, int, int, tuple[int, int]]
Answer = tuple[str, str, dict[str, int | bool | str]]

def choose_row_kernel(
    operation: str,
    *,
    element: int,
    rows: int,
    columns: int,
    vectors: bool = True,
    aligned: bool = True,
    adjacent: bool = True,
    constant_step: bool = True,
    mask: str = "none",
    causal: bool = False,
    scale: float = 1.0,
    mask_vectors: bool = True,
    mask_steps: bool = False,
    residual: bool = False,
    keeps: bool = False,
    plain_constants: bool = False,
    wants_dx: bool = True,
    gpu: Gpu,
) -> Answer:
    """Kernel, why, and launch parameters of a row operation by the facts of rows/choose.h, on any machine.

    operation: softmax, scaled_masked_softmax, softmax_backward, layer_norm, rms_norm, norm_backward; element: bytes;
    vectors: all rows have the same misalignment in all tensors; aligned: it is 0; adjacent: rows follow each other;
    constant_step: they are at a constant distance; mask: none, bytes, same, float32; gpu: multiprocessors, bytes of
    shared memory of a block and of a multiprocessor, capability. Raises ValueError on other values."""

def explain_softmax(op: str, x: Tensor, dim: int, out: Tensor | None, gpu: Gpu | None) -> Answer: ...
def explain_scaled_masked_softmax(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, out: Tensor | None, gpu: Gpu | None
) -> Answer: ...
def explain_softmax_backward(
    y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool, out: Tensor | None, gpu: Gpu | None
) -> Answer: ...
def explain_norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    rms: bool,
    keep: bool,
    gpu: Gpu | None,
) -> Answer: ...
def explain_norm_backward(
    grad: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rms: bool,
    need_dx: bool,
    need_columns: bool,
    gpu: Gpu | None,
) -> Answer: ...
def replay_on_gpu(
    name: str, kernel: Callable[..., Any], record: Callable[[Callable[..., Any], tuple[Any, ...]], tuple[Any, Any]]
) -> None:
    """Registers the CUDA kernel of operator `name`: `kernel`, until a call with its shapes has been recorded. In a
    build with CUDA. record: returns kernel(*arguments) and a description of the call, or None if it cannot be
    repeated."""

def record_gradient(name: str, function: Callable[..., Any]) -> None:
    """Registers the Autograd kernel of operator `name`: in C++ for plain CUDA tensors, else `function`. In a build with
    CUDA."""

def second_stream(device: int) -> int:
    """The CUDA stream (cudaStream_t) concurrent with GPU `device`'s current one, made at its first use. In a build with
    CUDA."""

def forget_recordings() -> None:
    """Drops all recorded calls. In a build with CUDA."""

def replays() -> int:
    """The number of calls that were repeated from a recording. In a build with CUDA."""

class TensorStates:
    """Tensors as they are apart from their numbers: address, sizes, strides, dtype, device and dispatch keys. It does
    not keep them alive."""

    def __init__(self, tensors: list[Tensor]) -> None: ...

def unchanged(items: list[Any], sizes: list[Any], types: list[Any], places: list[Any], states: TensorStates) -> bool:
    """True if dictionaries, classes, objects and tensors are as they were. items: [dictionary or class, key, value,
    ...], None for an absent one, the same objects or equal; sizes: [dictionary, size, ...]; types: [object, class,
    ...]; places: [dictionary, key, ...] of tensors with these states."""

def switches() -> bytes:
    """The switches of torch and of this package by which kernels are chosen, as they are now: equal bytes for equal
    switches."""

def note_kernels_off(number: int) -> None:
    """Says the number of the set of kernels that is off now; 0: none."""

def embed(
    ids: Tensor,
    words: Tensor,
    position_ids: Tensor,
    positions: Tensor,
    type_ids: Tensor | None,
    types: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """layer_norm(words[ids] + types[type_ids] + positions[position_ids]), the sum not rounded ahead of the norm.
    Without type_ids: row 0 of types. On a GPU, rows have a multiple of 16 bytes, at most 8192."""

def pack_padded(
    input_ids: Tensor,
    mask: Tensor | None,
    token_type_ids: Tensor | None,
    padding: int,
    packed: Tensor,
    positions: Tensor,
    packed_types: Tensor | None,
    place: Tensor,
    starts: Tensor,
) -> None:
    """Writes the tokens of padded texts [B, S] that the mask shows, and each text's first, one after the other, to
    packed, their positions and types, where each token of [B, S] went (-1: nowhere), and where the segments of
    attention begin. padding: RoBERTa's padding id, -1 for positions that are columns."""

def unpack_padded(states: Tensor, place: Tensor, batch: int, length: int) -> Tensor:
    """The states [T, width] of packed tokens as [batch, length, width], zero where no token went."""

def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: int,
    scale: float,
    left: int,
    right: int,
) -> Tensor:
    """The context [T, H * D] of q [T, H, D], and k and v [keys, h, D]. The queries from query_starts[i] to
    query_starts[i + 1] see the keys from key_starts[i] to key_starts[i + 1], of these the ones at most left before and
    right after their own place (-1: all); the last query is at the last key's place. longest: the most queries of a
    segment. Rows of no segment are undefined. On a GPU in float16 and bfloat16, with D of 32, 64, 80, 96 or 128."""

def simulate_device(
    *,
    shared_memory: int | None = None,
    multiprocessors: int | None = None,
    capability: tuple[int, int] | None = None,
    hopper_code: bool | None = None,
) -> None:
    """Chooses launches as for a GPU with these limits and refuses those that it could not run; without arguments ends
    the simulation. For tests of a build with CUDA."""
