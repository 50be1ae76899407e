"""`matmuls info`."""

import json
from typing import Annotated

import typer
from rich.table import Table

from .screen import console


def info(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print versions, GPUs, libraries, library handles and build options, as needed for a bug report."""
    from matmuls.info import collect

    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = "\n".join(", ".join(f"{k} {v}" for k, v in item.items()) for item in value) or "none"
        table.add_row(name, str(value))
    console.print(table)
