"""The page on training steps of graph networks."""

from typing import Any

from .format import losses, number
from .page import Page
from .results import Results

STEPS = "pyg-steps-cuda.json"
WAYS = "PyG edges", "plans edges", "PyG adjacency", "plans adjacency", "torch.sparse", "spmm", "plan"
PAIRS = (  # rival, ours, the rival's name in a sentence
    ("PyG edges", "plans edges", "PyG with the same input"),
    ("PyG adjacency", "plans adjacency", "PyG with the same input"),
    ("torch.sparse", "plan", "torch.sparse in the same model"),
    ("spmm", "plan", "spmm without a plan in the same model"),
)


def steps(results: Results) -> Page:
    page = Page("performance/pyg.md", "PyTorch Geometric's training steps")
    page.say(
        "The table has the wall-clock time of one training step (forward, backward, optimizer) in ms: lower is better. "
        "The models have two PyG layers.",
        "*edges*: the layers get a tensor of edges; *adjacency*: they get a sparse tensor of torch.",
        "*plans*: the same code after `matmuls.integrations.pyg.enable()`.",
        "*torch.sparse*: the same model written by hand with torch's sparse product; *spmm* and *plan*: with "
        "`matmuls.spmm` and with a plan.",
    )
    run = results.run(STEPS)
    ways = [way for way in WAYS if any(way in r["ways"] for r in run.rows)]
    page.table(
        "There is one row for each model, graph and width of the layers. `uniform:50000:1000000` is a random graph of "
        "50,000 vertices and 1,000,000 edges.",
        ("model", "graph", "width", *ways),
        ((r["model"], _name(r["graph"]), str(r["width"]), *(_ms(r, way) for way in ways)) for r in run.rows),
    )
    for rival, way, name in PAIRS:
        if way in ways:
            ratios = [(_speed(r, rival, way), _case(r)) for r in run.rows]
            page.say(losses(ratios, name, f"{way} compared with {rival}"))
    page.measured(run)
    return page


def _name(graph: str) -> str:
    return graph.rpartition("/")[2].removesuffix(".npz")


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, {_name(row['graph'])}, width {row['width']}"


def _speed(row: dict[str, Any], rival: str, way: str) -> float | None:
    """The rival's time divided by the way's; None if one of them did not run."""
    ms = [row["ways"].get(name, {}).get("ms") for name in (rival, way)]
    return ms[0] / ms[1] if all(ms) else None


def _ms(row: dict[str, Any], way: str) -> str:
    return number(row["ways"][way]["ms"]) if "ms" in row["ways"].get(way, {}) else ""
