"""The typer application: one function per command, each in its own file, which imports what it needs when it runs."""

from typing import Annotated

import typer

from . import bench, bench_bert, bert, embed, info, report, spmm, tune

app = typer.Typer(no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


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
app.command()(bench.bench)
app.command("bench-bert")(bench_bert.bench_bert)
app.command()(tune.tune)
app.command()(spmm.spmm)
app.command()(report.report)
