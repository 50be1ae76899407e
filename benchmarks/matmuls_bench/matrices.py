"""Loads sparse matrices for experiments: from a file, or randomly generated.

Files:
- Matrix Market (.mtx), also compressed (.gz, .bz2);
- METIS graphs (.graph, .metis), also compressed;
- NumPy's .npz, as written by scipy.sparse.save_npz or with the arrays crow, col, shape and optionally values.

Generated:
- `rmat:SCALE:EDGES`: 2^SCALE rows, EDGES entries per row on average, skewed degrees;
- `grid:SIDE`: 5-point stencil on SIDE x SIDE points;
- `pruned:ROWSxCOLUMNS:SPARSITY`: a weight with that share of zeros; SPARSITY `2of4`: 2:4 sparsity.

scipy's readers do the parsing where they exist. They trust their input: files are checked before, matrices after.
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

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
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


def _by_rows(name: str, row: Array, col: Array, values: Array | None, shape: tuple[int, int]) -> Matrix:
    """CSR from entries in any order. Duplicates stay separate; the entries of a row keep their order."""
    rows, columns = _sizes(shape[0], shape[1], row.size)
    row, col = _whole("rows", row), _whole("columns", col)
    if values is not None and values.dtype.kind not in "biuf":
        raise ValueError(f"expected real values, got {values.dtype}")
    if col.shape != row.shape or (values is not None and values.shape != row.shape):
        got = f"{row.size}, {col.size}" + ("" if values is None else f" and values of shape {values.shape}")
        raise ValueError(f"expected as many rows as columns and values, got {got}")
    for what, index, size in (("row", row, rows), ("column", col, columns)):
        if index.size and (index.min() < 0 or index.max() >= size):
            raise ValueError(f"expected {what}s within {rows} x {columns}, got {index.min()} to {index.max()}, from 0")
    kept = np.zeros(row.shape, np.int8) if values is None else values.astype(np.float64, copy=False)
    entries = scipy.sparse.coo_array((kept, (row, col)), shape=shape)
    entries.has_canonical_format = True  # otherwise tocsr sums duplicates
    a = entries.tocsr()
    return _csr(name, a.indptr, a.indices, None if values is None else a.data, shape)


def _pattern(name: str, counts: Array, col: Array, shape: tuple[int, int]) -> Matrix:
    """CSR from the number of entries of each row, and their columns row after row."""
    _sizes(*shape, col.size)
    return _csr(name, np.concatenate(([0], np.cumsum(counts))), col, None, shape)


def _csr(name: str, crow: Array, col: Array, values: Array | None, shape: tuple[int, int]) -> Matrix:
    dtype = torch.int32 if max(*shape, col.size) < INT32_MAX else torch.int64
    offsets, inner = (torch.from_numpy(x).to(dtype) for x in (crow, col))
    return Matrix(name, offsets, inner, None if values is None else torch.from_numpy(values), shape)


def _sizes(rows: int, columns: int, entries: int) -> tuple[int, int]:
    """Check sizes before the row offsets are allocated: a file of a few bytes may declare any size."""
    if not 0 <= min(rows, columns) <= max(rows, columns) <= INT64_MAX:
        raise ValueError(f"expected sizes from 0 to {INT64_MAX}, got {rows} x {columns}")
    if rows > (most := max(MOST_ROWS, ROWS_AN_ENTRY * entries)):
        raise ValueError(f"expected at most {most} rows of {entries} entries, got {rows}")
    return rows, columns


def _whole(what: str, numbers: Array) -> Array:
    """One-dimensional numbers as signed integers; ValueError if that would change one."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ValueError(f"expected {what} as whole numbers in one dimension, got {numbers.dtype} of {numbers.shape}")
    if numbers.dtype.kind == "i":
        return numbers
    with np.errstate(invalid="ignore"):  # NaN and infinity: rejected below
        whole = numbers.astype(np.int64, copy=False)
    if (other := numbers[whole != numbers]).size:
        raise ValueError(f"expected {what} as whole numbers, got {other[0]}")
    return whole


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


# Possessive quantifiers (`*+`) never backtrack: one pass over the file, constant memory. Blank lines may appear
# anywhere after the banner.
COMMENTS = re.compile(rb"(?:[ \t]*+%.*+\n|[ \t\r]*+\n)*+")  # scipy takes no carriage return before a %
SIZES = re.compile(rb"[ \t]*+(-?\d++)[ \t]++(-?\d++)(?:[ \t]++(\d++))?+[ \t\r]*+\n")
BLANK = re.compile(rb"\n[ \t\r]*+(?=\n)")
REAL = rb"-?+(?:(?:\d++\.?+\d*+|\.\d++)(?:[eE][-+]?+\d++)?+|(?i:inf(?:inity)?+|nan))"
FIELDS = {"real": REAL, "double": REAL, "integer": rb"-?+\d++", "unsigned-integer": rb"\d++", "pattern": b""}
SYMMETRIES = "general", "symmetric", "skew-symmetric"


@dataclass(frozen=True)
class _Market:
    """The parsed header of a Matrix Market file; its entries start at data[begin]."""

    data: bytes
    form: str
    field: str
    symmetry: str
    shape: tuple[int, int]
    entries: int
    begin: int

    @classmethod
    def of(cls, data: bytes) -> "_Market":
        banner = data[: data.find(b"\n")].decode("latin-1")
        words = banner.lower().split()
        if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
            raise ValueError(f"line 1: expected a Matrix Market banner, got {banner[:60]!r}")
        form, field, symmetry = words[2:]
        if form not in ("coordinate", "array") or (form, field) == ("array", "pattern"):
            raise ValueError(f"line 1: expected coordinates, or an array of numbers, got {form} {field}")
        if field not in FIELDS or symmetry not in SYMMETRIES:
            raise ValueError(f"line 1: expected a real matrix, general or symmetric, got {field} {symmetry}")
        if (field, symmetry) == ("unsigned-integer", "skew-symmetric"):
            raise ValueError(f"line 1: expected numbers that have a negative of a {symmetry} matrix, got {field}")
        begin = _end(COMMENTS, data, len(banner) + 1)
        sizes, where = SIZES.match(data, begin), _line(data, begin)
        if sizes is None or (sizes[3] is None) != (form == "array"):
            expected = "rows and columns, and the number of entries of coordinates alone"
            raise ValueError(f"{where}: expected {expected}, got {_shown(data, begin)}")
        rows, columns = int(sizes[1]), int(sizes[2])
        if symmetry != "general" and rows != columns:
            raise ValueError(f"{where}: expected a {symmetry} matrix to be square, got {rows} x {columns}")
        stored = {"general": rows * columns, "symmetric": rows * (rows + 1) // 2}.get(symmetry, rows * (rows - 1) // 2)
        entries = stored if form == "array" else int(sizes[3])
        return cls(data, form, field, symmetry, _sizes(rows, columns, entries), entries, sizes.end())

    def check_entries(self) -> None:
        """Check that there is one entry per line and as many as declared, before memory is allocated for them.

        scipy accepts a number followed by other characters and skips the rest of the line; a NUL byte crashes it.
        """
        data = self.data
        parts = [FIELDS[self.field]] if self.form == "array" else [rb"\d++", rb"\d++", FIELDS[self.field]]
        entry = rb"[ \t]*+" + rb"[ \t]++".join(part for part in parts if part)
        end = _end(re.compile(rb"(?:(?:" + entry + rb")?+[ \t\r]*+\n)*+"), data, self.begin)
        if end < len(data):
            expected = "" if self.form == "array" else "row and column" + (" and " if FIELDS[self.field] else "")
            expected += f"a number of field {self.field}" if FIELDS[self.field] else ""
            raise ValueError(f"{_line(data, end)}: expected {expected} on a line, got {_shown(data, end)}")
        count = data.count(NEWLINE, self.begin)
        if self.form == "array" or count != self.entries:  # scipy checks the count of coordinates, not of arrays
            count -= len(BLANK.findall(data, self.begin - 1))
        if count != self.entries:
            raise ValueError(f"expected {self.entries} entries of {sum(map(bool, parts))} numbers, got {count}")


def _end(pattern: re.Pattern[bytes], data: bytes, begin: int) -> int:
    found = pattern.match(data, begin)
    return found.end() if found else begin


def _line(data: bytes, at: int) -> str:
    return f"line {data.count(NEWLINE, 0, at) + 1}"


def _shown(data: bytes, at: int) -> str:
    return repr(data[at : at + 60].partition(NEWLINE)[0].decode("latin-1"))


def read_matrix_market(path: Path) -> Matrix:
    """Read coordinate or array; real, integer, unsigned-integer or pattern; general, symmetric or skew-symmetric."""
    data = _content(path)
    market = _Market.of(data if data.endswith(NEWLINE) else data + NEWLINE)
    market.check_entries()
    if market.entries == 0:  # an empty array crashes scipy
        a = scipy.sparse.coo_array(market.shape)
    else:
        banner = b"%%MatrixMarket"  # the only spelling that scipy accepts
        data = market.data if market.data.startswith(banner) else market.data.lstrip()
        if not data.startswith(banner):
            data = banner + data[len(banner) :]
        a = scipy.sparse.coo_array(scipy.io.mmread(io.BytesIO(data)))
    if market.symmetry == "skew-symmetric" and (rows := a.row[(a.row == a.col) & (a.data != 0)]).size:
        raise ValueError(
            f"expected a skew-symmetric matrix to have a diagonal of 0, got another number in row {rows[0] + 1}"
        )
    values = None if market.field == "pattern" else a.data
    return _by_rows(_name(path), a.row, a.col, values, market.shape)


SCIPYS = {  # the integer arrays that scipy.sparse.save_npz writes for each format
    "csr": ("indices", "indptr"),
    "csc": ("indices", "indptr"),
    "bsr": ("indices", "indptr"),
    "coo": ("row", "col"),
    "dia": ("offsets",),
}


NPZ = "the arrays of scipy.sparse.save_npz, or crow, col, shape and optionally values"


def read_npz(path: Path) -> Matrix:
    _check_archive(path)
    with np.load(path, allow_pickle=False) as file:

        def part(name: str) -> Array:
            if name not in file:
                given = ", ".join(map(repr, sorted(file)[:8])) or "no array"
                raise ValueError(f"expected {NPZ}, got {given}: {name} is missing")
            array: Array = file[name]
            return array

        sizes = _whole("sizes", part("shape"))
        if sizes.size != 2:
            raise ValueError(f"expected a shape of two sizes, got {sizes[:8].tolist()}")
        ours = "crow" in file
        data = part("col" if ours else "data")
        rows, columns = shape = _sizes(*sizes.tolist(), data.size)
        if ours:
            counts = np.diff(_offsets(part("crow"), rows, data.size, data.size))
            return _by_rows(_name(path), np.repeat(np.arange(rows), counts), data, file.get("values"), shape)
        form = part("format").item()
        form = form.decode() if isinstance(form, bytes) else str(form)
        if form not in SCIPYS:
            raise ValueError(f"expected {', '.join(SCIPYS)}, got {form[:20]!r}")
        parts = {name: _whole(name, part(name)) for name in SCIPYS[form]}
    if data.dtype.kind not in "biuf":
        raise ValueError(f"expected real values, got {data.dtype}")
    # scipy does not check offsets and block sizes, and narrows the offsets of diagonals to int32
    height, width = data.shape[1:] if form == "bsr" and data.ndim == 3 else (int(form != "bsr"), 1)
    if min(height, width) < 1 or rows % height or columns % width:
        raise ValueError(f"expected blocks that {rows} x {columns} can be cut into, got data of {data.shape}")
    if "indptr" in parts:
        count = parts["indices"].size
        _offsets(parts["indptr"], columns if form == "csc" else rows // height, 0, count)
    if form == "dia" and (far := [x for x in parts["offsets"].tolist() if abs(x) > max(INT32_MAX, rows, columns)]):
        raise ValueError(f"expected diagonals of {rows} x {columns}, got {far[0]}")
    a = scipy.sparse.load_npz(path)
    if "indptr" in parts:
        a.check_format(full_check=True)  # tocoo does not check indices
    a = a.tocoo()
    return _by_rows(_name(path), a.row, a.col, a.data, shape)


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


def _offsets(offsets: Array, outer: int, least: int, most: int) -> Array:
    """Check compressed offsets of `outer` rows or columns: from 0, not decreasing, the last in [least, most]."""
    offsets = _whole("offsets", offsets)
    if (
        offsets.shape != (outer + 1,)
        or offsets[0] != 0
        or not least <= offsets[-1] <= most
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise ValueError(f"expected {outer + 1} offsets that do not decrease, from 0 to {most}")
    return offsets


def read_metis(path: Path) -> Matrix:
    """Read a METIS graph: one line of neighbours per vertex, numbered from 1.

    The edge weights become the values; the vertex weights are ignored.
    """
    counts, numbers = _words(METIS_COMMENTS.sub(b"", _content(path)))
    header = numbers[: counts[0] if counts.size else 0]
    vertices, edges, *options = _whole("sizes", header).tolist()
    form = f"{options[0] if options else 0:03d}"
    if not re.fullmatch("[01]{3}", form):
        raise ValueError(f"expected a format of up to three digits, 0 or 1, got {form}")
    weights = options[1] if len(options) > 1 else int(form[1])
    skipped, step = int(form[0]) + weights, 2 if form[2] == "1" else 1
    lines, own = counts.size - 1, counts[1 : max(vertices, 0) + 1]
    if own.size != vertices or counts[vertices + 1 :].any():
        raise ValueError(f"expected a line for each of {vertices} vertices, got {lines}")
    if weights < 0 or (own < skipped).any() or ((own - skipped) % step).any():
        got = (own[:8] - skipped).tolist()
        raise ValueError(f"expected lines of {skipped} numbers and then {step} an edge, got {got} after those")
    flat = numbers[header.size :]
    if skipped:
        flat = flat[np.arange(flat.size) - np.repeat(np.cumsum(own) - own, own) >= skipped]
    flat, counts = flat.reshape(-1, step), own - skipped
    if len(flat) != 2 * edges:
        raise ValueError(f"expected {edges} edges, each at both of its ends, got {len(flat)} ends")
    row = np.repeat(np.arange(vertices), counts // step)
    col = _whole("neighbours", flat[:, 0]) - 1
    return _by_rows(_name(path), row, col, flat[:, 1] if step == 2 else None, (vertices, vertices))


METIS_COMMENTS = re.compile(rb"^%[^\n]*+\n?+", re.MULTILINE)
PIECE = 1 << 22  # bytes of text whose words are found together, in arrays of 20 times their size
WORD = re.compile(rb"[^ \t-\r]++")


def _words(text: bytes) -> tuple[Array, Array]:
    """How many numbers each line has, and all numbers as float64."""
    counts, numbers, begin = [np.zeros(0, np.int64)], [np.zeros(0)], 0
    while begin < len(text):
        end = text.find(NEWLINE, begin + PIECE) + 1 or len(text)
        piece = text[begin:end] if text.endswith(NEWLINE) or end < len(text) else text[begin:end] + NEWLINE
        begin = end
        data = np.frombuffer(piece, np.uint8)
        begins = (data != 32) & ((data < 9) | (data > 13))  # no white space
        begins[1:] &= ~begins[:-1]  # numpy copies what it reads and writes
        places = np.flatnonzero(begins)
        counts.append(np.diff(np.searchsorted(places, np.flatnonzero(data == NEWLINE[0])), prepend=0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a word that is no number; since numpy 2.3 an exception
            try:
                found = np.fromstring(piece, sep=" ") if places.size else np.zeros(0)
            except (ValueError, DeprecationWarning):
                found = None
        if found is None or found.size != places.size:
            wrong = next((w for w in WORD.findall(piece) if not re.fullmatch(rb"[+-]?+" + REAL, w)), b"")
            raise ValueError(f"expected numbers, got {wrong[:20].decode('latin-1')!r}")
        numbers.append(found)
    return np.concatenate(counts), np.concatenate(numbers)


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
