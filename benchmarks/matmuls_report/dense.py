"""The page on dense products."""

from dataclasses import replace
from typing import Any

from . import host
from .format import DTYPES, losses, mean_and_lowest, number
from .page import Page
from .plot import Panel, Plot
from .results import Results, Rows
from .times import groups, kind_of, plotted, ratio, rivals_us, shown_ratio, shown_us

INVARIANCE = ("cuda/batch-invariance.json", "cpu/batch-invariance.json")
PRODUCTS = ("matmul", "cublasMM", "cublasTransaMM", "cublasTransbMM", "cublasTransabMM")


def page(results: Results) -> Page:
    page = Page("performance/dense.md", "Dense products")
    _epilogues(page, results)
    _bias_act(page, results)
    _products(page, results)
    _host(page, results)
    _batch_invariance(page, results)
    return page


def _cells(row: dict[str, Any]) -> list[str]:
    rival = number(min(rivals_us(row).values()))
    return [row["case"], row["dtype"], shown_us(row), rival, shown_ratio(row), number(row["roof"])]


def _case(row: dict[str, Any]) -> str:
    return f"`{row['operation']}` {row['case']}, {row['dtype']}"


def _epilogues(page: Page, results: Results) -> None:
    run = results.bench("cublaslt_matmul")
    rows = [r for r in run.rows if r["kind"] == "gpu"]
    cases, bars = (list(dict.fromkeys(r["case"] for r in each)) for each in (rows, plotted(rows)))
    by = {(r["case"], r["dtype"]): r for r in rows}
    dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in rows)]
    page.heading("Product, bias and activation")
    page.plot(
        Plot(
            "performance/dense-epilogues",
            "Product, bias and activation by one call",
            run.machine,
            [
                Panel(
                    "bars",
                    f"over F.linear and then the activation, {kind_of(rows)}",
                    "speed relative to torch (higher is better)",
                    "case, M x K x N",
                    {d: [ratio(by[case, d]) if (case, d) in by else None for case in bars] for d in dtypes},
                    bars,
                    ratio=True,
                )
            ],
        )
    )
    page.table(
        "Each row is one case (M x K x N) and dtype. The *share of the peak* is the rate of matmuls divided by the "
        "highest rate that `torch.mm` reached in this run.",
        ("case", "dtype", "matmuls, µs", "torch, µs", "speed", "share of the peak"),
        (_cells(r) for case in cases for r in (by[case, d] for d in dtypes if (case, d) in by)),
    )
    page.say(losses([(ratio(r), _case(r)) for r in rows], "`F.linear` followed by the activation"), groups(rows))
    page.measured(run)


def _bias_act(page: Page, results: Results) -> None:
    run = results.bench("bias_act_")
    rows = sorted((r for r in run.rows if r["kind"] == "gpu"), key=lambda r: (DTYPES.index(r["dtype"]), r["case"]))
    page.heading("Bias and activation in place")
    page.table(
        "Each row is one case (rows x columns) of `custom_mm.bias_act_`. torch computes `x + bias` and then the "
        "activation.",
        ("case", "dtype", "matmuls, µs", "torch, µs", "speed", "[share](../index.md#terms)"),
        map(_cells, rows),
    )
    page.say(losses([(ratio(r), _case(r)) for r in rows], "torch"), groups(rows))
    page.measured(run)


def _products(page: Page, results: Results) -> None:
    runs = [results.bench(name) for name in PRODUCTS]
    rows: Rows = [r for run in runs for r in run.rows if r["kind"] == "gpu"]
    dtypes = [d for d in DTYPES if any(r["dtype"] == d for r in rows)]
    random = ", and as many of random sizes" if any(r.get("drawn") for r in rows) else ""
    page.heading("Plain products")
    page.table(
        "Each row is one operation. A cell has the geometric mean of the speed over `torch.matmul` and, in brackets, "
        f"the lowest: higher is better. The cases are squares from 64 to 8192, 65536x1024x1024, and batches of "
        f"attention{random}.",
        ("operation", *dtypes, "cases"),
        (
            [
                f"`{name}`",
                *(mean_and_lowest(ratio(r) for r in rows if (r["operation"], r["dtype"]) == (name, d)) for d in dtypes),
                str(sum(r["operation"] == name for r in rows)),
            ]
            for name in PRODUCTS
        ),
    )
    page.say(losses([(ratio(r), _case(r)) for r in rows], "`torch.matmul`"), groups(rows))
    page.measured(*{run.file: run for run in runs}.values())


def _host(page: Page, results: Results) -> None:
    runs = [results.bench(name) for name in (*PRODUCTS, "cublaslt_matmul")]
    rows = [r for run in runs for r in run.rows if r["kind"] == "host"]
    page.heading("Host time of one small call")
    page.table(
        "Each row is one small call, in bfloat16. The time is what the host spends in the call.",
        ("operation", "case", "matmuls, µs", "torch, µs", "speed"),
        (
            [f"`{r['operation']}`", r["case"], number(r["ours_us"]), number(r["rival_us"]), number(r["ratio"])]
            for r in rows
        ),
    )
    page.say(losses([(r["ratio"], _case(r)) for r in rows], "torch"))
    newer, older = (run.environment for run in (results.run(host.FILE), runs[0]))
    if str(newer.get("date")) > str(older.get("date")):
        page.say(
            "[Small calls](host.md) has a newer run, in float32, as called. The table above has the host's time alone."
        )
    page.measured(*{run.file: replace(run, rows=rows) for run in runs}.values())


def _batch_invariance(page: Page, results: Results) -> None:
    page.heading("The price of batch invariance")
    page.say(
        "The figures are the time under [`handles(batch_invariant=True)`](../guides/handles.md#batch-invariance) "
        "divided by the time without: lower is better."
    )
    for file in INVARIANCE:
        if not (results.folder / file).is_file():  # measured on one kind of machine so far
            continue
        run = results.run(file)
        dtypes, counts = (list(dict.fromkeys(r[key] for r in run.rows)) for key in ("dtype", "m"))
        of = {(d, m): [r["ratio"] for r in run.rows if (r["dtype"], r["m"]) == (d, m)] for d in dtypes for m in counts}
        page.table(
            f"Each row is one size of the first operand, on {'a GPU' if file.startswith('cuda') else 'a CPU'}. A cell "
            "has the lowest and the highest figure.",
            ("rows", *dtypes),
            ([str(m), *(f"{number(min(of[d, m]))} to {number(max(of[d, m]))}" for d in dtypes)] for m in counts),
        )
        page.measured(run)
