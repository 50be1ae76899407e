"""Plans: writes to their matrix, inference tensors, pickles, transforms."""

import copy
import pickle

import pytest
import torch

from common.sparse_cases import LAYOUTS, draw_sparse, in_layout
from custom_mm.indices import Check
from matmuls import plan, sddmm, sparse_attention, spmm
from matmuls.sparse import csr_pattern, tensor_pattern

# --------------------------------------------------------------------------------------------------------------- plans


def test_plan(device):
    dense = draw_sparse(20, 30, 0.2, torch.float32, device)
    a = dense.to_sparse_csr()
    made = plan(a)
    assert plan(made) is made
    assert made._pattern.crow.dtype == torch.int32
    assert (made.shape, made.nnz, made.dtype, made.device) == (a.shape, a._nnz(), torch.float32, a.device)
    assert made.nbytes == 4 * 21 + 4 * made.nnz + 4 * made.nnz
    b = torch.randn(30, 4, device=device)
    torch.testing.assert_close(made @ b, dense @ b)
    assert made.update(a.values() * 2) is made
    torch.testing.assert_close(made @ b, 2 * dense @ b)
    torch.testing.assert_close(made.with_values(a.values()) @ b, dense @ b)
    torch.testing.assert_close(made @ b, 2 * dense @ b)
    before = made.nbytes
    spmm(made, b.clone().requires_grad_()).sum().backward()
    assert made.nbytes == before + 4 * (31 + 2 * made.nnz)
    for word in ("20 x 30", f"{made.nnz} nonzeros", "int32", "kept", f"{made.nbytes} bytes"):
        assert word in made.explain()
    assert "nnz=" in repr(made)
    leaf = dense.to_sparse_csr().requires_grad_()
    once = plan(leaf)
    for n in (1, 2):  # a graph for each product
        (once @ b).sum().backward()
        torch.testing.assert_close(leaf.grad.to_dense(), n * (dense != 0) * b.sum(1))
    for bad in (a.values()[1:], a.values()[None]):
        with pytest.raises(ValueError, match=r"SparsePlan: expected values of shape"):
            made.update(bad)


def test_values_in_the_shape_of_the_tensors_values(device):
    dense = draw_sparse(24, 36, 0.4, device=device)
    batch = torch.stack([dense, dense]).to_sparse_csr()
    for a in (dense.to_sparse_bsr((2, 3)), batch):
        b = torch.randn(*a.shape[:-2], 36, 5, device=device)
        torch.testing.assert_close(plan(a).update(3 * a.values()) @ b, 3 * (a.to_dense() @ b))
        torch.testing.assert_close(plan(a).with_values(3 * a.values()) @ b, 3 * (a.to_dense() @ b))


def in_other_strides(values):
    """The same numbers, in memory by the last dimension first, with a gap behind each."""
    shape = values.shape[::-1]
    return values.new_zeros(*shape, 2)[..., 0].permute(*reversed(range(len(shape)))).copy_(values)


@pytest.mark.parametrize("kind", ["blocks", "batch", "csr"])
@pytest.mark.parametrize("constant", [False, True])
def test_values_of_any_strides(kind, constant, device):
    dense = draw_sparse(24, 36, 0.4, device=device)
    batch = torch.stack([dense, dense]).to_sparse_csr()
    a = {"blocks": dense.to_sparse_bsr((2, 3)), "batch": batch, "csr": dense.to_sparse_csr()}[kind]
    b, full = torch.randn(*a.shape[:-2], 36, 5, device=device), a.to_dense()
    values = in_other_strides(3 * a.values())
    assert not values.is_contiguous()
    made = plan(a, constant=constant)
    assert made.update(values) is made
    for _ in range(3):
        torch.testing.assert_close(made @ b, 3 * full @ b)
    values *= 2  # which every product reads; of a constant plan, as the version counter rises
    for _ in range(3):
        torch.testing.assert_close(made @ b, 6 * full @ b)
    torch.testing.assert_close(made.values, values.reshape(-1))
    torch.testing.assert_close(copy.copy(made) @ b, 6 * full @ b)
    torch.testing.assert_close(pickle.loads(pickle.dumps(made)) @ b, 6 * full @ b)
    trained = in_other_strides(a.values()).requires_grad_()
    plain = a.values().clone().requires_grad_()
    (made.with_values(plain) @ b).square().sum().backward()
    other = made.with_values(trained)
    for n in (1, 2):  # a graph for each product
        (other @ b).square().sum().backward()
        torch.testing.assert_close(trained.grad, n * plain.grad)
    with torch.no_grad():
        trained.mul_(-1)
    torch.testing.assert_close(other @ b, -full @ b)
    torch.testing.assert_close(other.update(a.values()) @ b, full @ b)
    torch.testing.assert_close(made.mT @ b[..., :24, :], 6 * full.mT @ b[..., :24, :])


def test_indices_are_checked_once_and_again_after_a_write(device):
    a = draw_sparse(20, 30, 0.2, torch.float32, device).to_sparse_csr()
    b = torch.randn(30, 4, device=device)
    first = spmm(a, b)
    structure = tensor_pattern._known[a][1]
    assert torch.equal(spmm(a, b), first)
    assert tensor_pattern._known[a][1] is structure
    a.detach().values().mul_(2)
    torch.testing.assert_close(spmm(a, b), 2 * first)
    a.detach().col_indices()[3] = 30
    with pytest.raises(ValueError, match=r"spmm: expected columns from 0 to 29 at nonzero 3, got 30"):
        spmm(a, b)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("leaf", [False, True])
def test_a_plan_sees_writes_to_its_matrix(leaf, layout, index, device):
    """Values and indices share a version counter: changed values are used, changed indices raise."""
    dense, b = draw_sparse(20, 30, 0.2, torch.float32, device).to_dense(), torch.randn(30, 4, device=device)
    a, moved = in_layout(dense, layout, index), in_layout(dense.roll(10, 1), layout, index)
    made, first = plan(a.requires_grad_(leaf)), spmm(a.detach(), b)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(made @ b, first)
        (a._values() if layout == "coo" else a.values()).mul_(2)
        for _ in range(2):
            torch.testing.assert_close(made @ b, 2 * first)
        copied, again = pickle.loads(pickle.dumps(made)), copy.copy(made)
        a.copy_(moved)
        for use in (lambda: made @ b, lambda: again @ b, lambda: sddmm(dense, b @ b.mT, made)):
            with pytest.raises(ValueError, match=": expected the indices that the plan was made of, got others"):
                use()
        torch.testing.assert_close(copied @ b, 2 * first)
        torch.testing.assert_close(made.update(copied.values) @ b, 2 * first)
        torch.testing.assert_close(spmm(a, b), plan(moved) @ b)
        assert a.to_dense().roll(-10, 1).equal(dense)


def test_a_transform_leaves_nothing_in_a_plan(device):
    eye, ones = torch.eye(4, device=device), torch.ones(4, 2, device=device)
    for made in (plan(eye.to_sparse_csr()), plan(eye.to_sparse_bsr((2, 2)))):
        assert torch.equal(torch.func.grad(lambda b, made=made: (made @ b).sum())(ones), ones)
        pickle.loads(pickle.dumps(made))


def test_blocks_whose_indices_overflow(device):
    crow, col = torch.tensor([[0, 1], [2**30 - 1, 0]], dtype=torch.int32, device=device)
    a = torch.sparse_bsr_tensor(crow, col[:1], torch.ones(1, 1, 4, device=device), (1, 2**33))
    assert plan(a)._pattern.col.tolist() == [2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize("block", [(0, 2), (2, 3)])
def test_blocks_that_do_not_fill_the_matrix_are_refused(block, device):
    crow, col = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    a = torch.sparse_bsr_tensor(crow, col, torch.zeros(0, *block, device=device), (2, 2), check_invariants=False)
    with pytest.raises(
        ValueError, match=rf"spmm: expected blocks that 2 x 2 can be cut into, got {block[0]} x {block[1]}"
    ):
        spmm(a, torch.ones(2, 1, device=device))


def test_indices_are_not_trusted_before_a_plans_check_ends(monkeypatch, device):
    """While a plan waits for the GPU's check of the indices, another thread's product runs its own check."""
    a = draw_sparse(20, 30, 0.2, torch.float32, device).to_sparse_csr()
    a.detach().col_indices()[3] = 30
    facts, met = Check.facts, []

    def slow(self):
        if self.name == "plan":
            with pytest.raises(ValueError, match="spmm: expected columns from 0 to 29 at nonzero 3, got 30"):
                spmm(a, torch.randn(30, 4, device=device))
            met.append(self.name)
        return facts(self)

    monkeypatch.setattr(Check, "facts", slow)
    with pytest.raises(ValueError, match="plan: expected columns from 0 to 29 at nonzero 3, got 30"):
        plan(a)
    assert met == ["plan"]


def test_a_structure_lives_no_longer_than_its_tensor():
    a = torch.eye(4).to_sparse_csr()
    before = len(tensor_pattern._known)
    spmm(a, torch.ones(4, 1))
    assert len(tensor_pattern._known) == before + 1
    del a
    assert len(tensor_pattern._known) == before


def test_the_mean_of_a_row_longer_than_float16_can_count(device):
    nonzeros = 70_000
    values = torch.ones(nonzeros, dtype=torch.float16)
    a = torch.sparse_csr_tensor(torch.tensor([0, nonzeros]), torch.arange(nonzeros), values, (1, nonzeros))
    b = torch.ones(nonzeros, 2, dtype=torch.float16, device=device, requires_grad=True)
    spmm(a.to(device), b, reduce="mean").sum().backward()
    torch.testing.assert_close(b.grad, torch.full_like(b, 1 / nonzeros), atol=1e-7, rtol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, "uncoalesced"])
def test_inference_first_and_training_after(layout, device):
    a = in_layout(draw_sparse(6, 9, 0.5, device=device), "coo" if layout == "uncoalesced" else layout)
    if layout == "uncoalesced":
        a = torch.sparse_coo_tensor(a.indices().repeat(1, 2), a.values().repeat(2), a.shape)
    x = torch.randn(9, 4, device=device)
    with torch.inference_mode():
        spmm(a, x)
        made = plan(a)
        made @ x
    x.requires_grad_()
    (spmm(a, x).sum() + (made @ x).sum()).backward()
    torch.testing.assert_close(x.grad, 2 * a.to_dense().sum(0)[:, None].expand(-1, 4))


def test_indices_of_inference_tensors_are_checked_each_time(device):
    with torch.inference_mode():
        a = draw_sparse(6, 9, 0.5, device=device).to_sparse_csr()
        x = torch.randn(9, 4, device=device)
        spmm(a, x)
        a.col_indices()[0] = 10**6
        with pytest.raises(ValueError, match="columns from 0 to 8"):
            spmm(a, x)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_plan_of_inference_tensors_copies_the_indices(layout, index, device):
    """Inference tensors have no version counter: a write would go unnoticed and lead out of bounds."""
    dense, x = draw_sparse(32, 32, 0.5, device=device), torch.randn(32, 4, device=device)
    with torch.inference_mode():
        a = in_layout(dense, layout, index)
        if layout == "bsr":  # a block size that has a kernel
            a = dense.to_sparse_bsr((16, 16))
            a = torch.sparse_bsr_tensor(a.crow_indices().to(index), a.col_indices().to(index), a.values(), a.shape)
        made = plan(a)
        for t in csr_pattern.indices_of("plan", a):
            t.fill_(10**6)
        torch.testing.assert_close(made @ x, dense @ x)
    assert not any(t.is_inference() for t in (*made._pattern.tensors, *made._pattern.block_tensors))


def test_a_plan_works_after_a_failed_transposition(monkeypatch, device):
    made = plan(draw_sparse(6, 9, 0.5, device=device).to_sparse_csr())
    right, x = csr_pattern._csr_transpose, torch.randn(9, 4, device=device, requires_grad=True)

    def fails(*args):
        t_crow, t_col, t_order = right(*args)
        return t_crow[:0], t_col, t_order  # no longest row of no rows

    monkeypatch.setattr(csr_pattern, "_csr_transpose", fails)
    with pytest.raises(RuntimeError):
        made @ x
    monkeypatch.undo()
    (made @ x).sum().backward()
    torch.testing.assert_close(x.grad[:, 0], (made @ torch.eye(9, device=device)).sum(0))


def test_empty_batches(device):
    x = torch.randn(2, 4, 5, device=device)
    assert torch.equal(spmm(torch.zeros(2, 3, 4, device=device).to_sparse_csr(), x), x.new_zeros(2, 3, 5))
    full = torch.ones(2, 3, 4, device=device).to_sparse_csr()
    assert spmm(full, x[..., :0]).shape == (2, 3, 0)
    assert not sddmm(x.new_ones(2, 3, 0), x.new_ones(2, 0, 4), full).any()


@pytest.mark.parametrize(
    ("col", "rise"),
    [
        ([0, 2, 1, 2, 0, 1, 2], True),
        ([0, 2, 1, 2, 0, 0, 2], False),
        ([2, 0, 1, 2, 0, 1, 2], False),
        ([0, 2, 1, 1, 0, 1, 2], False),
    ],
)
def test_unsorted_columns_raise(col, rise, device):
    """In rows of 2, 0, 2, 3 and 0 nonzeros, and in a long one."""
    crow, long = torch.tensor([0, 2, 2, 4, 7, 7, 1007]), torch.arange(1000)
    for last in (long, long.clamp(max=998)):
        a = torch.sparse_csr_tensor(crow, torch.cat([torch.tensor(col), last]), torch.ones(1007), (6, 1000)).to(device)
        assert plan(a)._pattern.distinct == (rise and last is long)


def test_int64_indices_are_narrowed_once(device, monkeypatch):
    counted, right = [], csr_pattern._csr_transpose
    monkeypatch.setattr(csr_pattern, "_csr_transpose", lambda *args: counted.append(1) or right(*args))
    pattern = draw_sparse(8, 8, 0.5, device=device).to_sparse_csr()
    q, k, v = (torch.randn(8, 4, device=device, requires_grad=True) for _ in range(3))
    for _ in range(3):
        sparse_attention(q, k, v, pattern).sum().backward()
    assert len(counted) == 1


def test_a_plan_pickled_after_its_indices_were_written_over_is_refused():
    made = plan(draw_sparse(6, 9, 0.5).to_sparse_csr())
    made._pattern.col[0] = 100
    kept = pickle.dumps(made)
    with pytest.raises(ValueError, match="columns from 0 to 8"):
        pickle.loads(kept)
