"""Plots as data, and their drawing: horizontal bars, lines, and strips (a dot for each case with their geometric mean).

A drawn SVG holds its data as JSON in its metadata. So `matmuls report --check` compares what a plot shows without
drawing it, whatever matplotlib's version.
"""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matmuls_bench import figures
from matmuls_bench.timing import geometric_mean

from .format import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, PANEL, MARGIN = 0.17, 0.75, 0.75  # inches: a bar; a panel's title and axis; the figure's title and caption
LINES_HEIGHT, STRIP = 2.3, 0.5  # inches: a panel of lines; a strip
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def rounded(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Six significant digits: the same text on every machine."""
    return tuple(None if v is None else float(f"{v:.6g}") for v in values)


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    bars: series maps a legend's entry to a value for each of `names`. lines: `names` are the x values. strips: series
    maps a strip's name to its dots. The values' axis is `values`, the other one `along`.
    """

    kind: str  # "bars", "lines" or "strips"
    title: str
    values: str  # label of the values' axis, with its unit and which direction is better
    along: str  # label of the other axis
    series: Mapping[str, Sequence[float | None]]
    names: Sequence[str | float] = ()
    ratio: bool = False  # a line at 1.0
    log: bool = False  # values on a logarithmic axis

    def __post_init__(self) -> None:
        object.__setattr__(self, "series", {name: rounded(values) for name, values in self.series.items()})

    @property
    def height(self) -> float:
        if self.kind == "lines":
            return PANEL + LINES_HEIGHT
        if self.kind == "strips":
            return PANEL + STRIP * len(self.series)
        return PANEL + BAR * len(self.names) * (len(self.series) + 0.8)


@dataclass(frozen=True)
class Plot:
    """A figure: panels below each other, a title, and a caption with machine, versions, date and commit."""

    name: str  # path below docs/assets, without .svg
    title: str
    caption: str
    panels: Sequence[Panel]

    @property
    def data(self) -> str:
        """What the plot shows, as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    def draw(self, path: Path) -> None:
        """Write the SVG. ImportError without matplotlib."""
        height = MARGIN + sum(panel.height for panel in self.panels)
        figure, axes = figures.start(self.title, rows=len(self.panels), height=height)
        for panel, place in zip(self.panels, axes, strict=True):
            DRAW[panel.kind](place, panel)
            _finish(place, panel)
        figures.finish(figure, path, self.caption, title=self.title, description=self.data)


def data_of(path: Path) -> str | None:
    """The JSON within a drawn SVG; None if there is no such file or it is another one."""
    try:
        return ElementTree.parse(path).findtext(f".//{DESCRIPTION}")
    except (OSError, ElementTree.ParseError):
        return None


def _colour(i: int) -> str:
    return figures.COLOURS[i % len(figures.COLOURS)]


def _bars(axes: "Axes", panel: Panel) -> None:
    names, series = [str(name) for name in panel.names], panel.series
    thick = 1 / (len(series) + 0.8)
    for i, (name, values) in enumerate(series.items()):
        where = [j + (i - (len(series) - 1) / 2) * thick for j in range(len(names))]
        base = 1.0 if panel.log else 0.0  # a logarithmic axis has no zero: bars of ratios begin at 1
        axes.barh(where, [(v or base) - base for v in values], thick * 0.92, left=base, label=name, color=_colour(i))
        for y, value in zip(where, values, strict=True):
            if value is not None:
                _note(axes, number(value), (value, y), "data")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    if not panel.log:
        axes.set_xlim(0, 1.1 * max(v or 0 for values in series.values() for v in values))


def _note(axes: "Axes", text: str, where: tuple[float, float], coordinates: Any) -> None:
    """Small text to the right of a point."""
    axes.annotate(
        text,
        where,
        (3, 0),
        xycoords=coordinates,
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
    )


def _strips(axes: "Axes", panel: Panel) -> None:
    for i, (name, dots) in enumerate(panel.series.items()):
        known = sorted(dot for dot in dots if dot is not None)
        spread = [i + ((j * 0.618034) % 1 - 0.5) * 0.5 for j in range(len(known))]  # an even spread, without chance
        axes.plot(known, spread, "o", markersize=3, alpha=0.45, color=_colour(0), label=name, markeredgewidth=0)
        mean = geometric_mean(known)
        axes.plot([mean, mean], [i - 0.38, i + 0.38], color=_colour(5), linewidth=2.5)
        words = f"mean {number(mean)}, lowest {number(known[0])}, {len(known)} cases"
        _note(axes, words, (1.0, i), ("axes fraction", "data"))
    axes.set_yticks(range(len(panel.series)), list(panel.series))
    axes.set_ylim(len(panel.series) - 0.5, -0.5)


def _lines(axes: "Axes", panel: Panel) -> None:
    for i, (name, values) in enumerate(panel.series.items()):
        points = [(x, v) for x, v in zip(panel.names, values, strict=True) if v is not None]
        marker = figures.MARKERS[i % len(figures.MARKERS)]
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.2, label=name, color=_colour(i))
    axes.set_xscale("log", base=2)
    least, most = (float(end) for end in (min(panel.names), max(panel.names)))
    axes.set_xticks([4**k for k in range(1, 10) if least <= 4**k <= most])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")


DRAW: dict[str, Callable[["Axes", Panel], None]] = {"bars": _bars, "strips": _strips, "lines": _lines}


def _finish(axes: "Axes", panel: Panel) -> None:
    """Labels, the line at 1.0, the scale and the legend."""
    from matplotlib.ticker import LogLocator, NullFormatter

    upright = panel.kind == "lines"
    values = panel.values if panel.kind != "strips" else f"{panel.values}\na dot is a case, a bar the geometric mean"
    x, y = (panel.along, values) if upright else (values, panel.along)
    figures.name_axes(axes, x, y)
    axes.set_title(panel.title, fontsize=9, loc="left")
    if panel.ratio:
        (axes.axhline if upright else axes.axvline)(1.0, color="black", linewidth=1, linestyle="--")
    if panel.log:
        axis: Any = axes.yaxis if upright else axes.xaxis
        (axes.set_yscale if upright else axes.set_xscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda v, _: number(v).rstrip("0").rstrip(".") if v < 10 else f"{v:.0f}")
        axis.set_minor_formatter(NullFormatter())
    if panel.kind != "strips" and len(panel.series) > 1:  # between the panel's title and its axes
        across = 4 if len(panel.series) <= 4 else 3
        axes.legend(fontsize=7.5, loc="lower left", bbox_to_anchor=(0, 1), ncols=across, frameon=False, borderpad=0.2)
        axes.set_title(panel.title, fontsize=9, loc="left", pad=6 + 12 * -(-len(panel.series) // across))
