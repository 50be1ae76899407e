"""`matmuls embed`: checks what the user names, encodes the texts with progress, says which records have no text."""

import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import DeviceOption, check_dtype, pick_device, pick_dtype
from .screen import Steps, clock, console, errors, fail, first_line, need_writable

SUFFIXES = (".npy", ".safetensors", ".parquet")
CHUNK = {"cpu": 512, "cuda": 8192}  # records that are encoded together
SHOWN = 20  # records without a text that are named


def embed(
    files: Annotated[
        list[Path], typer.Argument(help="text (a line a text), .jsonl, .csv, .tsv or .parquet", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="folder, or name on the Hugging Face hub, of a SentenceTransformer")],
    out: Annotated[Path, typer.Option(help="file of the vectors: .npy, .safetensors or .parquet")],
    field: Annotated[str, typer.Option(help="field of .jsonl with the text")] = "text",
    column: Annotated[str, typer.Option(help="column of .csv, .tsv and .parquet with the text")] = "text",
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="dtype of the model: float32, float16 or bfloat16")] = "float32",
    normalize: Annotated[bool, typer.Option("--normalize", help="divide each vector by its length")] = False,
    truncate_dim: Annotated[int | None, typer.Option(min=1, help="keep the first components only")] = None,
    prompt: Annotated[str | None, typer.Option(help="put this before every text")] = None,
    tokens_per_batch: Annotated[int | None, typer.Option(min=1, help="most tokens of a batch")] = None,
) -> None:
    """Embed the texts of files; row n of the result is the vector of record n.

    A run that was stopped, by Ctrl-C or otherwise, goes on when the same command is given again. A record without a
    text (invalid JSON or UTF-8, no such field) gets a row of NaN, null in Parquet, and is named at the end. Exit status
    1 if there are such records.
    """
    check_dtype(dtype)
    if out.suffix not in SUFFIXES:
        raise fail(f"--out is a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, got {out}")
    for file in files:
        if not file.is_file():
            raise fail(f"no file named {file}")
    if out.exists():
        raise fail(f"--out: {out} exists: delete it, or name another file")
    need_writable("--out", out.absolute().parent)
    if ".parquet" in {out.suffix, *(file.suffix.lower() for file in files)}:
        import pyarrow  # noqa: F401
    with Steps("loading torch", total=1.0) as steps:
        chosen = pick_device(device)
        steps.show("loading the model")
        st, handle = _load(model, chosen, dtype, tokens_per_batch)
        options = {"--model": model, "--dtype": dtype, "--normalize": normalize, "--truncate-dim": truncate_dim}
        options |= {"--prompt": prompt, "--tokens-per-batch": tokens_per_batch, "--device": chosen}
        names = {"jsonl": field, "csv": column, "parquet": column}
        summary, seconds = _run(steps, st, handle, files, out, names, CHUNK[chosen], options)
    rate = f", {handle.tokens / seconds:,.0f} tokens/s" if handle.tokens and seconds else ""
    console.print(f"written: {out}, {summary.rows} x {summary.width}, in {clock(seconds)}{rate}", highlight=False)
    if summary.bad_count:
        for line in summary.bad[:SHOWN]:
            errors.print(line, style="red", highlight=False, soft_wrap=True, markup=False)
        more = f"; the first {SHOWN} are above" if summary.bad_count > SHOWN else ""
        raise fail(f"{summary.bad_count} records have no text, and a row of NaN{more}", 1)


def _load(name: str, device: str, dtype: str, tokens_per_batch: int | None) -> tuple[Any, Any]:
    """The model, optimized, and the handle that counts its tokens."""
    if Path(name).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the import below
    elif os.sep in name and (name.startswith((".", os.sep)) or name.count(os.sep) > 1):
        raise fail(f"--model: no folder named {name}")
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    from matmuls.integrations.sentence_transformers import optimize

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        st = SentenceTransformer(name, device=device, model_kwargs={"dtype": pick_dtype(dtype)})
        return st, optimize(st, tokens_per_batch=tokens_per_batch)
    except ImportError:
        raise
    except Exception as error:  # of configuration, tokenizer, weights or the hub
        raise fail(f"--model: cannot load {name}: {first_line(error)}") from None


def _run(
    steps: Steps,
    st: Any,
    handle: Any,
    files: list[Path],
    out: Path,
    names: dict[str, str],
    chunk: int,
    options: dict[str, Any],
) -> tuple[Any, float]:
    """The summary and the seconds of this run."""
    from matmuls import embed as e

    def encode(texts: list[str]) -> Any:
        return st.encode(
            texts,
            prompt=options["--prompt"],
            normalize_embeddings=options["--normalize"],
            truncate_dim=options["--truncate-dim"],
            show_progress_bar=False,
        )

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

    kinds = [e.FORMATS.get(file.suffix.lower(), "") for file in files]
    job = e.Job(files, out, [names.get(kind, "") for kind in kinds], chunk, options)
    try:
        summary = e.run(job, encode, show)
    except (e.Foreign, e.Unreadable, OSError) as error:
        raise fail(str(error)) from None
    except (RuntimeError, ValueError) as error:  # of the model: no memory, a text that it cannot take
        raise fail(f"{first_line(error)}; the rows before are kept, and the same command goes on", 1) from None
    return summary, time.monotonic() - start
