"""`matmuls report`: generates README's tables from the table of operations and the committed benchmark results.

A table lies between `<!-- table: NAME -->` and `<!-- end -->`; NAME is one of the functions listed in `render`. Each of
them takes what `load` returns and returns Markdown.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import experiment
from .bench import COMPILED, DENSE, geometric_mean
from .specs import TABLE

MARKER = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DTYPES = ("bfloat16", "float16", "float32", "float64")
Rows = list[dict[str, Any]]
Cells = dict[tuple[str, ...], dict[int, str]]  # the cells of a line by width (columns or tokens)
Read = TypeVar("Read")
# raised by JSON of another structure
FOREIGN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def render(text: str, results: Path) -> str:
    """The text with every marked table regenerated. Raises ValueError on an unknown table name or malformed results."""
    tables = (
        *(operations, products, epilogues, inplace, rowwise, masked, slower_than_compiled, fused, two_experts),
        *(sparse, sparse_means, pruned, sparse_linear, blocks, memory, host, bert),
    )
    makers = {f.__name__: f for f in tables}
    run = load(results)

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in makers:
            raise ValueError(f"no table named {name}; there are {', '.join(makers)}")
        try:
            return match[1] + makers[name](run) + match[3]
        except FOREIGN as error:
            raise ValueError(f"expected what benchmarks wrote for the table {name} in {results}: {error!r}") from None

    return MARKER.sub(table, text)


class Run(NamedTuple):
    date: str
    complete: bool
    rows: Rows


def _run(file: Path) -> Run:
    content = json.loads(file.read_text(encoding="utf-8"))
    facts = content["environment"]
    return Run(str(facts["date"]), facts.get("complete", True), [dict(row) for row in content["rows"]])


def _bench(file: Path) -> Run:
    run = _run(file)
    return run._replace(rows=sorted(run.rows, key=lambda row: row["operation"]))


def load(results: Path) -> dict[str, Any]:
    """The rows of the committed GPU runs. Each operation's rows come from the newest complete run that has it.

    Raises ValueError if the folder has no results or malformed ones.
    """

    def read(pattern: str, of: Callable[[Path], Read]) -> list[Read]:
        found = []
        for file in sorted(results.glob(pattern)):
            try:
                found.append(of(file))
            except FOREIGN as error:
                raise ValueError(f"expected what a benchmark wrote in {file}: {error!r}") from None
        return found

    runs, models = read("bench-cuda*.json", _bench), read("bert-cuda*.json", _run)
    cases, blocks = read("spmm-cuda.json", experiment.load), read("blocks-cuda.json", _run)
    pruned, layers = read("spmm-pruned-cuda.json", experiment.load), read("sparse-linear-*.json", _run)
    if not any((runs, models, cases, blocks)):
        raise ValueError(f"expected a folder with the results of GPU runs, bench-cuda*.json and others, got {results}")
    newest: dict[str, Rows] = {}
    for run in sorted((run for run in runs if run.complete), key=lambda run: run.date):
        newest |= {name: list(own) for name, own in groupby(run.rows, key=lambda row: row["operation"])}
    return {
        "rows": [row for spec in TABLE for row in newest.get(spec.name, [])],
        "cases": [case for own in cases for case in own],
        "bert": max(models, key=lambda run: run.date).rows if models else [],
        "blocks": [row for run in blocks for row in run.rows],
        "pruned": [case for own in pruned for case in own],
        "layers": max(layers, key=lambda run: run.date).rows if layers else [],
    }


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def operations(run: dict[str, Any]) -> str:
    """One line per operation of the table."""
    return markdown(
        ("operation", "gradient", "dtypes"), ((s.summary, "yes" if s.gradient else "no", _dtypes(s)) for s in TABLE)
    )


def _dtypes(spec: Any) -> str:
    names = [str(d).removeprefix("torch.") for d in spec.dtypes]
    return ", ".join(n.replace("bfloat", "bf").replace("float", "fp").replace("complex", "c") for n in names)


def products(run: dict[str, Any]) -> str:
    """Speed over torch.matmul: geometric mean and lowest over the cases, per operation and dtype."""
    rows = [r for r in run["rows"] if r["kind"] == "gpu" and r["rival"] == "torch.matmul"]

    def cell(group: Rows) -> str:
        ratios = [r["ratio"] for r in group]
        return f"{geometric_mean(ratios):.3f} ({min(ratios):.3f})" if ratios else ""

    table = []
    for name, mine in groupby(rows, key=lambda r: r["operation"]):
        own = list(mine)
        table.append([f"`{name}`", *(cell([r for r in own if r["dtype"] == d]) for d in DTYPES), str(len(own))])
    return markdown(("operation", *DTYPES, "cases"), table)


def epilogues(run: dict[str, Any]) -> str:
    """16-bit products with bias and activation in one call, compared with F.linear followed by the activation."""
    rows = [
        r for r in run["rows"] if r["kind"] == "gpu" and r["operation"] == "cublaslt_matmul" and "float16" in r["dtype"]
    ]
    return markdown(
        ("case", "dtype", "ours, µs", "torch, µs", "speed", "share of the roof"),
        (
            [
                r["case"],
                r["dtype"],
                f"{r['ours_us']:.0f}",
                f"{r['rival_us']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['roof']:.2f}",
            ]
            for r in rows
        ),
    )


INPLACE = ("matmul_", "linear_")


def inplace(run: dict[str, Any]) -> str:
    """Speed over the out-of-place product by shape, operation and dtype, and the largest extra memory by width."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    extra: dict[tuple[str, bool], float] = {}
    for r in run["rows"]:
        if r["operation"] not in INPLACE:
            continue
        if r["kind"] == "gpu":
            cells.setdefault(r["case"], {})[r["operation"], r["dtype"]] = f"{r['ratio']:.2f}"
        elif r["kind"] == "memory":
            key = r["case"], "16" in r["dtype"]
            extra[key] = max(extra.get(key, 0.0), r["ours_mib"])
    known = [(op, d) for op in INPLACE for d in (*DTYPES, "TF32") if any((op, d) in line for line in cells.values())]
    widths = {"16 bits": True, "float32": False}

    def memory_of(case: str) -> Iterable[str]:
        return (f"{extra[case, narrow]:.0f}" if (case, narrow) in extra else "" for narrow in widths.values())

    return markdown(
        ("rows x K", *(f"`{op}` {d}" for op, d in known), *(f"extra MiB, {w}" for w in widths)),
        ([case, *(line.get(key, "") for key in known), *memory_of(case)] for case, line in cells.items()),
    )


def rowwise(run: dict[str, Any]) -> str:
    """Share of the roof and speed over the fastest rival, by operation, direction, dtype and number of columns."""
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for r in run["rows"]:
        if r["kind"] == "gpu" and r["operation"] in ("softmax_", "layer_norm_", "rms_norm_"):
            direction, shape = r["case"].split()
            line = cells.setdefault((f"`{r['operation']}`", direction, r["dtype"]), {})
            line[int(shape.split("x")[1])] = f"{r['roof']:.2f} ({r['ratio']:.2f})"
    columns = sorted({n for line in cells.values() for n in line})
    return markdown(
        ("operation", "direction", "dtype", *map(str, columns)),
        ([*key, *(line.get(n, "") for n in columns)] for key, line in cells.items()),
    )


def _over_torch(row: dict[str, Any]) -> Iterator[str]:
    """Speed over eager torch and over torch.compile."""
    eager = next(us for name, us in row["rivals_us"].items() if name != COMPILED)
    return (f"{us / row['ours_us']:.2f}" if us else "" for us in (eager, row["rivals_us"].get(COMPILED)))


def masked(run: dict[str, Any]) -> str:
    """The masked softmax by shape, mask and direction, compared with eager torch and torch.compile."""
    table = []
    for r in run["rows"]:
        if r["kind"] == "gpu" and r["operation"] == "scaled_masked_softmax":
            direction, shape, mask = r["case"].split(maxsplit=2)
            ours = f"{r['ours_us']:.0f}"
            table.append([shape, mask, direction, r["dtype"], ours, f"{r['roof']:.2f}", *_over_torch(r)])
    return markdown(
        ("shape", "mask", "direction", "dtype", "ours, µs", "share of the roof", "over eager", "over torch.compile"),
        table,
    )


def slower_than_compiled(run: dict[str, Any]) -> str:
    """A sentence: how many cases of row operations are slower than torch.compile's, and by how much."""
    rows = ("softmax_", "layer_norm_", "rms_norm_", "scaled_masked_softmax")
    compared = [r for r in run["rows"] if r["operation"] in rows and r["rivals_us"].get(COMPILED)]
    slower = [r for r in compared if r["rivals_us"][COMPILED] < r["ours_us"]]
    if not slower:
        return f"None of {len(compared)} cases of row operations is slower than torch.compile's.\n"
    most = max(1 - r["rivals_us"][COMPILED] / r["ours_us"] for r in slower)
    near = sum(r["roof"] >= 0.99 for r in slower)
    return (
        f"{len(slower)} of {len(compared)} cases of row operations are slower than torch.compile's, by up to "
        f"{most * 100:.1f} %; {near} of these run at .99 of a copy's speed or more.\n"
    )


def fused(run: dict[str, Any]) -> str:
    """attention_forward and feed_forward_, compared with eager torch and torch.compile."""
    rows = [r for r in run["rows"] if r["kind"] == "gpu" and r["operation"] in ("attention_forward", "feed_forward_")]
    return markdown(
        ("operation", "case", "dtype", "ours, µs", "over eager", "over torch.compile"),
        ([f"`{r['operation']}`", r["case"], r["dtype"], f"{r['ours_us']:.0f}", *_over_torch(r)] for r in rows),
    )


def two_experts(run: dict[str, Any]) -> str:
    """Masked products of two experts: speed over one dense product of the same size, and over the fastest rival."""
    table = []
    for r in run["rows"]:
        if r["kind"] == "gpu" and DENSE in r.get("rivals_us", {}):
            rivals = {name: us for name, us in r["rivals_us"].items() if us}
            dense = rivals.pop(DENSE)
            fastest = min(rivals, key=rivals.__getitem__)
            speeds = (f"{us / r['ours_us']:.2f}" for us in (dense, rivals[fastest]))
            table.append([f"`{r['operation']}`", r["case"], r["dtype"], f"{r['ours_us']:.0f}", *speeds, fastest])
    return markdown(
        ("operation", "case", "dtype", "ours, µs", "over one dense product", "over the fastest rival", "that rival"),
        table,
    )


def sparse(run: dict[str, Any]) -> str:
    """Sparse products with a plan by matrix, dtype and columns of B: speed over the fastest rival (share of floor)."""
    cells: Cells = {}
    for c in run["cases"]:
        speed, share = c.speed(), c.floor_share
        if speed is not None:
            cells.setdefault((c.matrix, c.dtype), {})[c.n] = f"{speed:.2f} ({share:.2f})"
    return _by_width(("matrix", "dtype"), "columns", cells)


def _by_width(names: tuple[str, ...], what: str, cells: Cells) -> str:
    """A table with a line for each key and a column for each width."""
    if not cells:
        return ""
    widths = sorted({n for line in cells.values() for n in line})
    return markdown(
        (*names, *(f"{n} {what}" for n in widths)),
        ([*key, *(line.get(n, "") for n in widths)] for key, line in cells.items()),
    )


def _lowest(speeds: Iterable[tuple[str, int, float | None]]) -> Cells:
    """The lowest speed of each name and width."""
    least: dict[tuple[str, ...], dict[int, float]] = {}
    for name, n, speed in speeds:
        if speed is not None:
            line = least.setdefault((name,), {})
            line[n] = min(speed, line.get(n, speed))
    return {key: {n: f"{speed:.2f}" for n, speed in line.items()} for key, line in least.items()}


def sparse_means(run: dict[str, Any]) -> str:
    """By dtype: geometric mean (lowest) of each ratio over the matrices and widths that have it, and their number."""

    def cell(ratios: list[float | None]) -> str:
        known = [r for r in ratios if r is not None]
        return f"{geometric_mean(known):.2f} ({min(known):.2f}), {len(known)}" if known else ""

    table = []
    for dtype in [d for d in DTYPES if any(c.dtype == d for c in run["cases"])]:
        own = [c for c in run["cases"] if c.dtype == dtype]
        ratios = (
            [c.speed() for c in own],
            [c.speed(experiment.PLANLESS) for c in own],
            [c.speed_over(experiment.DENSE) for c in own],
            [c.speed_over_any for c in own],
            [c.backward_speed for c in own],
            [c.pays_back for c in own],
            [c.pays_back_waited for c in own],
        )
        table.append([dtype, *map(cell, ratios)])
    if not table:
        return ""
    header = (
        *("dtype", "plan over sparse rivals", "without a plan", "plan over the dense product"),
        *("plan over the fastest of all", "forward + backward over torch.sparse"),
        *("first 50 calls, over those without a plan", "the same, synchronized after each call"),
    )
    filled = [i for i in range(len(header)) if any(row[i] for row in table)]  # a run may lack whole columns
    return markdown([header[i] for i in filled], ([row[i] for i in filled] for row in table))


def pruned(run: dict[str, Any]) -> str:
    """Speed of 16-bit products of pruned weights with a plan over the dense product; the lowest of the dtypes."""
    return _by_width(
        ("weights",),
        "columns",
        _lowest((c.matrix.removeprefix("pruned:"), c.n, c.speed_over(experiment.DENSE)) for c in run["pruned"]),
    )


def sparse_linear(run: dict[str, Any]) -> str:
    """Speed of pruned 16-bit SparseLinear layers over nn.Linear; the lowest of the dtypes."""
    speeds = (
        (
            f"{row['inputs']} to {row['outputs']}, {row['zeros']:.0%} zeros",
            row["tokens"],
            row["us"]["nn.Linear"] / row["us"]["SparseLinear"],
        )
        for row in run["layers"]
    )
    return _by_width(("layer",), "tokens", _lowest(speeds))


def blocks(run: dict[str, Any]) -> str:
    """Speed of float16 block-sparse (BSR) products over cuSPARSE's and, in brackets, over the dense product."""
    rows = [row for row in run["blocks"] if row["dtype"] == "float16"]
    cases = sorted({(row["zeros"], row["n"]) for row in rows})
    cells = {
        (row["block"], row["zeros"], row["n"]): "{:.1f} ({:.2f})".format(
            *(row["us"][other] / row["us"]["bsr_spmm"] for other in ("cusparse bsr_alg1", "dense"))
        )
        for row in rows
    }
    return markdown(
        ("blocks", *(f"{zeros:.0%} zeros, {n} columns" for zeros, n in cases)),
        (
            [f"{side}x{side}", *(cells.get((side, *case), "") for case in cases)]
            for side in sorted({row["block"] for row in rows})
        ),
    )


def memory(run: dict[str, Any]) -> str:
    """Peak memory of a call, compared with the alternative's."""
    rows = [r for r in run["rows"] if r["kind"] == "memory" and r["operation"] not in INPLACE]
    return markdown(
        ("operation", "case", "dtype", "ours, MiB", "rival, MiB", "rival / ours"),
        (
            [
                f"`{r['operation']}`",
                r["case"],
                r["dtype"],
                f"{r['ours_mib']:.1f}",
                f"{r['rival_mib']:.1f}",
                f"{r['ratio']:.2f}" if r["ratio"] else "",
            ]
            for r in rows
        ),
    )


def host(run: dict[str, Any]) -> str:
    """Host time of one small call, compared with the alternative's."""
    rows = [r for r in run["rows"] if r["kind"] == "host"]
    return markdown(
        ("operation", "case", "ours, µs", "rival, µs", "ours / rival"),
        (
            [f"`{r['operation']}`", r["case"], f"{r['ours_us']:.1f}", f"{r['rival_us']:.1f}", f"{1 / r['ratio']:.2f}"]
            for r in rows
        ),
    )


def bert(run: dict[str, Any]) -> str:
    """BERT models: time, peak memory above the returned probabilities, and both relative to the task's first way."""
    return markdown(
        ("task", "model", "way", "ms", "peak, MiB", "speed", "memory"),
        (
            [
                *(r[name] for name in ("task", "case", "way")),
                f"{r['ms']:.1f}",
                f"{r['above_mib']:.0f}",
                f"{r['speed']:.2f}",
                f"{r['memory']:.2f}",
            ]
            for r in run["bert"]
        ),
    )
