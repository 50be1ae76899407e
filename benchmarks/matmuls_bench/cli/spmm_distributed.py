"""`torchrun -m matmuls spmm --distributed`: distributed products of the named matrices, measured on every rank."""

import math
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from matmuls_cli.options import pick_device, pick_dtype
from matmuls_cli.screen import Steps, console, errors, fail, line

LAUNCH = "torchrun --nproc-per-node=2 -m matmuls spmm MATRIX --distributed"


def run(
    sources: list[str],
    dtypes: list[str],
    widths: list[int],
    device: str | None,
    out: Path | None,
    backward: bool,
    weak: bool,
    by: str,
    order: str | None,
) -> None:
    """Measure, and on rank 0 show and write the results. Exit status 1 if a product is wrong."""
    if "WORLD_SIZE" not in os.environ:
        raise fail(f"--distributed runs on several processes: {LAUNCH}")
    if by not in ("nonzeros", "rows"):
        raise fail(f"--split is nonzeros or rows, got {by}")
    if order not in (None, "rcm", "metis"):
        raise fail(f"--reorder is rcm or metis, got {order}")
    first = os.environ["RANK"] == "0"
    with Steps("loading torch", total=len(sources) * len(dtypes) * len(widths)) if first else nullcontext() as steps:
        import torch
        import torch.distributed as dist

        from ..spmm import distributed

        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")  # torch warns at the first sparse CSR tensor
        chosen = pick_device(device)
        if chosen == "cuda":
            own_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(own_device)
            dist.init_process_group("nccl", device_id=own_device)
        else:
            dist.init_process_group("gloo")
        show = (lambda what: None) if steps is None else steps.show
        cases: list[Any] = []
        predicted: list[Any] = []
        try:
            for source in sources:
                own: list[Any] = []
                matrix = None
                types = [pick_dtype(name) for name in dtypes]
                options: dict[str, Any] = {"backward": backward, "weak": weak, "by": by, "order": order, "news": show}
                for case, matrix in distributed.measure(source, types, widths, chosen, **options):  # noqa: B007
                    own.append(case)
                    if steps is not None:
                        steps.next(case.matrix)
                cases += own
                if first:
                    show(f"{source}: the model")
                    predicted += _predictions(own, matrix, by, chosen)
        except (ValueError, OSError) as error:
            raise (fail(str(error)) if first else typer.Exit(2)) from error  # the same on every rank
        finally:
            dist.destroy_process_group()
    if not first:
        return
    show_cases(cases)
    show_predictions(predicted)
    if out is not None:
        ends = [str(cases[0].ranks), *(["weak"] if weak else []), *([order] if order else [])]
        _write(out / f"spmm-distributed-{chosen}-{'-'.join(ends)}.json", cases, predicted, chosen)
    if wrong := [c for c in cases if not c.error <= c.tolerance]:
        for c in wrong:
            errors.print(f"{c.matrix}, {c.n} columns, {c.dtype}: error {c.error:.1e}, expected {c.tolerance:.1e}")
        raise typer.Exit(1)


def _predictions(cases: list[Any], matrix: Any, by: str, device: str) -> list[dict[str, Any]]:
    """The model's parameters and predictions for each dtype of one matrix."""
    from ..spmm import time_model as m

    found = []
    crow, col = (t.to(device) for t in (matrix.crow, matrix.col))
    for dtype in dict.fromkeys(c.dtype for c in cases):
        measured = [c.as_measured() for c in cases if c.dtype == dtype]
        if not any(one.load.rows for one in measured):
            continue
        fitted, last = m.fit(measured), measured[-1]
        link = fitted.link if math.isfinite(fitted.link) else None
        rows = m.predictions(fitted, crow, col, last.n, last.itemsize, by)
        found.append(
            {
                "matrix": cases[0].matrix,
                "dtype": dtype,
                "n": last.n,
                "model": {"latency_s": fitted.latency, "link_bytes_per_s": link, "rate": fitted.rate},
                "error": fitted.error,
                "predicted": [
                    {"gpus": gpus, "bytes": load.rows * last.n * last.itemsize, "seconds": seconds, "speedup": speedup}
                    for gpus, load, seconds, speedup in rows
                ],
            }
        )
    return found


def show_cases(cases: list[Any]) -> None:
    """A table with a row for each way of each case."""
    from ..spmm.distributed import OURS

    table = Table(title="seconds of the slowest rank; ratio: over the distributed plan's (higher: the plan is faster)")
    table.add_column("matrix", overflow="fold")
    table.add_column("with")
    for name in ("us as called", "us by events", "ratio", "fwd + bwd, us", "ratio"):
        table.add_column(name, justify="right")
    for c in cases:
        title = f"{line(c.matrix)}\n{c.rows} rows, {c.nnz} nonzeros\n{c.dtype}, {c.n} columns, {c.ranks} ranks"
        for name, seconds in c.wall.items():
            both = c.wall_backward.get(name)
            table.add_row(
                title,
                name,
                f"{seconds * 1e6:.1f}",
                f"{c.gpu[name] * 1e6:.1f}" if name in c.gpu else "",
                f"{seconds / c.wall[OURS]:.2f}",
                f"{both * 1e6:.1f}" if both else "",
                f"{both / c.wall_backward[OURS]:.2f}" if both else "",
            )
            title = ""
        for name in c.refused:
            table.add_row("", name, "refused")
        table.add_row("", Text(_facts(c), style="dim"), end_section=True)
    console.print(table)
    for told in dict.fromkeys(f"{name}: refused: {reason}" for c in cases for name, reason in c.refused.items()):
        console.print(line(told), highlight=False, soft_wrap=True)


def _facts(c: Any) -> str:
    mib = 2**20
    way = "all-gather" if c.gathers else "needed rows"
    lines = [
        f"{way}: {max(c.sent) / mib:.2f} MiB sent by the busiest rank, {sum(c.sent) / mib:.2f} in all",
        f"halo, the least possible: {max(c.halo) / mib:.2f} MiB, {sum(c.halo) / mib:.2f} in all",
        f"an all-gather: {c.gathered / mib:.2f} MiB from each rank",
    ]
    for what, wall in (("", c.wall), (", forward + backward", c.wall_backward)):
        if wall and (efficiency := c.efficiency(wall)) is not None:
            lines.append(f"{'weak' if c.weak else 'strong'} scaling efficiency{what}: {efficiency:.2f}")
    return "\n".join([*lines, f"error: {c.error:.1e}"])


def show_predictions(predicted: list[dict[str, Any]]) -> None:
    """A table of what the models predict."""
    for p in predicted:
        parameters = p["model"]
        link = parameters["link_bytes_per_s"]
        console.print(
            f"A model, not a measurement: {p['matrix']}, {p['dtype']}, {p['n']} columns. Latency "
            f"{parameters['latency_s'] * 1e6:.1f} us for each peer, link "
            f"{'too fast to tell' if link is None else f'{link / 1e9:.1f} GB/s'}, "
            f"{parameters['rate'] / 1e9:.1f} G nonzeros x columns/s. Largest error on the measurements "
            f"{p['error']:.0%}. Every process has the links of this run.",
            highlight=False,
        )
        table = Table()
        for name in ("processes", "MiB of the busiest", "predicted us", "speedup over one"):
            table.add_column(name, justify="right")
        for row in p["predicted"]:
            mib, us = row["bytes"] / 2**20, row["seconds"] * 1e6
            table.add_row(str(row["gpus"]), f"{mib:.2f}", f"{us:.1f}", f"{row['speedup']:.2f}")
        console.print(table)


def _write(path: Path, cases: list[Any], predicted: list[dict[str, Any]], device: str) -> None:
    from .. import machine

    machine.save(path, device, cases=[c.as_dict() for c in cases], models=predicted)
    console.print(f"written: {path}")
