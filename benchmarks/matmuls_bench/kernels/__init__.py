"""`matmuls bench --kernels`: what each kernel gains, from the times of all kernels that take the same calls."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matmuls import files

from ..timing import geometric_mean

FASTER = 1.02  # ratio from which another kernel counts as faster than the chosen one


@dataclass(frozen=True)
class Case:
    """A call that several kernels may serve, with the GPU time of each by itself.

    chosen: the kernel that the call takes. seconds: of every kernel that takes the call, by the names that `explain`
    prints. spread: interquartile range of the rounds over their median; 0 for a kernel that ran in one round.
    """

    family: str  # a key of custom_mm.kernel_switch.FAMILIES
    operation: str  # "softmax_", "plan @ b", "spmm"
    label: str  # sizes, or matrix and columns of B
    dtype: str
    chosen: str
    seconds: dict[str, float]
    spread: dict[str, float]

    @property
    def gain(self) -> float | None:
        """Seconds of the fastest other kernel over those of the chosen one; None without another."""
        others = [t for name, t in self.seconds.items() if name != self.chosen]
        return min(others) / self.seconds[self.chosen] if others else None


@dataclass(frozen=True)
class Gain:
    """The speed of a kernel over the fastest other kernel, in the cases where it is chosen.

    cases: how many. mean, least: geometric mean and minimum of `Case.gain`, None if no other kernel takes any of them.
    slower: the cases in which another kernel is more than 2 % faster, the worst first.
    """

    family: str
    kernel: str
    cases: int
    mean: float | None
    least: float | None
    slower: list[Case]


def gains(cases: Iterable[Case]) -> list[Gain]:
    """A `Gain` for each kernel that some case takes, in the order of the cases."""
    taking: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        taking.setdefault((case.family, case.chosen), []).append(case)
    found = []
    for (family, kernel), own in taking.items():
        known = sorted(((case.gain, case) for case in own if case.gain is not None), key=lambda pair: pair[0])
        ratios = [gain for gain, _ in known]
        slower = [case for gain, case in known if gain * FASTER < 1]
        mean, least = (geometric_mean(ratios), ratios[0]) if ratios else (None, None)
        found.append(Gain(family, kernel, len(own), mean, least, slower))
    return found


def save(path: Path, cases: Iterable[Case], environment: dict[str, Any]) -> None:
    """Write the cases as JSON, one a line. environment: as `machine.environment` gives it."""
    lines = ",\n".join(json.dumps(_rounded(case)) for case in cases)
    files.write(path, f'{{"environment": {json.dumps(environment, indent=1)},\n"cases": [\n{lines}\n]}}\n')


def _rounded(case: Case) -> dict[str, Any]:
    """The case with four significant digits of each figure."""
    figures = {name: {k: float(f"{v:.4g}") for k, v in getattr(case, name).items()} for name in ("seconds", "spread")}
    return asdict(case) | figures


def load(path: Path) -> list[Case]:
    """The cases of a file that `save` wrote."""
    return [Case(**case) for case in json.loads(path.read_text())["cases"]]
