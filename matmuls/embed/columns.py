"""The texts of a column of a Parquet file, a few at a time: a dictionary's texts are held once, pages are streamed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .streams import BLOCK, MOST, TOO_LONG

ROWS = 1024  # that are read together, where that holds each text once
LEAST, RATIO = 64 << 20, 64  # bytes of a part of the column that are expanded, or this many times those in the file


class Damaged(ValueError):
    """A file that pyarrow cannot read, or that is far larger than it says."""


class Column:
    """A Parquet file, and which of its columns has the texts; `pick` chooses among the names."""

    def __init__(self, path: Path, pick: Callable[[list[str]], int]) -> None:
        from pyarrow import parquet

        with _named():
            self._file = parquet.ParquetFile(path)
            self.close = self._file.close
            self.rows = self._file.metadata.num_rows
            schema = self._file.schema_arrow
            self._name = schema.names[pick(schema.names)]
            self._encodings = self._checked(path.stat().st_size, schema.field(self._name).type)
            if not self._is_delta:  # pyarrow reads these no other way
                self.close()
                self._file = parquet.ParquetFile(path, read_dictionary=[self._name], buffer_size=BLOCK)
                self.close = self._file.close

    @property
    def _is_delta(self) -> bool:
        return any("DELTA" in name for name in self._encodings)

    def _checked(self, size: int, kind: Any) -> set[str]:
        """The encodings of the column, after a check of its type and of the sizes that the file declares."""
        from pyarrow import types

        inner = kind.value_type if types.is_dictionary(kind) else kind
        view = getattr(types, "is_string_view", lambda kind: False)
        if not (types.is_string(inner) or types.is_large_string(inner) or types.is_null(inner) or view(inner)):
            raise Damaged(f"expected texts in column {self._name}, got {inner}")
        found: set[str] = set()
        for group in range(self._file.metadata.num_row_groups):
            about = self._file.metadata.row_group(group)
            for leaf in (about.column(i) for i in range(about.num_columns)):
                if leaf.path_in_schema == self._name:
                    packed, whole = leaf.total_compressed_size, leaf.total_uncompressed_size
                    if not 0 <= packed <= size or not 0 <= whole <= max(LEAST, RATIO * packed):
                        raise Damaged(
                            f"expected at most {max(LEAST >> 20, RATIO * max(packed, 0) >> 20)} MiB in column "
                            f"{self._name} of row group {group + 1}, which has {packed} bytes, got {whole >> 20} MiB"
                        )
                    found |= set(leaf.encodings)
        return found

    def texts(self) -> Iterator[tuple[str | None, str]]:
        """Each row's text, or None and the reason."""
        import pyarrow

        with _named():
            # DELTA_BYTE_ARRAY keeps what a text shares with the one before only once
            for batch in self._file.iter_batches(1 if self._is_delta else ROWS, columns=[self._name]):
                column = batch.column(0)
                coded = isinstance(column, pyarrow.DictionaryArray)
                for scalar in column.indices if coded else column:
                    found = column.dictionary[scalar.as_py()] if coded and scalar.is_valid else scalar
                    yield _text(found) if found.is_valid else (None, f"no text in column {self._name}")


def _text(scalar: Any) -> tuple[str | None, str]:
    held = scalar.as_buffer()
    if held.size > MOST:
        return None, TOO_LONG
    try:
        return bytes(held).decode(), ""
    except UnicodeDecodeError:
        return None, "no valid UTF-8"


@contextmanager
def _named() -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise Damaged(next(iter(str(error).splitlines()), type(error).__name__)) from None
