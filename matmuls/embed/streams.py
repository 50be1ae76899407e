"""Bytes of a file or a pipe, read a block at a time: what is held never exceeds a text and a block."""

import os
import select
from collections.abc import Iterator
from typing import BinaryIO

MOST = 16 << 20  # bytes of one text, with what surrounds it: a line, or a record of a CSV file
TOO_LONG = f"longer than {MOST >> 20} MiB"
BLOCK = 1 << 20
WAIT_SECONDS = 0.2  # of a pipe's reader, until it looks whether the run has ended


class Pipe:
    """A pipe, FIFO or terminal, opened. `stop` ends a `read` that waits, so that Ctrl-C is not held up."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._stopped = file, False

    def read(self, most: int) -> bytes:
        while not self._stopped:
            if select.select([self._file], [], [], WAIT_SECONDS)[0]:
                return os.read(self._file.fileno(), most)
        return b""

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._file.close()


class Window:
    """`held[at:]` are the bytes of a file from the next record on, as far as they are read."""

    def __init__(self, file: BinaryIO | Pipe) -> None:
        self.held, self.at = bytearray(), 0
        self._file, self._before = file, 0  # bytes of the file before those held

    @property
    def done(self) -> int:
        """Bytes of the file before the next record."""
        return self._before + self.at

    def starts(self) -> bool:
        """Begin a record: forget the bytes before it. False at the end of the file."""
        if self.at >= BLOCK or self.at == len(self.held):
            self._forget(self.at)
        return self.at < len(self.held) or self.more()

    def more(self) -> bool:
        """Read a block; False at the end of the file."""
        block = self._file.read(BLOCK)
        self.held += block
        return bool(block)

    def find(self, what: bytes, begin: int) -> int:
        """The place of one byte from `begin` on: len(held) at the file's end, -1 if the record would be too long."""
        while (found := self.held.find(what, begin, self.at + MOST + 1)) < 0:
            begin = max(begin, len(self.held))
            if begin > self.at + MOST:
                return -1
            if not self.more():
                return begin
        return found

    def line(self) -> bytes | None:
        """The next line without its end; None if it is longer than MOST."""
        end = self.find(b"\n", self.at)
        if end < 0:
            self.skip_line()
            return None
        found = bytes(memoryview(self.held)[self.at : end])
        self.at = min(end + 1, len(self.held))
        return found.removesuffix(b"\r")

    def skip_line(self) -> None:
        while (end := self.held.find(b"\n", self.at)) < 0:
            self._forget(len(self.held))
            if not self.more():
                return
        self.at = end + 1

    def skip_quoted(self, begin: int) -> int:
        """Skip the quoted text that held[begin] belongs to, of any length, up to its end; the number of its line ends,
        or -1 if it does not end as it must."""
        ends, at = 0, begin
        while True:
            at = self.held.find(b'"', at)
            if at < 0:
                ends += self.held.count(b"\n", begin)
                self._forget(len(self.held))
                if not self.more():
                    return -1
                begin = at = 0
            elif at + 1 == len(self.held) and not self.more():
                self.at = len(self.held)
                return ends + self.held.count(b"\n", begin)
            elif self.held[at + 1] != ord('"'):
                self.at = at + 1
                return ends + self.held.count(b"\n", begin, at) if self.held[self.at] in b",\r\n" else -1
            else:
                at += 2

    def back_to(self, done: int) -> bool:
        """Continue at this byte of the file; False for a pipe that has given bytes after it."""
        if done >= self._before:
            self.at = done - self._before
            return True
        if isinstance(self._file, Pipe):
            return False
        self._file.seek(done)
        self.held, self.at, self._before = bytearray(), 0, done
        return True

    def _forget(self, count: int) -> None:
        del self.held[:count]
        self.at, self._before = 0, self._before + count


def lines(window: Window) -> Iterator[bytes | None]:
    """The lines of a file, without a byte order mark; None for one that is longer than MOST."""
    first = True
    while window.starts():
        line = window.line()
        yield line.removeprefix(b"\xef\xbb\xbf") if first and line else line
        first = False
