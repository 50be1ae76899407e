"""Reads the result files of benchmarks/results: rows with the environment that they were measured in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from matmuls_bench import figures, kernels, spmm

Rows = list[dict[str, Any]]
# raised where JSON has another structure
FOREIGN = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
# names with wildcards -> reason: results that no page shows
NOT_SHOWN = {
    "*checks-*.json": "runs of tests, sanitizers and single commands",
    "*distributed-*-shared.json": "one matrix, whose rows were written into the other GPUs' memory; those of "
    "distributed-4.json were sent by NCCL",
    "*eight-processes-*.json": "divided products and models on two cores: bytes sent and results, not speeds",
    "*sparse-systems*.json": "sparse products and triangular solves; the limits quote them",
    "*traffic.json": "mixed requests for 27 minutes (GPU) and 30 (CPU), compared with eager; memory by the minute",
    "*training-steps.json": "training steps with the attention function; the guide quotes them",
    "*masked-choices.json": "measurements by which masked products are split; the code quotes them",
    "*attention-backends.json": "a measurement by which torch's attention is chosen",
    "cpu/cpu-rivals.json": "operations on a CPU against torch's; the limits quote them",
}


@dataclass(frozen=True)
class Run:
    """One result file, or the part of it that a table shows."""

    file: str
    environment: dict[str, Any]
    rows: Rows

    @property
    def machine(self) -> str:
        return figures.machine(self.environment)

    @property
    def card(self) -> str:
        """The GPU's short name, such as "H200"; "CPU" for others."""
        device = str(self.environment["device"])
        return device.removeprefix("NVIDIA ").split()[0] if device.startswith("NVIDIA") else "CPU"

    @property
    def where(self) -> str:
        """The machine with the name of the file, such as "H200 (`spmm-cuda.json`)"."""
        threads = self.environment.get("threads") if self.card == "CPU" else None
        cores = f", {threads} thread{'s' * (threads != 1)}" if threads else ""
        machine = figures.device(self.environment) if self.card == "CPU" else self.card
        return f"{machine}{cores} (`{self.file}`)"

    @property
    def times(self) -> str:
        """Says whether the times of a `matmuls bench` run on a GPU are as called or GPU times."""
        if any(row.get("called_us") for row in self.rows):
            return "Figures: as called."
        return "Times: GPU time." if any(row.get("kind") == "gpu" for row in self.rows) else ""


class Results:
    """The folder of result files. Its methods raise ValueError for a missing or malformed file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()  # names of the files that were read for the page at hand
        if not any(folder.glob("*.json")):
            raise ValueError(f"expected a folder with the JSON files of benchmarks, got {folder}")

    def _content(self, path: Path) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            content.setdefault("environment", {k: v for k, v in content.items() if isinstance(v, str)})
            content["environment"]["device"], content["environment"]["torch"]
            return content
        except FOREIGN as error:
            raise ValueError(f"expected what a benchmark wrote in {path}: {error!r}") from None

    def run(self, name: str) -> Run:
        """A file with rows."""
        content = self._content(self.folder / name)
        self.used.add(name)
        return Run(name, content["environment"], content.get("rows", []))

    def cases(self, name: str) -> tuple[Run, list[spmm.Case]]:
        """A file of `matmuls spmm`."""
        try:
            return self.run(name), spmm.load(self.folder / name)
        except FOREIGN as error:
            raise ValueError(f"expected what matmuls spmm wrote in {self.folder / name}: {error!r}") from None

    def kernels(self, name: str) -> tuple[Run, list[kernels.Case]]:
        """A file of `matmuls bench --kernels`."""
        try:
            return self.run(name), kernels.load(self.folder / name)
        except FOREIGN as error:
            made = "what matmuls bench --kernels wrote"
            raise ValueError(f"expected {made} in {self.folder / name}: {error!r}") from None

    def distributed(self, name: str) -> tuple[Run, dict[str, Any]]:
        """A file of `matmuls spmm --distributed` or of distributed_models.py, with all that is in it."""
        return self.run(name), self._content(self.folder / name)

    def encoding(self, name: str, part: str = "encode") -> dict[str, Any]:
        """How fast texts were encoded, or how far vectors drift: a part of a file of encode*.py."""
        found: dict[str, Any] = self._content(self.folder / name)[part]
        return found

    def bench(self, operation: str) -> Run:
        """The operation's rows of the newest complete `matmuls bench` on a GPU that has it."""
        if operation not in self._newest:
            raise ValueError(f"expected results of {operation} in {self.folder}/bench-cuda*.json")
        run = self._newest[operation]
        self.used.add(run.file)
        return run

    @cached_property
    def _newest(self) -> dict[str, Run]:
        runs = [(path.name, self._content(path)) for path in sorted(self.folder.glob("bench-cuda*.json"))]
        complete = [(name, c) for name, c in runs if c["environment"].get("complete", True)]
        newest: dict[str, Run] = {}
        for name, content in sorted(complete, key=lambda run: str(run[1]["environment"].get("date"))):
            rows = sorted(content["rows"], key=lambda row: row["operation"])
            for operation, own in groupby(rows, key=lambda row: row["operation"]):
                newest[operation] = Run(name, content["environment"], list(own))
        return newest

    def everything(self) -> Iterator[Run]:
        """Every file of the folder, by name."""
        for path in sorted(self.folder.rglob("*.json")):
            content = self._content(path)
            yield Run(path.relative_to(self.folder).as_posix(), content["environment"], content.get("rows", []))
