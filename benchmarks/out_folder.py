"""What the scripts here are called with."""

import argparse
from pathlib import Path

import torch


def out_folder(script: str, needs_gpu: bool = True) -> Path:
    """OUT, the folder for a script's JSON file; ends where a GPU is needed and missing. script: its docstring."""
    parser = argparse.ArgumentParser(description=script.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the JSON file")
    out: Path = parser.parse_args().out
    if needs_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device to run on")
    return out
