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
        "In each table, matmuls and its alternatives (*rivals*) were measured in the same run, in turns. They had "
        "the same inputs, layouts and precision. Times are medians after warm-up. Results are checked against a "
        "computation in float64 in the same run.",
    )
    page.items(
        "A time *as called* is the wall-clock time of a call in a plain loop. It includes the work of the host.",
        "A *GPU time* is the time of the GPU alone, measured by a CUDA graph of the calls.",
        "Some runs measured the GPU time only. The page then says so above or below the table. The other tables "
        "show the time as called. The GPU time follows in brackets if the two differ by more than 10 %.",
        "On a GPU, `matmuls bench` uses up to 128 sets of inputs in turn. Except in the smallest cases, these sets "
        "together are larger than the L2 cache. Sparse products run with warm caches instead.",
        "Some result files have cases of random sizes, which were not used to tune the code. The pages of these files "
        "compare the random cases with the others.",
        "A *speed* is the rival's time divided by the time of matmuls: above 1, matmuls is faster.",
        "*Slower cases*, below a table, says in how many cases matmuls is more than 0.5 % slower than the rival, "
        "and which case has the lowest speed. [Is the chosen kernel the fastest?](kernels.md) has no rivals: it "
        "compares kernels of matmuls, and lists the calls that lose the most.",
        "A *share* compares with the limit of the hardware. It is the time of a plain memory copy of the bytes "
        "that the operation must read and write, divided by the time of matmuls.",
        "The *share of the peak* of a dense product is its rate of floating-point operations, divided by the "
        "highest rate that `torch.mm` reached in the run.",
    )
    page.say(
        "`matmuls report` writes the tables and plots from the JSON files in `benchmarks/results`. To repeat a "
        "measurement on your machine, run the command below its table. `benchmarks/gpu.sh OUT` repeats all of "
        "them. `OUT` stands for a folder, to which the results are written. `matrices` is a folder with five "
        "matrix files that are not in the repository. [Sparse products](sparse.md) names the files and their "
        "sources.",
    )
    page.heading("Result files")
    where: dict[str, list[Page]] = {}
    for other, files in others:
        for file in files:
            where.setdefault(file, []).append(other)
    page.say(_lacking(results))
    page.table(
        "There is one row for each file in `benchmarks/results`, with the page that shows its figures.",
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
    """A sentence on the files without a date, a commit or a command."""
    facts = ("date", "commit", "command")
    lacking = {
        fact: [f"`{run.file}`" for run in results.everything() if not run.environment.get(fact)] for fact in facts
    }
    named = (f"These files lack the {fact}: {', '.join(files)}." for fact, files in lacking.items() if files)
    first = (
        "Each file names the machine and the version of torch, and in general also the date, the commit and the "
        "command."
    )
    return " ".join((first, *named))


def _link(page: Page) -> str:
    path = page.path.removeprefix("performance/") if page.path.startswith("performance/") else f"../{page.path}"
    return f"[{page.title.split(':')[0]}]({path})"


def reason(file: str) -> str:
    """Why no page shows a file; ValueError for one that a page should show."""
    for pattern, why in NOT_SHOWN.items():
        if fnmatch(file, pattern):
            return why
    raise ValueError(f"no page shows {file}; add it to a page of matmuls/report, or to NOT_SHOWN with the reason")
