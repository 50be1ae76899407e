"""Readers of matrix files against scipy's writers and by hand; drawn matrices; what is broken is told."""

import gzip

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


def test_hostile_npz(tmp_path):
    path = tmp_path / "a.npz"
    for change, message in (
        ({"crow": [0, 2, 1]}, "offsets that do not decrease"),
        ({"col": [0, 5]}, "expected columns within 2 x 2"),
        ({"shape": [2]}, "a.npz"),
        ({"crow": np.array([None])}, "a.npz"),
    ):
        np.savez(path, **{"crow": [0, 1, 2], "col": [0, 1], "shape": [2, 2]} | change)
        with pytest.raises(ValueError, match=message):
            matrices.load(str(path))
    for source in ("rmat:3", "grid:x", "pruned:3x3:2", "pruned:3:0.5"):
        with pytest.raises(ValueError, match=source):
            matrices.load(source)
