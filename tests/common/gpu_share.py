"""Divides a GPU's memory among the processes of one test run: into parts, each held by one process at a time."""

import fcntl
import gc
import os
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

BESIDE = 1.5 * 2**30  # bytes of a process outside its tests: CUDA context, handles, child interpreters
KEPT = 2**28  # bytes that torch's allocator may keep cached between tests


class Parts:
    """A number of parts, each a file that its holder locks. The kernel releases the locks of a process that dies."""

    def __init__(self, folder, count):
        self.count = count
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _open(self, name):
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def take(self, wanted):
        """Take parts. Only one process at a time collects them, so that none waits for more while holding some (no
        deadlock).
        """
        held = {}
        gate = self._open("gate")
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            while len(held) < min(wanted, self.count):
                for i in range(self.count):
                    if i in held or len(held) == wanted:
                        continue
                    file = self._open(str(i))
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        held[i] = file
                    except BlockingIOError:
                        os.close(file)
                if len(held) < min(wanted, self.count):
                    time.sleep(0.02)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield len(held)
        finally:
            for file in (*held.values(), gate):
                os.close(file)


class Share:
    """The share of this process, one of `processes`: `needs` bytes of the GPU during a test, or a fair share."""

    def __init__(self, processes, run):
        self.total = torch.cuda.get_device_properties(0).total_memory
        self.fair = max(self.total / processes - BESIDE, self.total / processes / 4)
        self.parts = Parts(Path(tempfile.gettempdir()) / f"matmuls-gpu-{os.getuid()}-{run}", processes)

    @contextmanager
    def take(self, needs=0):
        wanted = max(1, min(self.parts.count, -int(-needs // self.fair)))
        with self.parts.take(wanted) as held:
            whole = held == self.parts.count
            self._limit(1.0 if whole else held * self.fair / self.total)
            try:
                yield whole
            finally:
                if torch.cuda.memory_reserved() > KEPT:
                    gc.collect()
                    torch.cuda.empty_cache()

    def _limit(self, fraction):
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    def run(self, call, needs=0):
        """Return call(); on an out-of-memory error repeat it once with the whole GPU."""
        with self.take(needs) as whole:
            try:
                return call()
            except torch.OutOfMemoryError as error:
                if whole:
                    raise
                traceback.clear_frames(error.__traceback__)  # the frames hold tensors
        with self.take(self.total):
            return call()


def share_of_environment():
    """The Share of this process, or None if pytest runs in one process."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes < 2 or not torch.cuda.is_available():
        return None
    return Share(processes, os.environ.get("PYTEST_XDIST_TESTRUNUID", "run"))
