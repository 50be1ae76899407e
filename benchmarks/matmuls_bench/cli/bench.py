"""`matmuls bench`: times operations with progress and shows the rows."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from matmuls_cli.options import DeviceOption, check_dtype, pick_device, pick_dtype
from matmuls_cli.screen import Steps, console, errors, fail, may_be_stopped, need_writable

from .kernels import bench_kernels


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="operations of the table, or with --kernels families (default: all)")
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="only cases whose label contains this text; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the JSON file")] = None,
    quick: Annotated[bool, typer.Option(help="only small cases")] = False,
    precompile: Annotated[int, typer.Option(help="processes that first compile torch.compile's kernels")] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="time every kernel that takes a call: families rows, sparse products")
    ] = False,
    matrices: Annotated[Path | None, typer.Option(help="with --kernels: folder of .npz, .mtx and .graph files")] = None,
) -> None:
    """Time the table's operations against their alternatives and against the roofs measured in the same run.

    On a GPU each case is timed as called, in a plain loop with the host included, and by the time of the GPU alone.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written, and the exit status is 128 + the signal.
    """
    names, labels, dtypes = names or [], case or [], [check_dtype(name) for name in dtype or []]
    if out is not None:
        need_writable("--out", out)
    if matrices is not None and not (kernels and matrices.is_dir()):
        raise fail(f"--matrices is a folder, with --kernels, got {matrices}")
    if labels and kernels:
        raise fail("--case does not go with --kernels, whose cases have no labels")
    if kernels:
        bench_kernels(names, device, matrices, out)
        return
    with Steps("loading torch", total=1) as steps:
        from .. import operations as b
        from ..machine import measure_roofs

        chosen, types = pick_device(device), [pick_dtype(name) for name in dtypes]
        steps.show("choosing the cases")
        try:
            jobs = b.plan(names, chosen, types, quick, labels)
        except ValueError as error:
            raise fail(str(error)) from None
        if precompile:
            steps.show("compiling")
            if failed := b.precompile(precompile, names, chosen, types, quick, labels):
                errors.print(f"{failed} of the processes did not compile their whole share")
        budget = 0.1 if quick else 0.4 if chosen == "cpu" else 0.05  # seconds per rival; on a GPU at least 20 rounds
        rows: list[Any] = []
        measured = list(dict.fromkeys(job.dtype for job in jobs))
        steps.restart("measuring the roofs", total=len(jobs) + len(measured))
        roofs = measure_roofs(chosen, measured, quick)
        steps.show("measuring the roofs", completed=len(measured))
        with may_be_stopped() as stopped:
            for job in jobs:
                steps.show(job.label)
                rows += b.measure_job(job, roofs, budget)
                steps.next(job.label)
    show_bench(rows, roofs)
    if out is not None:
        path = out / f"bench-{chosen}{'-' + '-'.join(names) if names else ''}.json"
        b.save(path, rows, roofs, chosen, complete=not stopped and not labels)
        console.print(f"written: {path}")
    if stopped:
        raise typer.Exit(stopped[0])


def show_bench(rows: list[Any], roofs: Any) -> None:
    from ..timing import geometric_mean

    console.print(
        f"roofs of this run: copy {roofs.copy / 1e12:.3f} TB/s; product "
        + ", ".join(f"{dtype} {rate / 1e12:.1f} TFLOP/s" for dtype, rate in roofs.product.items())
    )
    console.print(
        "Time or memory of matmuls; ratio: the fastest rival's over it (higher is better). As called: wall time of a "
        "call in a loop, the host included; other times of kind gpu: of the GPU alone. *: a size that no constant was "
        "chosen by"
    )

    def number(x: float | None, digits: int) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    columns = {
        "operation": [row.operation for row in rows],
        "case": [row.case + "*" * row.drawn for row in rows],
        "dtype": [row.dtype for row in rows],
        "kind": [row.kind for row in rows],
        "as called, us": [number(row.called_us, 1) for row in rows],
        "ratio, as called": [number(row.called_ratio, 3) for row in rows],
        "over, as called": [row.called_rival or "" for row in rows],
        "time, us": [number(row.ours_us, 1) for row in rows],
        "ratio": [number(row.ratio, 3) for row in rows],
        "over": [row.rival for row in rows],
        "MiB": [number(row.ours_mib, 1) for row in rows],
        "TFLOP/s": [number(row.tflops, 2) for row in rows],
        "TB/s": [number(row.tbps, 3) for row in rows],
        "of the roof": [number(row.roof, 2) for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table()
    for name in shown:
        words = name in ("operation", "case", "dtype", "kind", "over", "over, as called")
        table.add_column(name, overflow="fold", justify="left" if words else "right")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        for name, ratios in (
            (f"{kind}, as called", [row.called_ratio for row in own]),
            (kind, [row.ratio for row in own]),
            (f"{kind}, as called, sizes marked *", [row.called_ratio for row in own if row.drawn]),
        ):
            if known := [ratio for ratio in ratios if ratio is not None]:
                mean, least = geometric_mean(known), min(known)
                console.print(f"{name}: geometric mean {mean:.3f}, lowest {least:.3f}, {len(known)} cases")
