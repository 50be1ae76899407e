"""The typer application: one function per command, each in its own file, which imports what it needs when it runs.

Another distribution adds a command by an entry point of the group `matmuls.commands`, which names its function.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import bert, embed, info, tune
from .screen import fail

GROUP = "matmuls.commands"
OF_BENCH = ("bench", "bench-bert", "spmm", "report")  # commands of the distribution matmuls-bench


class Commands(TyperGroup):
    """Own commands, and those of entry points, which are looked up when one of them is named, or all are listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(point.name for point in entry_points(group=GROUP))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in entry_points(group=GROUP, name=cmd_name):
            return _command(point)
        if cmd_name in OF_BENCH:
            needed = "matmuls-bench, which is not installed; run in a clone of the repository: pip install ./benchmarks"
            raise fail(f"{cmd_name} is a command of {needed}")
        return None


def _command(point: EntryPoint) -> Any:
    one = typer.Typer(add_completion=False)
    one.command(point.name)(point.load())
    return typer.main.get_command(one)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"matmuls {version('matmuls')}")
    except PackageNotFoundError:  # a source tree on the path
        from matmuls import __version__

        print(f"matmuls {__version__}")
    raise typer.Exit


@app.callback()
def matmuls(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """cuBLAS and cuSPARSE for PyTorch."""


app.command()(info.info)
app.command()(bert.bert)
app.command()(embed.embed)
app.command()(tune.tune)
