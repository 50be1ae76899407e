"""The page on products that write their result over their input."""

from .format import DTYPES, losses, number
from .page import Page
from .plot import Panel, Plot
from .results import Results, Rows
from .times import compiled, groups, kind_of, plotted, ratio, shown_over, shown_ratio, shown_us

PRODUCTS = {"matmul_": "torch.mm(a, b, out=c)", "linear_": "F.linear(x, weight, bias)"}


def page(results: Results) -> Page:
    page = Page("performance/inplace.md", "Products in place")
    page.say("`matmul_` and `linear_` are compared with torch's product into a separate tensor.")
    _products(page, results)
    _feed_forward(page, results)
    _cpu(page, results)
    return page


def _products(page: Page, results: Results) -> None:
    runs = {name: results.bench(name) for name in PRODUCTS}
    rows = [r for run in runs.values() for r in run.rows]
    timed = [r for r in rows if r["kind"] == "gpu"]
    by = {(r["operation"], r["case"], r["dtype"]): r for r in timed}
    cases = sorted({case for _, case, _ in by}, key=lambda case: [int(x) for x in case.split("x")][::-1])
    drawn = {r["case"] for r in plotted(timed)}
    bars = [case for case in cases if case in drawn]
    dtypes = [d for d in DTYPES if any(d == dtype for _, _, dtype in by)]
    page.heading("Products on a GPU")
    page.plot(
        Plot(
            "performance/inplace",
            "Products in place compared with products into another tensor",
            runs["matmul_"].machine,
            [
                Panel(
                    "bars",
                    f"{name} over {rival}, {kind_of(timed)}",
                    "speed relative to torch (higher is better)",
                    "rows x K",
                    {
                        d: [ratio(by[name, case, d]) if (name, case, d) in by else None for case in bars]
                        for d in dtypes
                        if any((name, case, d) in by for case in bars)
                    },
                    bars,
                    ratio=True,
                )
                for name, rival in PRODUCTS.items()
            ],
        )
    )
    for name, rival in PRODUCTS.items():
        page.table(
            f"Each row is one shape of `{name}` (rows x K, with a K x K weight). The figures are the speed over "
            f"`{rival}`: higher is better.",
            ("rows x K", *dtypes),
            (
                [case, *(shown_ratio(by[name, case, d]) if (name, case, d) in by else "" for d in dtypes)]
                for case in cases
            ),
        )
        page.say(groups([r for r in timed if r["operation"] == name]))
    page.lost(
        *(
            (f"`{name}` over `{rival}`", [(ratio(r), f"{c}, {d}") for (n, c, d), r in by.items() if n == name])
            for name, rival in PRODUCTS.items()
        )
    )
    _memory(page, [r for r in rows if r["kind"] == "memory"], cases, dtypes)
    page.measured(*{run.file: run for run in runs.values()}.values())


def _memory(page: Page, rows: Rows, cases: list[str], dtypes: list[str]) -> None:
    """What `matmul_` allocates, and the size of the result that a product into another tensor needs."""
    extra = {(r["case"], r["dtype"]): r["ours_mib"] for r in rows if r["operation"] == "matmul_"}

    def size(case: str, width: int) -> str:
        m, k = (int(x) for x in case.split("x"))
        return number(m * k * width / 2**20)

    page.table(
        "Each row is one shape of `matmul_`, with the peak memory without inputs. In this run the "
        f"default `workspace` was {number(max(extra.values()))} MiB. The last two columns are the size of a separate "
        "result.",
        ("rows x K", *(f"{d}, MiB" for d in dtypes), "result in 16 bits, MiB", "result in float32, MiB"),
        ([case, *(number(extra.get((case, d))) for d in dtypes), size(case, 2), size(case, 4)] for case in cases),
    )


def _feed_forward(page: Page, results: Results) -> None:
    run = results.bench("feed_forward_")
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    peaks = {(r["case"], r["dtype"]): r for r in run.rows if r["kind"] == "memory"}
    page.heading("A feed-forward network in place")
    page.table(
        "Each row is one case of `feed_forward_` (rows x width x inner width). The last "
        "two columns are the peak memory without inputs.",
        (
            *("case", "dtype", "matmuls, µs", "speed over eager torch", "speed over torch.compile"),
            *("matmuls, MiB", "eager torch, MiB"),
        ),
        (
            [
                *(r["case"], r["dtype"], shown_us(r), shown_over(r, "torch"), shown_over(r, *compiled(r))),
                *(number(peaks[r["case"], r["dtype"]][key]) for key in ("ours_mib", "rival_mib")),
            ]
            for r in rows
        ),
    )
    page.say(
        losses([(ratio(r), f"{r['case']}, {r['dtype']}") for r in rows], "the faster of eager and torch.compile"),
        groups(rows),
    )
    page.measured(run)


def _cpu(page: Page, results: Results) -> None:
    run = results.run("bench-cpu-inplace.json")
    rows = [r for r in run.rows if r["kind"] == "cpu"]
    page.heading("Products on a CPU")
    page.table(
        "Each row is one operation and case (rows x K). *spread* is the interquartile "
        "range of the repeats divided by their median.",
        ("operation", "case", "dtype", "matmuls, ms", "torch, ms", "speed", "spread"),
        (
            [
                *(f"`{r['operation']}`", r["case"], r["dtype"], number(r["ours_us"] / 1e3)),
                *(number(r["rival_us"] / 1e3), number(r["ratio"]), number(r["spread"])),
            ]
            for r in rows
        ),
    )
    page.say(losses([(r["ratio"], f"`{r['operation']}`, {r['case']}") for r in rows], "torch"))
    page.measured(run)
