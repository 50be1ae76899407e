"""Times SentenceTransformer.encode on a CPU, as it is at several batch sizes, and optimized, on docstrings.

Usage: python benchmarks/scripts/encode_texts.py OUT. Writes OUT/cpu/encode-texts.json. The model is all-MiniLM-L6-v2 in
float32 with 2 threads. The ways alternate (A B A B); the fastest round of each counts, since other work on the machine
only adds time. `cpu` is the time of all threads in the process, which other work hardly changes.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from docstrings import drawn
from out_folder import out_folder

from matmuls.bert import model_folder
from matmuls_bench import machine

BATCHES = (8, 32)  # the fastest of 8, 16, 32 and 64 for these texts, and the default
COUNTS = {1: 50, 10: 20, 200: 4, 2000: 2}  # texts -> rounds


def spent() -> tuple[float, float]:
    """Seconds: of the clock, and of the CPU in this process."""
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime


def least_of(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the fastest of rounds in which the ways take turns: of the clock, and of the CPU."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            wall, cpu = spent()
            way()
            after = spent()
            times[name].append((after[0] - wall, after[1] - cpu))
    kinds = enumerate(("seconds", "cpu_seconds"))
    return {kind: {name: min(t[i] for t in found) for name, found in times.items()} for i, kind in kinds}


def measured(texts: list[str], rounds: int, stock: Any, ours: Any) -> dict[str, Any]:
    """Seconds by way, and how near the optimized model's vectors are to stock's."""
    ways: dict[str, Callable[[], Any]] = {
        f"stock, batch_size={size}": lambda size=size: stock.encode(texts, batch_size=size)
        for size in BATCHES
        if size == BATCHES[0] or len(texts) > size
    }
    ways["optimized"] = lambda: ours.encode(texts)
    a, b = (ways[name]().astype(np.float64) for name in ("optimized", f"stock, batch_size={BATCHES[0]}"))
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return {
        "texts": len(texts),
        "cosine": float(cosine.min()),
        **least_of(ways, rounds),
    }


def main() -> None:
    out = out_folder(__doc__ or "", needs_gpu=False)
    from sentence_transformers import SentenceTransformer, __version__

    from matmuls.integrations.sentence_transformers import optimize

    torch.set_num_threads(2)
    stock, ours = (SentenceTransformer(str(model_folder()), device="cpu") for _ in range(2))
    handle = optimize(ours)
    texts = drawn(max(COUNTS))
    rows = []
    for count, rounds in COUNTS.items():
        before = handle.tokens
        rows.append(measured(texts[:count], rounds, stock, ours))
        rows[-1]["tokens"] = (handle.tokens - before) // (rounds + 1)
        print(rows[-1], flush=True)
    versions = {"sentence_transformers": __version__}
    machine.save(out / "cpu/encode-texts.json", "cpu", versions, rows=rows)


if __name__ == "__main__":
    main()
