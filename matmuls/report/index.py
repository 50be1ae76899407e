"""The page that leads to the others: how figures are made, and which result file is shown where."""

from fnmatch import fnmatch

from .headlines import SENTENCES
from .page import Page
from .results import NOT_SHOWN, Results


def page(results: Results, others: list[tuple[Page, set[str]]]) -> Page:
    """others: the other pages with the names of the result files that each shows."""
    page = Page("performance/index.md", "Performance")
    page.say("In short:")
    page.say("\n".join(f"- {sentence(results)}" for sentence in SENTENCES.values()))
    page.heading("Pages")
    shown = [other for other, _ in others if other.path.startswith("performance/")]
    page.say("\n".join(f"- [{other.title}]({other.path.removeprefix('performance/')})" for other in shown))
    page.heading("How the figures are made")
    page.say(
        "Every figure is of one run in which matmuls and its rivals take turns, with the same inputs, layouts "
        "and precision.",
        "Times are medians after warm-up. On a GPU `matmuls bench` rotates through up to 128 sets of inputs to exceed "
        "the L2 cache; the inputs of the smallest cases still fit in it. Sparse products run with warm caches.",
        "Results are compared with float64 in the same run.",
        "A speed is the rival's time over that of matmuls: above 1 matmuls is faster.",
        "Each page names the cases that are slower.",
    )
    page.say(
        "The tables and plots are written by `matmuls report` from the JSON files in `benchmarks/results`. To "
        "measure on a "
        "machine of yours, run the command that stands below a table, or `benchmarks/gpu.sh OUT` for all of them."
    )
    page.heading("Result files")
    where: dict[str, list[Page]] = {}
    for other, files in others:
        for file in files:
            where.setdefault(file, []).append(other)
    page.table(
        "A row is a file in `benchmarks/results`: where it was measured, and the page that shows it.",
        ("file", "machine", "torch", "date", "commit", "page"),
        (
            [
                *(f"`{run.file}`", run.card, str(run.environment["torch"]), str(run.environment.get("date", ""))[:10]),
                f"`{str(run.environment['commit'])[:7]}`" if run.environment.get("commit") else "",
                ", ".join(_link(other) for other in where.get(run.file, [])) or f"not shown: {reason(run.file)}",
            ]
            for run in results.everything()
        ),
    )
    return page


def _link(page: Page) -> str:
    path = page.path.removeprefix("performance/") if page.path.startswith("performance/") else f"../{page.path}"
    return f"[{page.title.split(':')[0]}]({path})"


def reason(file: str) -> str:
    """Why no page shows a file; ValueError for one that a page should show."""
    for pattern, why in NOT_SHOWN.items():
        if fnmatch(file, pattern):
            return why
    raise ValueError(f"no page shows {file}; add it to a page of matmuls/report, or to NOT_SHOWN with the reason")
