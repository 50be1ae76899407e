"""Matrices of scipy.sparse and CuPy as operands: in their own memory, with the errors of sparse tensors."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

import matmuls
from matmuls.sparse import foreign

FORMATS = "csr", "csc", "bsr", "coo", "dia", "lil", "dok"
SHARED = "csr", "csc", "bsr"


@pytest.fixture(scope="module")
def scipy():
    return pytest.importorskip("scipy.sparse")


def drawn(rows=12, columns=8):
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return full * (torch.rand(rows, columns, generator=generator) < 0.4)


def made(scipy, layout, full, kind="array", **kwargs):
    return getattr(scipy, f"{layout}_{kind}")(full.numpy(), **kwargs)


@pytest.mark.parametrize("kind", ["matrix", "array"])
@pytest.mark.parametrize("layout", FORMATS)
def test_operands(layout, kind, scipy):
    full, b = drawn(), torch.randn(8, 3, dtype=torch.float64)
    a = made(scipy, layout, full, kind)
    torch.testing.assert_close(matmuls.plan(a) @ b, full @ b)
    torch.testing.assert_close(b.mT @ matmuls.plan(a.T), b.mT @ full.mT)
    torch.testing.assert_close(matmuls.spmm(a, b), full @ b)
    torch.testing.assert_close(matmuls.spmm(a, b[:, 0], alpha=2), 2 * full @ b[:, 0])
    torch.testing.assert_close(matmuls.cusparseMM.apply(a, b), full @ b)
    square = full @ full.mT
    torch.testing.assert_close(matmuls.spgemm(a, a.T).to_dense(), square)
    torch.testing.assert_close((matmuls.plan(a) @ a.T).to_dense(), square)
    torch.testing.assert_close(matmuls.plan_spgemm(a, a.T)().to_dense(), square)
    lower = full[:8].tril(-1) + torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(lower @ matmuls.solve_triangular(made(scipy, layout, lower, kind), b, upper=False), b)
    torch.testing.assert_close(lower @ matmuls.plan_solve(made(scipy, layout, lower, kind), upper=False)(b), b)


@pytest.mark.parametrize("layout", FORMATS)
def test_patterns(layout, scipy):
    full = drawn()
    tensor, a = full.to_sparse_csr(), made(scipy, "csr" if layout == "bsr" else layout, full)  # no zeros in blocks
    q, k = torch.randn(12, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    # The place of each value of `a` among those by rows.
    order = full.mT.to_sparse().indices() if layout == "csc" else None
    places = torch.zeros(full.shape, dtype=torch.int64)
    places[full != 0] = torch.arange(tensor._nnz())
    order = torch.arange(tensor._nnz()) if order is None else places[order[1], order[0]]
    scores = matmuls.sddmm(q, k.mT, tensor)
    torch.testing.assert_close(matmuls.sddmm(q, k.mT, a), scores[order])
    torch.testing.assert_close(matmuls.sparse_softmax(scores[order], a), matmuls.sparse_softmax(scores, tensor)[order])
    torch.testing.assert_close(matmuls.sparse_attention(q, k, k, a), matmuls.sparse_attention(q, k, k, tensor))


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("layout", SHARED)
def test_values_are_shared(layout, index, scipy):
    full, b = drawn(), torch.randn(8, 3, dtype=torch.float64)
    a = made(scipy, layout, full)
    a.indices, a.indptr = a.indices.astype(index), a.indptr.astype(index)
    plan = matmuls.plan(a)
    assert plan.values.data_ptr() == a.data.ctypes.data
    assert foreign.native("plan", a).values().data_ptr() == a.data.ctypes.data
    torch.testing.assert_close(plan @ b, full @ b)
    a.data *= 2
    for _ in range(2):
        torch.testing.assert_close(plan @ b, 2 * full @ b)
    a.indices[:] = 0  # of which the plan has a copy
    torch.testing.assert_close(plan @ b, 2 * full @ b)
    values = plan.values
    del a
    torch.testing.assert_close(plan @ b, 2 * full @ b)
    torch.testing.assert_close(pickle.loads(pickle.dumps(plan)) @ b, 2 * full @ b)
    assert values.sum() != 0


@pytest.mark.filterwarnings("error")
def test_memory_of_other_kinds(scipy):
    """Memory that may not be written to, strided values, room for more nonzeros, columns in any order, duplicates."""
    full, b = drawn(), torch.randn(8, 3, dtype=torch.float64)
    a = made(scipy, "csr", full)
    a.data.flags.writeable = a.indices.flags.writeable = False
    torch.testing.assert_close(matmuls.plan(a) @ b, full @ b)
    spread = made(scipy, "csr", full)
    spread.data = spread.data.repeat(2)[::2]
    torch.testing.assert_close(matmuls.plan(spread) @ b, full @ b)
    roomy = made(scipy, "csr", full)
    nonzeros = roomy.nnz
    roomy.data, roomy.indices = (array.repeat(2) for array in (roomy.data, roomy.indices))
    roomy.data[:nonzeros], roomy.indices[:nonzeros] = roomy.data[::2].copy(), roomy.indices[::2].copy()
    roomy.indices[nonzeros:] = 100
    plan = matmuls.plan(roomy)
    assert plan.nnz == nonzeros
    torch.testing.assert_close(plan @ b, full @ b)
    twice = scipy.csr_array((torch.ones(4).double().numpy(), [3, 1, 3, 0], [0, 3, 4]), shape=(2, 8))
    torch.testing.assert_close(matmuls.plan(twice) @ b, torch.stack([2 * b[3] + b[1], b[0]]))
    coo = scipy.coo_array((twice.data, ([1, 0, 0, 0], [0, 3, 1, 3])), shape=(2, 8))
    torch.testing.assert_close(matmuls.plan(coo) @ b, torch.stack([2 * b[3] + b[1], b[0]]))
    torch.testing.assert_close(matmuls.plan(scipy.csr_array((3, 8))) @ b, torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_dtypes(dtype, scipy):
    full = drawn().to(dtype)
    full = full * (1 + 2j) if dtype.is_complex else full
    b = torch.randn(8, 3, dtype=dtype)
    torch.testing.assert_close(matmuls.plan(made(scipy, "csr", full)) @ b, full @ b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_errors_of_other_dtypes_are_those_of_tensors(dtype, scipy):
    full, b = drawn().to(dtype), torch.ones(8, 3, dtype=dtype)
    said = []
    for a in (full.to_sparse_csr(), made(scipy, "csr", full)):
        with pytest.raises(RuntimeError, match="expected dense of a floating-point or complex dtype") as caught:
            matmuls.plan(a) @ b
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_bad_matrices_are_errors(scipy):
    full, b = drawn(), torch.randn(8, 3, dtype=torch.float64)
    for dtype in ("longdouble", ">f8"):
        a = made(scipy, "csr", full)
        a.data = a.data.astype(dtype)
        with pytest.raises(
            TypeError, match=r"plan: expected data of scipy.sparse.*csr_array in a dtype and strides of"
        ):
            matmuls.plan(a)
    a = made(scipy, "csr", full)
    a.indices[0] = 8
    for name, call in {"plan": matmuls.plan, "spmm": lambda a: matmuls.spmm(a, b)}.items():
        with pytest.raises(ValueError, match=f"{name}: expected columns from 0 to 7 at nonzero 0, got 8"):
            call(a)
    a = made(scipy, "csr", full)
    a.indptr[-1] += 1
    with pytest.raises(ValueError, match=f"plan: expected the last offset to be {a.nnz - 1}"):
        matmuls.plan(a)
    with pytest.raises(ValueError, match=r"plan: expected a sparse matrix, got scipy.sparse.*coo_array of shape \[3\]"):
        matmuls.plan(scipy.coo_array([1.0, 0.0, 2.0]))
    with pytest.raises(TypeError, match="spmm: expected a sparse tensor or a plan, got ndarray"):
        matmuls.spmm(full.numpy(), b)


class Array:
    """What CuPy's arrays have: an interface to their memory, no more."""

    def __init__(self, tensor, interface):
        self.dtype = str(tensor.dtype)
        if interface == "__dlpack__":
            self.__dict__.update(tensor=tensor)
        else:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__


class WithDlpack(Array):
    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def stand_in(tensor, interface="__dlpack__"):
    """A matrix as of cupyx.scipy.sparse in the memory of a sparse CSR tensor."""
    kind = WithDlpack if interface == "__dlpack__" else Array
    offsets, indices = tensor.crow_indices().int(), tensor.col_indices().int()
    arrays = {"indptr": offsets, "indices": indices, "data": tensor.values()}
    arrays = {name: kind(t, interface) for name, t in arrays.items()}
    return SimpleNamespace(format="csr", shape=tuple(tensor.shape), tocsr=lambda: None, **arrays)


@pytest.mark.parametrize("interface", ["__dlpack__", pytest.param("__cuda_array_interface__", marks=pytest.mark.cuda)])
def test_a_stand_in_for_cupy(interface, device):
    on = "cuda" if interface == "__cuda_array_interface__" else device
    tensor, b = drawn().to(on).to_sparse_csr(), torch.randn(8, 3, dtype=torch.float64, device=on)
    a = stand_in(tensor, interface)
    plan = matmuls.plan(a)
    assert plan.values.data_ptr() == tensor.values().data_ptr()
    torch.testing.assert_close(plan @ b, tensor.to_dense() @ b)
    torch.testing.assert_close(matmuls.spmm(a, b), tensor.to_dense() @ b)
    assert "cupy" not in sys.modules
    a.data = [1.0]
    with pytest.raises(TypeError, match=r"plan: expected data of .* of numpy or with __dlpack__ or .*, got list"):
        matmuls.plan(a)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_cupy(layout):
    cupy = pytest.importorskip("cupy")
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    full, b = drawn().cuda(), torch.randn(8, 3, dtype=torch.float64, device="cuda")
    a = getattr(sparse, f"{layout}_matrix")(cupy.asarray(full))
    plan = matmuls.plan(a)
    torch.testing.assert_close(plan @ b, full @ b)
    torch.testing.assert_close(matmuls.spmm(a, b), full @ b)
    torch.testing.assert_close(matmuls.spgemm(a, a.T).to_dense(), full @ full.mT)
    if layout != "coo":
        assert plan.values.data_ptr() == a.data.data.ptr
