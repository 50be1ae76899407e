"""CUDA graphs of an optimized encoder's passes: captured when a size comes back, and then launched as one."""

import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from custom_mm import _C

from .snapshot import Snapshot

GRAPHS = 64  # of one model; the least recently used is dropped
STEPS = 8  # sizes from a power of two to the next: at most 1/8 of a captured pass is padding

FAILURES = 3  # captures of a size that failed, after which none is tried

Tensors = dict[str, Tensor]
_capturing = threading.Lock()  # torch allows one capture at a time in a process; taken after a model's lock


def rounded(size: int, least: int = 1) -> int:
    """The size, rounded up to one of STEPS sizes for each power of two."""
    size = max(size, least)
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS))
    return -(-size // step) * step


def doubled(size: int, least: int = 1) -> int:
    """The size, rounded up to `least` times a power of two."""
    return least << (-(-size // least) - 1).bit_length()


def _with_switches(key: Hashable) -> Hashable:
    """The key of a pass together with the switches by which kernels are chosen."""
    return key, _C.switches()


def _like(output: ModelOutput, values: Tensors) -> ModelOutput:
    """An output of the same class with these values in place of its own. Its constructor would make the same, in 12 us
    instead of one."""
    made = type(output).__new__(type(output))
    vars(made).update(vars(output), **values)
    for name, x in values.items():
        OrderedDict.__setitem__(made, name, x)
    return made


@dataclass(frozen=True)
class _Pass:
    """A captured pass: replaying the graph computes the outputs from the inputs, at the same addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Any


class Graphs:
    """The captured passes of one model by their sizes.

    They share their memory, so only one is replayed at a time: the streams of all threads wait for the last replay.
    A pass is captured when its sizes come for the second time.
    """

    def __init__(self) -> None:
        _all.add(self)
        self.calls: dict[Hashable, Any] = {}  # of `replayed`: what repeats a call, by its signature
        self.once: set[tuple[int, int]] = set()  # of `replayed`: shapes of batches of equal texts that came once
        self.equal: set[tuple[int, int]] = set()  # and those that are captured as a batch
        self.refused: set[tuple[int, int]] = set()  # and those whose capture has failed
        self._lock = threading.Lock()  # guards the members below
        self._snapshot: Snapshot | None = None  # of the model that was captured
        self._passes: OrderedDict[Hashable, _Pass | None] = OrderedDict()  # None: seen, not captured
        self._failed: Counter[Hashable] = Counter()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None  # the end of the last replay

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copied or unpickled model captures its own

    def __len__(self) -> int:
        return sum(x is not None for x in self._passes.values())

    def failed(self, key: Hashable) -> bool:
        """True if so many captures of a pass have failed that none is tried any more."""
        return self._failed[_with_switches(key)] >= FAILURES

    def holds(self) -> bool:
        """True if the model is as it was when `renew` was called."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.holds()

    def may_run(self) -> bool:
        """True if a captured pass may run, though its outputs are right only if the model `holds`."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.is_in_place()

    def renew(self, model: nn.Module) -> None:
        """Drops the graphs of a model that has changed."""
        self.clear()
        self._snapshot = Snapshot(model)

    def clear(self) -> None:
        """Waits for the last replay and frees all graphs with their memory."""
        with self._lock:
            self._wait()
            with _capturing:
                self._passes.clear()
            self._failed.clear()
            self.calls.clear()
            self.refused.clear()
            self._snapshot = self._pool = self._stream = self._last = None

    def run(
        self,
        key: Hashable,
        device: torch.device,
        make: Callable[[], Tensors],
        fill: Callable[[Tensors], None],
        body: Callable[[Tensors], Any],
        read: Callable[[Tensor, Tensors], Tensor],
    ) -> Any:
        """The outputs of a pass, replayed; None if the caller must compute them, because the key is new or no capture
        succeeded.

        Args:
            key: the sizes.
            device: the GPU.
            make: creates the input tensors of a pass.
            fill: writes this call's values to them.
            body: computes the outputs, a ModelOutput.
            read: copies one of them for the caller; the inputs are its second argument.
        """
        key = _with_switches(key)
        with self._lock:
            found = self._passes.get(key) or self._new(key, device, make, fill, body)
            return None if found is None else self._replayed(key, found, device, fill, read)

    def again(
        self,
        key: Hashable,
        device: torch.device,
        fill: Callable[[Tensors], None],
        read: Callable[[Tensor, Tensors], Tensor],
    ) -> Any:
        """As `run`, for a pass that was captured before; None if it is not there now."""
        key = _with_switches(key)
        with self._lock:
            found = self._passes.get(key)
            return None if found is None else self._replayed(key, found, device, fill, read)

    def _replayed(
        self,
        key: Hashable,
        found: _Pass,
        device: torch.device,
        fill: Callable[[Tensors], None],
        read: Callable[[Tensor, Tensors], Tensor],
    ) -> Any:
        """Outputs that the caller's stream computes. Each call makes the device current by itself, where it must be."""
        self._passes.move_to_end(key)
        stream = torch.cuda.current_stream(device)
        if self._last is not None:
            stream.wait_event(self._last)
        self._last = self._last or torch.cuda.Event()
        try:
            fill(found.inputs)
            found.graph.replay()
            return _like(found.outputs, {name: read(x, found.inputs) for name, x in found.outputs.items()})
        finally:  # later replays wait, also if there was no memory for a copy
            self._last.record(stream)

    def _new(
        self,
        key: Hashable,
        device: torch.device,
        make: Callable[[], Tensors],
        fill: Callable[[Tensors], None],
        body: Callable[[Tensors], Any],
    ) -> _Pass | None:
        """Captures a pass whose key comes for the second time."""
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            if self._failed[key] >= FAILURES:
                return None
            if key not in self._passes:
                self._passes[key] = None
                self._drop_oldest()
                return None
            if self._last is not None:
                torch.cuda.current_stream().wait_event(self._last)
            try:
                with _capturing:
                    found = self._passes[key] = self._captured(make, fill, body)
            except Exception:
                # no memory, an operation that a graph cannot hold, or another thread synchronized the device
                del self._passes[key]
                self._failed[key] += 1
                return None
            self._passes.move_to_end(key)
            self._drop_oldest()
            return found

    def _captured(
        self, make: Callable[[], Tensors], fill: Callable[[Tensors], None], body: Callable[[Tensors], Any]
    ) -> _Pass:
        if self._stream is None:
            # High priority: torch hands out its 32 ordinary streams in turn, also to other threads.
            self._stream, self._pool = torch.cuda.Stream(priority=-1), torch.cuda.graph_pool_handle()
        inputs = make()
        fill(inputs)
        # Loads kernels and chooses algorithms, which a capture may not. Not on the capture's stream: torch's cuBLAS
        # workspace of that stream must lie in the graphs' pool, because torch frees it while graphs still use it.
        body(inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = body(inputs)
            except BaseException:
                self._end(graph)
                raise
            self._end(graph)
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Pass(graph, inputs, outputs)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. If an operation has made it invalid, torch would go on to treat the device as capturing."""
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            generator = torch.cuda.default_generators[device]
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device, self._pool)
            with suppress(RuntimeError):
                generator.graphsafe_set_state(generator.clone_state())
            raise

    def _wait(self) -> None:
        """Waits for the last replay."""
        if self._last is not None:
            with _C.RelaxedCapture():  # another thread may capture a graph
                self._last.synchronize()

    def _drop_oldest(self) -> None:
        """Drops all but the last GRAPHS graphs, and the keys that came first."""
        captured = [key for key, found in self._passes.items() if found is not None]
        old = captured[: max(0, len(captured) - GRAPHS)] + [*self._passes][: max(0, len(self._passes) - 4 * GRAPHS)]
        if any(self._passes[key] is not None for key in old):
            self._wait()
        with _capturing:
            for key in old:
                self._passes.pop(key, None)


_all: weakref.WeakSet[Graphs] = weakref.WeakSet()
_of_parent: list[Any] = []


def _keep() -> None:
    """Keeps the parent's CUDA objects in a forked process: it cannot destroy them, and torch would end it."""
    _of_parent.extend((graphs._passes, graphs._stream, graphs._last) for graphs in _all)


os.register_at_fork(after_in_child=_keep)
