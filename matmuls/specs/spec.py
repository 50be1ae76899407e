"""What a row of the table is made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.custom_mm
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL = (*REAL, torch.complex64, torch.complex128)


class Draw:
    """Random tensors of one dtype on one device: `draw(3, 4)` is standard normal of that shape, the same for a seed."""

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
        """The same call with every tensor changed."""

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
    """One benchmark: a label and its arguments; where it is not the row's own call, what it runs instead."""

    label: str
    draw: Callable[[Draw], Call]  # from draw's tensors, dtype and device alone: it runs on "meta" too
    call: Callable[..., Any] | None = None  # such as a backward operator; may return a tuple of tensors and None
    reference: Callable[..., Any] | None = None
    rival: str | None = None
    in_place: bool | None = None
    moved: Callable[[Call], int] | None = None  # bytes that must move, where not every input and result once
    device: str | None = None  # "cpu" or "cuda" alone
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)  # more rivals
    dense: Callable[..., Any] | None = None  # a rival of as many operations on the same sizes, with another result
    tf32: bool = False  # in float32 alone, torch's switch letting everybody's products take TF32


@dataclass(frozen=True)
class Spec:
    """One row of the table."""

    name: str
    summary: str
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # torch with the same arguments: the truth in float64, the rival in a benchmark
    operators: tuple[torch._ops.OpOverload, ...]  # what it runs on; each needs a CPU and a CUDA kernel
    samples: Callable[[Draw], Iterator[Call]]
    bad: Callable[[Draw], Iterator[Bad]]
    empty: Callable[[Draw], Iterator[Call]]
    cases: tuple[Case, ...] = ()
    memory_cases: tuple[Case, ...] = ()  # their peak is measured, not their time
    host_case: Case | None = None  # small enough that the host's time is all there is
    host_reference: Callable[..., Tensor] | None = None  # what a user would type for it
    dtypes: tuple[torch.dtype, ...] = ALL
    bench_dtypes: tuple[torch.dtype, ...] | None = None  # timed unless told otherwise; None: bench.GPU_DTYPES
    cpu_bench_dtypes: tuple[torch.dtype, ...] | None = None  # None: bench.CPU_DTYPES
    gradient: bool = True
    autocast: bool = True
    flops: bool = True  # torch.utils.flop_counter counts it
    rival: str = "torch"
    compiled: bool = False  # on a GPU torch.compile(reference) is a second rival
    dense: Callable[..., Any] | None = None  # what the operations are counted on, where the reference does more
    arguments: Callable[[Call], tuple[Any, ...]] | None = None  # of operators[0], where they are not the call's

    frozen: tuple[int, ...] = ()  # arguments without a gradient
    opchecks: Callable[[Draw], Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]] | None = None  # where the
    # operators take other arguments than the row's calls
    static: bool = False  # what is made depends on values: not for torch.compile(fullgraph=True)
    contiguous: bool = False  # no other layout is taken
    writes: bool = False  # written over its first argument, under a name that does not end in "_"

    @property
    def in_place(self) -> bool:
        """The first argument is written over."""
        return self.writes or self.name.endswith("_")

    def on_a_copy(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call with its first argument left as it is; a leaf that requires grad is no leaf then."""
        writes = self.in_place or kwargs.get("inplace")
        return self.call(args[0].clone(), *args[1:], **kwargs) if writes else self.call(*args, **kwargs)
