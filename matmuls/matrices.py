"""Sparse matrices for experiments: read from files that people have, or drawn.

Read are Matrix Market (.mtx), NumPy's .npz as scipy.sparse.save_npz writes it or with crow, col, shape and, if they are
to be kept, values; and METIS graphs (.graph, .metis); each also compressed by gzip (.gz), .npz excepted. Drawn are
`rmat:SCALE:EDGES` (2^SCALE rows, EDGES a row, skewed), `grid:SIDE` (a 5-point stencil on SIDE x SIDE points) and
`pruned:ROWSxCOLUMNS:SPARSITY` (a weight of which that share is 0; `2of4`: two of each four of a row).
"""

import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Matrix:
    """By rows (CSR): crow and col int32, or int64 where that does not suffice; values float64, None: to be drawn."""

    name: str
    crow: torch.Tensor
    col: torch.Tensor
    values: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def nnz(self) -> int:
        return self.col.numel()


def load(source: str) -> Matrix:
    """A file or a drawn matrix. ValueError, naming the source, on what is neither; OSError where a file is missing."""
    kind = source.split(":")[0]
    try:
        if kind in DRAWN and ":" in source:
            return DRAWN[kind](source)
        path = Path(source)
        suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
        if suffix not in READERS:
            raise ValueError(f"expected a file ending in {', '.join(READERS)}, or {', '.join(DRAWN)}:..., got {source}")
        return READERS[suffix](path)
    except Exception as error:  # zip, zlib, gzip, numpy and int() have theirs, and of sizes MemoryError
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{source}: {str(error) or type(error).__name__}") from error


def _by_rows(name: str, row: Array, col: Array, values: Array | None, shape: tuple[int, int]) -> Matrix:
    """From entries in any order; duplicates stay."""
    rows, columns = shape
    if not 0 <= min(shape) <= max(shape) <= INT64_MAX:
        raise ValueError(f"expected sizes from 0 to {INT64_MAX}, got {rows} x {columns}")
    row, col = _whole("rows", row), _whole("columns", col)
    if values is not None and values.dtype.kind not in "biuf":
        raise ValueError(f"expected real values, got {values.dtype}")
    if col.shape != row.shape or (values is not None and values.shape != row.shape):
        got = f"{row.size}, {col.size}" + ("" if values is None else f" and values of shape {values.shape}")
        raise ValueError(f"expected as many rows as columns and values, got {got}")
    for what, index, size in (("row", row, rows), ("column", col, columns)):
        if index.size and (index.min() < 0 or index.max() >= size):
            raise ValueError(f"expected {what}s within {rows} x {columns}, got {index.min()} to {index.max()}, from 0")
    order = np.argsort(row, kind="stable")
    crow = np.concatenate([[0], np.bincount(row, minlength=rows).cumsum()])
    dtype = np.int32 if max(rows, columns, row.size) < INT32_MAX else np.int64
    kept = None if values is None else torch.from_numpy(np.ascontiguousarray(values[order], dtype=np.float64))
    offsets, inner = (torch.from_numpy(x.astype(dtype)) for x in (crow, col[order]))
    return Matrix(name, offsets, inner, kept, shape)


def _whole(what: str, numbers: Array) -> Array:
    """As int64, and no other numbers than they were."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ValueError(f"expected {what} as whole numbers in one dimension, got {numbers.dtype} of {numbers.shape}")
    with np.errstate(invalid="ignore"):  # of what is no number: that is found below
        whole = numbers.astype(np.int64, copy=False)
    if (other := numbers[whole != numbers]).size:
        raise ValueError(f"expected {what} as whole numbers, got {other[0]}")
    return whole


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("latin-1").replace("\r\n", "\n")


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def read_matrix_market(path: Path) -> Matrix:
    """Coordinate or array; real, integer or pattern; general, symmetric or skew-symmetric."""
    banner, _, rest = _text(path).partition("\n")
    words = banner.lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise ValueError(f"expected a Matrix Market banner, got {banner[:60]!r}")
    form, field, symmetry = words[2:]
    if form not in ("coordinate", "array") or (form, field) == ("array", "pattern"):
        raise ValueError(f"expected coordinates, or an array of numbers, got {form} {field}")
    if field not in ("real", "integer", "pattern", "double") or symmetry not in (
        "general",
        "symmetric",
        "skew-symmetric",
    ):
        raise ValueError(f"expected a real matrix, general or symmetric, got {field} {symmetry}")
    # comments and lines of nothing in one pass: a copy of the rest for each took 4 s of 80,000
    sizes, _, body = re.sub(r"\A([^\S\n]*(%.*)?\n)*+", "", rest).partition("\n")
    rows, columns, *entries = (int(x) for x in sizes.split())
    if len(entries) != (form == "coordinate"):
        raise ValueError(f"expected rows and columns, and the number of entries of coordinates alone, got {sizes!r}")
    if symmetry != "general" and rows != columns:
        raise ValueError(f"expected a {symmetry} matrix to be square, got {rows} x {columns}")
    numbers = np.array(body.split(), dtype=np.float64)
    if form == "array":
        full = _unpacked(numbers, rows, columns, symmetry)
        row, col = full.nonzero()
        return _by_rows(_name(path), row, col, full[row, col], (rows, columns))
    width = 2 if field == "pattern" else 3
    if numbers.size != entries[0] * width:
        raise ValueError(f"expected {entries[0]} entries of {width} numbers, got {numbers.size} numbers")
    table = numbers.reshape(-1, width)
    row, col = (_whole("indices", table[:, i]) - 1 for i in (0, 1))
    values = table[:, 2] if width == 3 else None
    if symmetry != "general":
        mirrored = row != col
        row, col = np.concatenate([row, col[mirrored]]), np.concatenate([col, row[mirrored]])
        sign = -1.0 if symmetry == "skew-symmetric" else 1.0
        values = None if values is None else np.concatenate([values, sign * values[mirrored]])
    return _by_rows(_name(path), row, col, values, (rows, columns))


def _unpacked(numbers: Array, rows: int, columns: int, symmetry: str) -> Array:
    """By columns, and of a symmetric matrix what is not above the diagonal."""
    if symmetry == "general":
        return numbers.reshape(columns, rows).T
    skew = symmetry == "skew-symmetric"
    full = np.zeros((rows, columns))
    col, row = np.triu_indices(rows, 1 if skew else 0)  # the lower triangle, column after column
    full[row, col] = numbers
    return full + np.tril(full, -1).T * (-1 if skew else 1)


def read_npz(path: Path) -> Matrix:
    with np.load(path, allow_pickle=False) as file:
        parts = dict(file)
    rows, columns = _whole("sizes", parts["shape"]).tolist()
    name = _name(path)
    if "crow" in parts:
        crow, col, values = parts["crow"], parts["col"], parts.get("values")
        return _by_rows(name, _expanded(crow, col, rows), col, values, (rows, columns))
    form = parts["format"].item()
    form = form.decode() if isinstance(form, bytes) else str(form)
    data = parts["data"]
    if form == "coo":
        return _by_rows(name, parts["row"], parts["col"], data, (rows, columns))
    if form not in ("csr", "csc", "bsr"):
        raise ValueError(f"expected csr, csc, coo or bsr, got {form}")
    height, width = data.shape[1:] if form == "bsr" else (1, 1)
    if min(height, width) < 1 or rows % height or columns % width:
        raise ValueError(f"expected blocks that {rows} x {columns} can be cut into, got {height} x {width}")
    indices, indptr = _whole("indices", parts["indices"]), parts["indptr"]
    inner = rows if form == "csc" else columns // width
    if indices.size and not 0 <= indices.min() <= indices.max() < inner:  # before they are multiplied
        raise ValueError(f"expected indices from 0 to {inner - 1}, got {indices.min()} to {indices.max()}")
    outer = _expanded(indptr, indices, columns if form == "csc" else rows // height)
    row, col = (indices, outer) if form == "csc" else (outer, indices)
    down, across = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
    row, col = row[:, None, None] * height + down, col[:, None, None] * width + across
    row, col = (np.broadcast_to(x, (indices.size, height, width)).ravel() for x in (row, col))
    return _by_rows(name, row, col, data.ravel() if form == "bsr" else data, (rows, columns))


def _expanded(offsets: Array, inner: Array, outer: int) -> Array:
    offsets = _whole("offsets", offsets)
    before, after = offsets[:-1], offsets[1:]
    if offsets.shape != (outer + 1,) or offsets[0] != 0 or offsets[-1] != inner.size or (after < before).any():
        raise ValueError(f"expected {outer + 1} offsets that do not decrease, from 0 to {inner.size}")
    return np.repeat(np.arange(outer), after - before)


def read_metis(path: Path) -> Matrix:
    """A line of neighbours for each vertex, counted from 1; weights of edges are its values, those of vertices none."""
    lines = [line.split() for line in _text(path).removesuffix("\n").split("\n") if not line.startswith("%")]
    vertices, edges, *options = (int(x) for x in lines[0])
    form = f"{options[0] if options else 0:03d}"
    if not re.fullmatch("[01]{3}", form):
        raise ValueError(f"expected a format of up to three digits, 0 or 1, got {form}")
    weights = options[1] if len(options) > 1 else int(form[1])
    skipped, step = int(form[0]) + weights, 2 if form[2] == "1" else 1
    own = lines[1 : vertices + 1]
    if len(own) != vertices or any(line for line in lines[vertices + 1 :]):
        raise ValueError(f"expected a line for each of {vertices} vertices, got {len(lines) - 1}")
    counts = [len(line) - skipped for line in own]
    if weights < 0 or any(count < 0 or count % step for count in counts):
        raise ValueError(f"expected lines of {skipped} numbers and then {step} an edge, got {counts[:8]} after those")
    flat = np.array([x for line in own for x in line[skipped:]], dtype=np.float64).reshape(-1, step)
    if len(flat) != 2 * edges:
        raise ValueError(f"expected {edges} edges, each at both of its ends, got {len(flat)} ends")
    row = np.repeat(np.arange(vertices), np.array(counts, dtype=np.int64) // step)
    col = _whole("neighbours", flat[:, 0]) - 1
    return _by_rows(_name(path), row, col, flat[:, 1] if step == 2 else None, (vertices, vertices))


def _numbers(source: str, pattern: str, form: str) -> list[int]:
    found = re.fullmatch(pattern, source)
    if found is None:
        raise ValueError(f"expected {form}")
    return [int(number) for number in found.groups()]


def draw_rmat(source: str) -> Matrix:
    """The recursive matrix of Chakrabarti, Zhan and Faloutsos with Graph500's a, b, c = 0.57, 0.19, 0.19."""
    scale, edges = _numbers(source, r"rmat:(\d+):(\d+)", "rmat:SCALE:EDGES")
    generator = np.random.default_rng(0)
    count = edges << scale
    row, col = np.zeros(count, np.int32), np.zeros(count, np.int32)
    a, ab, abc = (round(p * 65536) for p in (0.57, 0.76, 0.95))
    for _ in range(scale):
        u = generator.integers(0, 65536, count, dtype=np.uint16)
        down, across = u >= ab, ((u >= a) & (u < ab)) | (u >= abc)
        row, col = row << 1 | down, col << 1 | across
    both = np.unique(row.astype(np.int64) << scale | col)
    return _by_rows(source, both >> scale, both & ((1 << scale) - 1), None, (1 << scale, 1 << scale))


def draw_grid(source: str) -> Matrix:
    (side,) = _numbers(source, r"grid:(\d+)", "grid:SIDE")
    y, x = (t.ravel() for t in np.mgrid[:side, :side])
    rows, cols = [], []
    for dy, dx in ((-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)):
        inside = (y + dy >= 0) & (y + dy < side) & (x + dx >= 0) & (x + dx < side)
        rows.append((y * side + x)[inside])
        cols.append(((y + dy) * side + x + dx)[inside])
    return _by_rows(source, np.concatenate(rows), np.concatenate(cols), None, (side * side, side * side))


def draw_pruned(source: str) -> Matrix:
    rows, columns = _numbers(source, r"pruned:(\d+)x(\d+):(?:2of4|[\d.]+)", "pruned:ROWSxCOLUMNS:SPARSITY")
    sparsity = source.rpartition(":")[2]
    drawn = np.random.default_rng(0).random((rows, columns), dtype=np.float32)
    if sparsity == "2of4":
        if columns % 4 != 0:
            raise ValueError(f"expected columns in fours to keep two of, got {columns}")
        kept = np.zeros((rows, columns // 4, 4), dtype=bool)
        np.put_along_axis(kept, np.argpartition(drawn.reshape(kept.shape), 1)[..., :2], True, -1)
        kept = kept.reshape(rows, columns)
    elif 0 <= float(sparsity) <= 1:
        kept = drawn >= float(sparsity)
    else:
        raise ValueError(f"expected a sparsity from 0 to 1 or 2of4, got {sparsity}")
    return _by_rows(source, *kept.nonzero(), None, (rows, columns))


READERS = {".mtx": read_matrix_market, ".npz": read_npz, ".graph": read_metis, ".metis": read_metis}
DRAWN = {"rmat": draw_rmat, "grid": draw_grid, "pruned": draw_pruned}
