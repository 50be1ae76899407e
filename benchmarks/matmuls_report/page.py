"""A page of Markdown, built from top to bottom: paragraphs, tables that a sentence introduces, plots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .format import lost, table
from .plot import Plot
from .results import Run

NOTE = "<!-- Written by `matmuls report` from benchmarks/results. Do not edit. -->"
BRACKETS = "Figures are as called. *(GPU x)* is the figure by GPU time, given where the two differ by more than 10 %."


@dataclass
class Page:
    """A Markdown page below docs/ that is built from top to bottom, with its plots.

    path: below docs/, such as "performance/dense.md".
    """

    path: str
    title: str
    plots: list[Plot] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def say(self, *sentences: str) -> None:
        """A paragraph; nothing if all sentences are empty."""
        self._parts += filter(None, [" ".join(filter(None, sentences))])

    def items(self, *sentences: str) -> None:
        """A list, with one item for each argument."""
        self._parts.append("\n".join(f"- {sentence}" for sentence in sentences))

    def heading(self, text: str) -> None:
        self._parts.append(f"## {text}")

    def measured(self, *runs: Run) -> None:
        """On which machines the figures above were measured, and what the times are."""
        where, times = (dict.fromkeys(facts) for facts in ([r.where for r in runs], [r.times for r in runs]))
        self.say(f"Measured on: {', '.join(where)}.", *times)

    def table(self, sentence: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table after a sentence that says what a row is and which direction is better."""
        made = table(header, rows).rstrip("\n")
        if "(GPU " in made and BRACKETS not in self._parts:
            self._parts.append(BRACKETS)
        self._parts += [sentence, made]

    def lost(self, *comparisons: tuple[str, Iterable[tuple[float | None, str]]]) -> None:
        """A table with a row for each of several comparisons: its name, and speeds with their cases."""
        self._parts += ["Slower cases, with one row for each comparison:", lost(comparisons).rstrip("\n")]

    def plot(self, plot: Plot) -> None:
        """An image, with its title as the text that stands for it."""
        self.plots.append(plot)
        up = "../" * self.path.count("/")
        self._parts.append(f"![{plot.title}]({up}assets/{plot.name}.svg)")

    @property
    def text(self) -> str:
        return "\n\n".join([NOTE, f"# {self.title}", *self._parts]) + "\n"
