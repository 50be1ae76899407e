"""The sparse page's sections on pruned weights, layers, constant matrices and matrices in blocks."""

from collections.abc import Iterable
from typing import Any

from matmuls_bench import spmm

from .format import losses, natural, number
from .page import Page
from .plot import Panel, Plot
from .results import Results

PRUNED = ("spmm-pruned-cuda.json", "spmm-pruned-wide-cuda.json")
TWO_OF_FOUR = "spmm-two-of-four-cuda.json"


def _matrix(name: str) -> tuple[str, str]:
    """Shape and share of zeros of "pruned:4096x4096:0.9"."""
    _, shape, share = name.split(":")
    return shape, share


def _lowest(named: Iterable[tuple[tuple[str, ...], int, float | None]]) -> dict[tuple[str, ...], dict[int, float]]:
    """The lowest speed of each row and column, over dtypes."""
    least: dict[tuple[str, ...], dict[int, float]] = {}
    for name, n, speed in named:
        if speed is not None:
            line = least.setdefault(name, {})
            line[n] = min(speed, line.get(n, speed))
    return least


def _order(item: tuple[tuple[str, ...], Any]) -> list[Any]:
    return [natural(part) for part in item[0]]


def _grid(least: dict[tuple[str, ...], dict[int, float]]) -> tuple[list[int], list[list[str]]]:
    columns = sorted({n for line in least.values() for n in line})
    return columns, [
        [*name, *(number(line.get(n)) for n in columns)] for name, line in sorted(least.items(), key=_order)
    ]


def pruned(page: Page, results: Results) -> None:
    """Pruned 16-bit weights compared with the dense product, and 2:4 sparsity compared with torch's."""
    runs = [results.cases(name) for name in PRUNED]
    cases = [c for _, own in runs for c in own]
    least = _lowest((_matrix(c.matrix), c.n, c.speed_over(spmm.DENSE)) for c in cases)
    columns, rows = _grid(least)
    page.heading("Pruned weights in 16 bits, compared with the dense product")
    shown = [key for key in sorted(least) if key[0] == "4096x4096"]
    page.plot(
        Plot(
            "performance/sparse-pruned",
            "Pruned 4096x4096 weights in 16 bits, compared with the dense product",
            runs[0][0].machine,
            [
                Panel(
                    "bars",
                    "plan over torch.matmul on the dense weight, the lower of float16 and bfloat16",
                    "speed relative to the dense product (higher is better)",
                    "share of zeros",
                    {f"{n} columns": [least[key].get(n) for key in shown] for n in (8, 32, 64, 128)},
                    [share for _, share in shown],
                    ratio=True,
                )
            ],
        )
    )
    page.table(
        "Each row is one weight with zeros at random places. The figures are the speed of a plan over `torch.matmul` "
        "with the dense weight, the lower of float16 and bfloat16: higher is better.",
        ("shape", "zeros", *(f"{n} columns" for n in columns)),
        rows,
    )
    named = [(c.speed_over(spmm.DENSE), f"{c.matrix}, {c.dtype}, {c.n} columns") for c in cases]
    page.say(losses(named, "the dense product"))
    page.measured(*(run for run, _ in runs))

    run, fours = results.cases(TWO_OF_FOUR)
    page.heading("2:4 sparsity, compared with torch's semi-structured product")
    page.table(
        "Each row is one shape and number of columns of B, in bfloat16. The weight keeps two of every four "
        "neighbouring values. The last two columns are speeds of a plan.",
        ("shape", "columns of B", "plan, µs", "over the dense product", "over torch's semi-structured product"),
        (
            [
                *(_matrix(c.matrix)[0], str(c.n), number(c.results[spmm.PLAN].us)),
                *(number(c.speed_over(rival)) for rival in (spmm.DENSE, spmm.SEMI)),
            ]
            for c in sorted(fours, key=lambda c: (c.rows, c.columns, c.n))
        ),
    )
    rivals = ("the dense product", spmm.DENSE), ("torch's product", spmm.SEMI)
    page.lost(
        *(
            (f"over {words}", [(c.speed_over(rival), f"{_matrix(c.matrix)[0]}, {c.n} columns") for c in fours])
            for words, rival in rivals
        )
    )
    page.measured(run)


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def linear(page: Page, results: Results) -> None:
    """A frozen SparseLinear compared with nn.Linear."""
    run = results.run("sparse-linear-cuda.json")
    speeds = [
        (
            (f"{row['inputs']} to {row['outputs']}", f"{row['zeros']:.0%}"),
            row["tokens"],
            row["us"]["nn.Linear"] / row["us"]["SparseLinear"],
        )
        for row in run.rows
    ]
    columns, rows = _grid(_lowest(speeds))
    page.heading("A frozen SparseLinear, compared with nn.Linear")
    page.table(
        "Each row is one layer (features in and out, share of zeros). The figures are the speed over `nn.Linear`, the "
        "lower of float16 and bfloat16: higher is better. No gradient is computed.",
        ("layer", "zeros", *(_tokens(n) for n in columns)),
        rows,
    )
    page.say(losses([(s, f"{', '.join(name)} zeros, {_tokens(n)}") for name, n, s in speeds], "`nn.Linear`"))
    page.measured(run)


def constant(page: Page, results: Results) -> None:
    """Plans of constant matrices compared with plans that read the values anew."""
    run = results.run("sparse-constant-h100.json")
    names = ("plan, constant", "plan", "spmm", "torch.sparse", "dense")
    titles = {"plan, constant": "constant plan", "plan": "ordinary plan"}
    page.heading("Constant and ordinary plans")
    page.table(
        "Each row is one matrix with zeros at random places and one number of columns of B. The figures are times as "
        "called in µs.",
        ("shape", "zeros", "columns of B", "dtype", *(f"{titles.get(name, name)}, µs" for name in names)),
        (
            [
                *(f"{row['matrix'][0]} x {row['matrix'][1]}", f"{row['matrix'][2]:.0%}", str(row["n"]), row["dtype"]),
                *(number(row["us_as_called"][name]) for name in names),
            ]
            for row in run.rows
            if "matrix" in row
        ),
    )
    ratios = [
        (
            min(row["us_as_called"]["torch.sparse"], row["us_as_called"]["dense"])
            / row["us_as_called"]["plan, constant"],
            f"{row['matrix'][0]} x {row['matrix'][1]}, {row['matrix'][2]:.0%} zeros, {row['dtype']}, {row['n']} "
            "columns",
        )
        for row in run.rows
        if "matrix" in row
    ]
    page.say(losses(ratios, "the faster of torch.sparse and the dense product", "a constant plan as called"))
    layers = ("SparseLinear, frozen", "SparseLinear", "nn.Linear")
    page.table(
        "Each row is one layer (features in and out, share of zeros) and number of tokens. The figures are times as "
        "called in µs. [Small calls](host.md) has a newer run of small layers.",
        ("layer", "zeros", "tokens", "dtype", *(f"{name}, µs" for name in layers)),
        (
            [
                *(
                    f"{row['layer'][0]} to {row['layer'][1]}",
                    f"{row['layer'][2]:.0%}",
                    str(row["tokens"]),
                    row["dtype"],
                ),
                *(number(row["us_as_called"][name]) for name in layers),
            ]
            for row in run.rows
            if "layer" in row
        ),
    )
    named = [
        (
            row["us_as_called"]["nn.Linear"] / row["us_as_called"][layer],
            f"{layer}, {row['layer'][0]} to {row['layer'][1]}, {_tokens(row['tokens'])}",
        )
        for row in run.rows
        if "layer" in row
        for layer in layers[:2]
    ]
    page.say(losses(named, "`nn.Linear`", "SparseLinear as called"))
    page.measured(run)


def blocks(page: Page, results: Results) -> None:
    """Products of matrices in blocks compared with cuSPARSE's and the dense product."""
    run = results.run("blocks-cuda.json")
    names = {"bsr_spmm": "bsr_spmm, µs", "plan": "plan, µs", "cusparse bsr_alg1": "cuSPARSE, µs", "dense": "dense, µs"}
    page.heading("Matrices in blocks")
    page.table(
        "Each row is one 4096x4096 matrix and number of columns of B, in float16. The nonzeros lie in blocks at random "
        "places. The last two columns are speeds of `matmuls.blocks.bsr_spmm`. The slower cases below are counted in "
        "float16 and bfloat16.",
        ("blocks", "zeros", "columns of B", *names.values(), "over cuSPARSE", "over dense"),
        (
            [
                *(f"{row['block']} x {row['block']}", f"{row['zeros']:.0%}", str(row["n"])),
                *(number(row["us"][name]) for name in names),
                *(number(row["us"][name] / row["us"]["bsr_spmm"]) for name in ("cusparse bsr_alg1", "dense")),
            ]
            for row in run.rows
            if row["dtype"] == "float16"
        ),
    )
    named = [
        (
            min(row["us"]["dense"], row["us"]["cusparse bsr_alg1"]) / row["us"]["bsr_spmm"],
            f"blocks of {row['block']}, {row['zeros']:.0%} zeros, {row['n']} columns, {row['dtype']}",
        )
        for row in run.rows
    ]
    page.say(losses(named, "the faster of cuSPARSE and the dense product"))
    page.measured(run)
