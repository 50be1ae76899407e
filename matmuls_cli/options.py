"""Options that several commands share, and their checks. Importing it does not import torch."""

from typing import Annotated, Any

import typer

from .screen import fail

DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if a GPU is visible")]


def pick_device(device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise fail(f"--device is cpu or cuda, got {device}")
    import torch

    import custom_mm

    usable = custom_mm.build_info()["cuda"] is not None and torch.cuda.is_available()
    if device is None:
        return "cuda" if usable else "cpu"
    if device == "cuda" and not usable:
        from matmuls.info import collect

        raise fail(f"no CUDA device to run on; CUDA is {collect()['cuda']}")
    return device


def need_text(what: str, *texts: str | None) -> None:
    """Refuse an argument that is no valid UTF-8: Python keeps such bytes of the command line as lone surrogates."""
    for text in texts:
        if text is not None and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise fail(f"{what}: expected a text in UTF-8, got {text}")


def check_dtype(name: str) -> str:
    if name not in ("float64", "float32", "float16", "bfloat16"):
        raise fail(f"--dtype is float64, float32, float16 or bfloat16, got {name}")
    return name


def pick_dtype(name: str) -> Any:
    import torch

    return getattr(torch, check_dtype(name))
