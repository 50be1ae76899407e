"""`matmuls spmm`: checks what the user names, times every candidate and shows the results."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from matmuls_cli.options import DeviceOption, check_dtype, pick_device, pick_dtype
from matmuls_cli.screen import Steps, console, errors, fail, line, may_be_stopped, need_writable

from . import spmm_distributed


def spmm(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="files (.mtx, .npz, .graph, .metis) or rmat:18:16, grid:1024, pruned:4096x4096:0.9"),
    ] = None,
    n: Annotated[
        str, typer.Option("--n", "-n", help="columns of B (the dense operand), separated by commas")
    ] = "32,128,512",
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated (default: float32)")] = None,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="folder for a JSON file and a plot")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="shares of zeros, such as 0.5,0.9: find where sparse beats dense")
    ] = None,
    shape: Annotated[str, typer.Option(help="shape of the matrices of --sweep")] = "4096x4096",
    backward: Annotated[
        bool, typer.Option(help="also time forward + backward, with gradients of A's values and B")
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="cusparse, torch.sparse, scipy, dense or torch 2:4; may be repeated (default: all)"),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="rows over the processes of torchrun, compared with an all-gather of B"),
    ] = False,
    weak: Annotated[
        bool, typer.Option("--weak", help="with --distributed: drawn matrices grow with the processes")
    ] = False,
    split: Annotated[str, typer.Option(help="with --distributed: equal nonzeros or rows")] = "nonzeros",
    reorder: Annotated[str | None, typer.Option(help="with --distributed: rcm or metis, to send less")] = None,
) -> None:
    """Time every way to multiply the sparse matrices you name; check each result against float64.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written. Exit status 1 if a result of matmuls has a
    larger error than rounding explains, 2 if a matrix could not be read or does not fit in memory (the others are
    measured).
    """
    named = _named(sources or [], sweep, shape)
    widths = _widths(n)
    dtypes = [check_dtype(name) for name in dtype or ["float32"]]
    if out is not None:
        need_writable("--out", out)
    if distributed:
        spmm_distributed.run(named, dtypes, widths, device, out, backward, weak, split, reorder)
        return
    with Steps("loading torch", total=len(named) * len(dtypes) * len(widths)) as steps:
        from .. import spmm as e

        chosen = pick_device(device)
        try:
            rivals = e.rivals_named(against or e.RIVALS)
        except ValueError as error:
            raise fail(f"--against is {error}") from error
        # torch warns at the first sparse CSR and the first semi-structured tensor
        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)|The PyTorch API of SparseSemiStructuredTensor")
        cases: list[Any] = []
        refused: list[str] = []
        steps.restart("measuring a copy")
        with may_be_stopped() as stopped:
            types = [pick_dtype(name) for name in dtypes]
            for case in e.measure_all(named, types, widths, chosen, refused, backward, rivals, steps.show):
                cases.append(case)
    told = fail(*refused) if refused else None
    if told and not cases:
        raise told
    show_spmm(cases)
    swept = [case for case in cases if sweep and case.matrix.startswith(f"pruned:{shape}:")]
    for told_of in [*e.summary(cases), *e.crossovers(swept)]:
        console.print(told_of)
    if out is not None:
        path = out / f"spmm-{chosen}{'-sweep' if sweep else ''}.json"
        _write(path, cases, chosen, bool(sweep), complete=not (stopped or refused))
    if found := e.wrong(cases):
        errors.print("\n".join(map(line, found)), style="red")
        raise typer.Exit(1)
    if told:
        raise told
    if stopped:
        raise typer.Exit(stopped[0])


def _named(sources: list[str], sweep: str | None, shape: str) -> list[str]:
    """The matrices to measure; files must exist, so that it fails before a long run, not during it."""
    named = [*sources, *(f"pruned:{shape}:{share}" for share in (sweep or "").split(",") if share)]
    if not named:
        raise fail("no matrix: name files or drawn matrices, or give --sweep")
    for source in named:
        if ":" not in source and not Path(source).is_file():
            raise fail(f"no file named {source}")
    return named


def _widths(n: str) -> list[int]:
    """The numbers of columns of --n."""
    try:
        widths = [int(x) for x in n.split(",")]
    except ValueError:
        widths = []
    if not widths or min(widths) < 1 or max(widths) >= 2**63:
        raise fail(f"--n is numbers of columns separated by commas, got {n}")
    return widths


def _write(path: Path, cases: list[Any], device: str, sweep: bool, complete: bool) -> None:
    """The results as JSON and as a plot."""
    from .. import spmm as e
    from ..machine import environment

    e.save(path, cases, device, complete=complete)
    e.plot(path.with_suffix(".png"), cases, sweep, environment(device))
    console.print(f"written: {path}, {path.with_suffix('.png')}")


def show_spmm(cases: list[Any]) -> None:
    """A table with a row for each candidate of each case; reasons why one has no time are listed below it."""
    table = Table(
        title="* chosen by the plan; ratio: the fastest sparse rival's time over this one's (higher is better)"
    )
    table.add_column("matrix", overflow="fold")
    table.add_column("with")
    for name in ("time, us", "GFLOP/s", "of the floor", "ratio", "error"):
        table.add_column(name, justify="right")
    for c in cases:
        fastest = min(c.rivals.values(), default=None)
        title = f"{line(c.matrix)}\n{c.rows} x {c.columns}, {c.nnz} nonzeros\n{c.dtype}, {c.n} columns"
        for name, r in c.results.items():
            shown = f"{name} ({c.chosen})*" if name == "plan" else name
            if r.us is None:
                table.add_row(title, shown, _word(r))
            else:
                ratio = f"{fastest / r.us:.2f}" if fastest else ""
                share = f"{c.floor_us / r.us:.2f}"
                rate = f"{c.gflops / r.us * 1e6:.1f}"
                table.add_row(title, shown, f"{r.us:.1f}", rate, share, ratio, f"{r.error:.1e}")
            title = ""
        for name, r in c.backward.items():
            took = _word(r) if r.us is None else f"{r.us:.1f}"
            mib = f"{c.backward_mib[name]:.1f} MiB" if name in c.backward_mib else ""
            table.add_row("", f"forward + backward, {name}", took, "", mib)
        table.add_row("", Text(f"plan: {_first_products(c)}", style="dim"), end_section=True)
    console.print(table)
    for reason in _reasons(cases):
        console.print(line(reason), highlight=False, soft_wrap=True)


def _word(result: Any) -> str:
    """Why there is no time, in a word or two."""
    from ..spmm import NOT_INSTALLED

    return NOT_INSTALLED if result.refused == NOT_INSTALLED else "refused"


def _reasons(cases: list[Any]) -> list[str]:
    """A line for every candidate that was refused, with the reason."""
    named = [
        (name, r)
        for c in cases
        for name, r in (*c.results.items(), *((f"forward + backward, {k}", v) for k, v in c.backward.items()))
    ]
    return list(
        dict.fromkeys(
            f"{name}: {r.refused}" if _word(r) == r.refused else f"{name}: refused: {r.refused}"
            for name, r in named
            if r.us is None
        )
    )


def _first_products(c: Any) -> str:
    """What a plan costs, and when it has paid for itself."""
    first = f"with {c.calls} products {c.calls_us:.0f} us, {c.calls_planless_us:.0f} us without a plan"
    first += f"; synchronized after each: {c.waited_us:.0f} and {c.waited_planless_us:.0f} us" if c.waited_us else ""
    return f"{c.plan_us:.0f} us, {c.plan_bytes / 2**20:.1f} MiB, {first}"
