"""The types that make up the table: Spec (one operation) with its calls, bad calls and benchmark cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.custom_mm
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL = (*REAL, torch.complex64, torch.complex128)


class Draw:
    """Random tensors of one dtype on one device: `draw(3, 4)` is standard normal, reproducible from the seed."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.randn(shape, generator=self._generator, dtype=wide, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Call:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The call with `change` applied to every tensor."""

        def one(x: Any) -> Any:
            return change(x) if isinstance(x, Tensor) else x

        return Call(tuple(map(one, self.args)), {k: one(v) for k, v in self.kwargs.items()})


@dataclass(frozen=True)
class Bad:
    """A call that must raise RuntimeError with `match` in its message."""

    call: Call
    match: str


@dataclass(frozen=True)
class Case:
    """One benchmark: label, arguments, and functions that replace the row's."""

    label: str
    draw: Callable[[Draw], Call]  # uses only draw's tensors, dtype and device: also runs on "meta"
    call: Callable[..., Any] | None = None  # such as a backward operator; may return a tuple
    reference: Callable[..., Any] | None = None
    rival: str | None = None
    in_place: bool | None = None
    moved: Callable[[Call], int] | None = None  # bytes that must move; None: each input and result once
    device: str | None = None  # only "cpu" or only "cuda"
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)  # more rivals
    dense: Callable[..., Any] | None = None  # dense product of equal cost; its result differs
    tf32: bool = False  # float32 only, with TF32 allowed for ours and the rivals
    drawn: bool = False  # a size of table/drawn.py, by which no constant was chosen
    # If the reference is a chain of operations: positions of the arguments that are parameters of a module. Then
    # torch.compile with CUDA graphs is a rival on a GPU.
    parameters: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Spec:
    """One row of the table: an operation."""

    name: str
    summary: str
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # in torch: the truth in float64, the rival in a benchmark
    operators: tuple[torch._ops.OpOverload, ...]  # those it calls; each needs a CPU and a CUDA kernel
    samples: Callable[[Draw], Iterator[Call]]
    bad: Callable[[Draw], Iterator[Bad]]
    empty: Callable[[Draw], Iterator[Call]]
    cases: tuple[Case, ...] = ()
    memory_cases: tuple[Case, ...] = ()  # for peak memory, not time
    host_case: Case | None = None  # small: host time dominates
    host_reference: Callable[..., Tensor] | None = None  # the rival of host_case; None: reference
    dtypes: tuple[torch.dtype, ...] = ALL
    bench_dtypes: tuple[torch.dtype, ...] | None = None  # default of the bench; None: bench.jobs.GPU_DTYPES
    cpu_bench_dtypes: tuple[torch.dtype, ...] | None = None  # None: bench.jobs.CPU_DTYPES
    gradient: bool = True
    autocast: bool = True
    flops: bool = True  # whether torch.utils.flop_counter counts it
    rival: str = "torch"
    compiled: bool = False  # torch.compile(reference) is a rival on a GPU
    dense: Callable[..., Any] | None = None  # to count operations, if the reference does more
    arguments: Callable[[Call], tuple[Any, ...]] | None = None  # of operators[0], if not the call's

    frozen: tuple[int, ...] = ()  # arguments without a gradient
    opchecks: Callable[[Draw], Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]] | None = None  # for opcheck,
    # if the operators take other arguments than the row's calls
    static: bool = False  # data-dependent: not for torch.compile(fullgraph=True)
    waits: bool = False  # for the GPU, because an error depends on the values
    contiguous: bool = False  # rejects non-contiguous tensors
    writes: bool = False  # overwrites its first argument, though its name has no final "_"

    @property
    def in_place(self) -> bool:
        """Whether the first argument is overwritten."""
        return self.writes or self.name.endswith("_")

    def on_a_copy(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call with a clone as first argument, which is not a leaf of the autograd graph."""
        writes = self.in_place or kwargs.get("inplace")
        return self.call(args[0].clone(), *args[1:], **kwargs) if writes else self.call(*args, **kwargs)
