"""The command line `matmuls`: info, bert, bench, bench-bert, tune, spmm and report."""

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads; without it torch's profiler logs to stderr

app = typer.Typer(no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if a GPU is visible")]


def fail(message: str) -> typer.Exit:
    """Print one line to stderr; the returned exception exits with status 2 (wrong usage or a missing requirement)."""
    errors.print(f"matmuls: {message}", style="red", highlight=False, soft_wrap=True, markup=False, emoji=False)
    return typer.Exit(2)


def pick_device(device: str | None) -> str:
    import torch

    import custom_mm

    built = custom_mm.build_info()["cuda"] is not None
    if device is None:
        return "cuda" if built and torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise fail(f"--device is cpu or cuda, got {device}")
    if device == "cuda" and not (built and torch.cuda.is_available()):
        from .info import collect

        raise fail(f"no CUDA device to run on; CUDA is {collect()['cuda']}")
    return device


def pick_dtype(name: str) -> Any:
    import torch

    if name not in ("float64", "float32", "float16", "bfloat16"):
        raise fail(f"--dtype is float64, float32, float16 or bfloat16, got {name}")
    return getattr(torch, name)


def need_writable(option: str, folder: Path) -> None:
    """Create `folder` and write a temporary file to it, so that a long run does not fail when it saves its results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise fail(f"{option}: expected a folder that can be written, got {folder}: {error.strerror}") from None


def counting() -> Progress:
    """A progress bar over cases on stderr, removed at the end; disabled if stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, disable=not sys.stderr.isatty(), transient=True)


@contextmanager
def may_be_stopped() -> Iterator[list[int]]:
    """Ctrl-C (SIGINT) and SIGTERM end the block without an exception; the yielded list then holds the exit status."""
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopped.append(128 + number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    except KeyboardInterrupt:
        errors.print("stopped; the results below were measured before the stop")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_version(asked: bool) -> None:
    if asked:
        from .info import VERSION

        print(f"matmuls {VERSION}")
        raise typer.Exit


@app.callback()
def matmuls(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """cuBLAS and cuSPARSE for PyTorch."""


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print versions, GPUs, libraries, library handles and build options, as needed for a bug report."""
    from .info import collect

    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = "\n".join(", ".join(f"{k} {v}" for k, v in item.items()) for item in value) or "none"
        table.add_row(name, str(value))
    console.print(table)


@app.command()
def bert(
    texts: Annotated[list[str] | None, typer.Argument(help="texts to embed and compare")] = None,
    file: Annotated[Path | None, typer.Option(help="file with one text per line")] = None,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16")] = "float32",
    model: Annotated[Path | None, typer.Option(help="folder of a BERT model; all-MiniLM-L6-v2 by default")] = None,
    attn: Annotated[
        str, typer.Option(help="custom_mm, sdpa or eager: attention that the similarities come from")
    ] = "custom_mm",
    optimize: Annotated[
        bool, typer.Option("--optimize", help="also run the optimized model and take the similarities from it")
    ] = False,
    attentions: Annotated[Path | None, typer.Option(help="write the first text's attention to this .png file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Cosine similarity of texts embedded by a BERT model with matmuls attention, compared with stock attention.

    Exit status 1 if an embedding differs from stock attention's by more than 1e-5 in float32, 1e-4 with --optimize.
    """
    from .bert import ATTENTIONS, AttentionNotTaken, ModelMissing, NothingToOptimize, compare, model_folder

    texts = list(texts or [])
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise fail(f"cannot read {file}: {error}") from None
    if not texts:
        raise fail("no text: give texts as arguments or a file with --file")
    if model is not None and not (model / "config.json").is_file():
        raise fail(f"--model {model} is not a model folder: it has no config.json")
    if attn not in ATTENTIONS:
        raise fail(f"--attn is {', '.join(ATTENTIONS[:-1])} or {ATTENTIONS[-1]}, got {attn}")
    if attentions is not None and (
        attentions.suffix != ".png" or attentions.is_dir() or not attentions.parent.is_dir()
    ):
        raise fail(f"--attentions is a .png file in a folder that exists, got {attentions}")
    if attentions is not None:
        need_writable("--attentions", attentions.parent)
    if attentions is not None and importlib.util.find_spec("matplotlib") is None:
        raise fail("--attentions needs matplotlib; run: pip install 'matmuls[plot]'")
    chosen = pick_device(device)
    try:
        result = compare(texts, model or model_folder(), chosen, pick_dtype(dtype), attn, optimize, attentions)
    except (ModelMissing, NothingToOptimize, AttentionNotTaken) as error:
        raise fail(str(error)) from None
    except ImportError as error:
        raise fail(f"{error}; run: pip install 'matmuls[bert]'") from None
    if attentions is not None:
        errors.print(f"written: {attentions}", highlight=False)
    if as_json:
        print(json.dumps(asdict(result) | {"passed": result.passed}, indent=2))
    else:
        show_bert(result)
    if not result.passed:
        raise typer.Exit(1)


def show_bert(result: Any) -> None:
    shown = result.texts[:12]
    table = Table(title="Cosine similarity")
    table.add_column("", overflow="fold")
    for n in range(len(shown)):
        table.add_column(str(n + 1), justify="right")
    for n, text in enumerate(shown):
        row = [f"{x:.3f}" for x in result.similarities[n][: len(shown)]]
        table.add_row(Text(f"{n + 1}  {text}"), *row)
    console.print(table)
    if len(result.texts) > len(shown):
        console.print(f"({len(result.texts)} texts; --json has all of them)")

    runs = Table(title=f"{result.device}, {result.dtype}")
    runs.add_column("attention")
    for name in ("probabilities", "time, ms", "peak above weights, MiB", "difference"):
        runs.add_column(name, justify="right")
    for run in result.runs:
        name = f"{run.attention}, optimized" if run.optimized else run.attention
        name += " (ours)" if run.ours else " (stock)"
        given = "returned" if run.probabilities else ""
        runs.add_row(name, given, f"{run.ms:.2f}", f"{run.peak_mib:.2f}", f"{run.difference:.1e}")
    console.print(runs)
    verdict = "" if result.tolerance is None else f" (at most {result.tolerance:g} allowed)"
    console.print(f"largest difference of an embedding from stock attention's: {result.difference:.2e}{verdict}")


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="operations of the table (default: all)")] = None,
    device: DeviceOption = None,
    dtype: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the JSON file")] = None,
    quick: Annotated[bool, typer.Option(help="only small cases; takes seconds")] = False,
    precompile: Annotated[int, typer.Option(help="processes that first compile torch.compile's kernels")] = 0,
) -> None:
    """Time the table's operations against their alternatives and against the roofs measured in the same run.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written, and the exit status is 128 + the signal.
    """
    from . import bench as b

    chosen = pick_device(device)
    dtypes = [pick_dtype(name) for name in dtype or []]
    try:
        jobs = b.plan(names or [], chosen, dtypes, quick)
    except ValueError as error:
        raise fail(str(error)) from None
    if out is not None:
        need_writable("--out", out)
    if precompile and (failed := b.precompile(precompile, names or [], chosen, dtypes, quick)):
        errors.print(f"{failed} of the processes did not compile their whole share")
    budget = 0.1 if quick else 0.4 if chosen == "cpu" else 0.05  # seconds per rival; on a GPU at least 20 rounds
    rows: list[b.Row] = []
    with counting() as progress:
        task = progress.add_task("measuring the roofs", total=len(jobs))
        roofs = b.measure_roofs(chosen, list(dict.fromkeys(job.dtype for job in jobs)), quick)
        with may_be_stopped() as stopped:
            for job in jobs:
                progress.update(task, description=job.label)
                rows += b.measure_job(job, roofs, budget)
                progress.advance(task)
    show_bench(rows, roofs)
    if out is not None:
        path = out / f"bench-{chosen}{'-' + '-'.join(names) if names else ''}.json"
        b.save(path, rows, roofs, chosen, complete=not stopped)
        console.print(f"written: {path}")
    if stopped:
        raise typer.Exit(stopped[0])


def show_bench(rows: list[Any], roofs: Any) -> None:
    from .bench import geometric_mean

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


@app.command("bench-bert")
def bench_bert(
    device: DeviceOption = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="a tiny model that runs in seconds, as on a CPU")] = False,
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
    """Time BERT base and large (random weights, bfloat16) with matmuls attention, optimized or not, against stock."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise fail(f"{error}; run: pip install 'matmuls[bert]'") from None
    from . import bench_bert as b

    chosen = pick_device(device)
    if out is not None:
        need_writable("--out", out)
    table = Table(title="Speed and memory relative to the first way of each task and model", show_lines=False)
    for name in ("task", "model", "way"):
        table.add_column(name, overflow="fold")
    for name in ("piece", "chunk", "time, ms", "peak, MiB", "above probabilities", "speed", "memory", "error"):
        table.add_column(name, justify="right")
    rows = []
    for r in b.run(chosen, tiny, piece or [], chunk or [], rounds):
        rows.append(r)
        sizes = ["" if x is None else f"{x:g}" for x in (r.piece_mib, r.chunk_mib)]
        figures = [f"{r.ms:.2f}", f"{r.peak_mib:.1f}", f"{r.above_mib:.1f}", f"{r.speed:.2f}", f"{r.memory:.2f}"]
        table.add_row(r.task, r.case, r.way, *sizes, *figures, f"{r.error:.1e}")
    console.print(table)
    if out is not None:
        path = out / f"bert-{chosen}.json"
        b.save(path, rows, chosen)
        console.print(f"written: {path}")


@app.command()
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

    May be stopped at any time; the next run continues. Saved in the user's cache directory, one file per GPU model.
    """
    pick_device("cuda")
    try:
        from . import tune as t
        from .triton import configs
    except ImportError as error:
        raise fail(f"{error}; run: pip install triton") from None
    try:
        todo = t.problems(name, k, n, m or [512, 8192, 65536], dtype)
    except ValueError as error:
        raise fail(str(error)) from None
    gpu = configs.gpu(0)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not sys.stderr.isatty(),
    )
    process = t.Process(t.measure_on_gpu)
    compilers = t.Compilers(t.compile_on_gpu, max(1, jobs))
    with progress:
        begin, fastest = time.monotonic(), dict.fromkeys(todo, float("inf"))
        bar = progress.add_task("starting", total=budget)  # seconds: the search ends with its budget

        def step(problem: Any, tiles: Any, seconds: float | None) -> None:
            fastest[problem] = min(fastest[problem], seconds or float("inf"))
            text = (
                f"{todo.index(problem) + 1} of {len(todo)}: {_problem_name(problem)}, {fastest[problem] * 1e6:.1f} us"
            )
            progress.update(bar, description=text, completed=time.monotonic() - begin)

        try:
            found = t.tune(todo, gpu, configs.user_folder(), process, budget, step, ahead=compilers)
        finally:
            process.close()
            compilers.close()
    table = Table(title=gpu.name)
    for column in ("kernel", "tiles", "us", "default, us", "speed-up"):
        table.add_column(column, overflow="fold")
    for p, e in zip(todo, found, strict=True):
        gain = f"{e.default_us / e.us:.3f}" if e.us else ""
        table.add_row(_problem_name(p), str(e.tiles), f"{e.us:.1f}", f"{e.default_us:.1f}", gain)
    console.print(table)
    console.print(f"written: {configs.file_of(configs.user_folder(), gpu.name)}")


def _problem_name(p: Any) -> str:
    return f"{p.operator} {p.m}x{p.k}x{p.n} {p.dtype}"


@app.command()
def spmm(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="files (.mtx, .npz, .graph, .metis) or rmat:18:16, grid:1024, pruned:4096x4096:0.9"),
    ] = None,
    n: Annotated[str, typer.Option(help="columns of B (the dense operand), separated by commas")] = "32,128,512",
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
) -> None:
    """Time every way to multiply the sparse matrices you name; check each result against float64.

    Ctrl-C or SIGTERM stops the run: results so far are shown and written. Exit status 1 if a result of matmuls has a
    larger error than rounding explains, 2 if a matrix could not be read or does not fit in memory (the others are
    measured).
    """
    from . import experiment as e

    named = [*(sources or []), *(f"pruned:{shape}:{share}" for share in (sweep or "").split(",") if share)]
    if not named:
        raise fail("no matrix: name files or drawn matrices, or give --sweep")
    chosen, dtypes = pick_device(device), [pick_dtype(name) for name in dtype or ["float32"]]
    try:
        widths = [int(x) for x in n.split(",")]
    except ValueError:
        widths = []
    if not widths or min(widths) < 1 or max(widths) >= 2**63:
        raise fail(f"--n is numbers of columns separated by commas, got {n}")
    try:
        rivals = e.rivals_named(against or e.RIVALS)
    except ValueError as error:
        raise fail(f"--against is {error}") from error
    for source in named:  # fail before a long run, not during it
        if ":" not in source and not Path(source).is_file():
            raise fail(f"no file named {source}")
    if out is not None:
        need_writable("--out", out)
    # torch warns at the first sparse CSR and the first semi-structured tensor
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)|The PyTorch API of SparseSemiStructuredTensor")
    cases: list[Any] = []
    refused: list[str] = []
    with counting() as progress, may_be_stopped() as stopped:
        task = progress.add_task("measuring a copy", total=len(named) * len(dtypes) * len(widths))
        for case in e.measure_all(named, dtypes, widths, chosen, refused, backward, rivals):
            cases.append(case)
            progress.update(task, description=f"{case.matrix} {case.dtype} x {case.n}", advance=1)
    told = fail("\n".join(refused)) if refused else None
    if told and not cases:
        raise told
    show_spmm(cases)
    swept = [case for case in cases if sweep and case.matrix.startswith(f"pruned:{shape}:")]
    for line in [*e.summary(cases), *e.crossovers(swept)]:
        console.print(line)
    if out is not None:
        path = out / f"spmm-{chosen}{'-sweep' if sweep else ''}.json"
        e.save(path, cases, chosen, complete=not (stopped or refused))
        written = [path]
        try:
            e.plot(path.with_suffix(".png"), cases, bool(sweep))
            written.append(path.with_suffix(".png"))
        except ImportError as error:
            errors.print(f"no plot: {error}; run: pip install matplotlib")
        console.print(f"written: {', '.join(map(str, written))}")
    if found := e.wrong(cases):
        errors.print("\n".join(found), style="red")
        raise typer.Exit(1)
    if told:
        raise told
    if stopped:
        raise typer.Exit(stopped[0])


def show_spmm(cases: list[Any]) -> None:
    table = Table(
        title="* chosen by the plan; ratio: the fastest sparse rival's time over this one's (higher is better)"
    )
    table.add_column("matrix", overflow="fold")
    table.add_column("with")
    for name in ("time, us", "GFLOP/s", "of the floor", "ratio", "error"):
        table.add_column(name, justify="right")
    for c in cases:
        fastest = min(c.rivals.values(), default=None)
        title = f"{c.matrix}\n{c.rows} x {c.columns}, {c.nnz} nonzeros\n{c.dtype}, {c.n} columns"
        for name, r in c.results.items():
            shown = f"{name} ({c.chosen})*" if name == "plan" else name
            if r.us is None:
                table.add_row(title, shown, "refused")
            else:
                ratio = f"{fastest / r.us:.2f}" if fastest else ""
                share = f"{c.floor_us / r.us:.2f}"
                table.add_row(
                    title, shown, f"{r.us:.1f}", f"{c.gflops / r.us * 1e6:.1f}", share, ratio, f"{r.error:.1e}"
                )
            title = ""
        for name, r in c.backward.items():
            took = "refused" if r.us is None else f"{r.us:.1f}"
            mib = f"{c.backward_mib[name]:.1f} MiB" if name in c.backward_mib else ""
            table.add_row("", f"forward + backward, {name}", took, "", mib)
        first = f"with {c.calls} products {c.calls_us:.0f} us, {c.calls_planless_us:.0f} us without a plan"
        first += (
            f"; synchronized after each: {c.waited_us:.0f} and {c.waited_planless_us:.0f} us" if c.waited_us else ""
        )
        build = f"{c.plan_us:.0f} us, {c.plan_bytes / 2**20:.1f} MiB, {first}"
        table.add_row("", f"[dim]plan: {build}[/dim]", end_section=True)
    console.print(table)


@app.command()
def report(
    readme: Annotated[Path, typer.Option(help="file that quotes sentences of the report")] = Path("README.md"),
    docs: Annotated[Path, typer.Option(help="folder of the documentation")] = Path("docs"),
    results: Annotated[Path, typer.Option(help="folder of the JSON result files")] = Path("benchmarks/results"),
    check: Annotated[bool, typer.Option(help="do not write; exit status 1 if a page or a plot is out of date")] = False,
    redraw: Annotated[bool, typer.Option(help="draw every plot anew, not only those whose data changed")] = False,
) -> None:
    """Write the performance pages, their plots and the sentences that README quotes from the committed results."""
    from . import report as r

    try:
        made = r.make(readme, docs, results)
        found = made.stale() if check else made.write(redraw)
    except (OSError, ValueError) as error:
        raise fail(str(error)) from None
    except ImportError as error:
        raise fail(f"{error}; run: pip install 'matmuls[plot]'") from None
    for path in found:
        (errors if check else console).print(
            f"{path} {'is out of date; run: matmuls report' if check else 'written'}", highlight=False, soft_wrap=True
        )
    if found and check:
        raise typer.Exit(1)
    if not found:
        console.print("the pages, plots and quoted sentences are up to date")


def main() -> None:
    app()
