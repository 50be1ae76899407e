"""Memory, determinism, CUDA graphs and streams of softmax and the norms."""

import math

import pytest
import torch

import matmuls
from common.row_cases import SCALE, assert_as_good_as_torch, draw, layer_norm, with_gradients
from common.table_cases import padded_rows, transposed
from matmuls.timing import graph_of, peak_memory
from matmuls_bench.table import Draw

# -------------------------------------------------------------------------------------------------------------- memory

IN_NO_MEMORY = {
    "softmax_": lambda x: matmuls.softmax_(x),
    "softmax_ of columns": lambda x: matmuls.softmax_(x, 0),
    "softmax out": lambda x: matmuls.softmax(x, out=x),
    "softmax_backward_": lambda x: matmuls.softmax_backward_(x, x),
    "layer_norm_": lambda x: matmuls.layer_norm_(x),
    "rms_norm_": lambda x: matmuls.rms_norm_(x),
    "scaled_masked_softmax": lambda x: matmuls.scaled_masked_softmax(x, scale=SCALE, causal=True, inplace=True),
    "layernorm": lambda x: matmuls.layernorm(x, *x.shape),
    "inplace_softmax": lambda x: matmuls.inplace_softmax(x, *x.shape),
}


@pytest.mark.parametrize("function", IN_NO_MEMORY.values(), ids=IN_NO_MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [100, 70_000])
def test_in_place_takes_no_memory(function, dtype, columns, device):
    x = draw(16, columns, device=device, dtype=dtype)
    assert peak_memory(lambda: torch.empty_like(x), device) >= x.nbytes  # checks that the measurement sees allocations
    assert peak_memory(lambda: function(x), device) == 0


def test_weights_masks_and_outputs_of_any_stride_are_not_copied(device):
    """Nor is other memory needed for a weight, a residual or a mask."""
    x, other, weight = (draw(*s, device=device) for s in ((64, 100), (64, 200), (100,)))
    mask = torch.zeros(1, 100, dtype=torch.bool, device=device)
    for call in (
        lambda: matmuls.softmax(x, out=other[:, ::2]),
        lambda: matmuls.layer_norm_(x, weight, weight, residual=other[:, ::2]),
        lambda: matmuls.scaled_masked_softmax(x, mask, SCALE, inplace=True),
        lambda: matmuls.scaled_masked_softmax(x, other[:, 100:], SCALE, inplace=True),
        lambda: matmuls.softmax_backward_(x, other[:, ::2]),
    ):
        assert peak_memory(call, device) == 0


def test_attention_with_gradients_needs_two_tensors_of_the_scores_size(device):
    """The probabilities, and their gradient, which the gradient of the scores overwrites."""
    inputs = [draw(2, 4, 64, 8, device=device, seed=i).requires_grad_() for i in range(3)]
    grad = draw(2, 4, 64, 8, device=device, seed=3)
    small, scores = grad.nbytes, 2 * 4 * 64 * 64 * 4

    def attention(inplace=True):
        q, k, v = inputs
        weights = matmuls.scaled_masked_softmax(matmuls.matmul(q, k, transb=True), None, 8**-0.5, inplace=inplace)
        return torch.autograd.grad(matmuls.matmul(weights, v), inputs, grad)

    torch.testing.assert_close(attention(), attention(inplace=False))
    # the context, the gradients of q, k and v
    assert peak_memory(attention, device) <= 2 * scores + 4 * small + 1024
    assert peak_memory(lambda: attention(inplace=False), device) > 3 * scores


# --------------------------------------------------------------------------------------------- inplace_softmax_backward


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("piece", [1, 4 * 11 * 3, 4 * 7 * 11, 4 * 7 * 11 * 2 + 8, 8 << 20])
def test_inplace_softmax_backward_matches_autograd(lead, piece, device, monkeypatch):
    """In pieces of one row, a few rows, one matrix, two matrices, and all at once."""
    monkeypatch.setattr("matmuls.rowwise.PIECE_BYTES", piece)
    scores, values = draw(*lead, 7, 11, device=device).requires_grad_(), draw(*lead, 11, 6, device=device, seed=1)
    d_ov = draw(*lead, 7, 6, device=device, seed=2)
    probabilities = scores.softmax(-1)
    (expected,) = torch.autograd.grad(probabilities @ values, scores, d_ov)
    output = probabilities.detach().clone()
    rows = output.numel() // 11
    assert matmuls.inplace_softmax_backward(output, d_ov, values, rows, 11, 6) is output
    torch.testing.assert_close(output, expected)
    output = probabilities.detach().clone()
    matmuls.inplace_softmax_backward(output, transposed(d_ov), padded_rows(values), rows, 11, 6)
    torch.testing.assert_close(output, expected)


def test_inplace_softmax_backward_under_autocast(device):
    output, d_ov, values = (draw(2, *shape, device=device) for shape in ((3, 4), (3, 5), (4, 5)))
    expected = matmuls.inplace_softmax_backward(output.clone(), d_ov, values, 6, 4, 5)
    with torch.autocast(device):
        assert torch.equal(matmuls.inplace_softmax_backward(output, d_ov, values, 6, 4, 5), expected)
    with pytest.raises(RuntimeError, match="expected output of at least two dimensions and 3 columns"):
        matmuls.inplace_softmax_backward(output, d_ov, values, 8, 3, 5)


def test_inplace_softmax_backward_allocates_pieces_of_8_mib(device):
    draws = Draw(torch.float32, device)
    output, d_ov, values = draws(1, 3, 1500, 1500), draws(1, 3, 1500, 4), draws(1, 3, 1500, 4)

    def backward():
        matmuls.inplace_softmax_backward(output, d_ov, values, 4500, 1500, 4)

    backward()  # allocates cuBLAS's workspace
    assert 4 << 20 < peak_memory(backward, device) <= 8 << 20 < output.nbytes


def test_inplace_softmax_backward_refuses_mismatched_operands(device):
    draws = Draw(torch.float32, device)
    output, d_ov, values = draws(2, 7, 11), draws(2, 7, 6), draws(2, 11, 6)
    before = output.clone()

    def refused(match, output=output, d_ov=d_ov, values=values, rows=14, keys=11, columns=6):
        with pytest.raises(RuntimeError, match=match):
            matmuls.inplace_softmax_backward(output, d_ov, values, rows, keys, columns)

    name = "inplace_softmax_backward: expected"
    refused(f"{name} a contiguous tensor of 7 x 11 elements, got sizes", rows=7)
    refused(f"{name} a contiguous tensor of 14 x 10 elements", keys=10)
    refused(f"{name} a contiguous tensor of 14 x 11 elements", output=transposed(output))
    refused(rf"{name} d_ov of shape \[2, 7, 5\] and values of shape \[2, 11, 5\]", columns=5)
    refused(rf"{name} .* got \[2, 7, 6\] and \[2, 6, 11\]", values=values.mT)
    refused(rf"{name} .* got \[7, 6\] and", d_ov=d_ov[0])
    refused(f"{name} a contiguous tensor of 14 x 7 elements", output=output.view(-1), keys=7)
    refused("expected .* of dtype", d_ov=d_ov.double())
    refused("expected grad to be a strided tensor in Float", d_ov=d_ov.double(), values=values.double())
    assert torch.equal(output, before)


def test_inplace_softmax_backward_refuses_a_vector(device):
    output = draw(22, device=device)
    with pytest.raises(RuntimeError, match="inplace_softmax_backward: expected"):
        matmuls.inplace_softmax_backward(output, draw(2, 6, device=device), draw(11, 6, device=device), 2, 11, 6)


# ------------------------------------------------------------------------------------------ the same bits, every time


@pytest.mark.parametrize("shape", [(5000, 64), (300, 1000), (33, 20_000), (40, 140_000)], ids=str)
def test_gradients_of_a_norm_are_bitwise_reproducible(shape, device):
    grad, x = (draw(*shape, device=device, seed=i) for i in range(2))
    weight, bias = (draw(shape[-1], device=device, seed=i) for i in (2, 3))
    first, *others = [with_gradients(matmuls.layer_norm_)(grad, x, weight, bias) for _ in range(3)]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("shape", [(5000, 64), (300, 5000), (33, 200_000)], ids=str)
def test_softmax_is_bitwise_reproducible(shape, device):
    x = draw(*shape, device=device)
    first, *others = [matmuls.softmax_(x.clone()) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


# --------------------------------------------------------------------------------------------------- graphs, streams


def both(x, weight, grad):
    """softmax_ and layer_norm_ with their gradients."""
    y = matmuls.softmax_(x * 1)
    (dx,) = torch.autograd.grad(y, x, grad)
    z = matmuls.layer_norm_(x * 1, weight)
    return y.detach(), dx, z.detach(), *torch.autograd.grad(z, (x, weight), grad)


def inputs_of_both(rows, columns, seed):
    x, weight, grad = (
        draw(*shape, device="cuda", seed=seed + i)
        for i, shape in enumerate([(rows, columns), (columns,), (rows, columns)])
    )
    return x.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(700, 100), (64, 5000), (16, 100_000)], ids=str)
def test_a_graph_replayed_with_new_inputs(shape):
    x, weight, grad = inputs_of_both(*shape, seed=0)
    results = {}
    graph = graph_of([lambda: results.update(enumerate(both(x, weight, grad)))])
    for n in range(1, 5):
        with torch.no_grad():
            for t, other in zip((x, weight, grad), inputs_of_both(*shape, seed=10 * n), strict=True):
                t.copy_(other)
        graph.replay()
        replayed = [results[i].clone() for i in range(len(results))]
        for ours, eager in zip(replayed, both(x, weight, grad), strict=True):
            assert torch.equal(ours, eager)
        y, _, z, *_ = replayed
        torch.testing.assert_close(y, x.detach().softmax(-1))
        torch.testing.assert_close(z, layer_norm(x.detach(), weight.detach()))


@pytest.mark.cuda
def test_four_streams_at_once():
    inputs = [inputs_of_both(600, 5000, seed=10 * n) for n in range(4)]
    expected = [both(*tensors) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for ours, right in zip(both(*inputs[n]), expected[n], strict=True):
                    wrong[n] += (ours != right).sum()
    torch.cuda.synchronize()
    assert [w.item() for w in wrong] == [0] * 4


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4000, 128), (20_000, 1024), (1000, 16_384), (200, 65_536), (60, 262_144)], ids=str)
def test_dependent_launches_wait_for_earlier_kernels(shape):
    """Producers, row operations and consumers of the same memory give the same bits as calls with a synchronization
    after each.
    """
    sources = [draw(*shape, device="cuda", dtype=torch.bfloat16, seed=n) for n in range(4)]
    weight = draw(shape[-1], device="cuda", dtype=torch.bfloat16, seed=4)
    rstd = draw(shape[0], device="cuda", seed=5).abs()
    x, z = (torch.empty_like(sources[0]) for _ in range(2))

    def calls(n):
        yield torch.mul(sources[n % 4], 1.5, out=x)
        yield matmuls.softmax_(x)
        yield torch.add(x, sources[(n + 1) % 4], out=z)
        yield matmuls.layer_norm_(z, weight)
        yield matmuls.rms_norm_(x, weight)
        yield torch.mul(z, x, out=z)
        dz, *sums = torch.ops.custom_mm.norm_backward(z, x, rstd, weight, False)
        yield matmuls.softmax_(dz)
        yield torch.add(dz, z, out=x)
        yield (x, *sums)

    def results(n, wait=False):
        last = ()
        for step in calls(n):
            last = step
            if wait:
                torch.cuda.synchronize()
        return last

    expected = [[t.clone() for t in results(n, wait=True)] for n in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def check():
        for n in range(8):
            for ours, right in zip(results(n), expected[n % 4], strict=True):
                wrong.add_((ours != right).sum())

    graph = graph_of([check])
    for _ in range(20):
        check()
        graph.replay()
    assert wrong.item() == 0


@pytest.mark.cuda
@pytest.mark.gpu_memory(16)
def test_more_than_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    x = torch.empty(2_100_000, 1024, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.tensor([0, 1, 1_048_575, 2_097_151, 2_097_152, 2_099_999], device="cuda")
    for function, reference in ((matmuls.softmax_, lambda t: t.softmax(-1)), (matmuls.layer_norm_, layer_norm)):
        before = x[rows]
        function(x)
        assert_as_good_as_torch(x[rows], reference(before), reference(before.double()))


# ---------------------------------------------------------------------------- second derivatives, transforms, aliases


def test_future_columns_do_not_affect_causal_gradients():
    backward = torch.ops.custom_mm.softmax_backward.default
    y, grad = torch.randn(2, 4, 4).double().softmax(-1), torch.randn(2, 4, 4).double()
    leaves = y.requires_grad_(), grad.requires_grad_()
    assert torch.autograd.gradcheck(lambda y, g: backward(y, g, -1, 0.5, True), leaves)
    assert torch.autograd.gradgradcheck(lambda y, g: backward(y, g, -1, 0.5, True), leaves)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).triu(1) > 0, math.nan)
    (first,) = torch.autograd.grad(matmuls.scaled_masked_softmax(x, causal=True), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: matmuls.layer_norm_(x * 1, w[0]),
        lambda x, w: matmuls.rms_norm_(x * 1, w[0]),
        lambda x, w: matmuls.matmul_(x * 1, w, keep_input=True),
    ],
    ids=["layer_norm_", "rms_norm_", "matmul_"],
)
def test_vectorized_jacobians_and_hessians(function, device):
    x, w = torch.randn(2, 3, 4, dtype=torch.float64, device=device), torch.randn(4, 4, dtype=torch.float64).to(device)
    jacobian = torch.autograd.functional.jacobian
    one_by_one = jacobian(function, (x, w))
    at_once = jacobian(function, (x, w), vectorize=True)
    for a, b in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(a, b)
    hessian = torch.autograd.functional.hessian
    scalar = lambda x, w: function(x, w).square().sum()  # noqa: E731
    for a, b in zip(hessian(scalar, (x, w)), hessian(scalar, (x, w), vectorize=True), strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_that_miss_in_place_writes_are_refused():
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda m: matmuls.scaled_masked_softmax(x, m, inplace=True).square().sum())(mask)


def test_inplace_softmax_backward_refuses_an_out_that_aliases_its_inputs(device):
    y = torch.randn(5, 5, device=device).softmax(-1)
    d = torch.randn(5, 5, device=device)
    for arguments in ((y, d, y), (y, y, d)):
        with pytest.raises(RuntimeError, match="inplace_softmax_backward: expected out"):
            matmuls.inplace_softmax_backward(*arguments, 5, 5, 5)
    none = torch.empty(5, 0, device=device)
    assert torch.equal(matmuls.inplace_softmax_backward(y, none, none, 5, 5, 0), torch.zeros_like(y))
    for function in (matmuls.inplace_softmax, matmuls.layernorm):
        with pytest.raises(RuntimeError, match="expected a contiguous tensor of -5 x -5 elements"):
            function(d, -5, -5)


@pytest.mark.parametrize("columns", [7, 131, 1000])
def test_sums_of_squares_that_overflow(columns, device):
    x = torch.full((3, columns), 1e20, device=device)
    assert torch.equal(matmuls.rms_norm_(x), torch.zeros_like(x))


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1536, 1792, 3072, 577, 1031])
def test_a_mask_written_by_the_previous_kernel(columns):
    """That kernel allows programmatic dependent launch, as ours and Triton's do."""
    x = torch.randn(64, 4, columns, device="cuda", dtype=torch.float16)
    masks = (torch.rand(8, 64, 1, columns, device="cuda") > 0.5).byte().view(torch.uint8)
    expected = [matmuls.scaled_masked_softmax(x, m.bool()) for m in masks]
    mask = torch.zeros_like(masks[0])
    for _ in range(20):
        for m, y in zip(masks, expected, strict=True):
            mask.copy_(m)
            matmuls.softmax_(x[:1].clone())
            assert torch.equal(matmuls.scaled_masked_softmax(x, mask), y)
