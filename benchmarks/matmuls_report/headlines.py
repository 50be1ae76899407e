"""The three plots and the sentences that README shows."""

from collections.abc import Callable, Iterable

from matmuls_bench import spmm
from matmuls_bench.operations import DENSE
from matmuls_bench.timing import geometric_mean

from .format import number, table
from .graphs import STEPS, speeds
from .masked import over_rival
from .plot import Panel, Plot
from .results import Results, Rows
from .times import compiled, differ, kind_of, of_gpu, over, plotted, rivals_us, us

ALG2 = "cusparse csr_alg2"


def attention_plot(results: Results) -> Plot:
    """Attention with its probabilities compared with eager torch and torch.compile."""
    run = results.bench("attention_forward")
    rows = plotted([r for r in run.rows if r["kind"] == "gpu" and r["dtype"] == "bfloat16"])
    rows.sort(key=lambda r: [int(x) for x in r["case"].split("x")][2])
    eager = [rivals_us(r)["eager"] for r in rows]
    speeds: dict[str, list[float | None]] = {
        "matmuls": [e / us(r) for e, r in zip(eager, rows, strict=True)],
        "torch.compile": [
            e / min(rivals_us(r)[way] for way in compiled(r)) if compiled(r) else None
            for e, r in zip(eager, rows, strict=True)
        ],
        "eager torch": [1.0 for _ in rows],
    }
    panel = Panel(
        "bars",
        f"forward, bfloat16, {kind_of(rows)}",
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
    title = "Peak memory of BERT's forward pass, without weights"
    return Plot("headline-memory", title, run.machine, panels)


def _mib(rows: Rows, case: str, way: str) -> float | None:
    return next((r["peak_mib"] for r in rows if (r["case"], r["way"]) == (case, way)), None)


def attention(results: Results) -> str:
    run = results.bench("attention_forward")
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    ways = {"eager torch": lambda r: over(r, "eager"), "torch.compile": lambda r: over(r, *compiled(r))}
    spans = [_span(words, map(speed, rows), map(speed, map(of_gpu, rows))) for words, speed in ways.items()]
    return (
        f"Attention that also returns its probabilities is {' and '.join(spans)} "
        f"({run.card}, forward, 16-bit, {kind_of(rows)}, {len(rows)} cases)."
    )


def _span(words: str, speeds: Iterable[float | None], gpu: Iterable[float | None]) -> str:
    """The lowest and highest speed, and those of the GPU where they differ."""
    (low, high), (least, most) = ((min(known), max(known)) for known in (list(filter(None, x)) for x in (speeds, gpu)))
    gpu_span = f" (GPU time: {number(least)} to {number(most)})" if differ(low, least) or differ(high, most) else ""
    return f"{number(low)} to {number(high)} times as fast as {words}{gpu_span}"


def sparse(results: Results) -> str:
    run, cases = results.cases("spmm-cuda.json")
    wide = [c for c in cases if c.dtype == "float32"]
    narrow = [c for c in cases if c.dtype != "float32"]
    trained = [c for c in cases if c.backward_speed is not None]
    return (
        f"On an {run.card}, products with a constant plan were compared with the fastest of torch.sparse and seven "
        f"cuSPARSE algorithms. In 16 bits they are on average (geometric mean) {_speed(narrow, lambda c: c.speed())}. "
        f"In float32 they are {_speed(wide, lambda c: c.speed())}. Forward + backward with an ordinary plan is on "
        f"average {_speed(trained, lambda c: c.backward_speed, 'as torch.sparse')}. In the other "
        f"{len(cases) - len(trained)} cases torch's dense gradient did not fit into memory."
    )


def memory(results: Results) -> str:
    run = results.run("bert-cuda.json")
    longest = "base 8x2048"
    rows, returned = [], 0.0
    for task, words, stock in (("probabilities", "returned", "eager"), ("hidden states", "not returned", "sdpa")):
        own = [r for r in run.rows if r["task"] == task]
        returned += next(r["peak_mib"] - r["above_mib"] for r in own if r["case"] == longest)
        mib = (_mib(own, longest, way) for way in (stock, "custom_mm, optimized"))
        rows.append(
            [words, *(f"{x:,.0f} MiB{note}" for x, note in zip(mib, (f" ({stock} attention)", ""), strict=True))]
        )
    header = (
        "attention probabilities",
        "stock model",
        "with matmuls: `register()` and `optimize()`",
    )
    return (
        "Each row is the peak memory of a forward pass of BERT base with 8 texts of 2048 tokens, in bfloat16 on an "
        f"{run.card}. Weights are not counted. Returned probabilities are: they take {returned:,.0f} MiB."
        f"\n\n{table(header, rows).rstrip()}"
    )


def masked(results: Results) -> str:
    run = results.bench("masked_linear")
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    rivals = [s for s in map(over_rival, rows) if s is not None]
    dense = [s for s in (over(r, DENSE) for r in rows) if s is not None]
    return (
        "`masked_linear` multiplies each row by one of two weights. It is "
        f"{number(min(rivals))} to {number(max(rivals))} times as fast as the fastest rival: torch's products of "
        f"split, sorted or blended rows ({rows[0]['dtype']}, {run.card}, {kind_of(rows)}, {len(rivals)} cases). It has "
        f"{number(min(dense))} to {number(max(dense))} times the speed of one dense product, with a single weight."
    )


def graphs(results: Results) -> str:
    run = results.run(STEPS)
    parts = []
    for rival, ours, words in (
        ("PyG edges", "plans edges", "a tensor of edges"),
        ("PyG adjacency", "plans adjacency", "a sparse adjacency"),
    ):
        known = [speed for speed, _ in speeds(run, (rival,), (ours,))]
        parts.append(f"{number(geometric_mean(known))} times as fast with {words} (at least {number(min(known))})")
    return (
        "After `matmuls.integrations.pyg.enable()`, a training step of models of PyTorch Geometric (GCN, GraphSAGE, "
        f"GIN) is on average {' and '.join(parts)}, as called ({run.card}, {len(run.rows)} cases each)."
    )


def rival(seconds: dict[str, float]) -> float:
    """The time of the fastest way without matmuls."""
    return min(t for way, t in seconds.items() if way != "matmuls")


def encoders(results: Results) -> str:
    run = results.run("cuda/encoders.json")
    of_rival, found = "compiled, reduce-overhead", results.encoding("cuda/encoders-encode.json")
    small = [r for r in run.rows if of_rival in r["latency_seconds"]]
    times = [
        r[kind]["matmuls"] / r[kind][of_rival] for r in small for kind in ("latency_seconds", "throughput_seconds")
    ]
    tokens = [r["batch"] * r["length"] for r in small]
    seconds = found["seconds"]
    return (
        "`optimize(model)` replaces the layers of a Hugging Face encoder for inference. A call of BERT base with "
        f"{min(tokens)} to {max(tokens):,} tokens (bfloat16, {run.card}) takes {number(min(times))} to "
        f"{number(max(times))} of the time under "
        '`torch.compile(mode="reduce-overhead")`. `SentenceTransformer.encode` of '
        f"{found['texts']:,} texts is {number(rival(seconds) / seconds['matmuls'])} times as fast as the fastest of "
        f"{len(seconds) - 1} ways of sentence-transformers alone."
    )


def cpu(results: Results) -> str:
    run, cases = results.cases("spmm-cpu.json")
    return (
        f"On {run.environment['threads']} CPU threads a float32 product with a constant plan is on "
        f"average {_speed(cases, lambda c: c.speed(), 'as the faster of torch.sparse (MKL) and SciPy')}."
    )


Ratio = Callable[[spmm.Case], float | None]


def _speed(cases: list[spmm.Case], ratio: Ratio, base: str = "") -> str:
    """How many times as fast (as `base`): the geometric mean, with its minimum and the number of cases."""
    known = [r for r in map(ratio, cases) if r is not None]
    words = f"times as fast {base}".rstrip()
    return f"{number(geometric_mean(known))} {words} (at least {number(min(known))}, {len(known)} cases)"


SENTENCES: dict[str, Callable[[Results], str]] = {
    f.__name__: f for f in (attention, sparse, memory, encoders, graphs, masked, cpu)
}
