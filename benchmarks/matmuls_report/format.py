"""Numbers with three significant digits, tables of Markdown, and sentences that name the lowest speed."""

import re
from collections.abc import Iterable, Sequence

from matmuls_bench.timing import geometric_mean

# 3.14, 1,230, 90%, 3.14 (1.20), 3.14 (GPU 1.20), 0.92 (1.20 (GPU 1.40))
NUMBER = re.compile(r"[\d.,]+ ?%?( \((GPU )?[\d.,]+( \(GPU [\d.,]+\))?\))?")
DTYPES = ("bfloat16", "float16", "float32", "TF32", "float64")


def number(x: float | None) -> str:
    """Three significant digits, without an exponent; empty for None."""
    if x is None:
        return ""
    if abs(x) >= 999.5:
        return f"{float(f'{x:.3g}'):,.0f}"
    return f"{x:#.3g}".rstrip(".") if x else "0"


def natural(text: str) -> list[tuple[int, str]]:
    """A key to sort by that takes the numbers in a text as numbers: 768x3072 before 4096x4096."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns of numbers are aligned on the right."""
    rows = [list(row) for row in rows]
    numeric = [all(not row[i] or NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(header))]
    rule = ["---:" if right else "---" for right in numeric]
    return "".join(f"| {' | '.join(line)} |\n" for line in (list(header), rule, *rows))


def mean_and_lowest(ratios: Iterable[float | None]) -> str:
    """Geometric mean and, in brackets, the lowest."""
    known = [r for r in ratios if r is not None]
    return f"{number(geometric_mean(known))} ({number(min(known))})" if known else ""


def losses(ratios: Iterable[tuple[float | None, str]], over: str, of: str = "") -> str:
    """A sentence: how many cases are slower than `over`, and the lowest speed with its case. Takes (speed, case).

    of: which comparison this is, on a page with several.
    """
    count, lowest, case = _lost(ratios)
    name = f"**Slower cases, {of}.**" if of else "**Slower cases.**"
    lost = f"In {count} cases, matmuls is more than 0.5 % slower than {over}."
    return f"{name} {lost} The lowest speed is {lowest} ({case})."


def _lost(ratios: Iterable[tuple[float | None, str]]) -> tuple[str, str, str]:
    """How many cases are slower, the lowest speed, and its case."""
    known = [(r, case) for r, case in ratios if r is not None]
    lowest, case = min(known)
    slower = sum(r < 0.995 for r, _ in known)
    return f"all {slower}" if slower == len(known) > 2 else f"{slower} of {len(known)}", number(lowest), case


def lost(comparisons: Iterable[tuple[str, Iterable[tuple[float | None, str]]]]) -> str:
    """A table with a row for each comparison: how many cases are slower, and the lowest speed with its case."""
    return table(
        ("comparison", "slower cases", "lowest speed", "case"), ([name, *_lost(ratios)] for name, ratios in comparisons)
    )
