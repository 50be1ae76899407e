"""Records one call of an operator, its allocations and its launches, for `custom_mm._C` to repeat without Python.

A call that does anything else, as a copy or a product of torch, work on other streams than the current one and its
second one, or a kernel with scratch memory, is not recorded: it runs in Python each time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import Launched, Step, steps_of

_aten = torch.ops.aten
ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class NotRecordable(Exception):
    """The call cannot be repeated from a recording."""


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class _Watch(TorchDispatchMode):
    """Notes the tensors that are allocated, and whether torch did more than that and than to make views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # kept alive, so that no two have the same address
        self.more: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.made.append(result)
        else:
            results = result if isinstance(result, tuple | list) else (result,)
            sources = {_storage(a) for a in args if isinstance(a, Tensor)}
            views = all(isinstance(r, Tensor) and _storage(r) in sources for r in results)
            if func._schema.is_mutable or not views:
                self.more.append(str(func))
        return result


class _Call:
    """The tensors of a call: its arguments, then the buffers that it allocates."""

    def __init__(self, arguments: Sequence[Any], buffers: Sequence[Tensor]) -> None:
        self.arguments, self.buffers = arguments, buffers
        given: dict[int, int] = {}
        for i, a in enumerate(arguments):
            if isinstance(a, Tensor) and a.numel():
                given.setdefault(a.data_ptr(), i)
        self.given = given
        self.made = {_storage(b): i for i, b in enumerate(buffers) if b.numel()}

    def place(self, t: Tensor | None) -> dict[str, Any]:
        """The tensor that a kernel's pointer points into, and the offset: `Place` in src/masked/recording.h."""
        if t is None or t.data_ptr() == 0:
            return {"tensor": -1, "delta": 0}
        if (i := self.made.get(_storage(t))) is not None:
            return {"tensor": len(self.arguments) + i, "delta": t.data_ptr() - self.buffers[i].data_ptr()}
        if t.data_ptr() not in self.given:
            raise NotRecordable("a pointer into the middle of an argument")
        return {"tensor": self.given[t.data_ptr()], "delta": 0}

    def parameters(self, launched: Launched) -> list[Any]:
        """The parameters that Triton passes: all but those that it compiled in."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        maps = iter(getattr(launched.compiled.metadata, "tensordesc_meta", None) or ())
        found: list[Any] = []
        for arg, kind in zip(launched.args, launched.compiled.src.signature.values(), strict=True):
            if kind == "constexpr":
                continue
            if kind[0] == "*":
                found.append(self.place(arg))
            elif kind in ("i32", "i64"):
                found.append((int(arg), int(kind[1:]) // 8))
            elif kind.startswith("tensordesc") and (of := next(maps, None)) and not of["fp4_padded"]:
                if arg.padding != "zero":
                    raise NotRecordable(f"padding {arg.padding}")
                found.append(
                    self.place(arg.base)
                    | {
                        "type": TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]],
                        "swizzle": of["swizzle"],
                        "element_bytes": of["elem_size"],
                        "box": list(of["block_size"]),
                        "sizes": list(arg.shape),
                        "strides": list(arg.strides),
                    }
                )
            else:
                raise NotRecordable(f"a parameter of type {kind}")
        return found

    def launch(self, launched: Launched, main: int) -> dict[str, Any]:
        of = launched.compiled.metadata
        if of.num_ctas != 1 or of.launch_cooperative_grid or of.global_scratch_size or of.profile_scratch_size:
            raise NotRecordable("a cluster, a cooperative launch or scratch memory")
        return {
            "function": launched.compiled.function,
            "grid": launched.grid,
            "threads": 32 * of.num_warps,
            "shared": of.shared,
            "early": bool(of.launch_pdl),
            "second": launched.stream != main,
            "parameters": self.parameters(launched),
        }

    def output(self, t: Tensor) -> dict[str, Any]:
        at = next((i for i, b in enumerate(self.buffers) if b is t), None)
        at = self.made.get(_storage(t)) if at is None else at
        if at is None or self.buffers[at].dtype != t.dtype:
            raise NotRecordable("a result that is no buffer")
        return {"buffer": at, "sizes": list(t.shape), "strides": list(t.stride()), "offset": t.storage_offset()}


def _main_stream(log: list[Step]) -> int:
    """The stream of the first launch. Raises unless all others are on it, or `concurrently` on one other."""
    streams = [x.stream for x in log if isinstance(x, Launched)]
    if not streams or len(set(streams)) > 2:
        raise NotRecordable("no launch, or launches on several streams")
    forked = False
    for x in log:
        if isinstance(x, str):
            forked = x == "fork"
        elif x.stream != streams[0] and not forked:
            raise NotRecordable("a launch on another stream")
    return streams[0]


def _described(arguments: Sequence[Any], results: Sequence[Tensor], watch: _Watch, log: list[Step]) -> Any:
    if watch.more:
        raise NotRecordable(f"torch's {', '.join(watch.more)}")
    main = _main_stream(log)
    call = _Call(arguments, watch.made)
    buffers = [{"sizes": list(b.shape), "strides": list(b.stride()), "dtype": b.dtype} for b in watch.made]
    outputs = [call.output(t) for t in results]
    for o in outputs:  # a result that is a whole buffer is allocated with the result's shape
        whole = watch.made[o["buffer"]].numel() == torch.Size(o["sizes"]).numel() and o["offset"] == 0
        if whole and sum(other["buffer"] == o["buffer"] for other in outputs) == 1:
            buffers[o["buffer"]] |= {"sizes": o["sizes"], "strides": o["strides"]}
    return {
        "buffers": buffers,
        "launches": [x if isinstance(x, str) else call.launch(x, main) for x in log],
        "outputs": outputs,
    }


def record(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """The results of kernel(*arguments), and the description of the call that `custom_mm._C` repeats, or None."""
    watch, found = _Watch(), None
    try:
        with watch, steps_of() as log:
            found = kernel(*arguments)
    except torch.OutOfMemoryError:  # watch keeps every buffer until the call ends
        pass
    if found is None:  # after the except block, whose traceback keeps buffers too
        watch.made.clear()
        log.clear()  # the launches have buffers as arguments
        return kernel(*arguments), None
    try:
        return found, _described(arguments, (found,) if isinstance(found, Tensor) else found, watch, log)
    except (NotRecordable, ImportError, AttributeError, KeyError, ValueError):  # as by another version of Triton
        return found, None
