"""`matmuls tune`: searches tile sizes within a budget of seconds and shows what it found."""

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from .options import pick_device
from .screen import Steps, console, fail, missing


def tune(
    name: Annotated[str, typer.Argument(help="masked_linear or masked_ffn")],
    k: Annotated[int, typer.Option(help="features of x (masked_ffn: hidden size)")],
    n: Annotated[int, typer.Option(help="features of the result (masked_ffn: intermediate size)")],
    m: Annotated[list[int] | None, typer.Option(help="rows of x; may be repeated (default: 512, 8192, 65536)")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    budget: Annotated[float, typer.Option(help="seconds for the whole search")] = 600.0,
    jobs: Annotated[
        int, typer.Option(help="processes that compile candidates in advance; each takes half a GB of GPU memory")
    ] = 4,
) -> None:
    """Find the fastest tile sizes of the masked kernels for a shape on this GPU and save them for later calls.

    For the number of rows that is timed, they are never slower than the tile sizes in use before, which are timed
    together with them. May be stopped at any time; the next run continues. Saved in the user's cache directory, one
    file per GPU model.
    """
    with Steps("loading torch", total=budget) as steps:  # seconds: the search ends with its budget
        pick_device("cuda")
        try:
            from matmuls import tune as t
            from matmuls.triton import configs
        except ImportError as error:
            raise fail(missing(error)) from None
        try:
            todo = t.problems(name, k, n, m or [512, 8192, 65536], dtype)
        except ValueError as error:
            raise fail(str(error)) from None
        gpu = configs.gpu(0)
        process = t.Process(t.measure_on_gpu)
        compilers = t.Compilers(t.compile_on_gpu, max(1, jobs))
        steps.restart("starting")
        begin, fastest = time.monotonic(), dict.fromkeys(todo, float("inf"))

        def step(problem: Any, tiles: Any, seconds: float | None) -> None:
            fastest[problem] = min(fastest[problem], seconds or float("inf"))
            where = f"{todo.index(problem) + 1} of {len(todo)}: {_problem_name(problem)}"
            steps.show(f"{where}, {fastest[problem] * 1e6:.1f} us", min(time.monotonic() - begin, budget))

        try:
            found = t.tune(todo, gpu, configs.user_folder(), process, budget, step, ahead=compilers)
        finally:
            process.close()
            compilers.close()
    table = Table(title=gpu.name)
    for column in ("kernel", "tiles", "us", "before, us", "speed-up", "default, us"):
        table.add_column(column, overflow="fold")
    for p, (_, before_us, e) in zip(todo, found, strict=True):
        if e:
            times = f"{e.us:.1f}", _time(before_us), f"{before_us / e.us:.3f}" if before_us else "", _time(e.default_us)
            table.add_row(_problem_name(p), str(e.tiles), *times)
    if table.rows:
        console.print(table)
        console.print(f"written: {configs.file_of(configs.user_folder(), gpu.name)}")
    if failed := [_problem_name(p) for p, f in zip(todo, found, strict=True) if f.entry is None]:
        raise fail(f"no tile sizes could be timed, and those in use are kept, for {', '.join(failed)}", status=1)


def _time(us: float) -> str:
    return f"{us:.1f}" if us else "failed"


def _problem_name(p: Any) -> str:
    return f"{p.operator} {p.m}x{p.k}x{p.n} {p.dtype}"
