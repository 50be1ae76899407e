"""Every row operation at many lengths of rows, by each kernel that takes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import custom_mm
from custom_mm.kernel_switch import FAMILIES

from .. import timing
from . import Case

ELEMENTS = 2**26  # of a tensor: twice an H100's L2 in 16 bits
SQUARE = 4096  # columns of a causal matrix, at most
BUDGET = 0.02  # seconds of measurement per kernel; at least 20 rounds
DTYPES = (torch.bfloat16, torch.float32)
# Powers of two, and between them lengths that leave threads idle by each way to divide a row.
ALIGNED = (
    *(64, 128, 136, 192, 256, 320, 384, 512, 544, 640, 768, 896, 1024, 1032, 1280, 1536, 1920, 2048, 2560, 3072),
    *(4096, 5120, 6144, 8192, 8200, 10240, 12288, 16384, 20480, 32768, 50264, 65536, 131072, 151640, 262144),
)
UNALIGNED = (
    7,
    33,
    50,
    77,
    131,
    150,
    197,
    257,
    333,
    577,
    785,
    1023,
    1025,
    2049,
    4097,
    8191,
    16385,
    32003,
    50257,
    151643,
)


@dataclass(frozen=True)
class Call:
    """A row operation, and what its arguments are. make(x): the call's arguments and options for x [rows, columns]."""

    operation: str  # of torch.ops.custom_mm
    label: str
    make: Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def name(self) -> str:
        return f"{self.operation} {self.label}".strip()


def _softmax_backward(x: Tensor, causal: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x.softmax(-1), torch.randn_like(x)), {"causal": causal}


def _mask(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, columns]: an eighth of the columns are hidden."""
    hidden = torch.rand(1, x.shape[-1], device=x.device) < 0.125
    return hidden if dtype == torch.bool else torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -1e4)


def _constants(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.rand(x.shape[-1], device=x.device, dtype=x.dtype), torch.rand_like(x[0])


def _norm_backward(x: Tensor, rms: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rstd = torch.ones(x.shape[0], device=x.device)
    return (torch.randn_like(x), x, rstd, _constants(x)[0], rms), {}


CALLS = (
    Call("softmax_", "", lambda x: ((x,), {})),
    Call("scaled_masked_softmax_", "bool mask", lambda x: ((x, _mask(x, torch.bool), 0.125), {})),
    Call("scaled_masked_softmax_", "added mask", lambda x: ((x, _mask(x, x.dtype), 0.125), {})),
    Call("scaled_masked_softmax_", "causal", lambda x: ((x, None, 0.125, True), {})),
    Call("softmax_backward_", "", _softmax_backward),
    Call("softmax_backward_", "causal", partial(_softmax_backward, causal=True)),
    Call("layer_norm_", "", lambda x: ((x, *_constants(x)), {})),
    Call("layer_norm_", "residual", lambda x: ((x, *_constants(x), 1e-5, torch.randn_like(x)), {})),
    Call("rms_norm_", "", lambda x: ((x, _constants(x)[0]), {})),
    Call("rms_norm_", "residual", lambda x: ((x, _constants(x)[0], 1e-5, torch.randn_like(x)), {})),
    Call("norm_backward", "of layer_norm_", partial(_norm_backward, rms=False)),
    Call("norm_backward", "of rms_norm_", partial(_norm_backward, rms=True)),
)


def drawn(
    call: Call, rows: int, columns: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on `rows` rows, about; causal rows of up to 4096 columns are those of square matrices."""
    x = torch.randn(rows, columns, device=device).to(dtype)
    if call.label == "causal" and rows >= columns and columns <= SQUARE:  # row i of a matrix sees i + 1 columns
        x = x[: rows // columns * columns].view(-1, columns, columns)
    return call.make(x)


def runs_of(call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The kernels that take the call, each with a function that runs it by that kernel."""
    operator = getattr(torch.ops.custom_mm, call.operation)

    def run(kernel: str) -> Any:
        with custom_mm.only_kernel(kernel):
            return operator(*args, **options)

    found = {}
    for kernel in FAMILIES["rows"].kernels:
        try:
            with custom_mm.only_kernel(kernel):
                custom_mm.explain(call.operation, *args, **options)
        except ValueError:  # it does not take these rows
            continue
        found[kernel] = partial(run, kernel)
    return found


def case(call: Call, columns: int, dtype: torch.dtype) -> Case:
    """Time one call by every kernel that takes it."""
    args, options = drawn(call, max(ELEMENTS // columns, 1), columns, dtype)
    chosen = custom_mm.explain(call.operation, *args, **options).kernel
    runs = runs_of(call, args, options)
    timings = timing.time_on_gpu([[run] for run in runs.values()], BUDGET)
    return Case(
        family="rows",
        operation=call.name,
        label=" x ".join(map(str, args[0].shape)),
        dtype=str(dtype).removeprefix("torch."),
        chosen=chosen,
        seconds={name: t.seconds for name, t in zip(runs, timings, strict=True)},
        spread={name: t.spread for name, t in zip(runs, timings, strict=True)},
    )


def jobs() -> list[tuple[Call, int, torch.dtype]]:
    """Every call at every length; causal rows are those of square matrices of up to 4096 columns."""
    lengths = sorted({*ALIGNED, *UNALIGNED})
    return [
        (call, columns, dtype)
        for call in CALLS
        for dtype in DTYPES
        for columns in lengths
        if call.label != "causal" or columns <= SQUARE
    ]


def cases(part: Callable[[str], object] = lambda now: None) -> Iterator[Case]:
    """The cases of all `jobs`. part: called at the end of each, with its name."""
    torch.manual_seed(0)
    for call, columns, dtype in jobs():
        yield case(call, columns, dtype)
        part(f"{call.name}, {columns} columns")
