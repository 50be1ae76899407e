"""Times small calls as a user makes them, 64 x 64, and the same computed by torch: the host's time dominates.

Usage: python benchmarks/scripts/host_times.py OUT. Writes OUT/cuda/host-times.json. Wall clock per call in a row of
calls; the two sides of a case alternate (A B A B), and the median of the rounds counts.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from out_folder import out_folder
from torch import Tensor, nn
from torch.nn import functional as F

import matmuls
from custom_mm import init_cublas
from matmuls.nn import SparseLinear
from matmuls_bench import machine, timing

SIZE, CALLS, ROUNDS = 64, 300, 9
Call = Callable[[], Any]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, device="cuda") / 8).to(dtype)


def trained(function: Callable[..., Tensor], *leaves: Tensor) -> Call:
    """Forward and backward, with gradients of all leaves."""
    own = [x.detach().clone().requires_grad_() for x in leaves]
    gradient = torch.randn_like(function(*own))

    def step() -> None:
        for x in own:
            x.grad = None
        function(*own).backward(gradient)

    return step


def layer_step(layer: nn.Module, x: Tensor) -> Call:
    own = x.clone().requires_grad_()
    gradient = torch.randn_like(layer(own))

    def step() -> None:
        own.grad = None
        layer.zero_grad(set_to_none=True)
        layer(own).backward(gradient)

    return step


def without(function: Call) -> Call:
    """The call with gradients disabled."""

    def call() -> None:
        with torch.no_grad():
            function()

    return call


def cases() -> Iterator[tuple[str, str, Call, Call]]:
    """What is called, torch's way, the call, and torch's call."""
    a, b = draw(SIZE, SIZE), draw(SIZE, SIZE)
    yield "matmul", "torch.matmul", lambda: matmuls.matmul(a, b), lambda: torch.matmul(a, b)
    yield "cublasMM.apply", "torch.matmul", lambda: matmuls.cublasMM.apply(a, b), lambda: torch.matmul(a, b)
    step = trained(matmuls.cublasMM.apply, a, b), trained(torch.matmul, a, b)
    yield "cublasMM.apply, forward + backward", "torch.matmul", *step
    yield from _masked()
    yield from _sparse(a, b)
    scores, mask = draw(4, 2, SIZE, SIZE), torch.rand(4, 1, SIZE, SIZE, device="cuda") < 0.3

    def eager(x: Tensor) -> Tensor:
        return torch.softmax((x * 0.125).masked_fill(mask, float("-inf")), -1)

    step = trained(lambda x: matmuls.scaled_masked_softmax(x, mask, 0.125), scores), trained(eager, scores)
    yield "scaled_masked_softmax, forward + backward", "eager", *step


def _masked() -> Iterator[tuple[str, str, Call, Call]]:
    half = torch.float16
    x, mask = draw(SIZE, SIZE, dtype=half), torch.rand(SIZE, device="cuda") < 0.5
    w = [draw(SIZE, SIZE, dtype=half) for _ in range(6)]
    plan, column = matmuls.mask_plan(mask), mask.view(-1, 1).to(half)

    def blend(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return column * F.linear(x, w1) + (1 - column) * F.linear(x, w2)

    def expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)

    def blend_ffn(x: Tensor, *w: Tensor) -> Tensor:
        return column * expert(x, *w[:3]) + (1 - column) * expert(x, *w[3:])

    ours = lambda x, *w: matmuls.masked_linear(x, *w, plan)  # noqa: E731
    ffn = lambda x, *w: matmuls.masked_ffn(x, *w, plan)  # noqa: E731
    yield "mask_plan", "torch.matmul", lambda: matmuls.mask_plan(mask), lambda: torch.matmul(x, w[0])
    yield "masked_linear by a plan", "blend", without(lambda: ours(x, *w[:2])), without(lambda: blend(x, *w[:2]))
    step = trained(ours, x, *w[:2]), trained(blend, x, *w[:2])
    yield "masked_linear by a plan, forward + backward", "blend", *step
    yield "masked_ffn by a plan", "blend", without(lambda: ffn(x, *w)), without(lambda: blend_ffn(x, *w))
    yield "masked_ffn by a plan, forward + backward", "blend", trained(ffn, x, *w), trained(blend_ffn, x, *w)


def _sparse(a: Tensor, b: Tensor) -> Iterator[tuple[str, str, Call, Call]]:
    dense = nn.Linear(SIZE, SIZE, device="cuda")
    for name in ("SparseLinear", "SparseLinear, frozen"):
        layer = SparseLinear.from_linear(dense, sparsity=0.9)
        if "frozen" in name:
            layer.freeze()
        yield name, "nn.Linear", without(lambda layer=layer: layer(a)), without(lambda: dense(a))
        yield f"{name}, forward + backward", "nn.Linear", layer_step(layer, a), layer_step(dense, a)
    sparse = (a * (torch.rand_like(a) < 0.1)).to_sparse_csr()
    plan = matmuls.plan(sparse)
    yield "spmm", "torch.sparse.mm", lambda: matmuls.spmm(sparse, b), lambda: torch.sparse.mm(sparse, b)
    yield "plan @ b", "torch.sparse.mm", lambda: plan @ b, lambda: torch.sparse.mm(sparse, b)
    step = trained(lambda b: plan @ b, b), trained(lambda b: torch.sparse.mm(sparse, b), b)
    yield "plan @ b, forward + backward", "torch.sparse.mm", *step


def main() -> None:
    out = out_folder(__doc__ or "")
    torch.manual_seed(0)
    init_cublas()
    rows = []
    for name, rival, ours, theirs in cases():
        for call in (ours, theirs):
            for _ in range(20):
                call()
        times = timing.rounds_of({"ours": ours, "rival": theirs}, ROUNDS, CALLS)
        us = [statistics.median(t) * 1e6 for t in times.values()]
        rows.append({"call": name, "rival": rival, "us": us[0], "rival_us": us[1]})
        print(f"{name:45s} {us[0]:8.1f} us  {us[1]:8.1f} us of {rival}: {us[0] / us[1]:.2f}", flush=True)
    machine.save(out / "cuda/host-times.json", "cuda", rows=rows)


if __name__ == "__main__":
    main()
