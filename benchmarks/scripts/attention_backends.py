"""Times scaled_dot_product_attention, forward + backward, by each backend of torch and by the one that matmuls takes.

Usage: python benchmarks/scripts/attention_backends.py OUT. Writes OUT/cuda/attention-backends.json. 12 heads of 64 in
bfloat16 with dropout 0.1, as in BERT-base's training, in the layout of transformers: q, k and v are views of [B, L, H,
D], the result is [B, L, H, D]. "called_us": wall clock of a call with its backward pass, host included; the backends
take turns and the median of the rounds counts. "gpu_us": of a replayed CUDA graph.
"""

import json
import statistics
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from matmuls.integrations.transformers.sdpa import attend_by_torch
from matmuls_bench import machine, timing

SIZES = (8, 32), (8, 64), (8, 60), (64, 64), (8, 128), (32, 128), (32, 512), (8, 2048)
BACKENDS = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROUNDS, CALLS = 5, 100


def measured(batch: int, length: int, masked: bool) -> dict[str, Any]:
    shape = batch, length, 12, 64
    x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    mask = torch.arange(length, device="cuda").expand(batch, 1, 1, length) < 3 * length // 4 if masked else None

    def by_torch() -> object:
        q, k, v = (t.transpose(1, 2) for t in x)
        y = scaled_dot_product_attention(q, k, v, mask, 0.1, False, scale=0.125).transpose(1, 2).contiguous()
        return torch.autograd.grad(y, x, grad)

    def by_matmuls() -> object:
        q, k, v = (t.transpose(1, 2) for t in x)
        return torch.autograd.grad(attend_by_torch(q, k, v, mask, 0.1, False, 0.125), x, grad)

    called: dict[str, list[float]] = {}
    gpu: dict[str, float] = {}
    refused: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, backend in {**BACKENDS, "matmuls": None}.items():
            if name in refused:
                continue
            context: AbstractContextManager[Any] = nullcontext() if backend is None else sdpa_kernel(backend)
            run = by_matmuls if name == "matmuls" else by_torch
            try:
                with context:
                    called.setdefault(name, []).append(timing.seconds_of(run, CALLS) * 1e6)
                    gpu.setdefault(name, 0.0)
                    if not gpu[name]:
                        gpu[name] = timing.seconds_of(timing.graph_of([run]).replay, CALLS) * 1e6
            except RuntimeError as error:
                refused[name] = str(error).partition("\n")[0]
                called.pop(name, None)
    medians = {name: statistics.median(times) for name, times in called.items()}
    size = {"batch": batch, "length": length, "masked": masked}
    return size | {"called_us": medians, "gpu_us": gpu, "refused": refused}


def main(out: Path) -> None:
    rows = []
    for batch, length in SIZES:
        for masked in (False, True):
            rows.append(measured(batch, length, masked))
            print(json.dumps(rows[-1]), flush=True)
    machine.save(out / "cuda/attention-backends.json", "cuda", rows=rows)


if __name__ == "__main__":
    main(out_folder(__doc__ or ""))
