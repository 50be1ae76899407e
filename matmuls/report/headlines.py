"""The three plots and the sentences that README shows."""

from collections.abc import Callable

from .. import experiment
from ..bench import COMPILED, geometric_mean
from .format import number
from .plot import Panel, Plot
from .results import Results, Rows

ALG2 = "cusparse csr_alg2"


def attention_plot(results: Results) -> Plot:
    """Attention with its probabilities compared with eager torch and torch.compile."""
    run = results.bench("attention_forward")
    rows = [r for r in run.rows if r["kind"] == "gpu" and r["dtype"] == "bfloat16"]
    rows.sort(key=lambda r: [int(x) for x in r["case"].split("x")][2])
    eager = [r["rivals_us"]["eager"] for r in rows]
    speeds = {
        "matmuls": [e / r["ours_us"] for e, r in zip(eager, rows, strict=True)],
        "torch.compile": [e / r["rivals_us"][COMPILED] for e, r in zip(eager, rows, strict=True)],
        "eager torch": [1.0 for _ in rows],
    }
    panel = Panel(
        "bars",
        "forward, bfloat16",
        "speed relative to eager torch (higher is better)",
        "batch x heads x tokens x head size",
        speeds,
        [r["case"] for r in rows],
        ratio=True,
    )
    return Plot("headline-attention", "Attention that also returns its probabilities", run.machine, [panel])


def sparse_plot(results: Results) -> Plot:
    """Sparse products compared with the best rival, and forward + backward compared with torch.sparse."""
    run, cases = results.cases("spmm-cuda.json")
    dtypes, widths = ("float16", "bfloat16", "float32"), {c.n for c in cases}
    size = f"{len({c.matrix for c in cases})} matrices, {min(widths)} to {max(widths)} columns"
    panels = [
        Panel("strips", title, "speed relative to the rival (higher is better)", "dtype", dots, ratio=True, log=True)
        for title, dots in (
            (
                "product with a plan, over the best of seven cuSPARSE algorithms and torch.sparse",
                {d: [c.speed() for c in cases if c.dtype == d] for d in dtypes},
            ),
            (
                "forward + backward with a plan, over torch.sparse",
                {d: [c.backward_speed for c in cases if c.dtype == d] for d in dtypes},
            ),
        )
    ]
    return Plot("headline-sparse", f"Sparse matrix times dense matrix, {size}", run.machine, panels)


WAYS = {
    "custom_mm": "matmuls attention",
    "custom_mm, optimized": "matmuls attention and optimize()",
    "custom_mm, recompute": "matmuls attention, recompute",
}


def memory_plot(results: Results) -> Plot:
    """Peak memory of BERT's forward, with and without probabilities."""
    run = results.run("bert-cuda.json")
    panels = []
    for task, title in (("probabilities", "attention probabilities returned"), ("hidden states", "hidden states only")):
        rows = [r for r in run.rows if r["task"] == task]
        cases = list(dict.fromkeys(r["case"] for r in rows))
        ways = list(dict.fromkeys(r["way"] for r in rows))
        stock = {"eager": "stock, eager attention", "sdpa": "stock, torch's sdpa"}
        mib = {(stock | WAYS)[w]: [_mib(rows, case, w) for case in cases] for w in reversed(ways)}
        panels.append(Panel("bars", title, "peak memory, MiB (lower is better)", "BERT, batch x tokens", mib, cases))
    title = "Memory of BERT's forward, above its weights and returned probabilities"
    return Plot("headline-memory", title, run.machine, panels)


def _mib(rows: Rows, case: str, way: str) -> float | None:
    return next((r["above_mib"] for r in rows if (r["case"], r["way"]) == (case, way)), None)


def attention(results: Results) -> str:
    run = results.bench("attention_forward")
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    spans = []
    for way, words in (("eager", "eager torch"), (COMPILED, "torch.compile")):
        ratios = [r["rivals_us"][way] / r["ours_us"] for r in rows if r["rivals_us"].get(way)]
        spans.append(f"{number(min(ratios))} to {number(max(ratios))} times as fast as {words}")
    return (
        f"Attention that also returns its probabilities is {' and '.join(spans)} "
        f"({run.card}, forward, 16-bit, {len(rows)} cases)."
    )


def sparse(results: Results) -> str:
    run, cases = results.cases("spmm-cuda.json")
    wide = [c for c in cases if c.dtype == "float32"]
    narrow = [c for c in cases if c.dtype != "float32"]
    both = [(_mean(own, lambda c: c.speed()), _lowest(own, lambda c: c.speed())) for own in (narrow, wide)]
    trained = len(_known(cases, lambda c: c.backward_speed))
    training = _mean(cases, lambda c: c.backward_speed), _lowest(cases, lambda c: c.backward_speed)
    return (
        f"In 16 bits a sparse product with a plan is {both[0][0]} times (lowest {both[0][1]}), in float32 {both[1][0]} "
        f"times (lowest {both[1][1]}) as fast as the best of torch.sparse and seven cuSPARSE algorithms. "
        f"Forward + backward is {training[0]} times as fast as torch.sparse (lowest {training[1]}). "
        f"Geometric means on an {run.card}, of {len(cases)} products and {trained} gradients."
    )


def memory(results: Results) -> str:
    run = results.run("bert-cuda.json")
    longest = "base 8x2048"
    with_p, without = ([r for r in run.rows if r["task"] == task] for task in ("probabilities", "hidden states"))
    eager, ours = (_mib(with_p, longest, way) for way in ("eager", "custom_mm, optimized"))
    sdpa, mine = (_mib(without, longest, way) for way in ("sdpa", "custom_mm, optimized"))
    return (
        "Peak memory of BERT base with 8 texts of 2048 tokens, not counting weights and returned probabilities: "
        f"{number(ours)} MiB after `optimize()`, {number(eager)} MiB with eager attention. With no probabilities "
        f"returned: {number(mine)} MiB after `optimize()`, {number(sdpa)} MiB with torch's fused attention. "
        f"({run.card}, bfloat16, forward.)"
    )


def cpu(results: Results) -> str:
    run, cases = results.cases("spmm-cpu.json")
    return (
        f"On {run.environment['threads']} CPU threads a sparse product with a plan is on average "
        f"{_mean(cases, lambda c: c.speed())} times as fast as the faster of torch.sparse (MKL) and SciPy "
        f"(lowest {_lowest(cases, lambda c: c.speed())}; float32, {len(cases)} cases)."
    )


Ratio = Callable[[experiment.Case], float | None]


def _known(cases: list[experiment.Case], ratio: Ratio) -> list[float]:
    return [r for r in map(ratio, cases) if r is not None]


def _mean(cases: list[experiment.Case], ratio: Ratio) -> str:
    return number(geometric_mean(_known(cases, ratio)))


def _lowest(cases: list[experiment.Case], ratio: Ratio) -> str:
    return number(min(_known(cases, ratio)))


SENTENCES: dict[str, Callable[[Results], str]] = {f.__name__: f for f in (attention, sparse, memory, cpu)}
