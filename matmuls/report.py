"""`matmuls report`: README's tables, made from the table of operations and the results that were committed.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from .bench import geometric_mean
from .specs import TABLE

MARKER = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DTYPES = ("bfloat16", "float16", "float32", "float64")
Rows = list[dict[str, Any]]


def render(text: str, results: Path) -> str:
    """The text with every marked table made anew. Raises ValueError on a name without a table."""
    makers = {"operations": operations, "products": products, "epilogues": epilogues, "host": host}

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in makers:
            raise ValueError(f"no table named {name}; there are {', '.join(makers)}")
        return match[1] + makers[name](load(results)) + match[3]

    return MARKER.sub(table, text)


def load(results: Path) -> dict[str, Any]:
    """The newest full GPU run: environment, roofs and rows."""
    files = sorted(results.glob("bench-cuda*.json"))
    if not files:
        return {"environment": {}, "roofs": {}, "rows": []}
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return max(runs, key=lambda run: (len(run["rows"]), run["environment"]["date"]))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def operations(run: dict[str, Any]) -> str:
    """One line per row of the table."""
    return markdown(
        ("operation", "gradient", "dtypes"), ((s.summary, "yes" if s.gradient else "no", _dtypes(s)) for s in TABLE)
    )


def _dtypes(spec: Any) -> str:
    names = [str(d).removeprefix("torch.") for d in spec.dtypes]
    return ", ".join(n.replace("bfloat", "bf").replace("float", "fp").replace("complex", "c") for n in names)


def products(run: dict[str, Any]) -> str:
    """Speed over torch.matmul: geometric mean and lowest over the cases, per operation and dtype."""
    rows = [r for r in run["rows"] if r["kind"] == "gpu" and r["rival"] == "torch.matmul"]

    def cell(group: Rows) -> str:
        ratios = [r["ratio"] for r in group]
        return f"{geometric_mean(ratios):.3f} ({min(ratios):.3f})" if ratios else ""

    table = []
    for name, mine in groupby(rows, key=lambda r: r["operation"]):
        own = list(mine)
        table.append([f"`{name}`", *(cell([r for r in own if r["dtype"] == d]) for d in DTYPES), str(len(own))])
    return markdown(("operation", *DTYPES, "cases"), table)


def epilogues(run: dict[str, Any]) -> str:
    """Bias and activation in one call, 16-bit, beside F.linear and the activation."""
    rows = [
        r for r in run["rows"] if r["kind"] == "gpu" and r["operation"] == "cublaslt_matmul" and "float16" in r["dtype"]
    ]
    return markdown(
        ("case", "dtype", "ours, µs", "torch, µs", "speed", "share of the roof"),
        (
            [
                r["case"],
                r["dtype"],
                f"{r['ours_us']:.0f}",
                f"{r['rival_us']:.0f}",
                f"{r['ratio']:.2f}",
                f"{r['roof']:.2f}",
            ]
            for r in rows
        ),
    )


def host(run: dict[str, Any]) -> str:
    """Host time of one small call."""
    rows = [r for r in run["rows"] if r["kind"] == "host"]
    return markdown(
        ("operation", "case", "ours, µs", "rival, µs", "ours / rival"),
        (
            [f"`{r['operation']}`", r["case"], f"{r['ours_us']:.1f}", f"{r['rival_us']:.1f}", f"{1 / r['ratio']:.2f}"]
            for r in rows
        ),
    )
