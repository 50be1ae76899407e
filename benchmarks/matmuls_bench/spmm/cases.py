"""The results of `matmuls spmm`, their ratios, and the file that keeps them."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from matmuls.sparse import names

from .. import machine

PLAN, PLANLESS, TORCH, SCIPY, DENSE = "plan", "without a plan", "torch.sparse", "scipy", "dense"
SEMI = "torch 2:4"
NOT_INSTALLED = "not installed"
# Names of kernels in results of earlier versions.
FORMER_NAMES = {
    "ours": names.DEFAULT,
    "dense in halves": names.FP16X2,
    "two of four": names.SPARSE24,
    "tiles in shared memory": names.SMEM_TILES,
    "packed on tensor cores": names.PACKED_MMA,
    "rows reordered": names.REORDERED,
}


@dataclass(frozen=True)
class Result:
    """One candidate's time in microseconds and its error relative to the norm of the float64 result, or the reason
    (refused) why there is none."""

    us: float | None = None
    error: float | None = None
    spread: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Case:
    """The results for one matrix, dtype and number n of columns of B."""

    matrix: str
    rows: int
    columns: int
    nnz: int
    longest: int
    dtype: str
    n: int
    floor_us: float
    results: dict[str, Result]
    chosen: str  # the name of the kernel that the plan took, of matmuls/sparse/names.py
    plan_us: float  # building it
    plan_bytes: int
    # First products of a new matrix in a process that has already run this shape: their number, and wall time in total
    # with a plan (its construction and choice included) and without; back to back, and (GPU) synchronized after each.
    calls: int = 0
    calls_us: float = 0
    calls_planless_us: float = 0
    waited_us: float = 0
    waited_planless_us: float = 0
    backward: dict[str, Result] = field(default_factory=dict)
    backward_mib: dict[str, float] = field(default_factory=dict)  # peak above the operands

    @property
    def gflops(self) -> float:
        return 2 * self.nnz * self.n / 1e9

    @property
    def rivals(self) -> dict[str, float]:
        """Microseconds of all sparse candidates other than ours."""
        mine = (PLAN, PLANLESS, DENSE)
        return {name: r.us for name, r in self.results.items() if r.us is not None and name not in mine}

    def speed(self, name: str = PLAN) -> float | None:
        """The fastest sparse rival's time over that of the candidate `name`."""
        own = self.results[name].us
        return min(self.rivals.values()) / own if own and self.rivals else None

    @property
    def speed_over_any(self) -> float | None:
        """`speed` of the plan with the dense product among the rivals."""
        own, dense = self.results[PLAN].us, self.results[DENSE].us if DENSE in self.results else None
        found = [*self.rivals.values(), *([dense] if dense else [])]
        return min(found) / own if own and found else None

    def speed_over(self, rival: str, name: str = PLAN) -> float | None:
        own, other = self.results[name].us, self.results[rival].us if rival in self.results else None
        return other / own if own and other else None

    @property
    def floor_share(self) -> float | None:
        own = self.results[PLAN].us
        return self.floor_us / own if own else None

    @property
    def backward_speed(self) -> float | None:
        own, other = (self.backward.get(name, Result()).us for name in (PLAN, TORCH))
        return other / own if own and other else None

    @property
    def pays_back(self) -> float | None:
        """Time of the first products without a plan over that with one; above 1 the plan has paid for itself."""
        return self.calls_planless_us / self.calls_us if self.calls_us else None

    @property
    def pays_back_waited(self) -> float | None:
        """`pays_back` with a synchronization after each product."""
        return self.waited_planless_us / self.waited_us if self.waited_us else None


def save(path: Path, cases: list[Case], device: str, *, complete: bool = True) -> None:
    machine.save(path, device, {"complete": complete}, cases=[asdict(c) for c in cases])


def load(path: Path) -> list[Case]:
    """Read what `save` wrote; fields that an older version lacks get defaults, unknown ones are dropped."""
    known = {f.name for f in fields(Case)}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    for c in cases:
        c["results"], c["backward"] = ({n: Result(**r) for n, r in c[k].items()} for k in ("results", "backward"))
        c["chosen"] = FORMER_NAMES.get(c["chosen"], c["chosen"])
    return [Case(**{name: c[name] for name in known & c.keys()}) for c in cases]
