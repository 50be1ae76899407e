"""The pages on training steps of graph networks, and on sparse products over several GPUs."""

from typing import Any

from .format import number
from .page import Page
from .results import Results

STEPS = "pyg-steps-cuda.json"
WAYS = "PyG edges", "plans edges", "PyG adjacency", "plans adjacency", "torch.sparse"
DISTRIBUTED = "spmm-distributed-2-cuda.json"


def steps(results: Results) -> Page:
    page = Page("performance/pyg.md", "PyTorch Geometric's training steps")
    page.say(
        "These are training steps of models with two layers of PyTorch Geometric: forward, backward and one step of "
        "the optimizer, as called, in milliseconds of wall clock: lower is better.",
        "*edges*: the layers get a tensor of edges; *adjacency*: they get a sparse tensor of torch.",
        "*plans*: the same code after `matmuls.integrations.pyg.enable()`.",
        "*torch.sparse*: the same model written by hand with `torch.sparse.mm`.",
    )
    run = results.run(STEPS)
    page.table(
        "There is one row for each model, graph and width of the layers.",
        ("model", "graph", "width", *WAYS),
        ((r["model"], _name(r["graph"]), str(r["width"]), *(_ms(r, way) for way in WAYS)) for r in run.rows),
    )
    page.measured(run)
    return page


def distributed(results: Results) -> Page:
    page = Page("performance/distributed.md", "Sparse products on several GPUs")
    page.say(
        "`matmuls.distributed.plan` multiplies a matrix whose rows are shared out among processes, one for each GPU.",
        "The table has the wall clock of one product as called, in microseconds: lower is better.",
        "*all-gather*: every process first gets all rows of the dense operand, then multiplies its own rows.",
        "*efficiency*: the time of one GPU divided by the number of GPUs and by the plan's time: higher is better.",
        "The grid gains by a second GPU, because few of its rows must be sent. The other matrices are faster on one "
        "GPU: the exchange and its launches take longer than the second GPU saves.",
    )
    run, cases = results.distributed(DISTRIBUTED)
    page.table(
        f"There is one row for each matrix and number of columns of the dense operand, on {cases[0]['ranks']} GPUs.",
        ("matrix", "columns", "MiB sent", *TIMED, "efficiency", "forward + backward", "of one GPU"),
        (_distributed_row(case) for case in cases),
    )
    page.measured(run)
    return page


TIMED = "distributed plan", "all-gather + plan", "all-gather + torch.sparse", "one process, plan"


def _distributed_row(case: dict[str, Any]) -> list[str]:
    sent = f"{sum(case['sent']) / 2**20:.1f}"
    us = [f"{case['wall'][name] * 1e6:.0f}" for name in TIMED]
    backward = [f"{case['wall_backward'][name] * 1e6:.0f}" for name in ("distributed plan", "one process, plan")]
    return [case["matrix"], str(case["n"]), sent, *us, f"{case['efficiency']:.2f}", *backward]


def _name(graph: str) -> str:
    return graph.rpartition("/")[2].removesuffix(".npz")


def _ms(row: dict[str, Any], way: str) -> str:
    return number(row["ways"][way]["ms"]) if way in row["ways"] else ""
