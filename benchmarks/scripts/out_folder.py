"""Command-line arguments of the scripts in this folder."""

import argparse
from pathlib import Path

import torch


def out_folder(script: str, needs_gpu: bool = True) -> Path:
    """Parse OUT, the folder for the JSON file; exits with an error if `needs_gpu` and there is no GPU.

    script: the script's docstring, whose first line is the description.
    """
    parser = argparse.ArgumentParser(description=script.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the JSON file")
    out: Path = parser.parse_args().out
    if needs_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device to run on")
    return out
