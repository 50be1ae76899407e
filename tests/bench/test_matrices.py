"""Readers of matrix files against scipy's writers and by hand; generated matrices; malformed files raise."""

import bz2
import gzip
import io
import time

import numpy as np
import pytest
import scipy.io as scipy_io
import scipy.sparse as scipy_sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from matmuls_bench import matrices


def dense_of(m):
    values = torch.ones(m.nnz, dtype=torch.float64) if m.values is None else m.values
    row = torch.repeat_interleave(torch.arange(m.shape[0]), m.crow.diff())
    return torch.zeros(m.shape, dtype=torch.float64).index_put((row, m.col.long()), values, accumulate=True).numpy()


def drawn(rows=12, columns=8, symmetric=False):
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.3)
    return np.tril(dense) + np.tril(dense, -1).T if symmetric else dense


MARKET = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "dia"])
def test_scipy_npz(tmp_path, layout):
    dense = drawn()
    a = getattr(scipy_sparse, f"{layout}_array")(dense, **({"blocksize": (3, 2)} if layout == "bsr" else {}))
    scipy_sparse.save_npz(tmp_path / "a.npz", a)
    made = matrices.load(str(tmp_path / "a.npz"))
    np.testing.assert_array_equal(dense_of(made), dense)
    assert (made.name, made.crow.dtype) == ("a", torch.int32)


def test_npz_with_crow_and_col(tmp_path):
    a = scipy_sparse.csr_array(drawn())
    for values in ({}, {"values": a.data}):
        np.savez(tmp_path / "a.npz", crow=a.indptr, col=a.indices, shape=np.array(a.shape), **values)
        made = matrices.load(str(tmp_path / "a.npz"))
        assert (made.values is None) == (not values)
        np.testing.assert_array_equal(dense_of(made) != 0, drawn() != 0)


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
def test_matrix_market(tmp_path, symmetry):
    dense = drawn(9, 9, symmetry == "symmetric")
    if symmetry == "skew-symmetric":
        dense = np.tril(dense, -1) - np.tril(dense, -1).T
    path = tmp_path / "a.mtx"
    scipy_io.mmwrite(path, scipy_sparse.coo_array(dense), symmetry=symmetry, precision=17, comment="two\nlines")
    np.testing.assert_allclose(dense_of(matrices.load(str(path))), dense)
    packed = tmp_path / "b.mtx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    made = matrices.load(str(packed))
    np.testing.assert_allclose(dense_of(made), dense)
    assert made.name == "b"


def test_pattern_of_matrix_market(tmp_path):
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n% a comment\n\n3 3 3\n1 1\n3 1\n2 2\n")
    made = matrices.load(str(path))
    assert made.values is None
    np.testing.assert_array_equal(dense_of(made), [[1, 0, 1], [0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("text", "weighted"),
    [
        ("% comment\n3 2\n2 3\n1\n1\n", False),
        ("3 2 1\n2 5 3 7\n1 5\n1 7\n", True),
        ("3 2 11 2\n9 9 2 5 3 7\n9 9 1 5\n9 9 1 7\n", True),
        ("3 2 110 1\n4 9 2 3\n4 9 1\n4 9 1\n", False),
    ],
)
def test_metis(tmp_path, text, weighted):
    path = tmp_path / "a.graph"
    path.write_text(text)
    a, b = (5, 7) if weighted else (1, 1)
    np.testing.assert_array_equal(dense_of(matrices.load(str(path))), [[0, a, b], [a, 0, 0], [b, 0, 0]])


def test_generated_matrices():
    grid = dense_of(matrices.load("grid:4"))
    assert grid.shape == (16, 16)
    np.testing.assert_array_equal(grid, grid.T)
    assert sorted(grid.sum(1))[:4] == [3, 3, 3, 3]
    assert grid.sum() == 16 + 2 * 2 * 3 * 4
    rmat = matrices.load("rmat:10:8")
    assert rmat.shape == (1024, 1024)
    assert 0.6 * 8192 < rmat.nnz <= 8192
    assert rmat.crow.diff().max() > 20 * 8
    pruned = matrices.load("pruned:200x300:0.9")
    assert pruned.nnz == pytest.approx(6000, rel=0.1)
    halved = matrices.load("pruned:50x300:2of4")
    row = torch.repeat_interleave(torch.arange(50), halved.crow.diff().long())
    assert (torch.bincount(row * 75 + halved.col // 4, minlength=50 * 75) == 2).all()
    again = matrices.load("pruned:200x300:0.9")
    assert torch.equal(pruned.col, again.col)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "expected a file ending in .mtx, .npz"),
        ("a.mtx", "", "Not a Matrix Market file"),
        ("a.mtx", "hello\n", "Not a Matrix Market file"),
        ("a.mtx", MARKET.replace("real", "complex") + "1 1 1\n1 1 1 2\n", "expected real values, got complex128"),
        ("a.mtx", f"{MARKET}2 2 2\n1 1 1.0\n", "Truncated file. Expected another 1 lines"),
        ("a.mtx", f"{MARKET}2 2 1\n1 1 1\n2 2 1\n", "Too many lines in file"),
        ("a.mtx", f"{MARKET}2 2 2\n1 1 1.0\n3 1 1.0\n", "Line 4: Row index out of bounds"),
        ("a.mtx", f"{MARKET}2 2 1\n0 1 1.0\n", "Line 3: Row index out of bounds"),
        ("a.mtx", f"{MARKET}2 2 1\n1 18446744073709551617 1.0\n", "Line 3: .*out of "),
        ("a.mtx", f"{MARKET}2 x 1\n", "Invalid integer value"),
        ("a.mtx", f"{MARKET}2 2 1\n1 1 x\n", "Line 3: Invalid floating-point value"),
        ("a.mtx", f"{MARKET}2 2 1\n1 1 1\0.5\n", "expected coordinates in a text file, got a NUL byte"),
        ("a.mtx", f"{MARKET}2 2 {10**15}\n1 1 1\n", f"expected {10**15} entries, a line each, got"),
        ("a.mtx", f"{MARKET}2 -2 0\n", "dimensions can't be negative"),
        ("a.mtx", f"{MARKET}2 {2**63} 0\n", "Integer out of range"),
        ("a.mtx", f"{MARKET}{10**15} 2 0\n", f"a.mtx: expected at most {2**27} rows of 0 entries, got {10**15}"),
        ("a.mtx", MARKET.replace("coordinate", "array") + "1 1\n1\n1\n", "expected coordinates .*, got array"),
        ("a.mtx.bz2", "no bzip2", "a.mtx.bz2: expected a compressed .bz2 file, got"),
        ("a.mtx.gz", "no gzip", "a.mtx.gz: expected a compressed .gz file, got"),
        ("a.graph", "3 2 1\n2 3 2\n1 3 3\n3 2\n", r"expected lines of 0 numbers and then 2 an edge, got \[3, 3, 2\]"),
        ("a.graph", "2 1 10\n\n1 2 1\n", r"expected lines of 1 numbers and then 1 an edge, got \[-1, 2\]"),
        ("a.graph", "12 1\n1_0\n" + "\n" * 8 + "1\n\n\n", "a.graph"),
        ("a.graph", "3 1\n2\n", "expected a line for each of 3 vertices, got 2"),
        ("a.graph", "2 2\n2\n1\n", "expected 2 edges"),
        ("a.graph", "2 1\n3\n1\n", "index 2 exceeds matrix dimension 2"),
        ("a.npz", "PK", "a.npz"),
        ("a.npz", "PK\x03\x04 no archive", "a.npz"),
    ],
)
def test_malformed_files_raise(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        matrices.load(str(path))
    assert name in str(caught.value)


def test_variants_of_matrix_market(tmp_path):
    """Non-ASCII comments, Windows line ends, blank lines."""
    text = "%%MatrixMarket matrix coordinate real general\r\n% Müller\r\n\r\n  \r\n2 2 1\r\n2 1 4.5\r\n"
    (tmp_path / "a.mtx").write_bytes(text.encode("latin-1"))
    read = matrices.load(str(tmp_path / "a.mtx"))
    assert (read.crow.tolist(), read.col.tolist(), read.values.tolist()) == ([0, 0, 1], [0], [4.5])


def test_many_comment_lines(tmp_path):
    (tmp_path / "a.mtx").write_text(MARKET + "% comment\n\n \t% another\n" * 10**5 + "2 2 1\n2 1 4.5\n")
    begin = time.process_time()
    assert matrices.load(str(tmp_path / "a.mtx")).values.tolist() == [4.5]
    assert time.process_time() - begin < 2  # takes 0.03 s; copying the rest of the file for each line took 36 s


def test_scipy_npz_with_spare_indices(tmp_path):
    """scipy writes its whole arrays, which may have more indices than the offsets say."""
    np.savez(tmp_path / "a.npz", format=b"csr", shape=[2, 2], indptr=[0, 1, 2], indices=[1, 0, 7], data=[3.0, 4.0, 5.0])
    made = matrices.load(str(tmp_path / "a.npz"))
    assert (made.col.tolist(), made.values.tolist()) == ([1, 0], [3, 4])


ROWS = {"indptr": [0, 1, 2], "indices": [0, 1], "data": [1.0, 2], "shape": [2, 2]}
ENTRIES = {"format": "coo", "row": [0, 1], "col": [0, 1], "data": [1.0, 2], "shape": [2, 2]}
OWN = {"crow": [0, 1, 2], "col": [0, 1], "shape": [2, 2]}
BLOCKS = {"format": "bsr", "indptr": [0, 1], "indices": [0], "shape": [3, 2]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (OWN | {"crow": [0, 2, 1]}, "indptr must be a non-decreasing sequence"),
        (OWN | {"col": [0, 5]}, "indices must be < 2"),
        (OWN | {"shape": [2]}, "index pointer size 3 should be 2"),
        (OWN | {"shape": [2, -2]}, "elements cannot be negative"),
        (OWN | {"crow": np.array([None])}, "Object arrays cannot be loaded"),
        (OWN | {"col": [[0, 1]]}, "should be 1-D"),
        (OWN | {"values": [1, 2j]}, "expected real values, got complex128"),
        (OWN | {"values": [1, 2, 3]}, "should have the same size"),
        ({"shape": [2, 2]}, "expected the arrays of scipy.sparse.save_npz, or crow, .*, got shape"),
        (BLOCKS | {"data": np.ones((1, 2, 2))}, r"of whole blocks of \(3, 2\)"),
        (BLOCKS | {"data": np.ones((1, 0, 0))}, "by zero"),
        (BLOCKS | {"indices": [2**62], "shape": [1, 4], "data": np.ones((1, 1, 4))}, "column index values must be < 1"),
        (ENTRIES | {"col": [0, 1, 1], "data": [1.0, 2, 3]}, "arrays must have the same length"),
        (ENTRIES | {"row": [0, 2]}, "axis 0 index 2 exceeds matrix dimension 2"),
        (ENTRIES | {"row": [0, -1]}, "negative axis 0 index"),
        (ENTRIES | {"shape": [10**12, 2]}, rf"expected at most {2**27} rows of 2 entries, got {10**12}"),
        (ENTRIES | {"format": "lil"}, "not implemented for sparse matrix of format lil"),
        (ROWS | {"format": "csr", "indices": [0, 2]}, "indices must be < 2"),
        (ROWS | {"format": "csc", "indices": [0, -1]}, "indices must be >= 0"),
        (ROWS | {"format": "csr", "indptr": [0, 9, 0], "data": [], "indices": []}, "expected offsets that do not"),
        (ROWS | {"format": "csr", "indptr": np.array([0, 100, -100], np.int8)}, "expected offsets that do not"),
        (ROWS | {"format": "csc", "indptr": [0, 1, 3]}, "Last value of index pointer"),
        ({"format": "dia", "offsets": [0, 1], "data": [[1.0, 2]], "shape": [2, 2]}, "number of diagonals"),
    ],
)
def test_malformed_npz(tmp_path, parts, message):
    np.savez(tmp_path / "a.npz", **parts)
    with pytest.raises(ValueError, match=rf"a\.npz: .*{message}"):
        matrices.load(str(tmp_path / "a.npz"))


def test_an_encrypted_archive_and_wrong_names_of_drawn_matrices_raise(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **OWN)
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag "encrypted", here and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.npz: .*encrypted"):
        matrices.load(str(path))
    for source in ("rmat:3", "rmat:60:1", "grid:-3", "grid:x", "pruned:3x3:2", "pruned:3x6:2of4", "pruned:3:0.5"):
        with pytest.raises(ValueError, match=source):
            matrices.load(source)


@st.composite
def markets(draw):
    """A matrix and the file that scipy writes for it."""
    field = draw(st.sampled_from(["real", "integer", "unsigned-integer", "pattern"]))
    kinds = ["general", "symmetric"] + ["skew-symmetric"] * (field != "unsigned-integer")
    symmetry = draw(st.sampled_from(kinds))
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    columns = columns if symmetry == "general" else rows
    dtype, numbers = {
        "real": (np.float64, st.floats(allow_nan=False)),
        "pattern": (np.float64, st.just(1.0)),
        "integer": (np.int64, st.integers(1 - 2**63, 2**63 - 1)),
        "unsigned-integer": (np.uint64, st.integers(0, 2**64 - 1)),
    }[field]
    cells = draw(st.lists(st.one_of(st.just(0), numbers), min_size=rows * columns, max_size=rows * columns))
    dense = np.array(cells, dtype=dtype).reshape(rows, columns)
    if symmetry != "general":
        below = np.tril(dense, -1)
        dense = below - below.T if symmetry == "skew-symmetric" else np.tril(dense) + below.T
    with np.errstate(invalid="ignore"):
        dense = np.where(dense == 0, np.zeros((), dtype), dense)
    file = io.BytesIO()
    options = {"field": "pattern"} if field == "pattern" else {}
    a = scipy_sparse.coo_array(dense)
    scipy_io.mmwrite(
        file, a, symmetry=symmetry, precision=17, comment=draw(st.sampled_from(["", "two\nlines"])), **options
    )
    if field == "pattern":
        dense = np.abs(dense)
    return dense.astype(np.float64), file.getvalue()


@given(markets(), st.sampled_from(["", ".gz", ".bz2"]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_files_of_scipy_are_read_back(tmp_path_factory, market, packing, windows):
    dense, data = market
    path = tmp_path_factory.getbasetemp() / f"round.mtx{packing}"
    data = data.replace(b"\n", b"\r\n") if windows else data
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[packing](data))
    made = matrices.load(str(path))
    assert (made.name, made.shape, made.values is None) == ("round", dense.shape, b"pattern" in data[:60])
    np.testing.assert_array_equal(dense_of(made), dense)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_sparse_format_of_scipy_is_read_back(tmp_path_factory, data):
    layout = data.draw(st.sampled_from(["csr", "csc", "coo", "bsr", "dia"]))
    kind = data.draw(st.sampled_from(["array", "matrix"]))
    dtype = data.draw(st.sampled_from(["bool", "int8", "int64", "uint64", "float32", "float64"]))
    rows, columns = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    dense = np.array(
        data.draw(st.lists(st.sampled_from([0, 0, 1, 5, 100]), min_size=rows * columns, max_size=rows * columns)), dtype
    ).reshape(rows, columns)
    a = getattr(scipy_sparse, f"{layout}_{kind}")(dense)
    path = tmp_path_factory.getbasetemp() / "round.npz"
    scipy_sparse.save_npz(path, a, compressed=data.draw(st.booleans()))
    made = matrices.load(str(path))
    assert made.shape == dense.shape
    np.testing.assert_array_equal(dense_of(made), dense)


@given(markets(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_mutated_file_is_read_or_refused(tmp_path_factory, market, data):
    """One or two bytes of the sizes or entries are replaced, removed or inserted: no crash, and no index outside."""
    text = market[1].decode()
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(text.index("\n") + 1, len(text)))
        char = data.draw(st.sampled_from(["", *"0123456789 \t\n\r.-+eE_%\0infaxd,"]))
        text = text[:at] + char + text[at + data.draw(st.integers(0, 1)) :]
    path = tmp_path_factory.getbasetemp() / "changed.mtx"
    path.write_bytes(text.encode("latin-1"))
    try:
        made = matrices.load(str(path))
    except ValueError:
        return
    rows, columns = made.shape
    assert made.crow.shape == (rows + 1,)
    assert made.crow[0] == 0
    assert made.crow[-1] == made.nnz
    assert made.nnz == 0 or 0 <= made.col.min() <= made.col.max() < columns
