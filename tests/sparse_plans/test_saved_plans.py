"""Plans saved by torch.save are loaded by torch.load as it is called by default; damaged files raise errors."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import matmuls
from common.sparse_cases import LAYOUTS, draw_sparse, in_layout
from matmuls.nn import SparseLinear
from matmuls.sparse import pickled


def reloaded(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


def matrices(device):
    dense = draw_sparse(24, 36, 0.3, torch.float64, device)
    found = {layout: in_layout(dense, layout) for layout in LAYOUTS}
    found["blocks of a kernel"] = draw_sparse(32, 64, 0.1, torch.float32, device).to_sparse_bsr((16, 16))
    found["blocks by columns"] = draw_sparse(32, 64, 0.1, torch.float32, device).to_sparse_bsc((16, 16))
    found["batch"] = torch.stack([dense, dense]).to_sparse_csr()
    row, column = torch.randint(24, (80,), device=device), torch.randint(36, (80,), device=device)
    values = torch.randn(80, dtype=torch.float64, device=device)
    found["duplicates"] = torch.sparse_coo_tensor(torch.stack([row, column]), values, (24, 36))
    found["empty"] = torch.zeros(3, 36, dtype=torch.float64, device=device).to_sparse_csr()
    return found


@pytest.mark.parametrize("name", matrices("cpu"))
@pytest.mark.parametrize("kind", ["ordinary", "constant", "untuned", "trained", "used"])
def test_a_plan_is_loaded_by_default(name, kind, device):
    a = matrices(device)[name]
    b = torch.randn(a.shape[-1], 5, dtype=a.dtype, device=device)
    if kind == "trained":
        a = a.clone().requires_grad_()
    options = {"constant": {"constant": True}, "untuned": {"tune": False}}.get(kind, {})
    plan = matmuls.plan(a, products=9, **options)
    if kind == "used":
        (plan @ b.clone().requires_grad_()).sum().backward()
        _ = plan.mT @ b.new_ones(a.shape[-2], 2)
    expected = plan @ b
    copies = [reloaded(plan), pickle.loads(pickle.dumps(plan))]
    if plan._prepared.source is None:  # torch does not copy sparse tensors so
        copies.append(copy.deepcopy(plan))
    for made in copies:
        assert (made.shape, made.nnz, made.dtype, made.device) == (plan.shape, plan.nnz, plan.dtype, plan.device)
        for _ in range(2):
            torch.testing.assert_close(made @ b, expected)
        ours, theirs = made._selector, plan._selector
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.constant, ours.products) == (theirs.constant, theirs.products)
        assert (made._pattern.blocks is None) == (plan._pattern.blocks is None)
        assert made.values.data_ptr() != plan.values.data_ptr() or not plan.nnz
        torch.testing.assert_close(made.mT @ expected, plan.mT @ expected)
        other = torch.randn(plan._prepared.values_shape, dtype=a.dtype, device=device)
        if kind != "constant" and name != "duplicates":
            torch.testing.assert_close(made.with_values(other) @ b, plan.with_values(other) @ b)
        if kind == "trained":
            y = made @ b
            assert y.requires_grad
            y.sum().backward()


def test_what_is_saved_together_stays_together(device):
    plan = matmuls.plan(matrices(device)["csr"])
    found = reloaded({"plan": plan, "transposed": plan.T, "again": plan, "values": plan.values})
    assert found["again"] is found["plan"]
    assert found["transposed"].T is found["plan"]
    assert found["plan"].values.data_ptr() == found["values"].data_ptr()
    b = torch.randn(24, 3, dtype=torch.float64, device=device)
    torch.testing.assert_close(found["transposed"] @ b, plan.T @ b)


def test_other_plans_and_states(device):
    triangle = torch.eye(8, device=device, dtype=torch.float64).to_sparse_csr()
    solve, b = matmuls.plan_solve(triangle, upper=False, transpose=True), torch.randn(8, 2, device=device).double()
    for made in (reloaded(solve), copy.deepcopy(solve), copy.copy(solve)):
        assert repr(made) == repr(solve)
        torch.testing.assert_close(made(b), solve(b))
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(torch.nn.Linear(8, 4, device=device), sparsity=0.5)
    x = torch.randn(3, 8, device=device)
    y = layer(x)
    other = SparseLinear(8, 4, device=device)
    other.load_state_dict(reloaded(layer.state_dict()))
    torch.testing.assert_close(other(x), y)
    values = layer.plan().values
    strided = torch.stack([values, values], 1)[:, 0]
    torch.testing.assert_close(reloaded(layer.plan().with_values(strided)) @ x.mT, layer.plan() @ x.mT)


def test_a_new_process_loads_it(tmp_path):
    torch.save(matmuls.plan(matrices("cpu")["csr"], constant=True), tmp_path / "plan.pt")
    code = f"import torch, matmuls; print(torch.load({str(tmp_path / 'plan.pt')!r}).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None)
    assert done.stdout.strip() == "torch.Size([24, 36])"


def test_only_functions_that_check_are_safe():
    known = torch.serialization.get_safe_globals()
    ours = [x for x in known if getattr(x, "__module__", "").startswith(("matmuls", "custom_mm"))]
    assert {x.__name__ for x in ours} == {"plan_of_source", "plan_of_indices", "transposed_plan", "solve_plan"}


def damaged():
    """What a file could hold instead of each argument, and what the error says."""
    made = matmuls.plan(in_layout(draw_sparse(24, 36, 0.3), "csc"))
    (crow, col, order), shape, values, values_shape, blocks, settings = pickled.reduced(made)[1]
    n = made.nnz

    def changed(t, place, number):
        t = t.clone()
        t[place] = number
        return t

    rest = shape, values, values_shape, blocks, settings
    indices = crow, col, order
    yield ((crow, changed(col, 3, 36), order), *rest), "columns from 0 to 35"
    yield ((crow, changed(col, 3, -1), order), *rest), "columns from 0 to 35"
    yield ((changed(crow, -1, n + 1), col, order), *rest), "the last offset to be"
    yield ((crow, col, changed(order, 3, n)), *rest), f"an order from 0 to {n - 1}"
    yield ((crow, col, changed(order, 3, -1)), *rest), f"an order from 0 to {n - 1}"
    yield ((crow, col, changed(order, 3, order[4])), *rest), "an order with each value once"
    yield ((crow, col, order[1:]), *rest), f"an order of {n} values"
    yield ((crow, col, order.long()), *rest), "indices of one dtype"
    yield ((crow.float(), col.float(), order.float()), *rest), "int32 or int64 indices"
    yield ((crow, col.repeat(2)[::2], order), *rest), "contiguous"
    yield ((crow[:-1], col, order), *rest), "25 offsets of rows"
    yield ((crow, 7, order), *rest), "tensors of indices"
    yield (indices, (24, -36), *rest[1:]), "sizes of two dimensions or more"
    yield (indices, (24,), *rest[1:]), "sizes of two dimensions or more"
    yield (indices, (24, 36.0), *rest[1:]), "sizes of two dimensions or more"
    yield (indices, (2, 24, 36), *rest[1:]), "49 offsets of rows"
    yield (indices, shape, values[1:], None, None, settings), f"values of shape \\[{n}\\]"
    yield (indices, shape, values, None, (indices, 2, 2), settings), "13 offsets of rows"
    yield (indices, shape, values, None, ((crow[:13].clone(), col[:5], None), 2, 0), settings), "blocks that divide"
    grid = torch.zeros(13, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), None
    yield (indices, shape, values, None, (grid, 2, 2), settings), f"blocks of {n} values"
    for bad in ((0, False), (5, 1), (True, False), 7, ("a", False), (5, False, 1)):
        yield (indices, shape, values, None, None, bad), "a number of products and True or False"


@pytest.mark.parametrize(("given", "expected"), list(damaged()), ids=range(26))
def test_damaged_files_are_errors(given, expected):
    class Damaged:
        def __reduce__(self):
            return pickled.plan_of_indices, given

    with pytest.raises(ValueError, match=f"SparsePlan: expected.*{expected}"):
        reloaded(Damaged())
    with pytest.raises(ValueError, match=expected):
        pickle.loads(pickle.dumps(Damaged()))


def test_other_damage():
    source = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([9]), torch.ones(1), (1, 2), check_invariants=False
    )
    for function, given, expected in [
        (pickled.transposed_plan, (torch.ones(2),), "SparsePlan: expected a pickle with a plan, got Tensor"),
        (
            pickled.plan_of_source,
            (source, False, (5, False)),
            "SparsePlan: expected columns from 0 to 1 at nonzero 0, got 9",
        ),
    ]:
        with pytest.raises(ValueError, match=expected):
            function(*given)
    with pytest.raises(TypeError, match="SparsePlan: expected"):
        pickled.plan_of_indices((torch.tensor([0, 1]), torch.tensor([0]), None), (1, 1), 7, None, None, None)


def test_selectors_and_patterns_alone_are_not_loaded_by_default():
    plan = matmuls.plan(matrices("cpu")["csr"])
    for part in (plan._selector, plan._pattern, plan._prepared):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            reloaded(part)
