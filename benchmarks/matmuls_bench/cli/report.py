"""`matmuls report`: the generator of pages is benchmarks/matmuls_report, in a clone of the repository alone."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from matmuls_cli.screen import console, errors, fail


def report(
    readme: Annotated[Path, typer.Option(help="file that quotes sentences of the report")] = Path("README.md"),
    docs: Annotated[Path, typer.Option(help="folder of the documentation")] = Path("docs"),
    results: Annotated[Path, typer.Option(help="folder of the JSON result files")] = Path("benchmarks/results"),
    check: Annotated[bool, typer.Option(help="do not write; exit status 1 if a page or a plot is out of date")] = False,
    redraw: Annotated[bool, typer.Option(help="draw every plot anew, not only those whose data changed")] = False,
) -> None:
    """Write the performance pages, their plots and the sentences that README quotes from the committed results."""
    if find_spec("matmuls_report") is None:
        raise fail("report: expected a clone of the repository; run in it: pip install -e ./benchmarks")
    import matmuls_report as r

    try:
        made = r.make(readme, docs, results)
        found = made.stale() if check else made.write(redraw)
    except (OSError, ValueError) as error:
        raise fail(str(error)) from None
    for path in found:
        (errors if check else console).print(
            f"{path} {'is out of date; run: matmuls report' if check else 'written'}", highlight=False, soft_wrap=True
        )
    if found and check:
        raise typer.Exit(1)
    if not found:
        console.print("the pages, plots and quoted sentences are up to date")
