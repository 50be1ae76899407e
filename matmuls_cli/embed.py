"""`matmuls embed`: checks what the user names, encodes the texts with progress, says which records have no text."""

import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import DeviceOption, check_dtype, need_text, pick_device, pick_dtype
from .screen import Steps, clock, console, errors, fail, first_line, line, need_writable, warn

SUFFIXES = (".npy", ".safetensors", ".parquet")
FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")
CHUNK = {"cpu": 512, "cuda": 8192}  # records that are encoded together
SHOWN = 20  # records without a text that are named
INSTRUCTIONS = {"float16": ("amx_fp16", "avx512_fp16"), "bfloat16": ("amx_bf16", "avx512_bf16")}  # of x86-64


def embed(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="text (a line a text), .jsonl, .csv, .tsv or .parquet; or a pipe: /dev/stdin", show_default=False
        ),
    ],
    model: Annotated[str, typer.Option(help="folder, or name on the Hugging Face hub, of a SentenceTransformer")],
    out: Annotated[Path, typer.Option(help="file of the vectors: .npy, .safetensors or .parquet")],
    field: Annotated[str, typer.Option(help="field of .jsonl with the text")] = "text",
    column: Annotated[str, typer.Option(help="column of .csv, .tsv and .parquet with the text")] = "text",
    form: Annotated[
        str | None,
        typer.Option("--format", help="of all files: text, jsonl, csv, tsv or parquet; default: by the suffix"),
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str, typer.Option(help="dtype of the model: float32, float16 or bfloat16; the last two are slow on most CPUs")
    ] = "float32",
    out_dtype: Annotated[
        str | None, typer.Option(help="dtype of the vectors: float32 or float16; default: as the model computes them")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="products in int8, on a CPU: faster, with slightly different vectors")
    ] = False,
    normalize: Annotated[bool, typer.Option("--normalize", help="divide each vector by its length")] = False,
    truncate_dim: Annotated[int | None, typer.Option(min=1, help="keep the first components only")] = None,
    prompt: Annotated[str | None, typer.Option(help="put this before every text")] = None,
    tokens_per_batch: Annotated[int | None, typer.Option(min=1, help="most tokens of a batch")] = None,
) -> None:
    """Embed the texts of files; row n of the result is the vector of record n.

    A run that was stopped, by Ctrl-C or otherwise, goes on when the same command is given again, with the same model;
    with a pipe among the files it begins anew. A record without a text (invalid JSON or UTF-8, no such field, too many
    fields, longer than 16 MiB) gets a row of NaN, null in Parquet, and is named at the end. Exit status 1 if there are
    such records.
    """
    check_dtype(dtype)
    if out_dtype not in (None, "float32", "float16"):
        raise fail(f"--out-dtype is float32 or float16, got {out_dtype}")
    if form not in (None, *FORMATS):
        raise fail(f"--format is {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {form}")
    for option, text in (("--model", model), ("--prompt", prompt), ("--field", field), ("--column", column)):
        need_text(option, text)
    _need_files(files, out)
    if "parquet" in {out.suffix[1:], form, *(file.suffix.lower()[1:] for file in files)}:
        import pyarrow  # noqa: F401
    with Steps("loading torch", total=1.0) as steps:
        chosen = pick_device(device)
        sources = _sources(files, form, field, column)
        if chosen == "cpu" and (slow := _why_slow(dtype)):
            warn(slow)
        steps.show("loading the model")
        st, handle, prints = _load(model, chosen, dtype, tokens_per_batch, int8)
        options: dict[str, Any] = {"--model": model, "--dtype": dtype, "--out-dtype": out_dtype, "--int8": int8}
        options |= {"--prompt": prompt}
        options |= {"--normalize": normalize, "--truncate-dim": truncate_dim, "--tokens-per-batch": tokens_per_batch}
        options |= {"--device": chosen, **prints}
        summary, seconds = _run(steps, st, handle, sources, out, CHUNK[chosen], options)
    rate = f", {handle.tokens / seconds:,.0f} tokens/s" if handle.tokens and seconds else ""
    console.print(f"written: {out}, {summary.rows} x {summary.width}, in {clock(seconds)}{rate}", highlight=False)
    if summary.bad_count:
        for bad in summary.bad[:SHOWN]:
            errors.print(line(bad), style="red", highlight=False, soft_wrap=True)
        more = f"; the first {SHOWN} are above" if summary.bad_count > SHOWN else ""
        raise fail(f"{summary.bad_count} records have no text, and a row of NaN{more}", status=1)


def _need_files(files: list[Path], out: Path) -> None:
    """Check that the files are there, and that the result can be written."""
    if out.suffix not in SUFFIXES:
        raise fail(f"--out is a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, got {out}")
    for file in files:
        if file.is_dir():
            raise fail(f"expected a file, got the folder {file}")
        if not file.exists():
            raise fail(f"no file named {file}")
    if out.exists():
        raise fail(f"--out: {out} exists: delete it, or name another file")
    need_writable("--out", out.absolute().parent)


def _sources(files: list[Path], form: str | None, field: str, column: str) -> list[Any]:
    """The files, with their headers read: a column that is not there is found before the model is loaded."""
    from matmuls import embed as e

    found = []
    for file in files:
        kind = form or e.FORMATS.get(file.suffix.lower(), "text")
        found.append(e.Source(file, {"text": "", "jsonl": field}.get(kind, column), kind))
        try:
            found[-1].check()
        except (e.Unreadable, OSError) as error:
            raise fail(str(error)) from None
    return found


def _why_slow(dtype: str) -> str | None:
    """A warning of a dtype that this CPU computes without instructions of its own."""
    import torch

    wanted = INSTRUCTIONS.get(dtype)
    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if wanted is None or has.get("architecture") != "x86_64" or any(has.get(name) for name in wanted):
        return None
    instead = (
        "--dtype float32 --out-dtype float16 writes files of the same size" if dtype == "float16" else "use float32"
    )
    return f"--dtype {dtype} is several times slower than float32 on a CPU without {' or '.join(wanted)}: {instead}"


def _load(
    name: str, device: str, dtype: str, tokens_per_batch: int | None, int8: bool
) -> tuple[Any, Any, dict[str, str]]:
    """The model, optimized, the handle that counts its tokens, and the fingerprints of the model."""
    if Path(name).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the import below
    elif os.sep in name and (name.startswith((".", os.sep)) or name.count(os.sep) > 1):
        raise fail(f"--model: no folder named {name}")
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    from matmuls.embed.fingerprint import fingerprints
    from matmuls.integrations.sentence_transformers import optimize

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        st = SentenceTransformer(name, device=device, model_kwargs={"dtype": pick_dtype(dtype)})
        prints = fingerprints(st)
    except ImportError:
        raise
    except Exception as error:  # of configuration, tokenizer, weights or the hub
        raise fail(f"--model: cannot load {name}: {first_line(error)}") from None
    try:
        handle = optimize(st, tokens_per_batch=tokens_per_batch, int8=int8)
    except ValueError as error:
        raise fail(f"{'--int8' if int8 else '--model'}: {first_line(error)}") from None
    if int8 and not (handle.encoder and handle.encoder.layers):
        raise fail(f"--int8: {handle.reason or 'the model has no layer that matmuls computes'}")
    return st, handle, prints


def _run(
    steps: Steps,
    st: Any,
    handle: Any,
    sources: list[Any],
    out: Path,
    chunk: int,
    options: dict[str, Any],
) -> tuple[Any, float]:
    """The summary and the seconds of this run."""
    import numpy as np

    from matmuls import embed as e

    def encode(texts: list[str]) -> Any:
        made = st.encode(
            texts,
            prompt=options["--prompt"],
            normalize_embeddings=options["--normalize"],
            truncate_dim=options["--truncate-dim"],
            show_progress_bar=False,
        )
        if options["--out-dtype"] is None:
            return made
        with np.errstate(over="raise"):  # beyond float16's largest number
            return made.astype(options["--out-dtype"])

    start, begun, before = time.monotonic(), 0.0, 0

    def show(progress: Any) -> None:
        nonlocal start, begun, before
        if progress.resumed:
            start, begun, before = time.monotonic(), progress.done, progress.rows
            steps.restart("encoding", total=1.0 - begun)
            return
        seconds = max(time.monotonic() - start, 1e-9)
        count, of = (handle.tokens, "tokens") if handle.tokens else (progress.rows - before, "texts")
        rate = f"{count / seconds:,.0f} {of}/s"
        steps.show(f"row {progress.rows:,}, {rate}", completed=progress.done - begun)

    job = e.Job(sources, out, chunk, options)
    try:
        summary = e.run(job, encode, show)
    except (e.Foreign, e.Unreadable, OSError) as error:
        raise fail(str(error)) from None
    except (RuntimeError, ValueError, FloatingPointError) as error:  # no memory, a text that it cannot take
        kept = "; the rows before are kept, and the same command goes on" if job.goes_on else ""
        raise fail(f"{first_line(error)}{kept}", status=1) from None
    return summary, time.monotonic() - start
