"""`matmuls bench-bert`: times BERT models with progress and shows the rows."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from matmuls_cli.options import DeviceOption, pick_device
from matmuls_cli.screen import Steps, console, may_be_stopped, need_writable


def bench_bert(
    device: DeviceOption = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="a tiny model, as on a CPU")] = False,
    piece: Annotated[
        list[int] | None, typer.Option(min=0, help="MiB of attention scores computed at a time; repeat to compare")
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(min=1, help="MiB of activations per chunk of an optimized layer; repeat to compare"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls per variant")] = 15,
    out: Annotated[Path | None, typer.Option(help="folder for the JSON file")] = None,
) -> None:
    """Time BERT base and large (random weights, bfloat16) with matmuls attention, optimized or not, against stock.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written, and the exit status is 128 + the signal.
    """
    if out is not None:
        need_writable("--out", out)
    rows: list[Any] = []
    with Steps("loading torch and transformers", total=1) as steps:
        import transformers  # noqa: F401

        from .. import bert as b

        chosen = pick_device(device)
        pieces, chunks = piece or [], chunk or []
        steps.restart("making the models", total=b.tasks(chosen, tiny))
        with may_be_stopped() as stopped:
            rows.extend(b.run(chosen, tiny, pieces, chunks, rounds, steps.show))
    show_rows(rows)
    if out is not None:
        path = out / f"bert-{chosen}.json"
        b.save(path, rows, chosen, complete=not stopped)
        console.print(f"written: {path}")
    if stopped:
        raise typer.Exit(stopped[0])


def show_rows(rows: list[Any]) -> None:
    table = Table(title="Speed and memory relative to the first way of each task and model", show_lines=False)
    for name in ("task", "model", "way"):
        table.add_column(name, overflow="fold")
    for name in ("piece", "chunk", "time, ms", "peak, MiB", "above probabilities", "speed", "memory", "error"):
        table.add_column(name, justify="right")
    for r in rows:
        sizes = ["" if x is None else f"{x:g}" for x in (r.piece_mib, r.chunk_mib)]
        figures = [f"{r.ms:.2f}", f"{r.peak_mib:.1f}", f"{r.above_mib:.1f}", f"{r.speed:.2f}", f"{r.memory:.2f}"]
        table.add_row(r.task, r.case, r.way, *sizes, *figures, f"{r.error:.1e}")
    console.print(table)
