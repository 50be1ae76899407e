"""The page on training steps of graph networks."""

from typing import Any

from matmuls_bench.timing import geometric_mean

from .format import losses, number
from .page import Page
from .results import Results, Run

STEPS = "pyg-steps-cuda.json"
WAYS = "PyG edges", "plans edges", "PyG adjacency", "plans adjacency", "torch.sparse", "spmm", "plan"
CAPTURED = ", captured"
PAIRS = (  # rival, ours, the rival's name in a sentence
    ("PyG edges", "plans edges", "PyG with the same input"),
    ("PyG adjacency", "plans adjacency", "PyG with the same input"),
    ("torch.sparse", "plan", "torch.sparse in the same model"),
    ("spmm", "plan", "spmm without a plan in the same model"),
)


def steps(results: Results) -> Page:
    page = Page("performance/pyg.md", "PyTorch Geometric's training steps")
    run = results.run(STEPS)
    page.say(
        "These are times as called of one training step of a model with two PyG layers, in ms. The columns are:",
    )
    page.items(
        "*PyG edges*: the layers get a tensor of edges.",
        "*PyG adjacency*: the layers get a sparse tensor of torch.",
        "*plans edges*, *plans adjacency*: the same code after `matmuls.integrations.pyg.enable()`.",
        "*torch.sparse*: the same model written by hand with torch.sparse.",
        *(
            ["*spmm*, *plan*: the same model with `matmuls.spmm` and with a plan."]
            if "plan" in run.rows[0]["ways"]
            else []
        ),
    )
    page.say(
        "`uniform:50000:1000000` is a random graph of 50,000 vertices and 1,000,000 edges. `rmat:16:16` is an R-MAT "
        "graph of 2^16 vertices."
    )
    _table(
        page,
        run,
        "",
        "Each row is one model, graph and width of the layers.",
    )
    if any(way.endswith(CAPTURED) for r in run.rows for way in r["ways"]):
        _table(
            page,
            run,
            CAPTURED,
            "The rows are the same, but each step is one CUDA graph. A way without a figure cannot be captured.",
        )
        page.heading("Captured where that is faster")
        for rival, way, name in PAIRS:
            best = speeds(run, (rival, rival + CAPTURED), (way, way + CAPTURED))
            if best:
                mean = number(geometric_mean([speed for speed, _ in best]))
                page.say(
                    f"*{way}* is {mean} times as fast as {name} (geometric mean), each captured where that is faster."
                )
                page.say(losses(best, name, f"{way} compared with {rival}"))
    page.measured(run)
    return page


def _table(page: Page, run: Run, end: str, title: str) -> None:
    """A table of the ways whose names have this end, and their slower cases."""
    ways = [way for way in WAYS if any(way + end in r["ways"] for r in run.rows)]
    page.table(
        title,
        ("model", "graph", "width", *ways),
        ((r["model"], _name(r["graph"]), str(r["width"]), *(_ms(r, way + end) for way in ways)) for r in run.rows),
    )
    found = [(f"{way}{end} over {rival}{end}", speeds(run, (rival + end,), (way + end,))) for rival, way, _ in PAIRS]
    page.lost(*((name, known) for name, known in found if known))


def _name(graph: str) -> str:
    return graph.rpartition("/")[2].removesuffix(".npz")


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, {_name(row['graph'])}, width {row['width']}"


def speeds(run: Run, rivals: tuple[str, ...], ours: tuple[str, ...]) -> list[tuple[float, str]]:
    """The shortest time of the rivals divided by ours, and the case, where both sides ran."""
    found = []
    for row in run.rows:
        ms = [[row["ways"][way]["ms"] for way in ways if "ms" in row["ways"].get(way, {})] for ways in (rivals, ours)]
        if all(ms):
            found.append((min(ms[0]) / min(ms[1]), _case(row)))
    return found


def _ms(row: dict[str, Any], way: str) -> str:
    return number(row["ways"][way]["ms"]) if "ms" in row["ways"].get(way, {}) else ""
