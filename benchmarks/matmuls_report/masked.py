"""The page on products of two experts: each row goes through one of two weights."""

from typing import Any

from matmuls_bench.operations import DENSE

from .format import losses, number
from .page import Page
from .plot import Panel, Plot
from .results import Results, Rows, Run
from .times import groups, kind_of, over, plotted, rivals_us, shown_over, shown_us

OPERATIONS = {"masked_linear": "M x K x N", "masked_ffn": "rows x width x inner width"}
BACKWARD = "forward + backward "


def page(results: Results) -> Page:
    page = Page("performance/masked.md", "Two experts: masked_linear and masked_ffn")
    page.say(
        "`masked_linear` multiplies each row by one of two weights. `masked_ffn` does the same with two SwiGLU "
        "networks. *One dense product* is torch's product (or network) with one weight for all rows. The rivals "
        "compute the same result as matmuls: they split the rows, sort them, or blend two products of all rows.",
    )
    page.say("The masks are:")
    page.items(
        "*span*: the rows of the first weight are one contiguous range, half of all rows.",
        "*16 spans*: they are 16 ranges of equal length.",
        "*random 50 %*, *random 5 %*: each row has the first weight with this probability.",
        "*planning included*: the time includes making the mask plan. In the other cases the plan is made before.",
    )
    runs = {name: results.bench(name) for name in OPERATIONS}
    for name, run in runs.items():
        _operation(page, name, run)
    _memory(page, runs["masked_ffn"])
    return page


def _fastest(row: dict[str, Any]) -> str:
    """The fastest rival with the same result."""
    times = rivals_us(row)
    return min((name for name in times if name != DENSE), key=lambda name: times[name])


def over_rival(row: dict[str, Any]) -> float | None:
    """The speed over the fastest rival with the same result."""
    return over(row, _fastest(row))


def _split(row: dict[str, Any]) -> tuple[str, str, str]:
    """Direction, shape and mask of a case such as "forward + backward 512x4096x4096 16 spans"."""
    case = row["case"]
    shape, mask = case.removeprefix(BACKWARD).split(maxsplit=1)
    return ("forward + backward" if case.startswith(BACKWARD) else "forward", shape, mask)


def _operation(page: Page, name: str, run: Run) -> None:
    rows: Rows = [r for r in run.rows if r["kind"] == "gpu"]
    rows = sorted(rows, key=lambda r: (_split(r)[0], [int(x) for x in _split(r)[1].split("x")], _split(r)[2]))
    page.heading(f"`{name}`")
    shown = [r for r in plotted(rows) if _split(r)[2] == "span"]
    page.plot(
        Plot(
            f"performance/{name.replace('_', '-')}",
            f"{name}: one span of rows for the first weight, {rows[0]['dtype']}, {kind_of(rows)}",
            run.machine,
            [
                Panel(
                    "bars",
                    f"shapes {OPERATIONS[name]}",
                    "speed (higher is better)",
                    "case",
                    {
                        "over the fastest rival with the same result": [over_rival(r) for r in shown],
                        "over one dense product of the same size": [over(r, DENSE) for r in shown],
                    },
                    [f"{_split(r)[1]}\n{_split(r)[0]}" for r in shown],
                    ratio=True,
                )
            ],
        )
    )
    page.table(
        f"Each row is one direction, shape ({OPERATIONS[name]}) and kind of mask, in {rows[0]['dtype']}. The columns "
        "*over ...* are speeds.",
        ("direction", "shape", "mask", "matmuls, µs", "over one dense product", "over the fastest rival", "that rival"),
        (
            [
                *(*_split(r), shown_us(r), shown_over(r, DENSE), shown_over(r, _fastest(r)), _fastest(r)),
            ]
            for r in rows
        ),
    )
    page.say(losses([(over_rival(r), r["case"]) for r in rows], "the fastest rival"), groups(rows, over_rival))
    page.say(losses([(over(r, DENSE), r["case"]) for r in rows], "one dense product"))
    page.measured(run)


def _memory(page: Page, run: Run) -> None:
    page.heading("Memory")
    page.table(
        "Each row is one case of `masked_ffn`, with the peak memory without inputs in MiB. "
        "*recompute* is `recompute=True`.",
        ("case", "matmuls, MiB", "two networks of split rows, MiB"),
        ([r["case"], number(r["ours_mib"]), number(r["rival_mib"])] for r in run.rows if r["kind"] == "memory"),
    )
    page.measured(run)
