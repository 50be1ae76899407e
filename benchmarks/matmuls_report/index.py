"""The page that leads to the others: how figures are made, and which result file is shown where."""

from fnmatch import fnmatch

from .headlines import SENTENCES
from .page import Page
from .results import NOT_SHOWN, Results


def page(results: Results, others: list[tuple[Page, set[str]]]) -> Page:
    """others: the other pages with the names of the result files that each shows."""
    page = Page("performance/index.md", "Performance")
    sentences = [sentence(results) for sentence in SENTENCES.values()]
    page.items(*(sentence for sentence in sentences if "\n" not in sentence))
    for sentence in sentences:
        if "\n" in sentence:  # with a table
            page.say(sentence)
    page.heading("Pages")
    shown = [other for other, _ in others if other.path.startswith("performance/")]
    page.items(*(f"[{other.title}]({other.path.removeprefix('performance/')})" for other in shown))
    page.heading("How the figures are made")
    page.say(
        "matmuls and its rivals were measured in the same run, in turns, with the same inputs. Times are medians after "
        "warm-up. Results were checked against float64. The [overview](../index.md#terms) defines *speed*, *share*, "
        "*GPU time* and *as called*. *Slower cases* counts the cases in which matmuls is more than 0.5 % slower.",
        "`benchmarks/gpu.sh OUT` repeats all measurements on a GPU.",
    )
    page.heading("Result files")
    where: dict[str, list[Page]] = {}
    for other, files in others:
        for file in files:
            where.setdefault(file, []).append(other)
    page.say(_lacking(results))
    page.table(
        "Each row is one file, with the page that shows its figures.",
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


def _lacking(results: Results) -> str:
    """Says where the commands are, and which files lack theirs."""
    lacking = [f"`{run.file}`" for run in results.everything() if not run.environment.get("command")]
    named = f"These files lack the command: {', '.join(lacking)}." if lacking else ""
    return f"Each file in `benchmarks/results` has the command that made it. {named}".rstrip()


def _link(page: Page) -> str:
    path = page.path.removeprefix("performance/") if page.path.startswith("performance/") else f"../{page.path}"
    return f"[{page.title.split(':')[0]}]({path})"


def reason(file: str) -> str:
    """Why no page shows a file; ValueError for one that a page should show."""
    for pattern, why in NOT_SHOWN.items():
        if fnmatch(file, pattern):
            return why
    raise ValueError(f"no page shows {file}; add it to a page of matmuls_report, or to NOT_SHOWN with the reason")
