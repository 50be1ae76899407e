"""Records of .csv and .tsv files as their fields, read strictly: no record is lost without a word.

.tsv: a line is a record and a tab ends a field; quotes are characters as any other.
.csv (RFC 4180): a field in quotes may have commas, line ends and doubled quotes. If a record is bad, only its first
line is passed over: a quote that does not close swallows no other record.
"""

import re
from collections.abc import Iterator

from . import streams
from .streams import TOO_LONG, Window

AFTER = re.compile(rb",|\r?\n|\r?\Z")  # what may follow a closing quote
UNCLOSED = "a quote that does not close"
Row = tuple[list[bytes] | None, str, int]  # fields, or None and the reason; the number of lines


class Lost(ValueError):
    """Bytes of a pipe that would have to be read again."""


def rows(window: Window, tabs: bool) -> Iterator[Row]:
    """The line of each record, its fields, or None and the reason. The first is the header.

    A blank line is no record, but for a .tsv file of one column: there it is the empty text.
    """
    number, columns = 1, 0
    while window.starts():
        if window.done == 0 and window.held.startswith(b"\xef\xbb\xbf"):
            window.at = 3
        fields, why, count = _by_tabs(window, columns == 1) if tabs else _by_commas(window)
        if fields != []:
            columns = columns or len(fields or ())
            yield fields, why, number
        number += count


def _by_tabs(window: Window, alone: bool) -> Row:
    line = window.line()
    if line is None:
        return None, TOO_LONG, 1
    return line.split(b"\t") if line or alone else [], "", 1


def _by_commas(window: Window) -> Row:
    held, at = window.held, window.at
    fields: list[bytes] = []
    end = window.find(b"\n", at)
    if end >= 0 and held.find(b'"', at, end) < 0:
        line = window.line() or b""
        return line.split(b",") if line else [], "", 1
    while True:
        if held[at : at + 1] == b'"':
            close = _closing(window, at + 1)
            if close < 0:
                return _long_quoted(window, at + 1)
            after = AFTER.match(held, close + 1) if close < len(held) else None
            if after is None:
                window.skip_line()
                return None, UNCLOSED if close == len(held) else "text after a closing quote", 1
            fields.append(bytes(held[at + 1 : close]).replace(b'""', b'"'))
            at = after.end()
            if after[0] != b",":
                return fields, "", _passed(window, at)
            end = window.find(b"\n", at) if 0 <= end < at else end
        elif (comma := held.find(b",", at, end if end >= 0 else window.at + streams.MOST)) >= 0:
            fields.append(bytes(held[at:comma]))
            at = comma + 1
        elif end >= 0:
            fields.append(bytes(held[at:end]).removesuffix(b"\r"))
            return fields, "", _passed(window, min(end + 1, len(held)))
        else:
            count = held.count(b"\n", window.at, at) + 1
            window.at = at
            window.skip_line()
            return None, TOO_LONG, count


def _passed(window: Window, end: int) -> int:
    """Continue at held[end]; the number of lines before it."""
    count = window.held.count(b"\n", window.at, end)
    window.at = end
    return count


def _closing(window: Window, begin: int) -> int:
    """Where the quoted text that begins at held[begin] closes; len(held) if it does not, -1 if it is too long.

    The two bytes that follow are held, if the file has them.
    """
    while 0 <= (at := window.find(b'"', begin)) < len(window.held):
        while at + 3 > len(window.held) and window.more():
            pass
        if window.held[at + 1 : at + 2] != b'"':
            break
        begin = at + 2
    return at


def _long_quoted(window: Window, begin: int) -> Row:
    """Pass over a record whose quoted text, from held[begin] on, is too long; over its first line if it does not end
    as it must."""
    start, before = window.done, window.held.count(b"\n", window.at, begin)
    count = window.skip_quoted(begin)
    if count < 0 and not window.back_to(start):
        raise Lost(f"{UNCLOSED}, and a pipe cannot be read again")
    window.skip_line()
    return (None, UNCLOSED, 1) if count < 0 else (None, TOO_LONG, before + count + 1)
