"""The page on sparse products."""

from collections.abc import Callable, Iterable
from typing import Any

from .. import experiment
from ..experiment.candidates import DENSE_ELEMENTS
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
        "These figures are for products A @ B of a sparse A and a dense B. Caches are warm, as they are when one "
        "matrix is multiplied many times.",
        "*A plan* is a constant plan, `matmuls.plan(A, constant=True)`, unless a table says otherwise. It is a "
        "sparse matrix prepared for many products, whose values do not change "
        "([guide](../guides/sparse.md#plans)). The time to make the plan is not included: [What a plan "
        "costs](#what-a-plan-costs) has it. *Without a plan* means `matmuls.spmm(A, B)`.",
        "Times are GPU times, unless a table says *as called*. Times as called include the host, which limits "
        "small products.",
    )
    page.say(
        "*Forward + backward* computes A @ B and the gradients of A's values and of B. It runs an ordinary plan, "
        "`plan.with_values(values)`, because a constant plan gives no gradient to the values. The rival is "
        "torch.sparse. It computes the gradient of A as a dense matrix.",
    )
    page.say(
        f"There are two baselines. *The best rival* is {BEST}, chosen separately for each case. Some cuSPARSE "
        "algorithms have a preprocessing step. It is run before the product and is not timed. *CSR_ALG2* is one "
        "cuSPARSE algorithm without preprocessing, the baseline that papers commonly use.",
    )
    page.say(
        "Five matrices are files, converted to `.npz` with random values. `mdual` is a mesh, the file "
        "`mdual.graph` of METIS's source code. `Franz6_id1959_aug` is from the SuiteSparse Matrix Collection. "
        "`cond-mat-2005`, `email-Enron` and `NotreDame_www` are undirected graphs from the Python module "
        "`graph_tool.collection`. The files are not in the repository. The commands below expect them in the "
        "folder `matrices`. All other names, such as `rmat:18:16`, generate a matrix; see [the command "
        "line](../guides/command-line.md#your-own-matrices).",
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
    page.heading("Summary")
    page.plot(sparse_plot(results))
    page.table(
        f"There is one row for each GPU and dtype. {_cases(first)} The columns have the geometric mean of a speed "
        f"and, in brackets, the lowest speed: higher is better. {_left_out(first)}",
        ("GPU", "dtype", *RATIOS, "cases"),
        (
            [run.card, d, *(mean_and_lowest(ratio(c) for c in own) for ratio in RATIOS.values()), str(len(own))]
            for run, cases in runs
            for d in _dtypes(cases)
            for own in [[c for c in cases if c.dtype == d]]
        ),
    )
    for run, cases in runs:
        with_plan = [(c.speed(), label(c)) for c in cases]
        page.say(losses(with_plan, "the best rival", f"{run.card}, a plan compared with the best rival"))
        dense = [(c.speed_over(experiment.DENSE), label(c)) for c in cases]
        page.say(losses(dense, "the dense product", f"{run.card}, a plan compared with the dense product"))
    page.say(
        "A plan may select the dense product. Its speed relative to the dense product then differs from 1 only by "
        "noise: at most 6.4 %, in products of about 10 µs."
    )
    page.measured(*(run for run, _ in runs))


def _cases(cases: list[Case]) -> str:
    """A sentence on the number of cases of a dtype."""
    matrices, widths = len({c.matrix for c in cases}), sorted({c.n for c in cases})
    *some, last = widths
    return (
        f"Each row has {matrices * len(widths)} cases: {matrices} matrices x {len(widths)} widths of B "
        f"({', '.join(map(str, some))} and {last} columns)."
    )


def _left_out(cases: list[Case]) -> str:
    """Sentences on the columns that have fewer cases of a dtype than the others."""
    own = [c for c in cases if c.dtype == cases[0].dtype]
    dense, trained = (sum(ratio(c) is not None for c in own) for ratio in list(RATIOS.values())[-2:])
    return (
        f"The dense product was timed in {dense} of the {len(own)} cases, for matrices of at most "
        f"{DENSE_ELEMENTS:,} elements. Forward + backward was compared in {trained} of the {len(own)} cases: those "
        "in which torch's dense gradient fits into memory."
    )


def _matrices(page: Page, results: Results) -> None:
    run, cases = results.cases(FILES[0])
    page.heading("By matrix")
    by = {(c.matrix, c.dtype, c.n): c for c in cases}
    widths = sorted({c.n for c in cases})
    names = sorted({c.matrix for c in cases}, key=_order)
    page.plot(_matrix_plot(names, widths, by, run.machine))
    for dtype in _dtypes(cases):
        page.table(
            f"There is one row for each matrix, in {dtype}, and one column for each number of columns of B. A cell "
            "has the speed of a plan over the best rival and, in brackets, over CSR_ALG2. *share* is the time of a "
            "plain copy of the bytes that must be read and written, divided by the time of the plan. Higher is "
            "better for all.",
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
        "There is one row for each GPU and dtype. *building* is the time to make a plan, the median over the "
        f"cases. The other columns compare the first {max(c.calls for _, cases in runs for c in cases)} products of "
        "a new matrix (fewer if they are slow), as called, with a plan and without. The time with a plan includes "
        "building it and selecting a kernel. The ratio is the time without a plan divided by the time with one. "
        "Above 1, the plan has saved more time than it cost. A cell has the geometric mean of the ratio and, in "
        "brackets, the lowest. *queued*: the host launches the products without waiting for the GPU. "
        "*synchronized*: the host waits after each product.",
        ("GPU", "dtype", "building, µs", "queued", "synchronized"),
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
        page.say(
            losses([(c.pays_back, label(c)) for c in cases], "the same calls without a plan", f"{run.card}, queued")
        )
    page.say("These figures are from the same runs as the summary.")


def _memory(page: Page, results: Results) -> None:
    _, cases = results.cases(FILES[0])
    both = [c for c in cases if experiment.TORCH in c.backward_mib and experiment.PLAN in c.backward_mib]
    shown = sorted((c for c in both if c.n == 128 and c.dtype == "float32"), key=lambda c: _order(c.matrix))
    page.heading("Memory of forward + backward")
    page.table(
        "There is one row for each matrix, in float32, with 128 columns of B. The figures are the peak memory in "
        "MiB: lower is better. The memory of the operands is not counted. The table has only matrices for which "
        "torch's dense gradient of A fits into memory.",
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
        f"For the other {missing} of the {missing + len(shown)} matrices torch's dense gradient does not fit.",
        "These figures are from the same run on an H200 as the summary.",
    )


def _cpu(page: Page, results: Results) -> None:
    run, cases = results.cases("spmm-cpu.json")
    page.heading("On a CPU")
    page.table(
        "There is one row for each matrix and number of columns of B. The last two columns are speeds over the "
        "faster of torch.sparse (MKL) and SciPy: higher is better.",
        (
            *("matrix", "columns of B", "dtype", "plan, µs", "torch.sparse, µs", "SciPy, µs"),
            *("speed with a plan", "speed without"),
        ),
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
