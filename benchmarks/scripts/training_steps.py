"""Times training steps of BERT-base in bfloat16 as called, with matmuls attention and with torch's sdpa.

Usage: python benchmarks/scripts/training_steps.py OUT. Writes OUT/cuda/training-steps.json. A step is forward, loss,
backward and fused AdamW, with transformers' default dropout and an attention mask that hides nothing. The attention is
the one that `register` installs. Both ways are also compiled with torch.compile. The two ways of a pair take turns (A B
B A), with the GPU idle before and after each block of steps; "ms" is the median of the blocks, and "speed" the median
of the quotients of neighbouring blocks, because the host's speed drifts; "quartiles" are those of the quotients, and
"same" the median of the quotients of neighbouring blocks of sdpa, which would be 1 without noise.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder
from torch import nn
from transformers import BertConfig, BertModel

from matmuls.integrations.transformers import register
from matmuls_bench import machine, timing

SIZES = (8, 64), (32, 128), (32, 512), (8, 2048)
WARM, ROUNDS, BLOCK = 4, 31, 0.1  # steps before the first block; blocks of each way; seconds of a block


class Training:
    """A model and its optimizer; a call is one step."""

    def __init__(self, attention: str, length: int, compiled: bool) -> None:
        torch.manual_seed(0)
        config = BertConfig(max_position_embeddings=max(512, length), attn_implementation=attention)
        self.model: nn.Module = BertModel(config, add_pooling_layer=False).cuda().to(torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.run = torch.compile(self.model) if compiled else self.model

    def __call__(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.run(**given).last_hidden_state.float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measured(batch: int, length: int, compiled: bool) -> dict[str, Any]:
    torch.compiler.reset()
    ids = torch.randint(1000, 20000, (batch, length), device="cuda")
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    trained = {"sdpa": Training("sdpa", length, compiled), "matmuls": Training("custom_mm", length, compiled)}
    ways = {name: partial(step, given) for name, step in trained.items()}
    steps, losses = {}, {}
    for name, step in ways.items():
        losses[name] = step().item()
        timing.seconds_of(step, WARM)
        steps[name] = max(1, round(BLOCK / timing.seconds_of(step, 2)))
    times = timing.rounds_of(ways, ROUNDS, steps)
    ms = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    least = {name: min(t) * 1e3 for name, t in times.items()}
    size = {"batch": batch, "length": length, "compiled": compiled}
    quotients = [a / b for a, b in zip(times["sdpa"], times["matmuls"], strict=True)]
    lower, speed, upper = statistics.quantiles(quotients, n=4)
    pairs = zip(times["sdpa"][1::2], times["sdpa"][2::2], strict=True)  # A B B A: blocks of sdpa without one between
    same = statistics.median(a / b for a, b in pairs)
    noise = {"quartiles": (lower, upper), "same": same}
    return size | {"ms": ms, "least_ms": least, "losses": losses, "speed": speed} | noise


def main(out: Path) -> None:
    register()
    rows = []
    for batch, length in SIZES:
        for compiled in (False, True):
            rows.append(measured(batch, length, compiled))
            print(json.dumps(rows[-1]), flush=True)
    machine.save(out / "cuda/training-steps.json", "cuda", rows=rows)


if __name__ == "__main__":
    main(out_folder(__doc__ or ""))
