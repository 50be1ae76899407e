"""Softmax and the norms on rows of every length, count and layout."""

import pytest
import torch

import matmuls
from common.row_cases import (
    SIXTEEN,
    assert_as_good_as_torch,
    draw,
    every_dtype,
    every_operation,
    layer_norm,
    rms_norm,
    with_gradients,
)
from common.table_cases import batch_innermost, off_by_one_element, padded_rows, stepped, transposed
from matmuls_bench.table import Draw

COLUMNS = [1, 2, 3, 31, 32, 33, 127, 128, 256, 384, 512, 600, 768, 1000, 1024, 1025, 2048, 4096]
COLUMNS += [8191, 8192, 16384, 24584, 65536, 100003, 100352, 262144]
# Column counts whose last round of vectors has one vector, some vectors, or one for each thread of a row, with 5 to 8
# vectors per thread (with a residual 3 and 4).
COLUMNS += [72, 136, 264, 392, 520, 640, 1032, 1152, 1280, 1536, 1792, 2056, 2304, 2560, 3080, 5120, 6152, 8200]
COLUMNS += [10240, 14344]


@pytest.mark.gpu_memory(12)
@every_operation
@every_dtype
def test_rows_of_any_length(operation, dtype, device):
    """On a GPU with enough rows that each group of threads has several."""
    elements, most = (2**26, 300_000) if device == "cuda" else (2**17, 64)
    for columns in COLUMNS if dtype != torch.float64 else COLUMNS[3::3]:
        if columns < operation.least_columns:
            continue
        rows = max(3, min(elements // columns, most))
        operation.check(operation.draw(Draw(dtype, device, seed=columns), rows, columns))


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_gradients_of_norms_of_few_columns(columns, dtype, device):
    """Such a row hardly depends on x: dx is left over from cancellation, and its error is relative to the terms that
    cancel.
    """
    draws = Draw(dtype, device)
    grad, weight = draws(64, columns), draws(columns)
    x = draws(64, columns) + 8 * torch.arange(columns, dtype=dtype, device=device)
    for norm, reference in ((matmuls.layer_norm_, layer_norm), (matmuls.rms_norm_, rms_norm)):
        wide = grad.double(), x.double(), weight.double()
        ours, theirs = (with_gradients(f)(grad, x, weight) for f in (norm, reference))
        truths = with_gradients(reference)(*wide)
        h = wide[1] - (wide[1].mean(-1, keepdim=True) if norm is matmuls.layer_norm_ else 0)
        dx_terms = wide[0] * wide[2] / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        for triple, terms in zip(zip(ours, theirs, truths, strict=True), (wide[2], dx_terms, wide[0]), strict=True):
            assert_as_good_as_torch(*triple, torch.linalg.vector_norm(terms).item())


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 33), (7, 33), (100_000, 5), (100_000, 20)], ids=str)
def test_any_number_of_rows(operation, dtype, shape, device):
    operation.check(operation.draw(Draw(dtype, device), *shape))


@every_dtype
@pytest.mark.parametrize("columns", [1, 2, 4, 5, 8, 12, 16, 17, 24, 31, 32, 33, 64])
def test_a_short_row_of_a_norm_does_not_depend_on_the_others(columns, dtype):
    """Nor on the strides: on a CPU several rows are read before one is written."""
    draws = Draw(dtype, "cpu", seed=columns)
    x, residual, weight, bias = draws(77, columns), draws(77, columns), draws(columns), draws(columns)
    for norm in (
        lambda x, r: matmuls.layer_norm_(x, weight, bias, residual=r),
        lambda x, r: matmuls.rms_norm_(x, weight, residual=r),
        lambda x, _: matmuls.rms_norm_(x),
    ):
        whole = norm(x.clone(), residual)
        for first, last in ((0, 1), (3, 20), (40, 77)):
            assert torch.equal(norm(x[first:last].clone(), residual[first:last]), whole[first:last])
        apart = padded_rows(x)
        assert torch.equal(norm(apart, padded_rows(residual)), whole)


@pytest.mark.cuda
@every_operation
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 520), (torch.bfloat16, 1032)], ids=str)
def test_enough_rows_that_threads_process_four_at_a_time(operation, dtype, columns):
    operation.check(operation.draw(Draw(dtype, "cuda"), 200_001, columns))


def permuted(t):
    """A tensor with its leading dimensions in another order than in memory."""
    order = (*range(2, t.dim() - 1), 0, 1, t.dim() - 1) if t.dim() > 3 else range(t.dim())
    return (
        t.permute(*order)
        .clone(memory_format=torch.contiguous_format)
        .permute(*(list(order).index(d) for d in range(t.dim())))
    )


LAYOUTS = {
    "transposed": [transposed],
    "padded rows": [padded_rows],
    "stepped": [stepped],
    "off by one element": [off_by_one_element],
    "batch innermost": [batch_innermost],
    "permuted": [permuted],
    "aligned apart": [torch.clone, off_by_one_element],
    "each another": [off_by_one_element, padded_rows, transposed, stepped, torch.clone],
}


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_and_no_write_outside(operation, dtype, layouts, device):
    for shape in ((2, 3, 2, 5, 37), (3, 6, 64), (3, 1280), (3, 5003), (3, 8191)):
        operation.check(operation.draw(Draw(dtype, device), *shape), layouts)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("layout", [torch.clone, transposed, padded_rows], ids=lambda f: f.__name__)
def test_softmax_along_any_dimension(dim, layout, device):
    x, grad = (layout(draw(5, 33, 17, device=device, seed=i)) for i in range(2))
    expected = with_gradients(lambda x: x.softmax(dim))(grad, x)
    for function in (matmuls.softmax, matmuls.softmax_):
        torch.testing.assert_close(with_gradients(lambda x, f=function: f(x, dim))(grad, x), expected)
    y = layout(expected[0])
    torch.testing.assert_close(matmuls.softmax(x, dim, out=torch.empty_like(x)), expected[0])
    torch.testing.assert_close(matmuls.softmax_backward(y, grad, dim), expected[1])
    torch.testing.assert_close(matmuls.softmax_backward_(y, grad, dim), expected[1])
    torch.testing.assert_close(y, expected[1])
    torch.testing.assert_close(matmuls.softmax_(x, dim), expected[0])
    torch.testing.assert_close(x, expected[0])
