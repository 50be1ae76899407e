"""The page on sparse products."""

from collections.abc import Callable, Iterable
from typing import Any

from matmuls_bench import spmm
from matmuls_bench.spmm.candidates import DENSE_ELEMENTS

from .format import losses, mean_and_lowest, number
from .headlines import ALG2, sparse_plot
from .page import Page
from .plot import Panel, Plot
from .results import Results, Run
from .sparse_layers import blocks, constant, linear, pruned

Case = spmm.Case
FILES = ("spmm-cuda.json", "spmm-h100.json")
# what a column of the summary is: its title and its ratio
RATIOS: dict[str, Callable[[Case], float | None]] = {
    "over the best rival": lambda c: c.speed(),
    "over CSR_ALG2": lambda c: c.speed_over(ALG2),
    "without a plan, over the best rival": lambda c: c.speed(spmm.PLANLESS),
    "over the dense product": lambda c: c.speed_over(spmm.DENSE),
    "forward + backward over torch.sparse": lambda c: c.backward_speed,
}


def page(results: Results) -> Page:
    page = Page("performance/sparse.md", "Sparse products")
    page.say(
        "A @ B is the product of a sparse A and a dense B. *Plan* means a [constant plan](../index.md#terms), and "
        "times are GPU times, unless a table says otherwise. The time to make a plan is not included.",
    )
    page.items(
        "*The best rival* is the fastest of seven cuSPARSE algorithms and torch.sparse.",
        "*CSR_ALG2* is the cuSPARSE algorithm with which papers commonly compare.",
        "*Without a plan* means `matmuls.spmm(A, B)`.",
        "*Forward + backward* also computes the gradients of A's values and of B, with an ordinary plan.",
    )
    page.say(
        "Names such as `rmat:18:16` [generate a matrix](../guides/command-line.md#your-own-matrices). Five matrices "
        "are files: `mdual` is a mesh of METIS. `Franz6_id1959_aug` is from the SuiteSparse Matrix Collection. "
        "`cond-mat-2005`, `email-Enron` and `NotreDame_www` are graphs of `graph_tool.collection`.",
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
        f"Each row is one GPU and dtype, with {_cases(first)}. A cell has the geometric mean of a speed and, in "
        f"brackets, the lowest: higher is better. {_left_out(first)}",
        ("GPU", "dtype", *RATIOS, "cases"),
        (
            [run.card, d, *(mean_and_lowest(ratio(c) for c in own) for ratio in RATIOS.values()), str(len(own))]
            for run, cases in runs
            for d in _dtypes(cases)
            for own in [[c for c in cases if c.dtype == d]]
        ),
    )
    page.lost(
        *(
            (f"plan over the dense product, {run.card}", [(c.speed_over(spmm.DENSE), label(c)) for c in cases])
            for run, cases in runs
        ),
        *((f"plan over the best rival, {run.card}", [(c.speed(), label(c)) for c in cases]) for run, cases in runs),
    )
    page.say("A plan may select the dense product. A speed below 1 is then noise.", *(_noise(*one) for one in runs))
    page.measured(*(run for run, _ in runs))


def _noise(run: Run, cases: list[Case]) -> str:
    """How many plans that were slower than the dense product had selected it."""
    slower = [c for c in cases if (speed := c.speed_over(spmm.DENSE)) is not None and speed < 0.995]
    same = sum(c.chosen == spmm.DENSE for c in slower)
    return f"On the {run.card} it had selected it in {same} of the {len(slower)} slower cases."


def _cases(cases: list[Case]) -> str:
    """The number of cases of a dtype, in words."""
    matrices, widths = len({c.matrix for c in cases}), sorted({c.n for c in cases})
    *some, last = widths
    return f"{matrices} matrices and {', '.join(map(str, some))} or {last} columns of B"


def _left_out(cases: list[Case]) -> str:
    """Sentences on the columns that have fewer cases of a dtype than the others."""
    own = [c for c in cases if c.dtype == cases[0].dtype]
    dense, trained = (sum(ratio(c) is not None for c in own) for ratio in list(RATIOS.values())[-2:])
    return (
        f"The dense product was timed in {dense} of {len(own)} cases, for matrices of at most {DENSE_ELEMENTS:,} "
        f"elements. In {len(own) - trained} of the {len(own)} cases torch's dense gradient did not fit into memory."
    )


def _matrices(page: Page, results: Results) -> None:
    run, cases = results.cases(FILES[0])
    page.heading("By matrix")
    by = {(c.matrix, c.dtype, c.n): c for c in cases}
    widths = sorted({c.n for c in cases})
    names = sorted({c.matrix for c in cases}, key=_order)
    page.plot(_matrix_plot(names, widths, by, run.machine))
    dtypes = _dtypes(cases)
    sentence = (
        f"Each row is one matrix, in {dtypes[0]}. A cell has the speed of a plan over the best rival and, in brackets, "
        "over CSR_ALG2: higher is better."
    )
    for dtype in dtypes:
        page.table(
            sentence if dtype == dtypes[0] else f"The same rows, in {dtype}:",
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
        "Each row is one GPU and dtype. *building* is the median time to make a plan. The other columns are ratios for "
        f"the first {max(c.calls for _, cases in runs for c in cases)} products, as called: the time without a plan "
        "divided by the time with one, building included. A cell has the geometric mean and, in brackets, the lowest. "
        "*queued*: the host does not wait for the GPU. *synchronized*: it waits after each product.",
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
    page.lost(
        *((f"queued, {run.card}", [(c.pays_back, label(c)) for c in cases]) for run, cases in runs),
        *((f"synchronized, {run.card}", [(c.pays_back_waited, label(c)) for c in cases]) for run, cases in runs),
    )
    page.measured(*(run for run, _ in runs))


def _memory(page: Page, results: Results) -> None:
    run, cases = results.cases(FILES[0])
    both = [c for c in cases if spmm.TORCH in c.backward_mib and spmm.PLAN in c.backward_mib]
    shown = sorted((c for c in both if c.n == 128 and c.dtype == "float32"), key=lambda c: _order(c.matrix))
    page.heading("Memory of forward + backward")
    page.table(
        "Each row is one matrix, in float32, with 128 columns of B. The figures are the peak memory without operands.",
        ("matrix", "matmuls, MiB", "torch.sparse, MiB", "torch / matmuls"),
        (
            [
                c.matrix,
                *(number(c.backward_mib[name]) for name in (spmm.PLAN, spmm.TORCH)),
                number(c.backward_mib[spmm.TORCH] / c.backward_mib[spmm.PLAN]),
            ]
            for c in shown
        ),
    )
    page.measured(run)


def _cpu(page: Page, results: Results) -> None:
    run, cases = results.cases("spmm-cpu.json")
    page.heading("On a CPU")
    page.table(
        "Each row is one matrix and number of columns of B. The last two columns are speeds over the faster of "
        "torch.sparse (MKL) and SciPy.",
        (
            *("matrix", "columns of B", "dtype", "plan, µs", "torch.sparse, µs", "SciPy, µs"),
            *("speed with a plan", "speed without"),
        ),
        (
            [
                *(c.matrix, str(c.n), c.dtype),
                *(number(c.results[name].us) for name in (spmm.PLAN, spmm.TORCH, spmm.SCIPY)),
                *(number(c.speed(name)) for name in (spmm.PLAN, spmm.PLANLESS)),
            ]
            for c in sorted(cases, key=lambda c: (c.matrix.lower(), c.n))
        ),
    )
    page.say(losses([(c.speed(), label(c)) for c in cases], "the faster of torch.sparse and SciPy"))
    page.measured(run)
