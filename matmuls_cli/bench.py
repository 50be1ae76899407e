"""`matmuls bench`: times operations with progress and shows the rows."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .kernels import bench_kernels
from .options import DeviceOption, check_dtype, pick_device, pick_dtype
from .screen import Steps, console, errors, fail, may_be_stopped, need_writable


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="operations of the table, or with --kernels families (default: all)")
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the JSON file")] = None,
    quick: Annotated[bool, typer.Option(help="only small cases")] = False,
    precompile: Annotated[int, typer.Option(help="processes that first compile torch.compile's kernels")] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="time every kernel that takes a call: families rows, sparse products")
    ] = False,
    matrices: Annotated[Path | None, typer.Option(help="with --kernels: folder of .npz, .mtx and .graph files")] = None,
) -> None:
    """Time the table's operations against their alternatives and against the roofs measured in the same run.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written, and the exit status is 128 + the signal.
    """
    names, dtypes = names or [], [check_dtype(name) for name in dtype or []]
    if out is not None:
        need_writable("--out", out)
    if matrices is not None and not (kernels and matrices.is_dir()):
        raise fail(f"--matrices is a folder, beside --kernels, got {matrices}")
    if kernels:
        bench_kernels(names, device, matrices, out)
        return
    with Steps("loading torch", total=1) as steps:
        from matmuls import bench as b

        chosen, types = pick_device(device), [pick_dtype(name) for name in dtypes]
        steps.show("choosing the cases")
        try:
            jobs = b.plan(names, chosen, types, quick)
        except ValueError as error:
            raise fail(str(error)) from None
        if precompile:
            steps.show("compiling")
            if failed := b.precompile(precompile, names, chosen, types, quick):
                errors.print(f"{failed} of the processes did not compile their whole share")
        budget = 0.1 if quick else 0.4 if chosen == "cpu" else 0.05  # seconds per rival; on a GPU at least 20 rounds
        rows: list[Any] = []
        measured = list(dict.fromkeys(job.dtype for job in jobs))
        steps.restart("measuring the roofs", total=len(jobs) + len(measured))
        roofs = b.measure_roofs(chosen, measured, quick)
        steps.show("measuring the roofs", completed=len(measured))
        with may_be_stopped() as stopped:
            for job in jobs:
                steps.show(job.label)
                rows += b.measure_job(job, roofs, budget)
                steps.next(job.label)
    show_bench(rows, roofs)
    if out is not None:
        path = out / f"bench-{chosen}{'-' + '-'.join(names) if names else ''}.json"
        b.save(path, rows, roofs, chosen, complete=not stopped)
        console.print(f"written: {path}")
    if stopped:
        raise typer.Exit(stopped[0])


def show_bench(rows: list[Any], roofs: Any) -> None:
    from matmuls.bench import geometric_mean

    console.print(
        f"roofs of this run: copy {roofs.copy / 1e12:.3f} TB/s; product "
        + ", ".join(f"{dtype} {rate / 1e12:.1f} TFLOP/s" for dtype, rate in roofs.product.items())
    )
    table = Table(title="Time or memory of matmuls; ratio: the fastest rival's over it (higher is better)")
    for name in ("operation", "case", "dtype", "kind", "rival"):
        table.add_column(name, overflow="fold")
    for name in ("time, us", "MiB", "TFLOP/s", "TB/s", "of the roof", "ratio"):
        table.add_column(name, justify="right")

    def number(x: float | None, digits: int) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    for row in rows:
        cells = [
            number(row.ours_us, 1),
            number(row.ours_mib, 1),
            number(row.tflops, 2),
            number(row.tbps, 3),
            number(row.roof, 2),
            number(row.ratio, 3),
        ]
        table.add_row(row.operation, row.case, row.dtype, row.kind, row.rival, *cells)
    console.print(table)
    for kind in dict.fromkeys(row.kind for row in rows):
        ratios = [row.ratio for row in rows if row.kind == kind and row.ratio is not None]
        if ratios:
            console.print(
                f"{kind}: geometric mean {geometric_mean(ratios):.3f}, lowest {min(ratios):.3f}, {len(ratios)} cases"
            )
