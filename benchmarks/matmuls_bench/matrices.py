"""Loads sparse matrices for experiments: from a file, or randomly generated.

Files:
- Matrix Market (.mtx) with coordinates, also compressed (.gz, .bz2);
- METIS graphs (.graph, .metis), also compressed;
- NumPy's .npz, as written by scipy.sparse.save_npz or with the arrays crow, col, shape and optionally values.

Generated:
- `rmat:SCALE:EDGES`: 2^SCALE rows, EDGES entries per row on average, skewed degrees;
- `grid:SIDE`: 5-point stencil on SIDE x SIDE points;
- `pruned:ROWSxCOLUMNS:SPARSITY`: a weight with that share of zeros; SPARSITY `2of4`: 2:4 sparsity.

scipy reads where it has a reader. What a file may make it allocate is checked before, and the indices after.
"""

import bz2
import io
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy.io  # type: ignore[import-untyped]
import scipy.sparse  # type: ignore[import-untyped]
import torch

INT32_MAX = 2**31 - 1
MOST_ROWS, ROWS_AN_ENTRY = 2**27, 16  # limit of rows: 1 GiB of offsets, or 16 per entry
EXPANDED, RATIO = 64 << 20, 200  # limit of bytes that a compressed file becomes: 64 MiB, or 200 times its own
CHUNK = 1 << 18  # entries drawn at a time, so that they stay in the caches; even, as two are drawn from one number
NEWLINE = b"\n"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Matrix:
    """A matrix in CSR: crow and col int32 (int64 if the sizes need it); values float64, or None for a pattern."""

    name: str
    crow: torch.Tensor
    col: torch.Tensor
    values: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def nnz(self) -> int:
        return self.col.numel()


def load(source: str) -> Matrix:
    """Read or generate the matrix `source`.

    Raises ValueError, naming the source, if it is malformed or of an unknown kind, and OSError if a file is missing.
    """
    kind = source.split(":")[0]
    try:
        if kind in DRAWN and ":" in source:
            return DRAWN[kind](source)
        path = Path(source)
        suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
        if suffix not in READERS:
            raise ValueError(f"expected a file ending in {', '.join(READERS)}, or {', '.join(DRAWN)}:..., got {source}")
        return READERS[suffix](path)
    except Exception as error:  # zip, zlib, gzip, numpy, int(); MemoryError on sizes
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{source}: {str(error) or type(error).__name__}") from error


def _csr(name: str, crow: Array, col: Array, values: Array | None, shape: tuple[int, int]) -> Matrix:
    dtype = torch.int32 if max(*shape, col.size) < INT32_MAX else torch.int64
    offsets, inner = (torch.from_numpy(x).to(dtype) for x in (crow, col))
    return Matrix(name, offsets, inner, None if values is None else torch.from_numpy(values), shape)


def _of_scipy(path: Path, a: Any, pattern: bool = False) -> Matrix:
    """A matrix of scipy in any format, with its indices checked. Duplicates of coordinates are summed."""
    if a.dtype.kind not in "biuf":
        raise ValueError(f"expected real values, got {a.dtype}")
    if hasattr(a, "check_format"):  # of compressed formats: load_npz does not look at all indices
        a.check_format(full_check=True)
        cut = a.format == "bsr" and any(size % block for size, block in zip(a.shape, a.blocksize, strict=True))
        if cut or (np.diff(a.indptr) < 0).any():  # which it does not check of a matrix without nonzeros
            raise ValueError(f"expected offsets that do not decrease, of whole blocks of {a.shape}")
    _check_rows(a.shape[0], a.nnz)
    a = a.tocsr() if pattern else a.astype(np.float64).tocsr()
    values = None if pattern else a.data
    return _csr(_name(path), a.indptr, a.indices, values, a.shape)


def _pattern(name: str, counts: Array, col: Array, shape: tuple[int, int]) -> Matrix:
    """CSR from the number of entries of each row, and their columns row after row."""
    return _csr(name, np.concatenate(([0], np.cumsum(counts))), col, None, shape)


def _check_rows(rows: int, entries: int) -> None:
    """Check the rows before their offsets are allocated: a file of a few bytes may declare any number."""
    if rows > (most := max(MOST_ROWS, ROWS_AN_ENTRY * entries)):
        raise ValueError(f"expected at most {most} rows of {entries} entries, got {rows}")


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix not in COMPRESSED:
        return data
    magic, start = COMPRESSED[path.suffix]
    if not data.startswith(magic):
        raise ValueError(f"expected a compressed {path.suffix} file, got {data[:8]!r}")
    return _expanded(data, start)


def _expanded(data: bytes, start: Callable[[], Any]) -> bytes:
    """The content of a compressed file, which may have several parts; stops where it would be too large."""
    most = max(EXPANDED, RATIO * len(data))
    parts: list[bytes] = []
    size, whole = 0, len(data)
    while data:
        engine = start()
        while not engine.eof:
            part = engine.decompress(data, most + 1 - size)
            size += len(part)
            parts.append(part)
            if size > most:
                raise ValueError(_too_large(whole, most))
            data = getattr(engine, "unconsumed_tail", b"")  # of zlib; bz2 keeps what it has not read
            if not part and not data and not engine.eof:
                raise ValueError("expected a whole file, got one that was cut off")
        data = engine.unused_data.lstrip(b"\0")  # gzip's padding
    return b"".join(parts)


def _too_large(packed: int, most: int, instead: str = "decompress the file first") -> str:
    return f"expected at most {most >> 20} MiB in {packed} compressed bytes, got more: {instead}"


def _name(path: Path) -> str:
    name = (path.stem if path.suffix in COMPRESSED else path.name).rsplit(".", 1)[0]
    return name if name.isprintable() else ascii(name)[1:-1]  # it is shown, also in plots


def read_matrix_market(path: Path) -> Matrix:
    """Read coordinates of real numbers, as scipy.io.mmread does."""
    data = _content(path) + NEWLINE  # without one at the end scipy reads beyond it
    rows, _columns, entries, form, field, _symmetry = scipy.io.mminfo(io.BytesIO(data))
    if form != "coordinate" or b"\0" in data:  # scipy writes past the end of an array with too many numbers
        got = "a NUL byte" if form == "coordinate" else form
        raise ValueError(f"expected coordinates in a text file, got {got}")
    if entries > data.count(NEWLINE):  # scipy allocates what the header declares
        raise ValueError(f"expected {entries} entries, a line each, got {data.count(NEWLINE)} lines")
    _check_rows(rows, entries)
    return _of_scipy(path, scipy.sparse.coo_array(scipy.io.mmread(io.BytesIO(data))), pattern=field == "pattern")


def read_npz(path: Path) -> Matrix:
    _check_archive(path)
    with np.load(path, allow_pickle=False) as file:
        if "crow" not in file and "format" not in file:
            needed = "the arrays of scipy.sparse.save_npz, or crow, col, shape and optionally values"
            raise ValueError(f"expected {needed}, got {', '.join(file)}")
        if "crow" not in file:
            return _of_scipy(path, scipy.sparse.load_npz(path))
        crow, col, shape = file["crow"], file["col"], tuple(file["shape"].tolist())
        values = file.get("values", np.ones(col.shape, np.int8))
        return _of_scipy(path, scipy.sparse.csr_array((values, col, crow), shape), pattern="values" not in file)


def _check_archive(path: Path) -> None:
    """Check the sizes that the arrays of an .npz file declare before any is read: a few KB may expand to any size."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if (whole := sum(member.file_size for member in members)) > (most := max(EXPANDED, RATIO * size)):
            raise ValueError(_too_large(size, most, "save it without compression"))
        for member in members:
            with archive.open(member) as file:  # zipfile gives no more than file_size bytes
                _check_npy(file, whole)


def _check_npy(file: IO[bytes], most: int) -> None:
    """ValueError if the header of an .npy file declares more than `most` bytes, for which numpy would take memory."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:  # no array: numpy does not read it as one
        return
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > most:
        raise ValueError(f"expected at most {most} bytes in an array, got one of {shape}, {dtype}")


def read_metis(path: Path) -> Matrix:
    """Read a METIS graph: one line of neighbours per vertex, numbered from 1.

    The edge weights become the values; the vertex weights are ignored.
    """
    header, *lines = METIS_COMMENTS.sub(b"", _content(path)).split(b"\n")
    vertices, edges, *options = map(int, header.split())
    form = f"{options[0] if options else 0:03d}"
    skipped, step = int(form[0]) + (options[1] if len(options) > 1 else int(form[1])), 2 if form[2] == "1" else 1
    counts = np.array([len(line.split()) for line in lines], np.int64)
    if not 0 <= vertices <= counts.size or counts[vertices:].any():
        raise ValueError(f"expected a line for each of {vertices} vertices, got {counts.size}")
    counts = counts[:vertices] - skipped
    if counts.size and (counts.min() < 0 or (counts % step).any()):
        raise ValueError(f"expected lines of {skipped} numbers and then {step} an edge, got {counts[:8].tolist()}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a word that is no number; since numpy 2.3 an exception
        numbers = np.fromstring(b" ".join(lines), sep=" ")
    begins = np.cumsum(counts + skipped) - counts  # where the edges of each line are
    places = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    flat = numbers[places].reshape(-1, step)
    if len(flat) != 2 * edges:
        raise ValueError(f"expected {edges} edges, each at both of its ends, got {len(flat)} ends")
    row, col = np.repeat(np.arange(vertices), counts // step), flat[:, 0].astype(np.int64) - 1
    values = flat[:, 1] if step == 2 else np.ones(len(flat), np.int8)
    return _of_scipy(path, scipy.sparse.coo_array((values, (row, col)), (vertices, vertices)), pattern=step == 1)


METIS_COMMENTS = re.compile(rb"^%[^\n]*+\n?+", re.MULTILINE)


def _numbers(source: str, pattern: str, form: str) -> list[int]:
    found = re.fullmatch(pattern, source)
    if found is None:
        raise ValueError(f"expected {form}")
    return [int(number) for number in found.groups()]


def draw_rmat(source: str) -> Matrix:
    """R-MAT (Chakrabarti, Zhan, Faloutsos) with Graph500's a, b, c = 0.57, 0.19, 0.19; duplicate edges are merged."""
    scale, edges = _numbers(source, r"rmat:(\d+):(\d+)", "rmat:SCALE:EDGES")
    generator = np.random.default_rng(0)
    count = edges << scale
    row, col = np.zeros(count, np.int32), np.zeros(count, np.int32)
    a, ab, abc = (round(p * 65536) for p in (0.57, 0.76, 0.95))
    for _ in range(scale):
        for begin in range(0, count, CHUNK):
            some = slice(begin, begin + CHUNK)
            u = generator.integers(0, 65536, row[some].size, dtype=np.uint16)
            row[some] <<= 1
            row[some] |= u >= ab
            col[some] <<= 1
            col[some] |= ((u >= a) & (u < ab)) | (u >= abc)
    both = np.sort(row.astype(np.int64) << scale | col)  # np.unique takes a hundred times as long
    both = both[np.concatenate(([True], both[1:] != both[:-1]))[: both.size]]
    counts = np.bincount(both >> scale, minlength=1 << scale)
    return _pattern(source, counts, both & ((1 << scale) - 1), (1 << scale, 1 << scale))


def draw_grid(source: str) -> Matrix:
    (side,) = _numbers(source, r"grid:(\d+)", "grid:SIDE")
    here = np.arange(side)
    inside = np.ones((side, side, 5), bool)  # [y, x, neighbour]: up, left, the point, right, down
    inside[:1, :, 0] = inside[:, :1, 1] = inside[:, -1:, 3] = inside[-1:, :, 4] = False
    neighbours = (here[:, None] * side + here)[..., None] + np.array([-side, -1, 0, 1, side])
    return _pattern(source, inside.sum(-1).ravel(), neighbours[inside], (side * side, side * side))


def draw_pruned(source: str) -> Matrix:
    rows, columns = _numbers(source, r"pruned:(\d+)x(\d+):(?:2of4|[\d.]+)", "pruned:ROWSxCOLUMNS:SPARSITY")
    sparsity = source.rpartition(":")[2]
    drawn = np.random.default_rng(0).random((rows, columns), dtype=np.float32)
    if sparsity == "2of4":
        if columns % 4 != 0:
            raise ValueError(f"expected columns in fours to keep two of, got {columns}")
        fours = np.zeros((rows, columns // 4, 4), dtype=bool)
        np.put_along_axis(fours, np.argpartition(drawn.reshape(fours.shape), 1)[..., :2], True, -1)
        kept = fours.reshape(rows, columns)
    elif 0 <= float(sparsity) <= 1:
        kept = drawn >= float(sparsity)
    else:
        raise ValueError(f"expected a sparsity from 0 to 1 or 2of4, got {sparsity}")
    return _pattern(source, kept.sum(1), kept.nonzero()[1], (rows, columns))


COMPRESSED: dict[str, tuple[bytes, Callable[[], Any]]] = {  # the first bytes, and what expands the others
    ".gz": (b"\x1f\x8b", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)),
    ".bz2": (b"BZh", bz2.BZ2Decompressor),
}
READERS = {".mtx": read_matrix_market, ".npz": read_npz, ".graph": read_metis, ".metis": read_metis}
DRAWN = {"rmat": draw_rmat, "grid": draw_grid, "pruned": draw_pruned}
