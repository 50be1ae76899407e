"""Which time of a GPU's row is shown: as called where it was measured, and the GPU's where it differs or is alone."""

from collections.abc import Callable
from typing import Any

from matmuls_bench.operations import COMPILED, REPLAYED
from matmuls_bench.timing import geometric_mean

from .format import number
from .results import Rows

DIFFERS = 0.1  # share from which on both are shown


def us(row: dict[str, Any]) -> float:
    """The time of matmuls in microseconds."""
    return float(row.get("called_us") or row["ours_us"])


def rivals_us(row: dict[str, Any]) -> dict[str, float]:
    """Times of the rivals in microseconds, without those that were not measured."""
    # the oldest files name the fastest rival alone
    known = row.get("called_rivals_us") or row.get("rivals_us") or {row["rival"]: row["rival_us"]}
    return {name: time for name, time in known.items() if time}


def over(row: dict[str, Any], *names: str) -> float | None:
    """Speed over the fastest of the named rivals; None if none was measured."""
    known = [time for name, time in rivals_us(row).items() if name in names]
    return min(known) / us(row) if known else None


def ratio(row: dict[str, Any]) -> float | None:
    """Speed over the fastest rival."""
    return float(row["called_ratio"]) if row.get("called_ratio") else row["ratio"]


def shown_us(row: dict[str, Any]) -> str:
    """The time, with the GPU's in brackets where it differs."""
    return _with_gpu(us(row), us(of_gpu(row)))


def shown_over(row: dict[str, Any], *names: str) -> str:
    """The speed over the fastest of the named rivals, with the GPU's in brackets where it differs."""
    return _with_gpu(over(row, *names), over(of_gpu(row), *names))


def shown_ratio(row: dict[str, Any]) -> str:
    """The speed over the fastest rival, with the GPU's in brackets where it differs."""
    return _with_gpu(ratio(row), ratio(of_gpu(row)))


def compiled(row: dict[str, Any]) -> list[str]:
    """The modes of torch.compile that were measured: the default, and the one with CUDA graphs."""
    return [name for name in (COMPILED, REPLAYED) if name in rivals_us(row)]


def of_gpu(row: dict[str, Any]) -> dict[str, Any]:
    """The row without times as called."""
    return {key: value for key, value in row.items() if not key.startswith("called")}


def differ(shown: float, gpu: float) -> bool:
    """True if a figure as called is shown with the GPU's in brackets."""
    return abs(shown / gpu - 1) > DIFFERS


def kind_of(rows: Rows) -> str:
    """What the times are, for titles and sentences."""
    return "as called" if any(row.get("called_us") for row in rows) else "GPU time"


def plotted(rows: Rows) -> Rows:
    """The rows that a plot shows: of drawn sizes, if there are any."""
    return [row for row in rows if row.get("drawn")] or rows


def groups(rows: Rows, speed: Callable[[dict[str, Any]], float | None] = ratio) -> str:
    """A sentence that compares drawn sizes with the others; "" if there are none."""
    parts = []
    for drawn, words in ((True, "random sizes (not used to tune the code)"), (False, "other sizes")):
        known = [r for r in (speed(row) for row in rows if bool(row.get("drawn")) is drawn) if r is not None]
        if known:
            mean, least = number(geometric_mean(known)), number(min(known))
            parts.append(f"{mean} (lowest {least}) in the {len(known)} cases with {words}")
    return f"The speed is on average {' and '.join(parts)}." if len(parts) == 2 else ""


def _with_gpu(shown: float | None, gpu: float | None) -> str:
    if shown is None or gpu is None or not differ(shown, gpu):
        return number(shown)
    return f"{number(shown)} (GPU {number(gpu)})"
