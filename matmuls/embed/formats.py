"""The files of vectors: headers of .npy and .safetensors that keep their length, and Parquet."""

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ROWS = 4096  # of a row group of Parquet
NAME = "embeddings"  # of the tensor or column
_NPY, _SAFETENSORS = 128, 256  # bytes: room for every number of rows
_SAFETENSORS_NAMES = {"float16": "F16", "float32": "F32", "float64": "F64"}


def header(suffix: str, rows: int, width: int, dtype: "np.dtype[Any]") -> bytes:
    """The header of a file with this suffix, which precedes the rows; its length does not depend on their number."""
    if suffix == ".safetensors":
        about = {
            "dtype": _SAFETENSORS_NAMES[dtype.name],
            "shape": [rows, width],
            "data_offsets": [0, rows * width * dtype.itemsize],
        }
        text = json.dumps({NAME: about}).encode()
        return struct.pack("<Q", _SAFETENSORS - 8) + text.ljust(_SAFETENSORS - 8)
    text = (
        f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({rows}, {width}), }}".encode()
    )
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", _NPY - 10) + text.ljust(_NPY - 11) + b"\n"


def to_parquet(npy: Path, file: BinaryIO) -> None:
    """Write the rows of an .npy file as a Parquet file, as lists of fixed size; a row of NaN becomes null."""
    import pyarrow
    from pyarrow import parquet

    rows: Any = np.load(npy, mmap_mode="r")
    kind = pyarrow.list_(pyarrow.from_numpy_dtype(rows.dtype), rows.shape[1])
    schema = pyarrow.schema([(NAME, kind)])
    with parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(rows), ROWS):
            some = np.array(rows[start : start + ROWS])
            missing = pyarrow.array(np.isnan(some[:, 0]))
            column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(some.ravel()), type=kind, mask=missing)
            writer.write_table(pyarrow.table([column], schema=schema), row_group_size=ROWS)
