"""`matmuls bench --kernels`: times every kernel that takes a call, and shows what the chosen ones gain."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from matmuls_cli.options import pick_device
from matmuls_cli.screen import Steps, console, fail, may_be_stopped

FAMILIES = "rows", "dense products", "sparse products"
READ = "npz", "mtx", "graph"  # endings of the files of --matrices


def bench_kernels(names: list[str], device: str | None, matrices: Path | None, out: Path | None) -> None:
    if unknown := [name for name in names if name not in FAMILIES]:
        raise fail(f"no family of kernels named {unknown[0]}; there are {', '.join(FAMILIES)}")
    files = [str(file) for ending in READ for file in sorted(matrices.glob(f"*.{ending}"))] if matrices else []
    with Steps("loading torch", total=1) as steps:
        if pick_device(device) != "cuda":
            raise fail("--kernels needs a GPU: kernels of a CPU have no switch")
        from .. import kernels
        from ..machine import environment

        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")  # torch's at the first sparse CSR tensor
        cases: list[Any] = []
        with may_be_stopped() as stopped:
            for family in names or FAMILIES:
                for case in _cases(family, files, steps):
                    cases.append(case)
                    steps.show(f"{case.operation} {case.label}, {case.dtype}")
    show_kernels(kernels.gains(cases))
    if out is not None:
        path = out / "kernels-cuda.json"
        kernels.save(path, cases, environment("cuda") | {"complete": not stopped})
        console.print(f"written: {path}")
    if stopped:
        raise typer.Exit(stopped[0])


def _cases(family: str, files: list[str], steps: Steps) -> Iterator[Any]:
    from ..kernels import dense, rows

    if family == "sparse products":
        yield from _sparse_cases(files, steps)
        return
    module = rows if family == "rows" else dense
    steps.restart(family, total=len(module.jobs()))
    yield from module.cases(steps.next)


def _sparse_cases(files: list[str], steps: Steps) -> Iterator[Any]:
    from ..kernels import sparse

    named = [*files, *sparse.DRAWN]
    steps.restart("reading matrices", total=sparse.steps(named))
    try:
        yield from sparse.cases(named, steps.next)
    except (ValueError, OSError) as error:  # a matrix that cannot be read
        raise fail(str(error)) from error


def show_kernels(gains: list[Any]) -> None:
    """A table with a row for each kernel, and a line for each case in which another kernel is faster."""
    table = Table(title="gain: seconds of the fastest other kernel over those of the kernel, where it is chosen")
    for name in ("family", "kernel"):
        table.add_column(name)
    for name in ("cases", "gain, mean", "gain, min"):
        table.add_column(name, justify="right")
    for gain in gains:
        shown = ["" if x is None else f"{x:.2f}" for x in (gain.mean, gain.least)]
        table.add_row(gain.family, gain.kernel, str(gain.cases), *shown)
    console.print(table)
    for gain in gains:
        for case in gain.slower:
            other = min(case.seconds, key=lambda name: case.seconds[name])
            line = f"{case.operation} {case.label}, {case.dtype}: {other} {case.seconds[other] * 1e6:.1f} us, "
            line += f"{gain.kernel} {case.seconds[gain.kernel] * 1e6:.1f} us"
            console.print(line, highlight=False, soft_wrap=True)
