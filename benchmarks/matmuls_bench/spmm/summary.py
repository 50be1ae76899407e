"""Summaries of the cases of `matmuls spmm`: means, wrong results, the sparsity where sparse beats dense, a plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from matmuls.sparse.select import PRODUCTS

from .. import figures
from ..timing import geometric_mean
from .cases import DENSE, PLAN, PLANLESS, Case


def summary(cases: list[Case]) -> list[str]:
    """Lines with the geometric mean and the lowest of each ratio over the cases, by dtype."""
    lines = []
    for dtype in dict.fromkeys(c.dtype for c in cases):
        own = [c for c in cases if c.dtype == dtype]
        for words, ratios in (
            ("plan over the fastest rival", [c.speed() for c in own]),
            ("without a plan over the fastest rival", [c.speed(PLANLESS) for c in own]),
            ("plan over the dense product", [c.speed_over(DENSE) for c in own]),
            (f"the first {PRODUCTS} calls without a plan over those with one", [c.pays_back for c in own]),
            ("the same, synchronized after each call", [c.pays_back_waited for c in own]),
            ("forward and backward over torch.sparse", [c.backward_speed for c in own]),
        ):
            known = [r for r in ratios if r is not None]
            if known:
                mean, low = geometric_mean(known), min(known)
                lines.append(f"{dtype}, {words}: geometric mean {mean:.2f}, lowest {low:.2f}, {len(known)} cases")
    return lines


def wrong(cases: list[Case]) -> list[str]:
    """Lines for the results of ours whose error is larger than rounding explains."""
    return [
        f"{c.matrix}, {c.dtype}, {c.n} columns: {name} is off by {r.error} {r.refused or ''}"
        for c in cases
        for name, r in c.results.items()
        if name in (PLAN, PLANLESS)
        and (r.error is None or not r.error <= (16 + c.longest**0.5) * torch.finfo(getattr(torch, c.dtype)).eps)
    ]


def crossovers(cases: list[Case]) -> list[str]:
    """Lines for a sweep: by dtype and n, the lowest sparsity from which on ours is faster than the dense product."""
    lines = []
    for dtype, n in dict.fromkeys((c.dtype, c.n) for c in cases):
        own = [c for c in cases if (c.dtype, c.n) == (dtype, n)]
        pays = None
        for c in sorted(own, key=_sparsity, reverse=True):
            ratio = c.speed_over(DENSE, PLANLESS)
            if ratio is None or ratio < 1:
                break
            pays = _sparsity(c)
        words = "never" if pays is None else f"from {pays:.1%} zeros on"
        lines.append(f"{dtype}, {n} columns: sparse beats dense: {words}")
    return lines


def _sparsity(c: Case) -> float:
    return 1 - c.nnz / max(c.rows * c.columns, 1)


def plot(path: Path, cases: list[Case], sweep: bool, environment: Mapping[str, Any]) -> None:
    """Plot the microseconds of every candidate, over the sparsity (sweep) or by matrix. Needs matplotlib.

    environment: of `bench.environment`, for the caption.
    """
    kinds = list(dict.fromkeys((c.dtype, c.n) for c in cases))
    columns, rows = min(len(kinds), 3), -(-len(kinds) // 3)
    title = "Sparse times dense: time of one product by " + ("sparsity" if sweep else "matrix")
    figure, axes = figures.start(title, rows=rows, columns=columns, width=6 * columns, height=4.5 * rows + 0.5)
    names = list(dict.fromkeys(name for c in cases for name in c.results))
    for part, (dtype, n) in zip(axes, kinds, strict=False):
        own = [c for c in cases if (c.dtype, c.n) == (dtype, n)]
        where = [_sparsity(c) for c in own] if sweep else list(range(len(own)))
        for i, name in enumerate(names):
            points = [(x, c.results[name].us) for x, c in zip(where, own, strict=True) if name in c.results]
            known = [(x, us) for x, us in points if us is not None]
            look = _look(i, name in (PLAN, PLANLESS), sweep)
            part.plot(*zip(*known, strict=True), label=name, **look) if known else None
        label = "floor: a copy of the bytes that must move"
        part.plot(where, [c.floor_us for c in own], "k--" if sweep else "k_", label=label)
        x = "share of zeros in A" if sweep else "matrix A"
        figures.name_axes(part, x, "time of A @ B, µs (lower is better)", f"{dtype}, B of {n} columns")
        part.set_yscale("log")
        if not sweep:
            part.set_xticks(where, [c.matrix for c in own], rotation=60, ha="right", fontsize=7, parse_math=False)
    for unused in axes[len(kinds) :]:
        unused.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figures.finish(figure, path, figures.machine(environment))


def _look(i: int, ours: bool, sweep: bool) -> dict[str, Any]:
    """Line, marker and colour of the i-th candidate; ours are drawn thicker."""
    look = {"color": figures.COLOURS[i % len(figures.COLOURS)], "marker": figures.MARKERS[i % len(figures.MARKERS)]}
    width = {"linewidth": 2.5, "markersize": 7} if ours else {"linewidth": 1, "markersize": 5, "alpha": 0.8}
    return look | width | {"linestyle": "-" if sweep else "none"}
