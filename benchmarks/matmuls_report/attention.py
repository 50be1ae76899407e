"""The page on attention with its probabilities and on the masked softmax."""

from typing import Any

from .format import losses, natural, number
from .headlines import attention_plot
from .page import Page
from .plot import Panel, Plot
from .results import Results, Run
from .times import compiled, groups, kind_of, over, plotted, ratio, rivals_us, shown_over, shown_us


def page(results: Results) -> Page:
    page = Page("performance/attention.md", "Attention and masked softmax")
    page.say(
        "Attention that returns its probabilities is compared with torch operations, in eager mode and under "
        "torch.compile. torch's fused attention returns no probabilities.",
    )
    _attention(page, results)
    _masked(page, results)
    return page


def _over(row: dict[str, Any]) -> list[str]:
    """Speed over eager torch and over torch.compile, the faster of its modes."""
    eager = next(name for name in rivals_us(row) if name not in compiled(row))
    return [shown_over(row, eager), shown_over(row, *compiled(row))]


def _attention(page: Page, results: Results) -> None:
    run = results.bench("attention_forward")
    rows = sorted((r for r in run.rows if r["kind"] == "gpu"), key=lambda r: (r["dtype"], natural(r["case"])))
    page.heading("Attention with its probabilities, forward")
    page.plot(attention_plot(results))
    page.table(
        "Each row is one case (batch x heads x tokens x head size) and dtype. The last two columns are speeds.",
        ("case", "dtype", "matmuls, µs", "eager, µs", "torch.compile, µs", "over eager", "over torch.compile"),
        (
            [
                *(r["case"], r["dtype"], shown_us(r), number(rivals_us(r)["eager"])),
                number(min((rivals_us(r)[way] for way in compiled(r)), default=None)),
                *_over(r),
            ]
            for r in rows
        ),
    )
    page.say(losses([(ratio(r), f"{r['case']}, {r['dtype']}") for r in rows], "the fastest rival"), groups(rows))
    page.measured(run)


def _masked(page: Page, results: Results) -> None:
    run = results.bench("scaled_masked_softmax")
    by: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    directions: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for r in run.rows:
        if r["kind"] == "gpu":
            direction, shape, mask = r["case"].split(maxsplit=2)
            by.setdefault(r["dtype"], {}).setdefault((shape, mask), {})[direction] = r
            directions.setdefault((direction, mask), {})[shape, r["dtype"]] = r
    page.heading("Scaled masked softmax")
    page.plot(
        Plot(
            "performance/masked-softmax",
            f"Scaled masked softmax over torch.compile, float16 and bfloat16, {kind_of(run.rows)}",
            run.machine,
            [
                Panel(
                    "strips",
                    "a dot is one shape in one dtype",
                    "speed relative to torch.compile (higher is better)",
                    "direction, mask",
                    {
                        f"{direction}, {mask}": [over(r, *compiled(r)) for r in plotted([*own.values()])]
                        for (direction, mask), own in sorted(directions.items())
                    },
                    ratio=True,
                    log=True,
                )
            ],
        )
    )
    sentence = (
        f"Each row is one shape (batch x heads x queries x keys) and kind of mask, in {min(by)}. *over eager* and "
        "*over compile* are speeds over eager torch and torch.compile: higher is better."
    )
    for dtype, cases in sorted(by.items()):
        page.table(
            sentence if dtype == min(by) else f"The same rows, in {dtype}:",
            (
                *("shape", "mask", "forward, µs", "share", "over eager", "over compile"),
                *("backward, µs", "share", "over eager", "over compile"),
            ),
            (
                [shape, mask, *_cells(own, "forward"), *_cells(own, "backward")]
                for (shape, mask), own in sorted(cases.items(), key=lambda item: [natural(part) for part in item[0]])
            ),
        )
    page.say(
        "*added* is a float mask; its backward was not timed. *causal* is `causal=True`. The other masks are bool.",
    )
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    page.say(losses([(ratio(r), f"{r['case']}, {r['dtype']}") for r in rows], "the fastest rival"), groups(rows))
    _memory(page, run)
    page.measured(run)


def _cells(own: dict[str, Any], direction: str) -> list[str]:
    row = own.get(direction)
    return [shown_us(row), number(row["roof"]), *_over(row)] if row else [""] * 4


def _memory(page: Page, run: Run) -> None:
    page.table(
        "Each row is one dtype, with the peak memory of attention as three operations (product, masked softmax, "
        "product), without inputs.",
        ("case", "dtype", "matmuls, MiB", "eager, MiB"),
        (
            [r["case"].removeprefix("attention "), r["dtype"], number(r["ours_mib"]), number(r["rival_mib"])]
            for r in run.rows
            if r["kind"] == "memory"
        ),
    )
