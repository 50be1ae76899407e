"""The compiled module `_C`; where it cannot be loaded, an ImportError that says why and what to do.

`_C` runs with the minor version of torch, and the CUDA, that it was built with: the loader would name a missing symbol
of C++. setup.py records both in `_build.py`.
"""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

__all__ = ["_C"]

HERE = Path(__file__).resolve().parent


def _kind(cuda: str | None) -> str:
    return f"CUDA {cuda}" if cuda else "the CPU"


def why_not() -> str | None:
    """Why `_C` cannot be loaded here, in one sentence with the remedy; None if nothing is known to be in the way."""
    source = HERE.parent if (HERE.parent / "setup.py").is_file() else None
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    build = f"run `{sys.executable} -m pip install --no-build-isolation -e .` in {source}"
    if not any((HERE / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        if source:
            return (
                f"custom_mm: {source} is the source folder of matmuls, and its extension is not built for {python}: "
                f"run ./install_deps.sh or {build[4:]}; to use a matmuls that is installed, start Python elsewhere"
            )
        return f"custom_mm: {HERE} has no extension for {python}: install matmuls with this Python's pip"
    try:
        from . import _build
    except ImportError:  # a module that was copied here
        return None
    built, beside = (version.split("+")[0].split(".")[:2] for version in (_build.TORCH, torch.__version__))
    if built == beside and (_build.CUDA is None or _major(_build.CUDA) == _major(torch.version.cuda)):
        return None
    wheel = f"install the wheel of matmuls for torch {'.'.join(beside)} and {_kind(torch.version.cuda)}"
    return (
        f"custom_mm: this matmuls was built with torch {'.'.join(built)} for {_kind(_build.CUDA)}, which does not run "
        f"with the installed torch {torch.__version__} for {_kind(torch.version.cuda)}: {build if source else wheel}"
    )


def _major(cuda: str | None) -> str | None:
    return cuda and cuda.split(".")[0]


if reason := why_not():
    raise ImportError(reason, name="custom_mm._C")

from . import _C  # noqa: E402
