"""`matmuls report`: writes docs/performance, docs/support.md, their plots, and the sentences that README quotes.

Everything comes from the result files (benchmarks/results) and the table of operations. A Markdown file quotes a
sentence between `<!-- report:NAME -->` and `<!-- /report -->`; NAME is one of headlines.SENTENCES.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matmuls import files

from . import (
    attention,
    dense,
    distributed,
    encoders,
    graphs,
    headlines,
    host,
    index,
    inplace,
    kernels,
    masked,
    rows,
    sparse,
    support,
)
from .page import Page
from .plot import Plot, data_of
from .results import FOREIGN, Results

MARKER = re.compile(r"(<!-- report:(?P<name>[\w-]+) -->)(?P<old>.*?)(<!-- /report -->)", re.DOTALL)
PAGES: tuple[Callable[[Results], Page], ...] = (
    *(attention.page, sparse.page, encoders.page, rows.page, inplace.page, masked.page, dense.page, kernels.page),
    *(graphs.steps, distributed.page, host.page),
    support.page,
)


@dataclass(frozen=True)
class Report:
    """What the files should be: texts and plots by path, and files that no page names any more."""

    texts: dict[Path, str]
    plots: dict[Path, Plot]
    left_over: list[Path]

    def stale(self) -> list[Path]:
        """The files that differ; of a plot the data is compared, not the drawing."""
        texts = [path for path, text in self.texts.items() if _read(path) != text]
        return [*texts, *(path for path, plot in self.plots.items() if data_of(path) != plot.data), *self.left_over]

    def write(self, redraw: bool = False) -> list[Path]:
        """Write what is stale and return it. redraw: draw every plot, not only those whose data changed.

        ImportError without matplotlib, if there is something to draw.
        """
        stale = self.stale()
        drawn = [path for path in self.plots if redraw or path in stale]
        for path in drawn:
            self.plots[path].draw(path)
        for path in stale:
            if path in self.texts:
                files.write(path, self.texts[path])
            elif path in self.left_over:
                path.unlink()
        return list(dict.fromkeys([*stale, *drawn]))


def make(readme: Path, docs: Path, folder: Path) -> Report:
    """The report of the result files in `folder`. ValueError where a file is missing, malformed or shown by no page."""
    if not docs.is_dir():
        raise ValueError(
            f"expected the folder of the documentation, got {docs}, which is none: `matmuls report` is for a "
            "source checkout; "
            "run it there, or name the folder by --docs"
        )
    written = [path for path in sorted(docs.rglob("*.md")) if path.parent != docs / "performance"]  # by hand
    others = {path: path.read_text(encoding="utf-8") for path in (readme, *written)}
    results = Results(folder)
    pages: dict[str, Page] = {}
    used: dict[str, set[str]] = {}
    for make_page in PAGES:
        page = _made(make_page, results)
        pages[page.path], used[page.path] = page, set(results.used)
        results.used.clear()
    first = index.page(results, [(page, used[path]) for path, page in pages.items()])
    plots = [plot for page in pages.values() for plot in page.plots]
    texts = {docs / page.path: page.text for page in (first, *pages.values())}
    texts |= {path: quoted(text, results, path) for path, text in others.items() if path not in texts}
    drawn = {docs / "assets" / f"{plot.name}.svg": plot for plot in plots}
    kept = {path.resolve() for path in (*texts, *drawn)}
    generated = [
        *docs.glob("performance/*.md"),
        *docs.glob("assets/performance/*.svg"),
        *docs.glob("assets/headline-*.svg"),
    ]
    return Report(texts, drawn, [path for path in sorted(generated) if path.resolve() not in kept])


def _made(make_page: Callable[[Results], Page], results: Results) -> Page:
    try:
        return make_page(results)
    except ValueError:
        raise
    except FOREIGN as error:
        where = f"{make_page.__module__} in {results.folder}"
        raise ValueError(f"expected what benchmarks wrote, for the page of {where}: {error!r}") from None


def quoted(text: str, results: Results, path: Path) -> str:
    """The text with the sentence of every marker made anew."""

    def sentence(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in headlines.SENTENCES:
            raise ValueError(f"{path}: no sentence named {name}; there are {', '.join(headlines.SENTENCES)}")
        words = headlines.SENTENCES[name](results)
        around = "\n\n" if "\n" in words else "\n" if match["old"].startswith("\n") else ""  # a table needs blank lines
        return f"{match[1]}{around}{words}{around}{match[4]}"

    return MARKER.sub(sentence, text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
