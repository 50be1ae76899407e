"""Records the results of `matmuls bench`: one row for each case, in a JSON file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import machine
from ..machine import Roofs


@dataclass(frozen=True)
class Row:
    """One measured case.

    ratio: the rival's time or memory over ours (higher is better). roof: the least possible time over ours.

    The times of kind "gpu" are those of the GPU alone. Those that begin with `called` are wall times per call of a
    plain loop, the host included. On a CPU the other times are wall times already. Files of older versions lack these.
    """

    operation: str
    case: str
    dtype: str
    kind: str  # "gpu", "cpu", "host" or "memory"
    rival: str  # the fastest rival
    ratio: float | None  # None: ours allocates no memory
    ours_us: float | None = None
    rival_us: float | None = None
    rivals_us: dict[str, float] = field(default_factory=dict)  # every rival's time
    tflops: float | None = None
    tbps: float | None = None
    roof: float | None = None
    error: float | None = None
    rival_error: float | None = None
    spread: float | None = None
    extra_bytes: int | None = None  # allocated by ours at its peak, results excluded
    ours_mib: float | None = None  # peak of a call, results included
    rival_mib: float | None = None
    drawn: bool = False  # as Case.drawn
    called_us: float | None = None
    called_rival: str | None = None  # the fastest rival as called
    called_rivals_us: dict[str, float] = field(default_factory=dict)
    called_ratio: float | None = None
    called_spread: float | None = None


def save(path: Path, rows: list[Row], roofs: Roofs, device: str, *, complete: bool = True) -> None:
    """Write the rows with their environment. complete: all cases of the operations were measured."""
    facts = {"complete": complete}
    machine.save(path, device, facts, roofs=asdict(roofs), rows=[asdict(row) for row in rows])


def load(path: Path) -> list[Row]:
    """The rows of a file, of an older version too."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
