"""The page on kernels: what each one gains over the best of the others that take the same calls."""

from matmuls_bench.kernels import Case, gains

from .format import number
from .page import Page
from .results import Results

FILE = "kernels-cuda.json"


def page(results: Results) -> Page:
    page = Page("performance/kernels.md", "Is the chosen kernel the fastest?")
    page.say(
        "For most calls of row operations and sparse products matmuls chooses one of several kernels. Here every "
        "kernel that can compute a call was timed, by GPU time. The reference explains the names of the [row "
        "kernels](../reference/custom_mm.md#names-of-kernels) and of the [sparse "
        "kernels](../reference/custom_mm.md#kernels-of-a-plan).",
    )
    page.say(
        "*calls* is the number of calls for which a kernel is chosen. The two columns after it are the time of the "
        "fastest other kernel divided by the time of this kernel: higher is better. Times are in µs.",
    )
    run, cases = results.kernels(FILE)
    for family in dict.fromkeys(case.family for case in cases):
        _family(page, family, [case for case in cases if case.family == family])
    page.measured(run)
    return page


def _family(page: Page, family: str, cases: list[Case]) -> None:
    page.heading(family.capitalize())
    found = sorted(gains(cases), key=lambda gain: -gain.cases)
    page.table(
        "Each row is one kernel.",
        ("kernel", "calls", "geometric mean", "lowest", "calls where another is over 2 % faster"),
        (
            (f"`{g.kernel}`", str(g.cases), *(number(x) if x else "" for x in (g.mean, g.least)), str(len(g.slower)))
            for g in found
        ),
    )
    worst = sorted((case for g in found for case in g.slower), key=lambda case: case.gain or 1)[:10]
    if worst:
        page.table(
            f"Each row is one of the {len(worst)} calls that lose the most.",
            ("operation", "size of the input, or the matrix and B's columns", "dtype", "chosen", "fastest"),
            ((case.operation, case.label, case.dtype, *_times(case)) for case in worst),
        )


def _times(case: Case) -> tuple[str, str]:
    """The chosen kernel and the fastest, with their microseconds."""
    best = min(case.seconds, key=lambda name: case.seconds[name])
    chosen, fastest = (f"`{name}` {case.seconds[name] * 1e6:.1f}" for name in (case.chosen, best))
    return chosen, fastest
