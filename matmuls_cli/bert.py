"""`matmuls bert`: checks what the user gives, runs the comparison and shows it."""

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .options import DeviceOption, check_dtype, need_text, pick_device, pick_dtype
from .screen import Steps, console, errors, fail, line, need_writable

SHOWN = 12  # texts in the table of similarities
ATTENTIONS = ("custom_mm", "sdpa", "eager")
ON_A_CPU = (
    "This ran on a CPU: it shows that matmuls attention gives the results of stock attention, not that it is faster. "
    "On a GPU the same command shows what it saves in time and memory."
)


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

    Exit status 1 if an embedding differs from stock attention's by more than 1e-5 in float32, 1e-4 with --optimize, and
    if the model cannot run with matmuls attention.
    """
    need_text("text", *(texts or []))
    texts = [*(texts or []), *_lines(file)]
    if not texts:
        raise fail("no text: give texts as arguments or a file with --file")
    if model is not None and not (model / "config.json").is_file():
        raise fail(f"--model {model} is not a model folder: it has no config.json")
    if attn not in ATTENTIONS:
        raise fail(f"--attn is {', '.join(ATTENTIONS[:-1])} or {ATTENTIONS[-1]}, got {attn}")
    check_dtype(dtype)
    if attentions is not None:
        _need_picture(attentions)
    result = _compare(texts, model, device, dtype, attn, optimize, attentions)
    if attentions is not None:
        errors.print(f"written: {attentions}", highlight=False)
    if as_json:
        print(json.dumps(asdict(result) | {"passed": result.passed}, indent=2))
    else:
        _show(result)
    if not result.passed:
        raise typer.Exit(1)


def _lines(file: Path | None) -> list[str]:
    """The texts of a file, one a line."""
    if file is None:
        return []
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"cannot read {file}: {error}") from None


def _need_picture(path: Path) -> None:
    """Check that the file of --attentions can be written, before the model is loaded."""
    if path.suffix != ".png" or path.is_dir() or not path.parent.is_dir():
        raise fail(f"--attentions is a .png file in a folder that exists, got {path}")
    need_writable("--attentions", path.parent)
    if importlib.util.find_spec("matplotlib") is None:
        raise fail("--attentions: matplotlib: not installed; run: pip install 'matmuls[plot]'")


def _compare(
    texts: list[str],
    model: Path | None,
    device: str | None,
    dtype: str,
    attn: str,
    optimize: bool,
    attentions: Path | None,
) -> Any:
    """The result of `matmuls.bert.compare`, with progress: seconds on two cores, to begin with."""
    with Steps("loading torch", total=12) as steps:
        import torch  # noqa: F401

        steps.next("loading transformers", 2)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by that import: models come from folders, without a network
        import transformers  # noqa: F401

        from matmuls import bert as b

        steps.next("loading the model", 3)
        chosen = pick_device(device)
        parts = b.parts(attn, optimize, attentions is not None)
        steps.show("loading the model", total=steps.completed + parts + 1)
        try:
            folder = model or b.model_folder()
            return b.compare(texts, folder, chosen, pick_dtype(dtype), attn, optimize, attentions, steps.next)
        except (b.ModelMissing, b.NothingToOptimize) as error:
            raise fail(str(error)) from None
        except (b.AttentionNotTaken, b.ModelFails, NotImplementedError) as error:
            raise fail(f"bert: {error}", status=1) from None


def _show(result: Any) -> None:
    shown = result.texts[:SHOWN]
    table = Table(title="Cosine similarity")
    table.add_column("", overflow="fold")
    for n in range(len(shown)):
        table.add_column(str(n + 1), justify="right")
    for n, text in enumerate(shown):
        row = [f"{x:.3f}" for x in result.similarities[n][: len(shown)]]
        table.add_row(line(f"{n + 1}  {text}"), *row)
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
    if result.device.startswith("CPU"):
        console.print(ON_A_CPU, soft_wrap=True, highlight=False)
