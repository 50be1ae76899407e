"""The machine of a measurement: its roofs, and its versions as the result files record them."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import custom_mm
from matmuls import files

from . import timing
from .table import Draw


@dataclass(frozen=True)
class Roofs:
    """Bytes (copy) and floating-point operations (product, by dtype) per second that the device reached in this run."""

    copy: float
    product: dict[str, float]

    def seconds(self, flops: int, nbytes: int, dtype: str) -> float:
        return max(flops / self.product[dtype] if flops else 0.0, nbytes / self.copy)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_rate(count: int, device: str) -> float:
    """Bytes read + written per second, by torch's copy or an elementwise kernel, the faster of both."""
    source, target = (torch.randn(count, device=device) for _ in range(2))
    timings = timing.time_on(device, [[lambda: target.copy_(source)], [lambda: torch.neg(source, out=target)]])
    return 2 * source.nbytes / min(timing.seconds for timing in timings)


def measure_roofs(device: str, dtypes: list[torch.dtype], quick: bool) -> Roofs:
    """Rate of a copy of 2 GB (GPU) or 128 MB (CPU, quick), and of square products, the best over the sizes."""
    copy = copy_rate(2**25 if device == "cpu" or quick else 2**29, device)
    sizes = (512, 1024) if device == "cpu" or quick else (2048, 4096, 8192)
    product = {}
    for dtype in dtypes:
        draw = Draw(dtype, device)
        best = 0.0
        for n in sizes:
            a, b = draw(n, n), draw(n, n)
            seconds = timing.time_on(device, [[partial(torch.mm, a, b, out=torch.empty_like(a))]])[0].seconds
            best = max(best, 2 * n**3 / seconds)
        product[name_of(dtype)] = best
    return Roofs(copy, product)


def environment(device: str) -> dict[str, Any]:
    """The machine, versions, command and commit of a measurement."""
    # an installed copy may lie in another repository
    ours = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    sources = ":/src", ":/custom_mm", ":/matmuls", ":/benchmarks/matmuls_bench"
    changes = _git("status", "--porcelain", "--", *sources) if ours else None
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # set by torchrun
    script = Path(sys.argv[0])
    if script.parent.name == "scripts":
        arguments = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]
        program = [*([] if processes else ["python"]), f"benchmarks/scripts/{script.name}", *arguments]
    else:
        program = [*(["-m"] if processes else []), "matmuls", *sys.argv[1:]]
    launcher = ["torchrun", f"--nproc-per-node={processes}"] if processes else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*launcher, *program]),
        "commit": os.environ.get("MATMULS_COMMIT") or (_git("rev-parse", "HEAD") if ours else None),
        "modified": None if changes is None else bool(changes),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "build": custom_mm.build_info(),
        "driver": _driver() if device == "cuda" else None,
    }


def save(path: Path, device: str, facts: Mapping[str, object] | None = None, **parts: object) -> None:
    """Write a result file: the environment, with these facts of the run added, and the parts by their names."""
    content = {"environment": environment(device) | dict(facts or {}), **parts}
    files.write(path, json.dumps(content, indent=1, default=float) + "\n")


def _cpu() -> str:
    """The CPU's name where Linux knows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), platform.processor() or platform.machine())


def _git(*args: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None
