"""Times COO and sampled products, two experts, SparseLinear and norms of short rows on a CPU against torch's.

Usage: python benchmarks/scripts/cpu_rivals.py OUT [PART ...]. Writes OUT/cpu/cpu-rivals.json. The rival of each
operation is the fastest that torch has. One thread; most sizes are drawn from one seed. Both sides alternate (A B A B).
The clock is the CPU time of the thread, so that other processes on the machine count less. A speed is the median of the
ratios of neighbouring rounds; above 1 matmuls is faster.
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import matmuls
from matmuls_bench import machine

SEED = 20261129
ROUNDS, ROUND, BUDGET = 9, 2e-3, 1.0  # rounds of each side, 3 at least; least seconds of a round; of a case, about
Side = Callable[[], object]
Case = tuple[str, Side, Side]  # what it is, ours, the rival


def speed(ours: Side, rival: Side) -> dict[str, float]:
    def seconds(side: Side, calls: int) -> float:
        start = time.thread_time()
        for _ in range(calls):
            side()
        return (time.thread_time() - start) / calls

    calls, both = [], 0.0
    for side in (ours, rival):
        side()
        once = max(seconds(side, 1), 1e-7)
        calls.append(max(1, int(ROUND / once)))
        both += calls[-1] * once
    count = max(3, min(ROUNDS, int(BUDGET / both)))
    rounds = [(seconds(ours, calls[0]), seconds(rival, calls[1])) for _ in range(count)]
    us, rival_us = (statistics.median(side) * 1e6 for side in zip(*rounds, strict=True))
    ratio = statistics.median(theirs / own for own, theirs in rounds)
    return {"us": round(us, 1), "rival_us": round(rival_us, 1), "speed": round(ratio, 3)}


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** rng.random())


def coo_products(rng: random.Random) -> Iterator[Case]:
    """spmm of an uncoalesced COO matrix and torch.sparse.mm: with one tensor, and with a new one at each call."""
    for _ in range(8):
        rows, columns = log_uniform(rng, 500, 30000), log_uniform(rng, 500, 30000)
        entries, n = log_uniform(rng, 20000, 400000), log_uniform(rng, 1, 128)
        index = torch.stack([torch.randint(rows, (entries,)), torch.randint(columns, (entries,))])
        values, b = torch.randn(entries), torch.randn(columns, n)
        what = f"[{rows}, {columns}] with {entries} entries x {n}"

        def new(parts: Any = (index, values, (rows, columns))) -> torch.Tensor:
            return torch.sparse_coo_tensor(*parts, check_invariants=False)

        a = new()
        yield what, lambda a=a, b=b: matmuls.spmm(a, b), lambda a=a, b=b: torch.sparse.mm(a, b)
        ours, rival = (lambda f=f, n=new, b=b: f(n(), b) for f in (matmuls.spmm, torch.sparse.mm))
        yield f"{what}, a new tensor", ours, rival


def sampled_products(rng: random.Random) -> Iterator[Case]:
    """sddmm and torch.sparse.sampled_addmm."""
    for k in (8, 16, 24, 32, 64, 100, log_uniform(rng, 4, 256), log_uniform(rng, 4, 256)):
        rows, columns, entries = log_uniform(rng, 500, 20000), log_uniform(rng, 500, 20000), log_uniform(rng, 2e4, 5e5)
        index = torch.stack([torch.randint(rows, (entries,)), torch.randint(columns, (entries,))])
        pattern = torch.sparse_coo_tensor(index, torch.ones(entries), (rows, columns)).coalesce().to_sparse_csr()
        a, b = torch.randn(rows, k), torch.randn(columns, k).mT
        yield (
            f"[{rows}, {columns}] at {pattern.values().shape[0]} nonzeros, k {k}",
            lambda a=a, b=b, p=pattern: matmuls.sddmm(a, b, p),
            lambda a=a, b=b, p=pattern: torch.sparse.sampled_addmm(p, a, b, beta=0),
        )


def two_experts(rng: random.Random) -> Iterator[Case]:
    """masked_linear and masked_ffn, and the rows of each expert taken, multiplied and put back."""
    drawn = [tuple(log_uniform(rng, 200, 2000) for _ in range(3)) for _ in range(3)]
    for m, k, n in [(1024, 768, 3072), (4096, 1024, 1024), *drawn]:
        x, mask = torch.randn(m, k, requires_grad=True), torch.rand(m) < 0.5
        w, u = ([torch.randn(*s, requires_grad=True) for s in ((n, k), (k, n), (n, k))] for _ in range(2))

        def linear(x: Any, w: Any) -> torch.Tensor:
            return x @ w[0].T

        def ffn(x: Any, w: Any) -> torch.Tensor:
            return (F.silu(x @ w[0].T) * (x @ w[2].T)) @ w[1].T

        def split(network: Any, mask: Any = mask, x: Any = x, w: Any = w, u: Any = u) -> torch.Tensor:
            first, second = network(x[mask], w), network(x[~mask], u)
            y = first.new_empty(x.shape[0], first.shape[1])
            y[mask], y[~mask] = first, second
            return y

        ours = {
            linear: lambda x=x, w=w, u=u, mask=mask: matmuls.masked_linear(x, w[0], u[0], mask),
            ffn: lambda x=x, w=w, u=u, mask=mask: matmuls.masked_ffn(x, *w, *u, mask),
        }
        for network, own in ours.items():
            rival = lambda network=network, split=split: split(network)  # noqa: E731
            what = f"masked_{network.__name__}, x [{m}, {k}], weights {n}"
            yield what, without_gradient(own), without_gradient(rival)
            yield f"{what}, forward and backward", trained(own), trained(rival)


def without_gradient(run: Side) -> Side:
    def call() -> object:
        with torch.no_grad():
            return run()

    return call


def trained(run: Callable[[], torch.Tensor]) -> Side:
    return lambda: run().sum().backward()


def sparse_layers(rng: random.Random) -> Iterator[Case]:
    """SparseLinear with values that may change, and nn.Linear."""
    drawn = [(log_uniform(rng, 200, 2000), log_uniform(rng, 200, 2000)) for _ in range(2)]
    for inputs, outputs in [(768, 3072), *drawn]:
        for sparsity in (0.5, 0.8):
            linear = torch.nn.Linear(inputs, outputs)
            layer = matmuls.nn.SparseLinear.from_linear(linear, sparsity=sparsity)
            for rows in (1, 4, 16, 64, 512):
                x = torch.randn(rows, inputs)
                what = f"{inputs} -> {outputs}, {sparsity:.0%} zeros, {rows} rows"
                ours, rival = (lambda f=f, x=x: f(x) for f in (layer, linear))
                yield what, without_gradient(ours), without_gradient(rival)
                if rows > 16:
                    x.requires_grad_()
                    yield f"{what}, forward and backward", trained(ours), trained(rival)


def short_rows(rng: random.Random) -> Iterator[Case]:
    """layer_norm_, rms_norm_ and softmax_ of short float32 rows, and torch's. Weights of 1 and -1 keep the magnitude of
    what is overwritten again and again."""
    for columns in (4, 8, 16, 24, log_uniform(rng, 2, 64), log_uniform(rng, 2, 64)):
        rows = log_uniform(rng, 1e5, 4e5) // columns
        x = torch.randn(rows, columns)
        weight, bias = torch.randint(2, (columns,)).float() * 2 - 1, torch.zeros(columns)
        own, shape = x.clone(), (columns,)
        yield (
            f"layer_norm_ [{rows}, {columns}]",
            lambda own=own, w=weight, b=bias: matmuls.layer_norm_(own, w, b),
            lambda x=x, w=weight, b=bias, s=shape: F.layer_norm(x, s, w, b),
        )
        yield (
            f"rms_norm_ [{rows}, {columns}]",
            lambda own=own, w=weight: matmuls.rms_norm_(own, w),
            lambda x=x, w=weight, s=shape: F.rms_norm(x, s, w),
        )
        yield (
            f"softmax_ [{rows}, {columns}]",
            lambda own=own: matmuls.softmax_(own),
            lambda x=x: torch.softmax(x, -1),
        )


PARTS = {f.__name__: f for f in (coo_products, sampled_products, sparse_layers, short_rows, two_experts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the JSON file")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is given")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # torch's, that sparse layouts are in beta
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    result: dict[str, Any] = {"seed": SEED, "clock": "thread CPU time"}
    for name in arguments.parts or PARTS:
        rows = []
        for what, ours, rival in PARTS[name](random.Random(f"{SEED} {name}")):
            rows.append({"case": what, **speed(ours, rival)})
            print(name, *rows[-1].values(), flush=True)
        result[name] = {"lowest": min(row["speed"] for row in rows), "cases": rows}
        machine.save(arguments.out / "cpu/cpu-rivals.json", "cpu", **result)


if __name__ == "__main__":
    main()
