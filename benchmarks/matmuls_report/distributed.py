"""The page on several GPUs: sparse products, training steps and modules that are divided among them."""

import re
from pathlib import Path
from typing import Any

from .format import number
from .page import Page
from .results import Results, Run

OURS, GATHERED, TORCH, ALONE = "distributed plan", "all-gather + plan", "all-gather + torch.sparse", "one process, plan"
GATHERINGS, FASTER = (GATHERED, TORCH), "the faster all-gather"
ORDERS = {"rcm": "reverse Cuthill-McKee", "metis": "METIS"}
COLUMNS = {
    "MiB sent": "what all GPUs together send in a product.",
    OURS: "the product by `matmuls.distributed.plan`.",
    FASTER: "every process first gets all rows of the dense operand. It then multiplies by a plan or by torch.sparse, "
    "whichever is faster.",
    ALONE: "the whole product on one GPU.",
    "predicted from N GPUs": "a time predicted from the measurements on N GPUs.",
    "efficiency": "the time of *one process, plan*, divided by the number of GPUs and by the time of *distributed "
    "plan*. Higher is better, and 1 is ideal.",
}
KINDS = {
    "products": r"distributed-\d+(-cuda)?(-rcm|-metis)?",
    "weak": r"distributed-\d+-weak",
    "models": r"distributed-models-\d+",
}
Predicted = dict[tuple[str, str, int, int], tuple[int, float]]  # matrix, dtype, n, GPUs -> fitted on how many, seconds


def page(results: Results) -> Page:
    page = Page("performance/distributed.md", "Sparse products on several GPUs")
    page.say(
        "The rows of a sparse matrix are divided among processes, one for each GPU. The tables have times as called of "
        "one product, in µs.",
        "The columns are:",
    )
    page.items(*(f"*{name}*: {meaning}" for name, meaning in COLUMNS.items()))
    predicted: Predicted = {}
    for run, content in _files(results, "products"):
        _products(page, run, content["cases"], predicted)
        predicted |= _predictions(content)
    for run, content in _files(results, "weak"):
        _weak(page, run, content["cases"])
    for run, _ in _files(results, "models"):
        _models(page, run)
    return page


def _files(results: Results, kind: str) -> list[tuple[Run, dict[str, Any]]]:
    """The files of a kind, those of the fewest GPUs first."""
    paths = [p for p in results.folder.rglob("*.json") if re.fullmatch(KINDS[kind], p.stem)]
    paths.sort(key=lambda path: int(re.findall(r"\d+", path.stem)[0]))
    return [results.distributed(path.relative_to(results.folder).as_posix()) for path in paths]


def _predictions(content: dict[str, Any]) -> Predicted:
    fitted = content["cases"][0]["ranks"]
    return {
        (model["matrix"], model["dtype"], model["n"], row["gpus"]): (fitted, row["seconds"])
        for model in content["models"]
        for row in model["predicted"]
        if row["gpus"] > fitted
    }


def _products(page: Page, run: Run, cases: list[dict[str, Any]], predicted: Predicted) -> None:
    ranks = cases[0]["ranks"]
    known = [predicted.get((case["matrix"], case["dtype"], case["n"], ranks)) for case in cases]
    fitted = {one[0] for one in known if one}
    extra = [f"predicted from {min(fitted)} GPUs"] if fitted else []
    order = re.search(r"-(rcm|metis)\.json$", run.file)
    page.heading(f"On {ranks} GPUs{', reordered' if order else ''}")
    page.table(
        "Each row is one matrix, dtype and number of columns of the dense operand."
        + (f" Rows and columns of every matrix are first reordered by {ORDERS[order[1]]}." if order else ""),
        (
            *("matrix, dtype, columns", "MiB sent", OURS, *extra, FASTER, ALONE, "efficiency"),
            *("forward + backward", f"forward + backward, {FASTER}", "forward + backward, one GPU"),
        ),
        (
            [
                *(f"{case['matrix']}, {case['dtype']}, {case['n']}", f"{sum(case['sent']) / 2**20:.1f}"),
                _us(case["wall"][OURS]),
                *(_us(one[1] if one else None) for _ in extra),
                *(_us(_fastest(case["wall"], GATHERINGS)), _us(case["wall"][ALONE]), f"{case['efficiency']:.2f}"),
                *(_us(_fastest(case["wall_backward"], ways)) for ways in ((OURS,), GATHERINGS, (ALONE,))),
            ]
            for case, one in zip(cases, known, strict=True)
        ),
    )
    page.lost(
        *(
            (
                name,
                [
                    (
                        _fastest(case[times], rivals) / case[times][OURS],
                        f"{case['matrix']}, {case['dtype']}, {case['n']} columns",
                    )
                    for case in cases
                ],
            )
            for name, times, rivals in (
                (f"over {FASTER}", "wall", GATHERINGS),
                ("over one GPU", "wall", (ALONE,)),
                (f"forward + backward, over {FASTER}", "wall_backward", GATHERINGS),
                ("forward + backward, over one GPU", "wall_backward", (ALONE,)),
            )
        )
    )
    page.measured(run)


def _fastest(times: dict[str, float], ways: tuple[str, ...]) -> float:
    return min(times[way] for way in ways if way in times)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f}"


def _weak(page: Page, run: Run, cases: list[dict[str, Any]]) -> None:
    ranks = cases[0]["ranks"]
    page.heading(f"Weak scaling on {ranks} GPUs")
    page.table(
        f"Each row is one dtype. The grid on {ranks} GPUs has {ranks} times as many vertices as the grid on one GPU. "
        f"*efficiency* is the time of one GPU for the small grid, divided by that of {ranks} GPUs for the large grid.",
        ("matrix", "dtype", "columns", "efficiency", "efficiency, forward + backward"),
        (
            [case["matrix"], case["dtype"], str(case["n"]), *(f"{case[key]:.2f}" for key in EFFICIENCIES)]
            for case in cases
        ),
    )
    page.measured(run)


EFFICIENCIES = "efficiency", "efficiency_backward"


def _models(page: Page, run: Run) -> None:
    rows = [row for row in run.rows if "failed" not in row]
    steps = [row for row in rows if row["case"] == "GCN"]
    modules = [row for row in rows if row["case"] != "GCN"]
    ranks = rows[0]["ranks"]
    page.heading(f"Models on {ranks} GPUs")
    page.table(
        "Each row is one graph and dtype. The times are those of a training step of a GCN with two layers of 128 "
        "features, in ms. *efficiency* is the time on one GPU, divided by the number of GPUs and by "
        "the time on all GPUs. The losses are those of the fifth step.",
        ("graph, dtype", "vertices", "ms", "ms, one GPU", "efficiency", "loss", "loss, one GPU"),
        (
            [
                *(f"{row['graph']}, {row['dtype']}", str(row["rows"])),
                *(number(row["seconds"][way] * 1e3) for way in ("divided", "alone")),
                f"{row['efficiency']:.2f}",
                *(f"{row['losses'][way][-1]:.5f}" for way in ("divided", "alone")),
            ]
            for row in steps
        ),
    )
    if modules:
        page.table(
            "Each row is one module and direction. A module is divided by its output features (*columns*), its input "
            "features (*inner*) or the rows of x (*rows*), as *nn.Linear* is. Times are in ms. A "
            "SparseLinear has 95 % zeros. *error* is the largest relative difference from one GPU.",
            ("module, divided by", "rows x in x out", "", "ms", "nn.Linear", "one GPU", "nn.Linear, one GPU", "error"),
            (
                [
                    *(f"{row['case']}, {row['by']}", f"{row['rows']} x {row['in']} x {row['out']}", direction),
                    *(
                        number(row[kind][f"{name}, {where}"] * 1e3)
                        for where in ("divided", "alone")
                        for name in ("matmuls", "nn.Linear")
                    ),
                    f"{row['error']['matmuls']:.1e}",
                ]
                for row in modules
                for kind, direction in (("seconds", "forward"), ("seconds_backward", "forward + backward"))
            ),
        )
    if len(rows) < len(run.rows):
        page.say(f"{len(run.rows) - len(rows)} of {len(run.rows)} cases ended with an error and are not shown.")
    words = str(run.environment.get("command")).partition(" OUT ")[2].split()
    lacking = {Path(word).stem for word in words} - {Path(row["graph"]).stem for row in steps}
    if lacking:
        page.say(f"The run ended before {', '.join(sorted(lacking))}.")
    page.measured(run)
