"""The rows that are on the disk, and for which job, so that a stopped run goes on without a lost or doubled row.

While a job runs, OUT.part holds the header and the rows, and OUT.journal how many rows are whole. Rows are flushed to
the disk before the journal names them, and the journal is replaced, not written over; what lies behind the rows that it
names is cut off at the next start. So a stop at any moment, of the process or of the machine, loses at most the rows
since the last entry, which are computed again. OUT itself appears when all rows are there.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MOST_BAD = 1000  # records without a row that are named; the others are counted


class Foreign(ValueError):
    """The files of another job, or of another run, are in the way."""


class Rows:
    """Vectors that are appended to OUT.part, and their journal."""

    def __init__(self, out: Path, job: dict[str, Any], width: int, dtype: "np.dtype[Any]", header: bytes) -> None:
        self.part, self.journal = beside(out)
        self.count, self.bad_count = 0, 0
        self.bad: list[str] = []
        self._job, self._header, self._row_bytes = job, len(header), width * dtype.itemsize
        begun = self.part.exists()
        self._file: BinaryIO = self.part.open("r+b" if begun else "x+b")
        try:
            _lock(self._file, out)
            if not begun:
                self.journal.unlink(missing_ok=True)  # of a run that ended
            self._go_on(header)
        except BaseException:
            self._file.close()
            raise

    def _go_on(self, header: bytes) -> None:
        """Read what an earlier run of the same job has written, or begin."""
        if self.journal.exists():
            try:
                found = json.loads(self.journal.read_text(encoding="utf-8"))
                differing = [name for name, x in self._job.items() if found["job"][name] != x]
                self.count, self.bad_count, self.bad = found["rows"], found["bad_count"], found["bad"]
            except (LookupError, TypeError, ValueError):
                raise Foreign(f"expected the journal of a run in {self.journal}; delete it and {self.part}") from None
            if differing:
                raise Foreign(
                    f"{self.part} is of a run with other {', '.join(differing)}: give the same, or delete it and "
                    f"{self.journal}"
                )
        whole = self._header + self.count * self._row_bytes
        if self.count and os.fstat(self._file.fileno()).st_size < whole:
            raise Foreign(f"{self.part} has fewer rows than {self.journal} says: delete both")
        self._file.truncate(whole if self.count else 0)
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(whole)

    def append(self, vectors: "np.ndarray[Any, Any]", bad: list[str]) -> None:
        """Append rows; `bad`: the records among them that have no text. They count from the next `keep` on."""
        self._file.write(np.ascontiguousarray(vectors).data)
        self.count += len(vectors)
        self.bad_count += len(bad)
        self.bad += bad[: MOST_BAD - len(self.bad)]

    def keep(self) -> None:
        """Flush the rows to the disk, then say so in the journal."""
        self._flush()
        text = json.dumps({"job": self._job, "rows": self.count, "bad_count": self.bad_count, "bad": self.bad})
        new = self.journal.with_name(f"{self.journal.name}.new")
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.journal)
        _flush_folder(self.journal.parent)

    def finish(self, header: bytes) -> None:
        """Write the header with the number of rows that there are."""
        self._file.seek(0)
        self._file.write(header)
        self._flush()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def beside(out: Path) -> tuple[Path, Path]:
    """The files of a run that has not ended: rows and journal."""
    return out.with_name(f"{out.name}.part"), out.with_name(f"{out.name}.journal")


def publish(out: Path, whole: Path) -> None:
    """Give the finished file its name, then remove the journal and what else is left of the run."""
    part, journal = beside(out)
    with whole.open("r+b") as file:
        os.fsync(file.fileno())
    whole.replace(out)
    _flush_folder(out.parent)
    journal.unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def _lock(file: BinaryIO, out: Path) -> None:
    """One process at a time, where the system has file locks."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Foreign(f"another process writes {out}") from None


def _flush_folder(folder: Path) -> None:
    """The names in a folder; not all systems can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
