"""Collects the rows of batches in the order of the inputs, on their own device or on the CPU."""

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

AHEAD = 64  # batches whose rows are still on their way to the CPU; bounds what is launched before they are there


@dataclass
class Collected:
    """The rows of `count` inputs. to_cpu: on the CPU, those of bfloat16 in float32, as numpy takes them.

    batch   GPU                           host
    1       passes, copy to pinned rows
    2       passes, copy to pinned rows   rows of batch 1 to their places
    ...     ...                           ...
    """

    count: int
    to_cpu: bool
    _all: Tensor | None = None
    _coming: deque[tuple[Tensor, list[int], torch.cuda.Event]] = field(default_factory=deque)

    def add(self, rows: Tensor, numbers: list[int], places: Tensor) -> None:
        """Takes the rows of a batch [texts, ...]. numbers: which of the inputs they are; places: the same as a tensor
        [texts] int64 on their device."""
        rows = rows.float() if self.to_cpu and rows.dtype == torch.bfloat16 else rows
        comes = self.to_cpu and rows.is_cuda
        if self._all is None:
            self._all = rows.new_empty(self.count, *rows.shape[1:], device="cpu" if comes else None)
        if not comes:
            self._all.index_copy_(0, places, rows)
            return
        pinned = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        pinned.copy_(rows, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(rows.device))
        self._coming.append((pinned, numbers, copied))
        self._take(AHEAD)

    def all(self) -> Tensor | None:
        """The rows of all inputs [count, ...]; None if there were none."""
        self._take(0)
        return self._all

    def _take(self, most: int) -> None:
        """Places the rows that have come, and waits for others until at most `most` batches are on their way. By numpy,
        in this thread: torch would share the copy with other threads, and the tokenizer's have their cores."""
        while self._coming and (len(self._coming) > most or self._coming[0][2].query()):
            rows, numbers, copied = self._coming.popleft()
            copied.synchronize()
            cast(Tensor, self._all).numpy()[numbers] = rows.numpy()
