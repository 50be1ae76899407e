"""The rows that are on the disk, and for which job, so that a stopped run goes on without a lost or doubled row.

While a job runs, OUT.part holds the header and the rows, and OUT.journal how many rows are whole. Rows are flushed to
the disk before the journal names them, and the journal is replaced, not written over; what lies behind the rows that it
names is cut off at the next start. So a stop at any moment, of the process or of the machine, loses at most the rows
since the last entry, which are computed again. OUT itself appears when all rows are there. A job with a pipe among its
inputs has no journal: it begins anew.

The names of these files are no secret, and the folder may belong to others: no symbolic link is followed, and no file
is written that has another name elsewhere.
"""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MOST_BAD = 1000  # records without a row that are named; the others are counted
MOST_JOURNAL = 64 << 20  # bytes: 1000 names of 4096 bytes with their reasons, and room
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class Foreign(ValueError):
    """The files of another job, or of another run, are in the way."""


class Rows:
    """Vectors that are appended to OUT.part, and their journal. job: its facts, or None to keep no journal."""

    def __init__(
        self, out: Path, job: dict[str, Any] | None, width: int, dtype: "np.dtype[Any]", header: bytes
    ) -> None:
        self.part, self.journal = beside(out)
        self.count, self.bad_count = 0, 0
        self.bad: list[str] = []
        self._job, self._header, self._row_bytes = job, len(header), width * dtype.itemsize
        begun = os.path.lexists(self.part)
        self._file: BinaryIO = old_file(self.part, os.O_RDWR) if begun else new_file(self.part)
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
        if os.path.lexists(self.journal):
            if self._job is None:
                raise Foreign(f"{self.part} is of a run whose inputs were no pipes: delete it and {self.journal}")
            with old_file(self.journal, os.O_RDONLY) as file:
                job, self.count, self.bad_count, self.bad = self._entry(file.read(MOST_JOURNAL))
            if differing := [name for name, x in self._job.items() if name not in job or job[name] != x]:
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

    def _entry(self, text: bytes) -> tuple[dict[str, Any], int, int, list[str]]:
        """The facts of the job, the rows, the number of those without a text, and some of their names."""
        try:
            found = json.loads(text)
            job, rows, bad_count, bad = (found[name] for name in ("job", "rows", "bad_count", "bad"))
            counts = type(rows) is type(bad_count) is int and 0 <= bad_count <= rows and len(bad) <= bad_count
            if counts and isinstance(job, dict) and isinstance(bad, list) and all(isinstance(x, str) for x in bad):
                return job, rows, bad_count, bad
        except (LookupError, TypeError, ValueError, RecursionError):
            pass
        raise Foreign(f"expected the journal of a run in {self.journal}: delete it and {self.part}")

    def append(self, vectors: "np.ndarray[Any, Any]", bad: list[str]) -> None:
        """Append rows; `bad`: the records among them that have no text. They count from the next `keep` on."""
        self._file.write(np.ascontiguousarray(vectors).data)
        self.count += len(vectors)
        self.bad_count += len(bad)
        self.bad += bad[: MOST_BAD - len(self.bad)]

    def keep(self) -> None:
        """Flush the rows to the disk, then say so in the journal."""
        self._flush()
        if self._job is None:
            return
        text = json.dumps({"job": self._job, "rows": self.count, "bad_count": self.bad_count, "bad": self.bad})
        new = self.journal.with_name(f"{self.journal.name}.new")
        with new_file(new) as file:
            file.write(text.encode())
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
    with old_file(whole, os.O_RDWR) as file:
        os.fsync(file.fileno())
    whole.replace(out)
    _flush_folder(out.parent)
    journal.unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def new_file(path: Path) -> BinaryIO:
    """A new file for reading and writing; what had its name, also a link, loses it."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666), "w+b")


def old_file(path: Path, flags: int) -> BinaryIO:
    """A file of an earlier run; Foreign if the name is a link, or not that of a file alone."""
    try:
        file = os.fdopen(os.open(path, flags | os.O_NONBLOCK | NO_LINK), "rb" if flags == os.O_RDONLY else "r+b")
    except OSError as error:
        if not path.is_symlink():
            raise
        raise Foreign(f"{path} is a symbolic link: delete it") from error
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        return file
    file.close()
    raise Foreign(f"expected {path} to be a file with one name: delete it")


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
