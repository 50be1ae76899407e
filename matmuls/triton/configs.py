"""Tile configurations of the kernels: from the nearest shape in the user's file or the shipped file, or a default.

`matmuls tune` writes the user's file, one per GPU model, in the user's cache directory. Files are JSON and not trusted:
a broken, foreign or oversized file, or an entry of a later version, is reported once and ignored.
"""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from .. import files
from ..device import capability, forget_recordings, is_batch_invariant, multiprocessors
from .launch import INTERPRETED

Result = TypeVar("Result")
SCHEMA = 1
LARGEST_FILE = 1 << 20  # bytes; a thousand entries take a fifth of it
INVARIANT_ROWS = 1024  # the bucket of all row counts under handles(batch_invariant=True)
NEAR = 3.0  # how many doublings of M, K and N together the shape of an entry may differ
SHIPPED = Path(__file__).parent / "shipped"
# The GPU whose shipped file serves all GPUs of a capability, whose multiprocessors are alike.
SHIPPED_FOR = {(9, 0): "NVIDIA H200"}
# The tuned kernels. K is the dimension summed over, N the width of the result. A gradient of weights is [N, K] (of a
# network's weights [N, K] or [K, N]); the operand with N columns is in the plan's order.
OPERATORS = (
    "masked_linear",  # forward: gather and scatter, weights [N, K]
    "masked_linear_t",  # the gradient of x: the same on transposed weights
    "masked_weights",  # the gradient of the weights
    "masked_few_weights",  # the same for few rows, on sm_90: both operands sorted, concurrent with the product for x
    "masked_ffn_gate_up",
    "masked_ffn_down",  # scatter only
    "masked_ffn_gradient",
    "masked_ffn_input",  # the gradient of x, two products into one sum
    "masked_ffn_weights",  # one or both operands in the plan's order; also used for masked_linear on sm_90
)
WEIGHTS = ("masked_weights", "masked_few_weights", "masked_ffn_weights")
CHUNKED = ("masked_weights", "masked_ffn_weights")  # whose `split` is a number of chunks of rows


@dataclass(frozen=True)
class Tiles:
    """One configuration: a tile of rows x columns of the result, depth of the sum per step."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3
    group: int = 8  # row tiles that share a pass over the columns
    persistent: bool = False  # one program per multiprocessor, each loops over tiles
    flatten: bool = False  # tile loop and sum loop form one pipeline: the next tile's loads overlap a tile's stores
    tma: bool = False  # TMA descriptors for weights (for the weights' gradient: one sorted operand); sm_90 and later
    pieces: int = 1  # number of parts in which a tile's result is stored
    # gradient of weights: number of chunks into which the rows are cut, summed afterwards. masked_linear, if not 1 and
    # with tma: the kernel for few rows, one wave of tiles for any mask
    split: int = 1

    def __post_init__(self) -> None:
        powers = (self.rows, self.columns, self.depth, self.warps, self.pieces)
        numbers = (*powers, self.stages, self.group, self.split)
        if not all(type(n) is int for n in numbers) or not all(
            type(b) is bool for b in (self.persistent, self.flatten, self.tma)
        ):
            raise ValueError(f"expected whole numbers, and true or false, got {self}")
        if any(n < 1 or n & (n - 1) for n in powers) or not all(16 <= n <= 256 for n in powers[:3]):
            raise ValueError(f"expected powers of two, tiles between 16 and 256, got {self}")
        if self.warps > 16 or self.pieces > 8 or not 1 <= self.stages <= 8:
            raise ValueError(f"expected at most 16 warps, 8 pieces and 8 stages, got {self}")
        if not 1 <= self.group <= 64 or not 1 <= self.split <= 64:
            raise ValueError(f"expected a group and a split between 1 and 64, got {self}")

    @property
    def walk(self) -> int:
        """0: one tile per program; 1: a loop over tiles; 2: the loop as one pipeline."""
        return self.persistent + (self.persistent and self.flatten)


class Entry(NamedTuple):
    """The fastest configuration found for one shape."""

    operator: str
    k: int
    n: int
    m: int  # bucket
    dtype: str
    triton: str
    tiles: Tiles
    us: float
    default_us: float


def bucket(m: int) -> int:
    """Rounds a row count to the bucket that shares a configuration: the next power of two from 16 to 65536."""
    return min(65536, max(16, 1 << (m - 1).bit_length()))


# KB of shared memory per block, by capability; a capability that is not listed has those of its major version
SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (11, 0): 227}


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def kilobytes(self) -> int:
        """KB of shared memory per block; 99, as 12.0 has, if the capability is unknown."""
        return SHARED.get(self.capability, SHARED.get((self.capability[0], 0), 99))

    @property
    def takes_large_tiles(self) -> bool:
        """True if TMA brings tiles to a block with as much shared memory as on Hopper: not on 12.0."""
        return self.capability >= (9, 0) and self.kilobytes >= SHARED[9, 0]


@functools.cache
def gpu(index: int | None) -> Gpu:
    if INTERPRETED or index is None:
        return Gpu("interpreter", (8, 0), 4)
    device = torch.device("cuda", index)
    return Gpu(torch.cuda.get_device_name(device), capability(device), multiprocessors(device))


# ---------------------------------------------------------------------------------------------------------------- files


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"


def user_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("matmuls") / "tiles"


class Contents(NamedTuple):
    """Contents of a file: its entries, and verbatim those unknown to this version, each with what is wrong."""

    entries: list[Entry]
    unknown: list[tuple[dict[str, Any], ValueError]]


def parse(text: str, name: str) -> Contents:
    """Parses a file for the GPU called name. Raises ValueError saying what is wrong."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"expected an object with schema {SCHEMA}")
    if content.get("gpu") != name:
        raise ValueError(f"expected entries for {name}, got {content.get('gpu')!r}")
    if not isinstance(content.get("entries"), list):
        raise ValueError("expected a list of entries")
    found = Contents([], [])
    for e in content["entries"]:
        if not isinstance(e, dict):
            raise ValueError(f"expected an entry of {', '.join(Entry._fields)}, got {e!r:.200}")
        try:
            found.entries.append(_entry(e))
        except ValueError as error:
            found.unknown.append((e, error))
    return found


def _entry(e: dict[str, Any]) -> Entry:
    if set(e) != set(Entry._fields):
        raise ValueError(f"expected an entry of {', '.join(Entry._fields)}, got {e!r:.200}")
    whole = [e[f] for f in ("k", "n", "m")]
    if e["operator"] not in OPERATORS or not all(type(n) is int and 0 < n < 1 << 31 for n in whole):
        raise ValueError(f"expected a known operator and sizes, got {e!r:.200}")
    if not all(isinstance(e[f], str) for f in ("dtype", "triton")) or not all(
        isinstance(e[f], int | float) and abs(e[f]) < 1e15 for f in ("us", "default_us")
    ):
        raise ValueError(f"expected a dtype, a Triton version and times, got {e!r:.200}")
    if not isinstance(e["tiles"], dict) or not set(e["tiles"]) <= {f.name for f in fields(Tiles)}:
        raise ValueError(f"expected tiles, got {e['tiles']!r:.200}")
    try:
        return Entry(**{**e, "tiles": Tiles(**e["tiles"])})
    except TypeError as error:
        raise ValueError(str(error)) from None


UNREADABLE = (OSError, ValueError, RecursionError)


def load(path: Path, name: str) -> Contents:
    """Loads the file; empty if there is none. Raises one of UNREADABLE saying what is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return Contents([], [])
    if len(content) > LARGEST_FILE:
        raise ValueError(f"expected at most {LARGEST_FILE} bytes")
    return parse(content.decode(), name)


def read(path: Path, name: str) -> list[Entry]:
    """The file's entries; none if the file is missing or, with a report, unusable."""
    try:
        entries, unknown = load(path, name)
    except UNREADABLE as error:
        warnings.warn(f"matmuls: {path} is ignored: {error}", stacklevel=2)
        return []
    if unknown:
        count = f"{len(unknown)} of {len(entries) + len(unknown)} entries, the first"
        warnings.warn(f"matmuls: a part of {path} is ignored: {count}: {unknown[0][1]}", stacklevel=2)
    return entries


def write(path: Path, name: str, entries: Iterable[Entry], unknown: Iterable[dict[str, Any]] = ()) -> None:
    known = ({**e._asdict(), "tiles": asdict(e.tiles)} for e in entries)
    content = {"schema": SCHEMA, "gpu": name, "entries": [*known, *unknown]}
    files.write(path, json.dumps(content, indent=1) + "\n")


def entries(gpu: Gpu, folder: Path) -> tuple[list[Entry], list[Entry]]:
    """The user's, from the file in `folder`, and the shipped ones."""
    like = SHIPPED_FOR.get(gpu.capability, gpu.name)
    return read(file_of(folder, gpu.name), gpu.name), read(file_of(SHIPPED, like), like)


@functools.cache
def _entries(gpu: Gpu) -> tuple[list[Entry], list[Entry]]:
    return entries(gpu, user_folder())


def reload() -> None:
    """Read the files again at the next call."""
    for cached in (_entries, tiles):
        cached.cache_clear()
    forget_recordings()


# -------------------------------------------------------------------------------------------------------------- look-up


def chunks(t: Tiles, m: int, n: int, k: int, multiprocessors: int) -> int:
    """`split` of a gradient of weights: a program for every multiprocessor, with at least a thousand rows each.

    A tile of one chunk is stored at once, parts are stored in float32 and read again. So more chunks cost time where
    the tiles of one chunk already keep the GPU busy: 6,000 x 6,144 x 1,536 on an H200, with 50, 25 and 5 % of the rows
    in the first expert, takes 172, 174 and 200 us with one chunk, 180, 237 and 227 with two. With fewer tiles they can
    save time: 8,192 x 1,024 x 1,024 takes 45, 61 and 76 us with one chunk, 45, 53 and 52 with two
    (benchmarks/results/cuda/masked-choices.json).
    """
    return max(1, min(multiprocessors // (-(-n // t.rows) * -(-k // t.columns)), m // 1024, 16))


def choose(
    mine: list[Entry],
    shipped: list[Entry],
    operator: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    version: str,
    multiprocessors: int,
) -> Tiles | None:
    """The nearest entry: one of the user's for this K, N and Triton version, or a shipped one; the user's if both are
    equally near, None if all are farther than NEAR.

    A user's entry without a time is ignored: earlier versions wrote the default as one if every trial had failed.
    """

    def distance(e: Entry) -> float:
        return sum(abs(math.log2(a / b)) for a, b in ((e.m, m), (e.n, n), (e.k, k)))

    own = [e for e in mine if (e.operator, e.k, e.n, e.dtype, e.triton) == (operator, k, n, dtype, version) and e.us]
    given = [e for e in shipped if (e.operator, e.dtype) == (operator, dtype)]
    near = [e for e in (*own, *given) if distance(e) <= NEAR]
    if not near:
        return None
    nearest = min(near, key=lambda e: (distance(e), e.triton != version))  # the first of equals
    if operator not in CHUNKED or (nearest.k, nearest.n) == (k, n):
        return nearest.tiles
    return replace(nearest.tiles, split=chunks(nearest.tiles, m, n, k, multiprocessors))


def default(operator: str, m: int, n: int, k: int, size: int, gpu: Gpu, tf32: bool = False) -> Tiles:
    """Tiles that fit every GPU of the kind, for an element size in bytes; on sm_90 the fastest ones on an H200."""
    t = _default(operator, m, n, k, size, gpu, tf32)
    weights = 2 if operator == "masked_ffn_gate_up" else 1
    stage = t.depth * (t.rows + weights * t.columns) * size
    return replace(t, stages=max(1, min(t.stages, gpu.kilobytes * 1024 // stage)))


def _default(operator: str, m: int, n: int, k: int, size: int, gpu: Gpu, tf32: bool) -> Tiles:
    pieces = 4 if operator == "masked_ffn_gradient" else 1
    if size > 2:
        side = 128 if tf32 else 64
        if m <= 64 and operator not in WEIGHTS:
            return Tiles(16 if m <= 16 else 32, 64, 32, warps=4)
        return Tiles(side, side, 32, warps=8 if tf32 else 4, pieces=min(pieces, 2))
    if operator == "masked_few_weights":  # 48 KB of stages: what the product for x leaves free on a multiprocessor
        return Tiles(128, 128, 32, warps=4, stages=3, group=4, tma=True, pieces=2)
    if operator in WEIGHTS:
        chosen = Tiles(128, 128, 32, stages=4)
        if gpu.takes_large_tiles:
            # rows are sorted first if the product is long compared with that
            tma = operator == "masked_ffn_weights" or (m > 1024 and max(n, k) >= 2048)
            small = Tiles(128, 128, 128) if m > 1024 else Tiles(128, 256, 64)
            chosen = Tiles(128, 256, 64, tma=True, pieces=4) if tma else small
        return replace(chosen, split=chunks(chosen, m, n, k, gpu.multiprocessors))
    if m <= 16:
        return Tiles(16, 64, 128 if operator != "masked_ffn_gate_up" else 64, warps=4, pieces=min(pieces, 2))
    if m <= 64:
        return Tiles(64, 64, 64, warps=4, stages=4 if gpu.takes_large_tiles else 3, pieces=min(pieces, 2))
    if not gpu.takes_large_tiles:
        wide = 64 if operator == "masked_ffn_gate_up" else 128
        return Tiles(128, wide, 32, warps=8, stages=4, pieces=pieces)
    if operator == "masked_ffn_gate_up":
        return Tiles(128, 128, 64, pieces=2)
    if operator == "masked_ffn_gradient":
        return Tiles(128, 256, 64, pieces=pieces)
    stages = 3 if k < 2048 else 4
    return Tiles(128, 256, 64, stages=stages, persistent=True, flatten=True, tma=True, pieces=8)


SMALLEST = Tiles(32, 32, 32, warps=4, stages=2)  # fallback if a configuration does not fit


@functools.lru_cache(maxsize=4096)
def tiles(operator: str, m: int, n: int, k: int, dtype: torch.dtype, index: int | None, tf32: bool = False) -> Tiles:
    """The tiles that `operator` runs with; m is a bucket."""
    device = gpu(index)
    name = str(dtype).removeprefix("torch.")
    safe = default(operator, m, n, k, dtype.itemsize, device, tf32)
    if INTERPRETED or index is None or tf32:  # `matmuls tune` times float32 without TF32
        return safe
    mine, shipped = _entries(device)
    found = choose(mine, shipped, operator, m, n, k, name, triton.__version__, device.multiprocessors)
    if found is None:
        _advise(operator, m, n, k, name, device.name)
    return found or safe


_advised: set[tuple[str, int, int, str, str]] = set()


def _advise(operator: str, m: int, n: int, k: int, dtype: str, name: str) -> None:
    """Warn once for each kernel, K, N and dtype, at the first number of rows that is not tuned."""
    if (key := (operator, n, k, dtype, name)) in _advised:
        return
    _advised.add(key)
    group = "masked_ffn" if operator.startswith("masked_ffn") else "masked_linear"
    layer = (n, k) if operator in ("masked_linear_t", "masked_ffn_down", "masked_ffn_input") else (k, n)
    warnings.warn(
        f"matmuls: {operator} with M={m}, K={k}, N={n} in {dtype} is not tuned for {name} and runs with a default; "
        f"to tune it: matmuls tune {group} --m {m} --k {layer[0]} --n {layer[1]} --dtype {dtype}",
        stacklevel=2,
    )


_refused: set[tuple[str, Tiles, int | None]] = set()
forced: dict[str, Tiles] = {}  # operator -> what the tuner is trying


def run(
    operator: str, m: int, n: int, k: int, like: torch.Tensor, tf32: bool, attempt: Callable[[Tiles], Result]
) -> Result:
    """Runs `attempt` with the tiles of this shape; if the GPU cannot run them, with the smallest, which is reported
    once."""
    if operator in forced:
        return attempt(forced[operator])
    index = like.device.index
    rows = INVARIANT_ROWS if is_batch_invariant() else bucket(m)
    chosen = tiles(operator, rows, n, k, like.dtype, index, tf32)
    if (operator, chosen, index) not in _refused:
        try:
            return attempt(chosen)
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            warnings.warn(f"matmuls: {operator} with {chosen} does not run here: {error}", stacklevel=2)
            _refused.add((operator, chosen, index))
    return attempt(SMALLEST)
