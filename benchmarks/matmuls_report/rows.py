"""The page on operations along rows: softmax and the norms."""

from typing import Any

from .format import losses, number
from .page import Page
from .plot import Panel, Plot
from .results import Results, Rows, Run
from .times import compiled, groups, over, ratio, shown_ratio, shown_us

OPERATIONS = ("softmax_", "layer_norm_", "rms_norm_")


def page(results: Results) -> Page:
    page = Page("performance/rows.md", "Softmax and norms along rows")
    runs = {name: results.bench(name) for name in OPERATIONS}
    page.say(
        "In the first tables a cell has the [share](../index.md#terms), by GPU time, and in brackets the speed over "
        "the faster of eager torch and torch.compile. The tensors have about 2^29 elements.",
        "The rival of the backward pass of `rms_norm_` is a formula of torch operations, not a fused kernel.",
    )
    _shares(page, runs)
    for name, run in runs.items():
        _operation(page, name, run)
    _residual(page, runs["layer_norm_"], runs["rms_norm_"])
    _compiled(page, [r for run in runs.values() for r in run.rows])
    _cpu(page, results)
    _dims(page, results)
    return page


def _by_columns(run: Run) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The rows of a run by direction, dtype and columns, without drawn sizes."""
    own = {shape: r for shape, r in _by_shape(run).items() if not r.get("drawn")}
    return {(direction, dtype, columns): r for (direction, dtype, _, columns), r in own.items()}


def _by_shape(run: Run) -> dict[tuple[str, str, int, int], dict[str, Any]]:
    """The rows of a run by direction, dtype, rows and columns."""
    found = {}
    for r in run.rows:
        if r["kind"] == "gpu":
            direction, shape = r["case"].split()
            count, columns = map(int, shape.split("x"))
            found[direction, r["dtype"], count, columns] = r
    return found


LINES = [(direction, dtype) for direction in ("forward", "backward") for dtype in ("bfloat16", "float32")]


def _shares(page: Page, runs: dict[str, Run]) -> None:
    panels = []
    for name, run in runs.items():
        by = _by_columns(run)
        columns = sorted({n for direction, _, n in by if direction != "residual"})
        shares = {
            f"{direction}, {dtype}": [
                by[direction, dtype, n]["roof"] if (direction, dtype, n) in by else None for n in columns
            ]
            for direction, dtype in LINES
        }
        panels.append(
            Panel("lines", name, "share of a copy's speed\n(higher is better)", "columns", shares, columns, ratio=True)
        )
    caption = "; ".join(dict.fromkeys(run.machine for run in runs.values()))
    title = "Operations along rows compared with a memory copy of the same size"
    page.plot(Plot("performance/rows", title, caption, panels))


def _operation(page: Page, name: str, run: Run) -> None:
    by = _by_columns(run)
    columns = sorted({n for direction, _, n in by if direction != "residual"})
    page.heading(f"`{name}`")
    header = tuple(f"{direction}, {dtype}" for direction, dtype in LINES)
    page.table(
        "Each row is one number of columns.",
        ("columns", *header),
        ([str(n), *(_cell(by.get((*line, n))) for line in LINES)] for n in columns),
    )
    found = {shape: r for shape, r in _by_shape(run).items() if shape[0] != "residual"}
    drawn = sorted({(n, count) for (_, _, count, n), r in found.items() if r.get("drawn")})
    if drawn:
        page.table(
            "Each row is one random shape, rows x columns.",
            ("shape", *header),
            ([f"{count}x{n}", *(_cell(found.get((*line, count, n))) for line in LINES)] for n, count in drawn),
        )
    cases = [(ratio(r), f"{d}, {dtype}, {_size(r)}") for (d, dtype, *_), r in found.items()]
    page.say(losses(cases, "the faster of eager torch and torch.compile"), groups([*found.values()]))
    page.measured(run)


def _cell(row: dict[str, Any] | None) -> str:
    return f"{number(row['roof'])} ({shown_ratio(row)})" if row else ""


def _size(row: dict[str, Any]) -> str:
    shape: str = row["case"].split()[1]
    return shape if row.get("drawn") else f"{shape.split('x')[1]} columns"


def _residual(page: Page, *runs: Run) -> None:
    rows = [r for run in runs for r in run.rows if r["case"].startswith("residual")]
    page.heading("Norms of x + residual")
    page.table(
        "Each row is one case (rows x columns). The speed is over the faster of eager torch and torch.compile.",
        ("operation", "shape", "dtype", "matmuls, µs", "share", "speed"),
        (
            [
                *(f"`{r['operation']}`", r["case"].split()[1], r["dtype"]),
                *(shown_us(r), number(r["roof"]), shown_ratio(r)),
            ]
            for r in rows
        ),
    )
    cases = [(ratio(r), f"`{r['operation']}`, {r['case'].split()[1]}, {r['dtype']}") for r in rows]
    page.say(
        losses(cases, "the faster of eager torch and torch.compile"),
        groups(rows),
    )
    page.measured(*runs)


def _compiled(page: Page, rows: Rows) -> None:
    """A sentence on the cases that are slower than torch.compile's."""
    ratios = [
        (over(r, *compiled(r)), f"`{r['operation']}`, {r['case']}, {r['dtype']}") for r in rows if r["kind"] == "gpu"
    ]
    page.heading("Compared with torch.compile only")
    page.say(
        "These are the same cases, compared with torch.compile alone.",
        losses(ratios, "torch.compile"),
    )


def _cpu(page: Page, results: Results) -> None:
    run = results.run("bench-cpu-rows.json")
    rows = [r for r in run.rows if r["kind"] == "cpu"]
    page.heading("On a CPU")
    page.table(
        "Each row is one case (rows x columns). matmuls works in place. torch's operation writes a new tensor.",
        ("operation", "shape", "dtype", "matmuls, µs", "torch, µs", "speed"),
        (
            [
                *(f"`{r['operation']}`", r["case"].split()[1], r["dtype"]),
                *(number(r[key]) for key in ("ours_us", "rival_us", "ratio")),
            ]
            for r in rows
        ),
    )
    page.say(losses([(r["ratio"], f"`{r['operation']}`, {r['case']}, {r['dtype']}") for r in rows], "torch"))
    page.measured(run)


def _dims(page: Page, results: Results) -> None:
    run = results.run("softmax-dims-cpu.json")
    names = ("softmax", "softmax_", "softmax_backward")
    dots = {name: [r["us"][rival] / r["us"][name] for r in run.rows] for name, rival in zip(names, DIMS, strict=True)}
    page.heading("Softmax along every dimension on a CPU")
    page.plot(
        Plot(
            "performance/rows-dims-cpu",
            "Softmax along every dimension of tensors of random shapes, on a CPU",
            run.machine,
            [
                Panel(
                    "strips",
                    "over torch",
                    "speed relative to torch (higher is better)",
                    "operation",
                    dots,
                    ratio=True,
                    log=True,
                )
            ],
        )
    )
    page.say("The tensors have random shapes.")
    labels = [f"shape {r['shape']}, dimension {r['dim']}, {r['dtype']}" for r in run.rows]
    page.lost(*((f"`{name}` over torch", zip(dots[name], labels, strict=True)) for name in names))
    page.measured(run)


DIMS = ("torch", "torch", "torch backward")  # the rivals of softmax, softmax_ and softmax_backward
