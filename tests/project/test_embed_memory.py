"""Small files and long texts take little memory in `matmuls embed` and in the readers of matrices."""

import bz2
import gzip
import os
import subprocess
import sys

import numpy as np
import pytest

from matmuls import embed

MIB = f"""
import resource, sys
from pathlib import Path
sys.path[:0] = [{str(os.path.dirname(os.path.dirname(embed.__path__[0])))!r}]
import types
sys.modules["matmuls"] = package = types.ModuleType("matmuls")  # without torch
package.__path__ = [{os.path.dirname(embed.__path__[0])!r}]
"""


def peak_mib(code, *args):
    """The memory above that of the imports, and what the code prints. The child starts anew: a fork would begin with
    the memory of this process."""
    code = f"""{MIB}
def peak():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM")) / 1024
{code}"""
    run = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    *lines, mib = run.stdout.splitlines()
    return float(mib), lines


READ = """
from matmuls.embed import Source
import numpy
if sys.argv[1].endswith("parquet"):
    import pyarrow.parquet
before = peak()
try:
    for record in Source(Path(sys.argv[1])):
        if record.number < 4:
            print(record.number, record.why or record.text[:9])
except ValueError as error:
    print(error)
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "b.csv", "a.tsv"])
def test_a_text_of_100_mib_takes_little_memory(tmp_path, name):
    begin, end = {"a.jsonl": (b'{"text": "', b'"}'), "b.csv": (b'"', b'"')}.get(name, (b"", b""))
    with (tmp_path / name).open("wb") as file:
        file.write(b"text\n" if name[-3:] in ("csv", "tsv") else b"")
        for content in (b"first", None, b"last"):
            file.write(begin)
            for _ in range(0 if content else 100):
                file.write((b"ab\n" if name == "b.csv" else b"abc") * (2**20 // 3))
            file.write((content or b"") + end + b"\n")
    mib, lines = peak_mib(READ, tmp_path / name)
    assert [lines[0], lines[2]] == ["1 first", "3 last"]
    assert lines[1].endswith("longer than 16 MiB")
    assert mib < 60  # measured: 18, also with 400 MiB; the whole line took two times its size


@pytest.mark.parametrize("how", ["dictionary", "delta", "plain", "lengths"])
def test_a_small_parquet_file_takes_little_memory(tmp_path, how):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    encoding = {"delta": "DELTA_BYTE_ARRAY", "lengths": "DELTA_LENGTH_BYTE_ARRAY"}.get(how)
    options = {"column_encoding": {"text": encoding}} if encoding else {}
    options |= {} if how == "dictionary" else {"use_dictionary": False}
    table = pyarrow.table({"text": ["a" * 2**20] * 256})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 60_000
    mib, lines = peak_mib(READ, tmp_path / "a.parquet")
    if how in ("dictionary", "delta"):
        assert lines == [f"{n} aaaaaaaaa" for n in (1, 2, 3)]
    else:
        assert "expected at most 64 MiB in column text of row group 1, which has " in lines[0]
    assert mib < 120  # measured: 47 and 55 with 1024 texts, whose batch took 1050


LOAD = """
from matmuls_bench import matrices
before = peak()
try:
    matrices.load(sys.argv[1])
    print("read")
except ValueError as error:
    print(error)
print(peak() - before)
"""


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("kind", ["market", "shape", "header", "metis"])
def test_a_small_file_of_a_matrix_takes_little_memory(tmp_path, kind):
    path = tmp_path / {"market": "a.mtx.bz2", "metis": "a.graph.gz"}.get(kind, "a.npz")
    if kind == "market":
        head = b"%%MatrixMarket matrix coordinate pattern general\n1 1 75000000\n"
        path.write_bytes(bz2.compress(head) + bz2.compress(b"1 1\n" * 250_000) * 300)
    elif kind == "metis":
        path.write_bytes(gzip.compress(b"2 5000000\n" + b"12 " * 5_000_000 + b"\n" + b"11 " * 5_000_000 + b"\n", 1))
    elif kind == "shape":
        np.savez_compressed(path, shape=np.zeros(2**26, np.int64), crow=[0], col=[0])
    else:
        np.savez(path, shape=[1, 1], crow=[0, 0], col=[0])
        content = path.read_bytes()
        path.write_bytes(content.replace(b"'shape': (1,), ", b"'shape': (9999999999,), ").replace(b" " * 40, b" " * 31))
    assert path.stat().st_size < 600_000
    mib, lines = peak_mib(LOAD, path)
    assert lines != ["read"]
    assert mib < (500 if kind == "metis" else 250)  # measured: 131 for the first
