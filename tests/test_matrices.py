"""Readers of matrix files against scipy's writers and by hand; drawn matrices; what is broken is told."""

import gzip
import time

import numpy as np
import pytest
import torch

from matmuls import matrices

scipy_sparse = pytest.importorskip("scipy.sparse")
scipy_io = pytest.importorskip("scipy.io")


def dense_of(m):
    values = torch.ones(m.nnz, dtype=torch.float64) if m.values is None else m.values
    row = torch.repeat_interleave(torch.arange(m.shape[0]), m.crow.diff())
    return torch.zeros(m.shape, dtype=torch.float64).index_put((row, m.col.long()), values, accumulate=True).numpy()


def drawn(rows=12, columns=8, symmetric=False):
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.3)
    return np.tril(dense) + np.tril(dense, -1).T if symmetric else dense


MARKET = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_scipys_npz(tmp_path, layout):
    dense = drawn()
    a = getattr(scipy_sparse, f"{layout}_array")(dense, **({"blocksize": (3, 2)} if layout == "bsr" else {}))
    scipy_sparse.save_npz(tmp_path / "a.npz", a)
    made = matrices.load(str(tmp_path / "a.npz"))
    np.testing.assert_array_equal(dense_of(made), dense)
    assert (made.name, made.crow.dtype) == ("a", torch.int32)


def test_our_npz(tmp_path):
    a = scipy_sparse.csr_array(drawn())
    for values in ({}, {"values": a.data}):
        np.savez(tmp_path / "a.npz", crow=a.indptr, col=a.indices, shape=np.array(a.shape), **values)
        made = matrices.load(str(tmp_path / "a.npz"))
        assert (made.values is None) == (not values)
        np.testing.assert_array_equal(dense_of(made) != 0, drawn() != 0)


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
@pytest.mark.parametrize("form", ["coordinate", "array"])
def test_matrix_market(tmp_path, symmetry, form):
    dense = drawn(9, 9, symmetry == "symmetric")
    if symmetry == "skew-symmetric":
        dense = np.tril(dense, -1) - np.tril(dense, -1).T
    path = tmp_path / "a.mtx"
    a = scipy_sparse.coo_array(dense) if form == "coordinate" else dense
    scipy_io.mmwrite(path, a, symmetry=symmetry, precision=17, comment="two\nlines")
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


def test_drawn():
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
        ("a.mtx", "hello\n", "expected a Matrix Market banner, got 'hello'"),
        ("a.mtx", "%%MatrixMarket matrix coordinate complex general\n", "expected a real matrix"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1.0\n", "expected 2 entries of 3 numbers"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1.0\n", "expected rows within 2 x 2"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 1\n0 1 1.0\n", "expected rows within 2 x 2"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 x 1\n", "invalid literal"),
        ("a.mtx", f"{MARKET}2 2 1\n1 1.5 1.0\n", "expected indices as whole numbers, got 1.5"),
        ("a.mtx", f"{MARKET}2 2 1\nnan 1 1.0\n", "expected indices as whole numbers, got nan"),
        ("a.mtx", f"{MARKET}2 -2 0\n", "expected sizes from 0 to 9223372036854775807, got 2 x -2"),
        ("a.mtx", f"{MARKET}2 {2**63} 0\n", "expected sizes from 0 to 9223372036854775807"),
        ("a.mtx", f"{MARKET}{10**15} 2 0\n", "a.mtx: Unable to allocate"),
        ("a.mtx", f"{MARKET}2 2\n1 1 1.0\n", "expected rows and columns, and the number of entries"),
        ("a.mtx", MARKET.replace("coordinate", "foo"), "expected coordinates, or an array of numbers, got foo real"),
        (
            "a.mtx",
            "%%MatrixMarket matrix array pattern general\n",
            "coordinates, or an array of numbers, got array pat",
        ),
        ("a.mtx", MARKET.replace("general", "symmetric") + "3 2 0\n", "expected a symmetric matrix to be square"),
        ("a.graph", "3 2 1\n2 3 2\n1 3 3\n3 2\n", r"expected lines of 0 numbers and then 2 an edge, got \[3, 3, 2\]"),
        ("a.graph", "2 1 10\n\n1 2 1\n", r"expected lines of 1 numbers and then 1 an edge, got \[-1, 2\]"),
        ("a.graph", "2 1 10 -1\n2\n1\n", "expected lines of -1 numbers"),
        ("a.graph", "2 1 1011\n2\n1\n", "expected a format of up to three digits, 0 or 1, got 1011"),
        ("a.graph", "2 1\n2.5\n1\n", "expected neighbours as whole numbers, got 2.5"),
        ("a.graph", "2 1\n2\n", "expected a line for each of 2 vertices, got 1"),
        ("a.graph", "2 2\n2\n1\n", "expected 2 edges"),
        ("a.graph", "2 1\n3\n1\n", "expected columns within 2 x 2"),
        ("a.npz", "PK", "a.npz"),
        ("a.npz", "PK\x03\x04 no archive", "a.npz"),
        ("a.mtx.gz", "no gzip", "a.mtx.gz: Not a gzipped file"),
        ("a.mtx", "", "expected a Matrix Market banner"),
        ("a.mtx", "%%MatrixMarket matrix coordinate real general\n%\n", "not enough values"),
    ],
)
def test_broken_files_are_told(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        matrices.load(str(path))
    assert name in str(caught.value)


def test_matrix_market_as_others_write_it(tmp_path):
    """A comment beyond ASCII, ends of lines as on Windows, lines of nothing."""
    text = "%%MatrixMarket matrix coordinate real general\r\n% Müller\r\n\r\n  \r\n2 2 1\r\n2 1 4.5\r\n"
    (tmp_path / "a.mtx").write_bytes(text.encode("latin-1"))
    read = matrices.load(str(tmp_path / "a.mtx"))
    assert (read.crow.tolist(), read.col.tolist(), read.values.tolist()) == ([0, 0, 1], [0], [4.5])


def test_comments_without_end(tmp_path):
    (tmp_path / "a.mtx").write_text(MARKET + "% comment\n\n \t% another\n" * 10**5 + "2 2 1\n2 1 4.5\n")
    begin = time.process_time()
    assert matrices.load(str(tmp_path / "a.mtx")).values.tolist() == [4.5]
    assert time.process_time() - begin < 2  # 0.03 s; a copy of the rest for each line took 36


def test_hostile_npz(tmp_path):
    path = tmp_path / "a.npz"
    for change, message in (
        ({"crow": [0, 2, 1]}, "offsets that do not decrease"),
        ({"col": [0, 5]}, "expected columns within 2 x 2"),
        ({"shape": [2]}, "a.npz"),
        ({"crow": np.array([None])}, "a.npz"),
        ({"crow": np.array([0, 5, 2], np.uint32)}, "offsets that do not decrease"),
        ({"crow": [[0, 1, 2]]}, r"expected offsets as whole numbers in one dimension, got int64 of \(1, 3\)"),
        ({"col": [0, 0.7]}, "expected columns as whole numbers, got 0.7"),
        ({"col": [[0, 1]]}, "a.npz"),
        ({"shape": [2.5, 2]}, "expected sizes as whole numbers, got 2.5"),
        ({"shape": [2, -2]}, "expected sizes from 0 to 9223372036854775807, got 2 x -2"),
        ({"values": [1, 2j]}, "expected real values, got complex128"),
        ({"values": ["1", "2"]}, "expected real values, got <U1"),
        ({"values": [1, 2, 3]}, r"expected as many rows as columns and values, got 2, 2 and values of shape \(3,\)"),
        ({"values": [[1], [2]]}, r"got 2, 2 and values of shape \(2, 1\)"),
    ):
        np.savez(path, **{"crow": [0, 1, 2], "col": [0, 1], "shape": [2, 2]} | change)
        with pytest.raises(ValueError, match=message):
            matrices.load(str(path))
    blocks = {"format": b"bsr", "indptr": [0, 1], "indices": [0], "shape": [3, 2]}
    for block in ((2, 2), (0, 0)):
        np.savez(path, **blocks, data=np.ones((1, *block)))
        with pytest.raises(ValueError, match="expected blocks that 3 x 2 can be cut into, got"):
            matrices.load(str(path))
    for index in (1, -1, 2**62):  # times the width of a block 2^64
        np.savez(path, format="bsr", indptr=[0, 1], indices=[index], shape=[1, 4], data=np.ones((1, 1, 4)))
        with pytest.raises(ValueError, match=rf"a.npz: expected indices from 0 to 0, got {index} to {index}"):
            matrices.load(str(path))
    np.savez(path, format=b"coo", row=[0, 1], col=[0, 1, 1], data=[1.0, 2, 3], shape=[2, 2])
    with pytest.raises(ValueError, match="expected as many rows as columns and values, got 2, 3"):
        matrices.load(str(path))
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag of what is encrypted, here and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.npz: .*encrypted"):
        matrices.load(str(path))
    for source in ("rmat:3", "rmat:60:1", "grid:-3", "grid:x", "pruned:3x3:2", "pruned:3x6:2of4", "pruned:3:0.5"):
        with pytest.raises(ValueError, match=source):
            matrices.load(source)
