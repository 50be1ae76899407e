"""Reads records, encodes their texts and appends the vectors, a chunk at a time.

this thread        the other one
encodes chunk 1    reads chunk 2
encodes chunk 2    appends the rows of chunk 1, reads chunk 3
...                ...
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from .formats import header, to_parquet
from .journal import Foreign, Rows, beside, new_file, publish
from .records import Record, Source
from .streams import MOST

KEEP_SECONDS = 2.0  # between two entries of the journal
SUFFIXES = (".npy", ".safetensors", ".parquet")
Found = tuple[float, Path, Record]  # the share of all bytes that is read by then


@dataclass(frozen=True)
class Job:
    """The inputs, the result and the options of a run. chunk: most records that are encoded together; in every run the
    same, so that the bytes are. options: what else the vectors depend on, by its name in messages."""

    inputs: list[Source]
    out: Path
    chunk: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """A run that was stopped can go on: no input is a pipe, which cannot be read again."""
        return not any(source.is_pipe for source in self.inputs)

    def facts(self) -> dict[str, Any]:
        """The facts that must be equal when a stopped run goes on."""
        stats = [(source.path, source.path.stat()) for source in self.inputs]
        found = [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        names = [[source.name, source.kind] for source in self.inputs]
        return {"input files": found, "--field, --column or --format": names, "chunks": self.chunk, **self.options}


@dataclass(frozen=True)
class Progress:
    """The share of the bytes that is read, and the rows that are written; `resumed`: what an earlier run had done."""

    done: float
    rows: int
    resumed: bool = False


@dataclass(frozen=True)
class Summary:
    """Rows that were written, and the records that have a row of NaN, as "FILE:NUMBER: REASON"; bad names the first
    1000 of bad_count."""

    rows: int
    width: int
    bad_count: int
    bad: list[str]


def run(
    job: Job,
    encode: Callable[[list[str]], "np.ndarray[Any, Any]"],
    news: Callable[[Progress], object] = lambda progress: None,
) -> Summary:
    """Embed all texts of a job; go on where an earlier run of the same job stopped.

    encode: texts -> vectors [texts, width]. Row n is that of record n of all inputs; a record without a text has a row
    of NaN. Raises Unreadable for a file that cannot be read, Foreign for the files of another job, OSError.
    """
    if job.out.exists():
        raise Foreign(f"{job.out} exists: delete it, or name another file")
    like = encode([""])
    width, dtype = like.shape[1], like.dtype
    facts = job.facts() if job.goes_on else None
    rows = Rows(job.out, facts, width, dtype, header(job.out.suffix, 0, width, dtype))
    try:
        found = _numbered(job)
        skipped = deque(islice(found, rows.count), maxlen=1)  # an earlier run has encoded them
        news(Progress(skipped[0][0] if skipped else 0.0, rows.count, resumed=True))
        shares = _encoded(job, found, rows, lambda chunk: _vectors(chunk, encode, width, dtype))
        with closing(shares):  # waits for the other thread
            for done in shares:
                news(Progress(done, rows.count))
        rows.keep()
        rows.finish(header(job.out.suffix, rows.count, width, dtype))
    finally:
        rows.close()
    whole = beside(job.out)[0]
    if job.out.suffix == ".parquet":
        whole = job.out.with_name(f"{job.out.name}.new")
        with new_file(whole) as file:
            to_parquet(beside(job.out)[0], file)
    publish(job.out, whole)
    return Summary(rows.count, width, rows.bad_count, rows.bad)


def _encoded(
    job: Job,
    found: Iterator[Found],
    rows: Rows,
    vectors: "Callable[[list[Found]], tuple[np.ndarray[Any, Any], list[str]]]",
) -> Generator[float, None, None]:
    """Appends the rows of all records; yields the share of all bytes after each chunk. Files are read and written in
    another thread."""
    kept = time.monotonic()

    def append(made: "np.ndarray[Any, Any]", bad: list[str], done: float) -> float:
        nonlocal kept
        rows.append(made, bad)
        if time.monotonic() - kept >= KEEP_SECONDS:
            rows.keep()
            kept = time.monotonic()
        return done

    with ThreadPoolExecutor(1, thread_name_prefix="matmuls-files") as files:

        def read() -> "Future[list[Found]]":
            return files.submit(_chunk, found, job.chunk)

        try:
            following, appended = read(), None
            while chunk := following.result():
                following = read()
                made = vectors(chunk)
                if appended is not None:
                    yield appended.result()
                appended = files.submit(append, *made, chunk[-1][0])
            if appended is not None:
                yield appended.result()
        finally:
            for source in job.inputs:
                source.stop()


def _chunk(found: Iterator[Found], most: int) -> list[Found]:
    """The next records, at most so many; fewer where their texts are long, so that memory stays flat."""
    chunk: list[Found] = []
    size = 0
    while len(chunk) < most and size < MOST and (one := next(found, None)) is not None:
        chunk.append(one)
        size += len(one[2].text or "")
    return chunk


def _numbered(job: Job) -> Iterator[Found]:
    """The records of all inputs, each with the share of all bytes that is read by then."""
    before, total = 0, max(sum(source.size for source in job.inputs), 1)
    for source in job.inputs:
        for record in source:
            yield (before + record.done * source.size) / total, source.path, record
        before += source.size


def _vectors(
    chunk: list[Found],
    encode: Callable[[list[str]], "np.ndarray[Any, Any]"],
    width: int,
    dtype: "np.dtype[Any]",
) -> "tuple[np.ndarray[Any, Any], list[str]]":
    """The rows of a chunk, and its records without a text."""
    good = [i for i, (_, _, record) in enumerate(chunk) if record.text is not None]
    made = encode([chunk[i][2].text or "" for i in good]) if good else np.empty((0, width), dtype)
    if len(good) == len(chunk):
        return made, []
    vectors = np.full((len(chunk), width), np.nan, dtype)
    vectors[good] = made
    return vectors, [f"{path}:{record.number}: {record.why}" for _, path, record in chunk if record.text is None]
