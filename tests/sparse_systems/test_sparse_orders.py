"""Operators that take an order of the values refuse one that does not name each value once: they write through it. And
index checks that are given no indices."""

import resource
from pathlib import Path

import pytest
import torch

from custom_mm import _C
from matmuls import plan

ops = torch.ops.custom_mm
CROW, COL, TWICE = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 2]), torch.tensor([0, 3, 3, 1])
VALUES, LEFT, RIGHT = torch.randn(4), torch.randn(2, 5), torch.randn(3, 5)
EYE = [torch.arange(4), torch.arange(3)]
ONES = torch.ones(3)
CALLS = {
    "csr_sddmm": lambda order: ops.csr_sddmm(CROW, COL, LEFT, RIGHT, 3, 1.0, order),
    "csr_softmax": lambda order: ops.csr_softmax(CROW, VALUES, 1.0, order),
    "csr_softmax_backward": lambda order: ops.csr_softmax_backward(CROW, VALUES, VALUES, 1.0, order),
    "csr_spmm": lambda order: ops.csr_spmm(CROW, COL, VALUES, RIGHT, 3, "sum", 1.0, order),
    "csr_linear": lambda order: ops.csr_linear(CROW, COL, VALUES, RIGHT[:, :3], None, order),
    "csr_spgemm": lambda order: ops.csr_spgemm(VALUES, ONES, [CROW, COL], EYE, [CROW, COL, order], 3),
    "csr_spgemm_sampled": lambda order: ops.csr_spgemm_sampled(VALUES, ONES, [CROW, COL, order], [CROW, COL], EYE, 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_order_that_names_a_value_twice_is_refused(name):
    assert CALLS[name](torch.tensor([2, 0, 3, 1])).isfinite().all()
    with pytest.raises(ValueError, match="expected order to name every value once, got 3 again at nonzero 2"):
        CALLS[name](TWICE)
    with pytest.raises(ValueError, match="order"):
        CALLS[name](torch.tensor([0, 1, 2, 4]))


def test_an_int32_order_that_names_a_value_twice_is_refused():
    with pytest.raises(ValueError, match="sparse_softmax: expected order to name every value once, got 3 again"):
        ops.csr_softmax(CROW.int(), VALUES, 1.0, TWICE.int())


def test_a_write_to_the_order_of_a_plan_is_noticed():
    a = torch.randn(6, 5, dtype=torch.float64)
    made, x = plan(a.to_sparse_csc()), torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(made @ x, a @ x)
    made._pattern.order[0] = made._pattern.order[1]
    with pytest.raises(ValueError, match="name every value once"):
        made @ x


MALFORMED = {
    "floats": torch.ones(5),
    "a matrix": torch.ones(1, 5, dtype=torch.int64),
    "a number": torch.tensor(1),
    "16 bits": torch.ones(5, dtype=torch.int16),
    "sparse": torch.ones(5, dtype=torch.int64).to_sparse(),
    "meta matrix": torch.ones(1, 5, dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_vector_of_indices_is_refused(name):
    for check in (
        lambda: _C.validate_offsets("spmm", MALFORMED[name], 4, "columns"),
        lambda: _C.validate_indices("spmm", "columns", MALFORMED[name], 4),
    ):
        with pytest.raises(ValueError, match=r"spmm: expected (offsets|columns) of one dimension"):
            check()


def test_offsets_need_an_element():
    with pytest.raises(ValueError, match="with at least 1 elements"):
        _C.validate_offsets("spmm", torch.empty(0, dtype=torch.int64), 0, "columns")
    strided = torch.stack([torch.tensor([0, 2, 4]), torch.full((3,), -1)], 1)[:, 0]
    _C.validate_offsets("spmm", strided, 4, "columns")
    _C.validate_indices("spmm", "columns", strided, 5)


@pytest.fixture
def little_memory():
    """2 GiB of address space besides what is in use."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_columns_that_the_nonzeros_do_not_account_for_are_refused(dtype, little_memory):
    """8 or 16 GiB of offsets for four nonzeros."""
    most = 2**31 - 1
    with pytest.raises(ValueError, match=f"csr_transpose: expected at most {2**28} columns with 4 nonzeros.*{most}"):
        ops.csr_transpose(CROW.to(dtype), COL.to(dtype), most)
    wide = torch.sparse_csr_tensor(CROW.to(dtype), COL.to(dtype), VALUES, (2, most))
    with pytest.raises(ValueError, match="csr_transpose: expected at most"):
        VALUES[:2] @ plan(wide)
    with pytest.raises(ValueError, match="expected at most"):
        plan(torch.sparse_csc_tensor(CROW.to(dtype), COL.to(dtype), VALUES, (most, 2)))
    with pytest.raises(ValueError, match="expected at most"):
        plan(torch.sparse_coo_tensor(torch.stack([COL, COL]), VALUES, (most, 3)))


def test_a_transposed_matrix_of_many_columns_takes_no_more_than_its_offsets(little_memory):
    columns = 3 << 26  # 768 MiB of int32 offsets
    crow, col, order = ops.csr_transpose(CROW.int(), COL.int(), columns)
    assert crow[:4].tolist() == [0, 2, 3, 4]
    assert crow[4:].eq(4).all()
    assert (col.tolist(), order.tolist()) == ([0, 1, 0, 1], [0, 2, 1, 3])
