"""Parts that all figures use: title, axis labels, colour scale, caption with the machine, colour-blind safe palette.

matplotlib is imported when a figure is made, not before.

    figure, (axes,) = figures.start("SpMM, float32", columns=1)
    figures.name_axes(axes, "share of zeros", "time, µs (lower is better)")
    figures.finish(figure, Path("spmm.png"), figures.machine(bench.environment("cuda")))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any common colour blindness can tell apart. The first is matmuls.
COLOURS = ("#0072B2", "#E69F00", "#999999", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "os^DvPX*"
WIDTH = 7.2  # inches: text of 9 points is 12 pixels high where the figure is 700 pixels wide
STYLE: Any = {  # matplotlib types its settings by 300 literal names
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "matmuls",  # the same ids in every run
}


def device(environment: Mapping[str, Any]) -> str:
    """The name of the GPU or the kind of CPU."""
    name = str(environment["device"])
    return "x86-64 CPU" if name == "x86_64" else name


def machine(environment: Mapping[str, Any]) -> str:
    """A caption of what `bench.environment` returns: "NVIDIA H200, torch 2.11.0+cu130, 2026-11-26, commit 3478cc4"."""
    facts = [device(environment), f"torch {environment['torch']}" if environment.get("torch") else None]
    facts += [str(environment.get("date") or "")[:10], f"commit {str(environment.get('commit') or '')[:7]}"]
    return ", ".join(str(fact) for fact in facts if fact and fact != "commit ")


def start(
    title: str, *, rows: int = 1, columns: int = 1, width: float = WIDTH, height: float = 4.0
) -> "tuple[Figure, list[Axes]]":
    """An empty figure with a title, and its rows * columns axes in reading order. Sizes in inches.

    ImportError without matplotlib.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold", parse_math=False)
        axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    return figure, axes


def name_axes(axes: "Axes", x: str, y: str, title: str = "") -> None:
    """Label both axes (with their units) and draw a faint grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)


def colour_scale(figure: "Figure", image: Any, axes: Any, label: str) -> None:
    """A colour bar that says what the colours of an image (of `axes.imshow`) mean."""
    figure.colorbar(image, ax=axes, label=label)


def finish(figure: "Figure", path: Path, caption: str, *, title: str = "", description: str = "") -> None:
    """Write the figure with a caption below it, as PNG or SVG by the path's suffix.

    An SVG is the same bytes each time (for one version of matplotlib); title and description go into its metadata.
    """
    import matplotlib as mpl

    figure.supxlabel(caption, fontsize=7.5, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] | None = None
    if path.suffix == ".svg":
        metadata = {"Date": None, "Creator": "matmuls", "Title": title, "Description": description}
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=150, metadata=metadata)
