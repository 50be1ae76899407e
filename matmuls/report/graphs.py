"""The pages on training steps of graph networks, and on sparse products over several GPUs."""

from typing import Any

from .format import losses, number
from .page import Page
from .results import Results, Run

STEPS = "pyg-steps-cuda.json"
WAYS = "PyG edges", "plans edges", "PyG adjacency", "plans adjacency", "torch.sparse"
DISTRIBUTED = "distributed-2-cuda.json", "cuda/distributed-4.json"
WEAK = "cuda/distributed-4-weak.json"


def steps(results: Results) -> Page:
    page = Page("performance/pyg.md", "PyTorch Geometric's training steps")
    page.say(
        "The table has the wall-clock time of one training step (forward, backward, optimizer) in ms: lower is better. "
        "The models have two PyG layers.",
        "*edges*: the layers get a tensor of edges; *adjacency*: they get a sparse tensor of torch.",
        "*plans*: the same code after `matmuls.integrations.pyg.enable()`.",
        "*torch.sparse*: the same model written by hand with `torch.sparse.mm`.",
    )
    run = results.run(STEPS)
    page.table(
        "There is one row for each model, graph and width of the layers. `uniform:50000:1000000` is a random graph of "
        "50,000 vertices and 1,000,000 edges.",
        ("model", "graph", "width", *WAYS),
        ((r["model"], _name(r["graph"]), str(r["width"]), *(_ms(r, way) for way in WAYS)) for r in run.rows),
    )
    for rival in ("PyG {}", "torch.sparse"):
        for given in ("edges", "adjacency"):
            ratios = [(_speed(r, rival.format(given), f"plans {given}"), _case(r)) for r in run.rows]
            over = "PyG with the same input" if rival != "torch.sparse" else rival
            page.say(losses(ratios, over, f"plans with {given} compared with {rival.format(given)}"))
    page.measured(run)
    return page


def distributed(results: Results) -> Page:
    page = Page("performance/distributed.md", "Sparse products on several GPUs")
    page.say(
        "`matmuls.distributed.plan` multiplies a matrix whose rows are divided among processes, one for each GPU.",
        "The tables have the wall clock of one product as called, in microseconds: lower is better.",
        "*all-gather*: every process first gets all rows of the dense operand, then multiplies its own rows.",
        "*efficiency* is t(one GPU) / (number of GPUs x t(distributed plan)); higher is better, 1 is ideal.",
        "*MiB sent* is the sum over the GPUs in a product.",
        "The commands below run under torchrun: `torchrun --nproc-per-node=2 -m matmuls spmm ...`.",
        "For large grids further GPUs save time, because few rows of the dense operand must be sent. The other "
        "matrices are faster on one GPU: the exchange and its launches take longer than the other GPUs save.",
    )
    for file in DISTRIBUTED:
        _by_ranks(page, *results.distributed(file))
    run, cases = results.distributed(WEAK)
    page.heading(f"Weak scaling on {cases[0]['ranks']} GPUs")
    page.table(
        "There is one row for each dtype. One GPU multiplies a grid with a quarter of the vertices here, and "
        "*efficiency* is t(one GPU) / t(distributed plan): 1 is ideal.",
        ("matrix", "dtype", "columns", "efficiency", "efficiency, forward + backward"),
        (
            (
                case["matrix"],
                case["dtype"],
                str(case["n"]),
                f"{case['efficiency']:.2f}",
                f"{case['efficiency_backward']:.2f}",
            )
            for case in cases
        ),
    )
    page.measured(run)
    return page


def _by_ranks(page: Page, run: Run, cases: list[dict[str, Any]]) -> None:
    page.heading(f"On {cases[0]['ranks']} GPUs")
    page.table(
        "There is one row for each matrix, dtype and number of columns of the dense operand.",
        (
            "matrix, dtype",
            "columns",
            "MiB sent",
            *TIMED,
            "efficiency",
            "forward + backward",
            "forward + backward, one GPU",
        ),
        (_distributed_row(case) for case in cases),
    )
    for name, times, rivals in (
        ("the faster all-gather", "wall", TIMED[1:3]),
        ("one GPU", "wall", TIMED[3:]),
        ("one GPU, forward + backward", "wall_backward", TIMED[3:]),
    ):
        ratios = [
            (
                min(case[times][rival] for rival in rivals) / case[times][TIMED[0]],
                f"{case['matrix']}, {case['dtype']}, {case['n']} columns",
            )
            for case in cases
        ]
        page.say(losses(ratios, name.partition(",")[0], f"compared with {name}"))
    page.measured(run)


TIMED = "distributed plan", "all-gather + plan", "all-gather + torch.sparse", "one process, plan"


def _distributed_row(case: dict[str, Any]) -> list[str]:
    sent = f"{sum(case['sent']) / 2**20:.1f}"
    us = [f"{case['wall'][name] * 1e6:.0f}" for name in TIMED]
    backward = [f"{case['wall_backward'][name] * 1e6:.0f}" for name in ("distributed plan", "one process, plan")]
    return [f"{case['matrix']}, {case['dtype']}", str(case["n"]), sent, *us, f"{case['efficiency']:.2f}", *backward]


def _name(graph: str) -> str:
    return graph.rpartition("/")[2].removesuffix(".npz")


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, {_name(row['graph'])}, width {row['width']}"


def _speed(row: dict[str, Any], rival: str, way: str) -> float | None:
    """The rival's time divided by the way's; None if one of them did not run."""
    ms = [row["ways"].get(name, {}).get("ms") for name in (rival, way)]
    return ms[0] / ms[1] if all(ms) else None


def _ms(row: dict[str, Any], way: str) -> str:
    return number(row["ways"][way]["ms"]) if way in row["ways"] else ""
