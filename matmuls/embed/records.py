"""The texts of files and pipes, one at a time: lines, JSON lines, tables (.csv, .tsv) and Parquet."""

import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from . import columns, tables
from .streams import TOO_LONG, Pipe, Window, lines

FORMATS = {  # by the suffix of a file; others have a text on each line
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


class Unreadable(ValueError):
    """A file that cannot be read as a whole, or lacks the column."""


@dataclass(frozen=True)
class Record:
    """The text at `number` (from 1) of its file, or None and `why`; `done`: the share of the file that is read."""

    number: int
    text: str | None
    why: str = ""
    done: float = 0.0


Begun = tuple[Callable[[], object], Iterator[Record]]


class Source:
    """A file or pipe of records. `check` reads its header and raises Unreadable if that lacks the column; iterating
    gives the records.

    name: the field or column with the text. kind: one of the FORMATS or "text", by default as the suffix says.
    """

    def __init__(self, path: Path, name: str = "text", kind: str | None = None) -> None:
        self.path, self.name = path, name
        self.kind = kind or FORMATS.get(path.suffix.lower(), "text")
        found = path.stat()
        self.is_pipe = not stat.S_ISREG(found.st_mode)
        self.size = 0 if self.is_pipe else found.st_size
        self._pipe: Pipe | None = None
        self._begun: Begun | None = None  # of a pipe, which is opened once

    def check(self) -> None:
        if self.kind in ("csv", "tsv", "parquet") and self._begun is None:
            begun = self._opened()
            if self.is_pipe:
                self._begun = begun
            else:
                begun[0]()

    def stop(self) -> None:
        """End the records of a pipe, also for a thread that waits for them."""
        if self._pipe is not None:
            self._pipe.stop()

    def __iter__(self) -> Iterator[Record]:
        close, found = self._begun or self._opened()
        try:
            yield from found
        except (OSError, columns.Damaged) as error:
            raise self._unreadable(error) from None
        finally:
            close()

    def _opened(self) -> Begun:
        """The function that closes the file, and its records. Reads a header at once."""
        try:
            if self.kind == "parquet":
                if self.is_pipe:
                    raise Unreadable(f"cannot read {self.path}: Parquet is read from a file, not from a pipe")
                column = columns.Column(self.path, self.column_of)
                return column.close, self._rows(column)
            opened = self.path.open("rb")
            if self.is_pipe:
                self._pipe = Pipe(opened)
            file: BinaryIO | Pipe = self._pipe or opened
            try:
                return file.close, self._table(file) if self.kind in ("csv", "tsv") else self._lines(file)
            except BaseException:
                file.close()
                raise
        except (OSError, columns.Damaged) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> Unreadable:
        return Unreadable(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}")

    def column_of(self, names: list[str]) -> int:
        """Which of these columns has the texts."""
        if names.count(self.name) != 1:
            got = ", ".join(map(shown, names))
            raise Unreadable(f"expected one column {self.name} in {self.path}, got the columns {got}")
        return names.index(self.name)

    def _share(self, window: Window) -> float:
        return window.done / self.size if self.size else 0.0

    def _rows(self, column: columns.Column) -> Iterator[Record]:
        for number, (text, why) in enumerate(column.texts(), 1):
            yield Record(number, text, why, number / column.rows)

    def _lines(self, file: BinaryIO | Pipe) -> Iterator[Record]:
        window, read = Window(file), self._field if self.kind == "jsonl" else _decoded
        for number, line in enumerate(lines(window), 1):
            text, why = (None, TOO_LONG) if line is None else read(line)
            yield Record(number, text, why, self._share(window))

    def _field(self, line: bytes) -> tuple[str | None, str]:
        text, why = _decoded(line)
        if text is None:
            return None, why
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None, "no valid JSON"
        return text_of(found.get(self.name) if isinstance(found, dict) else None, f"no text in field {self.name}")

    def _table(self, file: BinaryIO | Pipe) -> Iterator[Record]:
        window = Window(file)
        rows = tables.rows(window, self.kind == "tsv")
        names, why, _ = next(rows, ([], "", 1))
        if names is None:
            raise Unreadable(f"cannot read the header of {self.path}: {why}")
        column = self.column_of([name.decode(errors="surrogateescape") for name in names])
        return self._below(window, rows, column, len(names))

    def _below(self, window: Window, rows: Iterator[tables.Row], column: int, count: int) -> Iterator[Record]:
        """The records below the header, each with the line that it begins at."""
        number = 0
        try:
            for number, (fields, why, line) in enumerate(rows, 1):
                text = None
                if fields is not None and len(fields) != count:
                    why = f"expected {count} fields as in the header, got {len(fields)}"
                elif fields is not None:
                    text, why = _decoded(fields[column])
                yield Record(number, text, f"line {line}: {why}" if why else "", self._share(window))
        except tables.Lost as error:
            raise Unreadable(f"cannot read {self.path} from record {number + 1} on: {error}") from None


def shown(name: str, most: int = 60) -> str:
    """A name from a file, for a message: in quotes and shortened if it is no plain word."""
    return name if name.isidentifier() and len(name) <= most else repr(name if len(name) <= most else name[:most])


def _decoded(line: bytes) -> tuple[str | None, str]:
    try:
        return line.decode(), ""
    except UnicodeDecodeError:
        return None, "no valid UTF-8"


def text_of(found: Any, why: str) -> tuple[str | None, str]:
    """A text, or None and the reason; lone surrogates, as of JSON's "\\ud800", are no text."""
    if not isinstance(found, str):
        return None, why
    try:
        found.encode()
    except UnicodeEncodeError:
        return None, "no valid UTF-8"
    return found, ""
