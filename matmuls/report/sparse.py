"""The page on sparse products."""

from collections.abc import Callable, Iterable
from typing import Any

from .. import experiment
from .format import losses, mean_and_lowest, number
from .headlines import ALG2, sparse_plot
from .page import Page
from .plot import Panel, Plot
from .results import Results
from .sparse_layers import blocks, constant, linear, pruned

Case = experiment.Case
FILES = ("spmm-cuda.json", "spmm-h100.json")
BEST = "the best of seven cuSPARSE algorithms and torch.sparse"
# what a column of the summary is: its title and its ratio
RATIOS: dict[str, Callable[[Case], float | None]] = {
    "over the best rival": lambda c: c.speed(),
    "over CSR_ALG2": lambda c: c.speed_over(ALG2),
    "without a plan, over the best rival": lambda c: c.speed(experiment.PLANLESS),
    "over the dense product": lambda c: c.speed_over(experiment.DENSE),
    "forward + backward over torch.sparse": lambda c: c.backward_speed,
}


def page(results: Results) -> Page:
    page = Page("performance/sparse.md", "Sparse products")
    page.say(
        "Each figure is for a product A @ B: A is sparse, B is dense, and caches are warm, as when one matrix "
        "multiplies many "
        "times. A *plan* (`matmuls.plan(A, constant=True)`) is made once for a matrix. Building it is not in "
        "these times; see "
        "[What a plan costs](#what-a-plan-costs).",
    )
    page.say(
        f"There are two baselines. *The best rival* is {BEST}. It is chosen anew for each case, and cuSPARSE's "
        "preprocessing "
        "is used where an algorithm has it. *CSR_ALG2* is one cuSPARSE algorithm without preprocessing, the "
        "baseline that papers "
        "commonly use. Higher is better throughout.",
    )
    _summary(page, results)
    _matrices(page, results)
    _first_products(page, results)
    _memory(page, results)
    pruned(page, results)
    linear(page, results)
    constant(page, results)
    blocks(page, results)
    _cpu(page, results)
    return page


def label(c: Case) -> str:
    return f"{c.matrix}, {c.dtype}, {c.n} columns"


def _dtypes(cases: Iterable[Case]) -> list[str]:
    found = {c.dtype for c in cases}
    return [d for d in ("bfloat16", "float16", "float32") if d in found]


def _summary(page: Page, results: Results) -> None:
    runs = [results.cases(file) for file in FILES]
    first = runs[0][1]
    widths = [str(n) for n in sorted({c.n for c in first})]
    page.heading("Summary")
    page.plot(sparse_plot(results))
    page.table(
        "A row is a dtype on one card. A cell is the geometric mean of the speed and, in brackets, the lowest, "
        f"over {len({c.matrix for c in first})} matrices by {', '.join(widths)} columns of B. A case whose rival did "
        "not fit into memory is left out. matmuls runs with a plan, unless a column says otherwise.",
        ("card", "dtype", *RATIOS, "cases"),
        (
            [run.card, d, *(mean_and_lowest(ratio(c) for c in own) for ratio in RATIOS.values()), str(len(own))]
            for run, cases in runs
            for d in _dtypes(cases)
            for own in [[c for c in cases if c.dtype == d]]
        ),
    )
    for run, cases in runs:
        page.say(losses([(c.speed(), label(c)) for c in cases], "the best rival", f"{run.card}, with a plan"))
        dense = [(c.speed_over(experiment.DENSE), label(c)) for c in cases]
        page.say(losses(dense, "the dense product", f"{run.card}, with a plan"))
    page.say("A plan may choose the dense product itself. The ratio over the dense product is then 1, but for noise.")
    page.measured(*(run for run, _ in runs))


def _matrices(page: Page, results: Results) -> None:
    run, cases = results.cases(FILES[0])
    page.heading("By matrix")
    by = {(c.matrix, c.dtype, c.n): c for c in cases}
    widths = sorted({c.n for c in cases})
    names = sorted({c.matrix for c in cases}, key=_order)
    page.plot(_matrix_plot(names, widths, by, run.machine))
    for dtype in _dtypes(cases):
        page.table(
            f"A row is a matrix, in {dtype}. Each cell has the speed of a plan over the best rival and, in "
            "brackets, over CSR_ALG2, for B of so many columns. Share = time to copy the bytes that must move / time "
            f"of the plan, at {widths[-1]} columns. Higher is better for all.",
            ("matrix", "shape", "nonzeros", *(f"{n} columns" for n in widths), f"share, {widths[-1]} columns"),
            (
                [
                    *(name, f"{first.rows} x {first.columns}", f"{first.nnz:,}"),
                    *(f"{number(c.speed())} ({number(c.speed_over(ALG2))})" for c in own),
                    number(own[-1].floor_share),
                ]
                for name in names
                for own in [[by[name, dtype, n] for n in widths]]
                for first in own[:1]
            ),
        )
    page.measured(run)


def _order(name: str) -> tuple[bool, str]:
    """Graphs before pruned weights."""
    return name.startswith("pruned:"), name.lower()


def _matrix_plot(names: list[str], widths: list[int], by: dict[Any, Case], machine: str) -> Plot:
    panels = [
        Panel(
            "bars",
            f"float16, {widths[1]} columns",
            "speed of a plan (higher is better)",
            "matrix",
            {
                "over the best rival": [by[name, "float16", widths[1]].speed() for name in names],
                "over CSR_ALG2": [by[name, "float16", widths[1]].speed_over(ALG2) for name in names],
            },
            names,
            ratio=True,
            log=True,
        )
    ]
    return Plot("performance/sparse-matrices", "Sparse products with a plan, by matrix", machine, panels)


def _first_products(page: Page, results: Results) -> None:
    page.heading("What a plan costs")
    runs = [results.cases(file) for file in FILES]
    page.table(
        "A row is a dtype on one card. The time to build a plan is a median over the cases. Each ratio is the time of "
        f"a new matrix's first {max(c.calls for _, cases in runs for c in cases)} products (fewer if slow) without a "
        "plan, divided by the time with one, including building it: geometric mean (lowest). Above 1 the plan has paid "
        "for itself. *Called one after the other*: the host launches the products without waiting for the GPU. *Waited "
        "for after each*: the host waits until each product is done.",
        ("card", "dtype", "building, µs", "called one after the other", "waited for after each"),
        (
            [
                *(run.card, d, number(sorted(c.plan_us for c in own)[len(own) // 2])),
                *(mean_and_lowest(getattr(c, name) for c in own) for name in ("pays_back", "pays_back_waited")),
            ]
            for run, cases in runs
            for d in _dtypes(cases)
            for own in [[c for c in cases if c.dtype == d]]
        ),
    )
    for run, cases in runs:
        page.say(losses([(c.pays_back, label(c)) for c in cases], "the same calls without a plan", run.card))
    page.say("From the runs of the summary.")


def _memory(page: Page, results: Results) -> None:
    _, cases = results.cases(FILES[0])
    both = [c for c in cases if experiment.TORCH in c.backward_mib and experiment.PLAN in c.backward_mib]
    shown = sorted((c for c in both if c.n == 128 and c.dtype == "float32"), key=lambda c: _order(c.matrix))
    page.heading("Memory of forward + backward")
    page.table(
        "A row is a matrix, in float32, with 128 columns of B. Only matrices where torch.sparse fits in memory are "
        "listed, because its gradient of A is dense. Peak memory above the operands in MiB: lower is better.",
        ("matrix", "matmuls, MiB", "torch.sparse, MiB", "torch / matmuls"),
        (
            [
                c.matrix,
                *(number(c.backward_mib[name]) for name in (experiment.PLAN, experiment.TORCH)),
                number(c.backward_mib[experiment.TORCH] / c.backward_mib[experiment.PLAN]),
            ]
            for c in shown
        ),
    )
    missing = len([c for c in cases if c.n == 128 and c.dtype == "float32"]) - len(shown)
    page.say(
        f"For {missing} matrices there is no figure of torch.sparse, since its dense gradient did not fit into memory.",
        "From the run of the summary.",
    )


def _cpu(page: Page, results: Results) -> None:
    run, cases = results.cases("spmm-cpu.json")
    page.heading("On a CPU")
    page.table(
        "A row is a matrix by so many columns. Speeds are over the faster of torch.sparse (MKL) and SciPy: "
        "higher is better.",
        ("matrix", "columns of B", "dtype", "plan, µs", "torch.sparse, µs", "SciPy, µs", "plan", "without a plan"),
        (
            [
                *(c.matrix, str(c.n), c.dtype),
                *(number(c.results[name].us) for name in (experiment.PLAN, experiment.TORCH, experiment.SCIPY)),
                *(number(c.speed(name)) for name in (experiment.PLAN, experiment.PLANLESS)),
            ]
            for c in sorted(cases, key=lambda c: (c.matrix.lower(), c.n))
        ),
    )
    page.say(losses([(c.speed(), label(c)) for c in cases], "the faster of torch.sparse and SciPy"))
    page.measured(run)
