"""`matmuls info`."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.table import Table

from .screen import console, fail, missing


def info(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print versions, GPUs, libraries, library handles and build options, as needed for a bug report.

    Exit status 1, with the reason, if matmuls cannot be imported, for example because it was built with another
    torch.
    """
    why = None
    try:
        from matmuls.info import collect

        facts = collect()
    except ImportError as error:
        why, facts = missing(error), _without_matmuls()
    if as_json:
        print(json.dumps(facts | ({"error": why} if why else {}), indent=2))
    else:
        _show(facts)
    if why:
        raise fail(why, status=1)


def _without_matmuls() -> dict[str, Any]:
    """The facts that can be had where matmuls cannot be imported."""
    return {
        "matmuls": _version("matmuls"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": _version("torch"),
        "packages": {name: _version(name) for name in ("numpy", "scipy", "transformers", "triton")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _show(facts: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = "\n".join(", ".join(f"{k} {v}" for k, v in item.items()) for item in value) or "none"
        table.add_row(name, str(value))
    console.print(table)
