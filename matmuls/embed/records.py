"""The texts of files, one at a time: lines, JSON lines, CSV and Parquet."""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}  # others: lines


class Unreadable(ValueError):
    """A file that cannot be read as a whole, or lacks the column."""


@dataclass(frozen=True)
class Record:
    """The text at `number` (from 1) of its file, or None and `why`; `done`: the share of the file that is read."""

    number: int
    text: str | None
    why: str = ""
    done: float = 0.0


def records(path: Path, name: str) -> Iterator[Record]:
    """The records of a file; `name`: the field or column with the text. The number of a record is that of its line, for
    Parquet that of its row. Raises Unreadable."""
    kind = FORMATS.get(path.suffix.lower())
    try:
        if kind == "parquet":
            yield from _parquet(path, name)
        elif kind == "csv":
            yield from _csv(path, name)
        else:
            with path.open("rb") as file:
                yield from _lines(file, path.stat().st_size, (lambda line: _field(line, name)) if kind else _decoded)
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror or error}") from None


def _lines(file: BinaryIO, size: int, read: Callable[[bytes], tuple[str | None, str]]) -> Iterator[Record]:
    done = 0
    for number, line in enumerate(file, 1):
        done += len(line)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        text, why = read(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        yield Record(number, text, why, done / max(size, 1))


def _decoded(line: bytes) -> tuple[str | None, str]:
    try:
        return line.decode(), ""
    except UnicodeDecodeError:
        return None, "no valid UTF-8"


def _field(line: bytes, name: str) -> tuple[str | None, str]:
    text, why = _decoded(line)
    if text is None:
        return None, why
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None, "no valid JSON"
    return _text(found.get(name) if isinstance(found, dict) else None, f"no text in field {name}")


def _text(found: Any, why: str) -> tuple[str | None, str]:
    """A text, or None and the reason; lone surrogates, as of JSON's "\\ud800", are no text."""
    if not isinstance(found, str):
        return None, why
    try:
        found.encode()
    except UnicodeEncodeError:
        return None, "no valid UTF-8"
    return found, ""


def _csv(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    size = max(path.stat().st_size, 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        done = 0

        def counted() -> Iterator[str]:
            nonlocal done
            for line in file:
                done += len(line)  # of characters, not bytes: only for the time left
                yield line

        rows = csv.reader(counted(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        header = next(rows, [])
        if header.count(name) != 1:
            raise Unreadable(f"expected one column {name} in {path}, got the columns {', '.join(header)}")
        column = header.index(name)
        while True:
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield Record(rows.line_num, None, str(error), done / size)
                continue
            if row is None:
                return
            if row:  # a blank line is no record
                text, why = _text(row[column] if column < len(row) else None, f"no column {name}")
                yield Record(rows.line_num, text, why, done / size)


def _parquet(path: Path, name: str) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if names.count(name) != 1:
                raise Unreadable(f"expected one column {name} in {path}, got the columns {', '.join(names)}")
            number = 0
            for batch in file.iter_batches(1024, columns=[name]):
                for found in batch.column(0).to_pylist():
                    number += 1
                    yield Record(number, *_text(found, f"no text in column {name}"), number / file.metadata.num_rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot read {path}: {next(iter(str(error).splitlines()), '')}") from None
