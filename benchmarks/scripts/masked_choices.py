"""Times what choices for two experts are set by: the split of a last wave of tiles, and chunks of rows.

Usage: python benchmarks/scripts/masked_choices.py OUT. Writes OUT/cuda/masked-choices.json. A case has the us of each
way: GPU time of a call in a CUDA graph, the least of rounds in which the ways take turns. The masked products are those
of masked_linear in bfloat16, with the given share of the rows in the first expert: [M, K] by two weights [K, N] with
and without a split of the last wave of tiles, and the gradient of the weights with its rows in one chunk and in two.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from out_folder import out_folder
from torch import Tensor

from matmuls import mask_plan
from matmuls.triton import configs, last_wave, masked_linear, masked_weights
from matmuls_bench import machine, timing

CALLS, BUDGET = 10, 0.05  # calls in a graph; seconds of each way
PRODUCTS = (
    *((6000, 6144, 1536), (1500, 4096, 512), (5000, 4096, 1024), (2048, 2048, 2048), (3000, 3072, 768)),
    *((2048, 1024, 1024), (6000, 1536, 6144), (1100, 4096, 1024)),
)
WEIGHTS = (
    *((6000, 6144, 1536), (6000, 2560, 2560), (12288, 2048, 2048), (16384, 3072, 768), (8000, 3072, 768)),
    *((3000, 4096, 1536), (8192, 1024, 1024)),
)
SHARES = 0.5, 0.25, 0.05, 0.0
Ways = dict[str, Callable[[], Any]]


def draw(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).bfloat16()


def measured(choice: str, case: str, ways: Ways) -> dict[str, Any]:
    times = timing.time_on_gpu([[call] * CALLS for call in ways.values()], BUDGET)
    us = {name: t.fastest * 1e6 for name, t in zip(ways, times, strict=True)}
    return {"choice": choice, "case": case, "us": us}


def last_waves() -> Iterator[dict[str, Any]]:
    for m, k, n in PRODUCTS:
        x, w1, w2 = draw(m, k), draw(n, k), draw(n, k)
        for share in SHARES[::2]:
            rows, counts, _ = mask_plan(torch.rand(m, device="cuda") < share)

            def product(worth: int, args: tuple[Tensor, ...] = (x, w1, w2, rows, counts)) -> None:
                with patch.object(last_wave, "WORTH", worth):
                    masked_linear.product(*args)

            ways: Ways = {"split": lambda p=product: p(0), "whole": lambda p=product: p(1 << 60)}
            ways["torch.mm"] = lambda x=x, w1=w1: torch.mm(x, w1.T)
            yield measured("last wave", f"{m}x{k}x{n}, {share:.0%}", ways)


def chunks_of_rows() -> Iterator[dict[str, Any]]:
    for m, n, k in WEIGHTS:
        g, x = draw(m, n), draw(m, k)
        for share in SHARES:
            rows, counts, _ = mask_plan(torch.rand(m, device="cuda") < share)

            def gradient(split: int, args: tuple[Tensor, ...] = (g, x, rows, counts)) -> None:
                tiles = configs.Tiles(128, 256, 64, tma=True, pieces=4, split=split)
                with patch.dict(configs.forced, {"masked_ffn_weights": tiles}):
                    masked_weights.weight_gradients(*args, gather_g=False, gather_x=False)

            ways: Ways = {f"{s} chunks": lambda s=s, f=gradient: f(s) for s in (1, 2)}
            ways["torch.mm"] = lambda g=g, x=x: torch.mm(g.T, x)
            yield measured("chunks of rows", f"{m}x{n}x{k}, {share:.0%}", ways)


def main(out: Path) -> None:
    torch.manual_seed(0)
    rows = []
    for family in (last_waves, chunks_of_rows):
        for row in family():
            rows.append(row)
            print(json.dumps(row), flush=True)
    machine.save(out / "cuda/masked-choices.json", "cuda", rows=rows)


if __name__ == "__main__":
    main(out_folder(__doc__ or ""))
