"""Tests of in-place products beyond the table: sizes, layouts, workspace, gradients, concurrent kernels."""

import pytest
import torch
import torch.nn.functional as F

import custom_mm
import matmuls
from common.row_cases import assert_as_good_as_torch, draw, every_dtype
from matmuls.nn import InplaceLinear
from matmuls.timing import graph_of, peak_memory

WIDTHS = [8, 64, 100, 384, 768, 1000, 1024, 2048, 4096, 8192]


def check(a, b, transb=False, bias=None, workspace=matmuls.inplace.WORKSPACE):
    """As accurate as torch, for each row as well: a result written to a wrong row has a large error."""
    reference = [F.linear(x, y if transb else y.mT, z) for x, y, z in ((a, b, bias), tuple_of_double(a, b, bias))]
    rest = a[..., reference[0].shape[-1] :].clone()
    ours = matmuls.matmul_(a, b, transb=transb, bias=bias, workspace=workspace)
    assert ours.data_ptr() == a.data_ptr()
    assert_as_good_as_torch(ours, *reference)
    rows = (ours - reference[1]).norm(dim=-1) <= 0.05 * reference[1].norm(dim=-1) + 1e-3
    assert rows.all()
    assert torch.equal(a[..., ours.shape[-1] :], rest)


def hopper():
    return torch.cuda.get_device_capability() == (9, 0)


def tuple_of_double(*tensors):
    return tuple(t.double() if t is not None else None for t in tensors)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7, 127, 128, 129, 40000])
def test_sizes(device, rows, width, dtype):
    if device == "cpu" and (width > 1024 or rows > 129):
        pytest.skip("seconds on a CPU")
    a, b = draw(rows, width, device=device, dtype=dtype), draw(width, width, device=device, dtype=dtype) / width**0.5
    check(a.clone(), b)
    check(a.clone(), b, transb=True, bias=draw(width, device=device, dtype=dtype, seed=1))
    check(a.clone(), b[:, : width // 2])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(20001, 1160), (5000, 4096), (2000, 4400), (1000, 8192)])
def test_large(rows, width, dtype):
    a, b = draw(rows, width, device="cuda", dtype=dtype), draw(width, width, device="cuda", dtype=dtype) / width**0.5
    check(a.clone(), b)
    check(a, b, transb=True)


@pytest.mark.cuda
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [
        (40001, 192, 192),
        (30000, 576, 576),
        (20000, 1344, 1344),
        (5000, 4224, 4224),
        (9999, 1000, 568),
        (600, 4304, 4136),
    ],
)
def test_tiles_of_192_columns(rows, inner, columns, dtype, transb):
    """Tiles that are stored in three parts: tails in rows, K and columns, a of strided rows."""
    whole = draw(rows, inner + 24, device="cuda", dtype=dtype)
    b = draw(*((columns, inner) if transb else (inner, columns)), device="cuda", dtype=dtype) / inner**0.5
    tile = {"tile_rows": 128, "tile_columns": 192}
    for bias in (None, draw(columns, device="cuda", dtype=dtype, seed=1)):
        x = whole.clone()
        a = x[:, 8:-16]
        if torch.cuda.get_device_properties(0).multi_processor_count == 132 and hopper():
            assert custom_mm.explain("matmul_", a, b, transb, bias).launch == tile
        check(a, b, transb, bias)
        assert torch.equal(x[:, :8], whole[:, :8])
        assert torch.equal(x[:, -16:], whole[:, -16:])


@pytest.mark.cuda
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((1, 64), (7, 8), (129, 100), (300, 1000), (512, 1024), (100, 2048), (5000, 768), (40000, 100), (2000, 4400)),
        *((40001, 192), (30000, 576)),  # tiles of 192 columns, if b is K-major
    ],
)
def test_tf32(rows, width, transb):
    """With 10-bit mantissas, each row is within 1 in 500 of the truth."""
    a, b = draw(rows, width, device="cuda"), draw(width, width, device="cuda") / width**0.5
    torch.set_float32_matmul_precision("high")
    try:
        for columns, bias in ((width, None), (width, draw(width, device="cuda", seed=1)), (width // 8 * 4, None)):
            x, y = a.clone(), (b[:columns] if transb else b[:, :columns])
            matmuls.matmul_(x, y, transb=transb, bias=bias)
            truth = F.linear(*tuple_of_double(a, y if transb else y.mT, bias))
            assert ((x[:, :columns] - truth).norm(dim=1) <= 2e-3 * truth.norm(dim=1) + 1e-3).all()
            assert torch.equal(x[:, columns:], a[:, columns:])
    finally:
        torch.set_float32_matmul_precision("highest")


@every_dtype
@pytest.mark.parametrize("transb", [False, True])
def test_layouts(device, transb, dtype):
    def own(*shape):
        return draw(*shape, device=device, dtype=dtype)

    for b in (own(64, 64).mT, own(64, 128)[:, ::2], own(128, 64)[::2], own(64, 80)[:, 8:72], own(64, 65)[:, 1:]):
        check(own(33, 64), b / 8, transb)
        check(own(33, 80)[:, 8:72], b / 8, transb)  # row stride larger than the row
        check(own(33, 65)[:, 1:], b / 8, transb)  # unaligned by one element
        check(own(5, 7, 80)[:, 1:6, :64], b / 8, transb)
        check(own(5, 7, 64).transpose(0, 1), b / 8, transb)


@pytest.mark.parametrize("panel_rows", [1, 3, 128, 1000])
def test_workspace_of_a_few_rows(device, panel_rows):
    a, b = draw(300, 64, device=device), draw(64, 64, device=device) / 8
    check(a.clone(), b, workspace=panel_rows * 64 * 4)
    check(a, b[:, :40], bias=draw(40, device=device), workspace=panel_rows * 64 * 4)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("workspace", [1 << 20, 8 << 20])
def test_the_workspace_limit_is_respected(workspace, apart, device):
    rows, dtype = (50000, torch.bfloat16) if device == "cuda" else (4000, torch.float32)
    a, b = draw(rows, 2048, device=device, dtype=dtype), draw(1024, 1024, device=device, dtype=dtype)
    a = a[:, ::2] if apart else a[:, :1024]
    matmuls.matmul_(a, b, workspace=workspace)
    assert peak_memory(lambda: matmuls.matmul_(a, b, workspace=workspace), device) <= workspace


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("columns", [5, 3])
def test_gradients(device, transb, columns):
    a, bias = (draw(*s, device=device, dtype=torch.float64).requires_grad_() for s in ((2, 3, 5), (columns,)))
    b = draw(*((columns, 5) if transb else (5, columns)), device=device, dtype=torch.float64)

    def whole(a, bias, b=b, keep_input=False):
        x = a.clone()
        y = matmuls.matmul_(x, b, transb=transb, bias=bias, keep_input=keep_input)
        return y, x  # x also holds the columns outside the product

    assert torch.autograd.gradcheck(whole, (a, bias))
    assert torch.autograd.gradgradcheck(whole, (a, bias))
    b.requires_grad_()
    assert torch.autograd.gradcheck(lambda *args: whole(*args, keep_input=True), (a, bias, b))
    assert torch.autograd.gradgradcheck(lambda *args: whole(*args, keep_input=True), (a, bias, b))


@pytest.mark.parametrize("keep_input", [False, True])
def test_compiled_over_an_input_of_the_graph(device, keep_input):
    """Gradients flow through the in-place write."""
    torch._dynamo.reset()
    leaf, b = (draw(9, 9, device=device, seed=i).requires_grad_(keep_input or i == 0) for i in range(2))
    inputs = [t for t in (leaf, b) if t.requires_grad]

    def function(a):
        return matmuls.matmul_(a, b, keep_input=keep_input)

    expected = torch.autograd.grad((leaf @ b).sin().sum(), inputs)
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(f(leaf * 1).sin().sum(), inputs), expected)


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: torch.cat([x, x], -1)[..., :5]], ids=["product", "part"])
def test_inductor_saves_a_view_before_it_is_overwritten(make, device):
    torch._dynamo.reset()
    x, w = draw(3, 4, 5, device=device), draw(5, 5, device=device).requires_grad_()

    def function(x):
        h = make(x)
        matmuls.matmul_(h[:, 1:], w, keep_input=True)
        return h.square().sum()

    expected, found = (torch.autograd.grad(f(x), w)[0] for f in (function, torch.compile(function, fullgraph=True)))
    torch.testing.assert_close(found, expected)
    torch.library.opcheck(torch.ops.custom_mm.kept.default, (x.requires_grad_(),))


def test_gradients_of_a_product_without_columns(device):
    leaf, b, bias = (draw(*shape, device=device).requires_grad_() for shape in ((2, 4, 6), (6, 0), (0,)))
    a = leaf * 1
    matmuls.matmul_(a, b, bias=bias, keep_input=True)
    a.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    assert b.grad.shape == b.shape
    assert bias.grad.shape == bias.shape


def test_a_gradient_that_needs_the_old_a_is_refused(device):
    a, b = draw(3, 4, device=device), draw(4, 4, device=device).requires_grad_()
    before = a.clone()
    with pytest.raises(RuntimeError, match="matmul_: expected b without a gradient, which needs the a that is written"):
        matmuls.matmul_(a, b)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        matmuls.matmul_(a.requires_grad_(), b.detach())
    assert torch.equal(a, before)
    with torch.no_grad():
        matmuls.matmul_(a, b)


def test_autograd_refuses_a_stale_saved_tensor(device):
    x = draw(3, 4, device=device).requires_grad_()
    y = x * 1
    z = (y * y).sum()
    matmuls.matmul_(y, draw(4, 4, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_only_b_is_saved_for_backward(device):
    a, b = draw(3, 4, device=device).requires_grad_(), draw(4, 4, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        matmuls.matmul_(a * 1, b)
    assert [t.data_ptr() for t in kept if t.numel() == b.numel()] == [b.data_ptr()]
    assert not [t for t in kept if t.shape == a.shape and t.data_ptr() != b.data_ptr() and t.data_ptr() != a.data_ptr()]


# ------------------------------------------------------------------------------------------------------------- module


def test_feed_forward_keeps_its_dtype_under_autocast(device):
    x, up, down = (draw(*s, device=device, dtype=torch.float32) for s in ((5, 8), (16, 8), (8, 16)))
    expected = F.layer_norm(x + F.linear(F.linear(x, up).relu(), down), (8,))
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        matmuls.feed_forward_(x, up, None, down, None, activation="relu")
    torch.testing.assert_close(x, expected)


def test_inplace_linear(device):
    linear = torch.nn.Linear(16, 16).to(device).requires_grad_(False)
    module, x = InplaceLinear.from_linear(linear), draw(5, 16, device=device)
    assert module.weight is linear.weight
    assert module.bias is linear.bias
    expected, address = linear(x), x.data_ptr()
    y = module(x)
    assert y.data_ptr() == address
    torch.testing.assert_close(y, expected)
    assert list(module.state_dict()) == list(linear.state_dict())
    narrow = InplaceLinear(16, 4, bias=False, device=device).requires_grad_(False)
    x = draw(2, 3, 16, device=device)
    torch.testing.assert_close(F.linear(x.clone(), narrow.weight), narrow(x))


def test_inplace_linear_in_training(device):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 16).to(device)
    x = draw(5, 16, device=device).requires_grad_()
    with pytest.raises(RuntimeError, match="keep_input=True"):
        InplaceLinear.from_linear(linear)(x * 1)
    truth = torch.autograd.grad(linear(x * 1).square().sum(), (x, linear.weight, linear.bias))
    ours = InplaceLinear.from_linear(linear, keep_input=True)(x * 1)
    for got, want in zip(torch.autograd.grad(ours.square().sum(), (x, linear.weight, linear.bias)), truth, strict=True):
        torch.testing.assert_close(got, want)


def test_inplace_linear_under_autocast(device):
    """It keeps the dtype of its input."""
    linear = torch.nn.Linear(16, 16).to(device).requires_grad_(False)
    with torch.autocast(device, dtype=torch.bfloat16):
        x = linear(draw(5, 16, device=device).float())
        expected, address = linear(x), x.data_ptr()
        y = InplaceLinear.from_linear(linear)(x)
    assert y.dtype == torch.bfloat16
    assert y.data_ptr() == address
    torch.testing.assert_close(y, expected)


def test_inplace_linear_cannot_grow():
    with pytest.raises(ValueError, match="InplaceLinear: expected no more output than input features, got 5 and 4"):
        InplaceLinear(4, 5)


# ------------------------------------------------------------------------------------------------- under load (a GPU)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [576, 768, 1024, 2048, 4224])
def test_a_thousand_times_with_other_streams_busy(width):
    """The same buffers repeatedly with three other streams busy: every result is correct and nothing hangs."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    a = draw(5000, width, device="cuda", dtype=torch.bfloat16)
    q = torch.linalg.qr(draw(width, width, device="cuda"))[0].to(torch.bfloat16)
    others = [draw(2000, width, device="cuda", dtype=torch.bfloat16) for _ in streams]
    expected = matmuls.matmul_(a.clone(), q)
    assert_as_good_as_torch(expected, a @ q, a.double() @ q.double())
    x = torch.empty_like(a)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for stream in streams:  # they must not reuse memory freed above before this stream is done with it
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(1000):
        for stream, other in zip(streams, others, strict=True):
            with torch.cuda.stream(stream):
                matmuls.matmul_(other, q)
        x.copy_(a)
        matmuls.matmul_(x, q)
        wrong += (x != expected).any()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    assert wrong.item() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [(512, 512, 384, 300), (1024, 1024, 1000, 512), (512, 5000, 3000, 40000)])
def test_sequences_of_products_on_four_streams(rows):
    """Ten products in sequence on each of four streams, repeated until launches have overlapped in every
    combination.
    """
    streams = [torch.cuda.Stream() for _ in rows]
    q = torch.linalg.qr(draw(1024, 1024, device="cuda"))[0].to(torch.bfloat16)  # orthogonal: preserves norms

    def ten(x):
        for _ in range(10):
            matmuls.matmul_(x, q)
        return x

    inputs = [draw(m, 1024, device="cuda", dtype=torch.bfloat16, seed=m) for m in rows]
    expected, xs = [ten(a.clone()) for a in inputs], [torch.empty_like(a) for a in inputs]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in rows]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, a, x in zip(streams, inputs, xs, strict=True):
            with torch.cuda.stream(stream):
                x.copy_(a)
        for _ in range(10):
            for stream, x in zip(streams, xs, strict=True):
                with torch.cuda.stream(stream):
                    matmuls.matmul_(x, q)
        for stream, x, y, count in zip(streams, xs, expected, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += (x != y).any()
    torch.cuda.synchronize()
    assert not any(count.item() for count in wrong)


@pytest.mark.cuda
def test_concurrent_graphs():
    """Two graphs and a stream at once use different counters."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    b = draw(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32
    inputs = [draw(6000, 1024, device="cuda", dtype=torch.bfloat16, seed=i) for i in range(3)]
    expected = [matmuls.matmul_(a.clone(), b) for a in inputs]
    xs = [a.clone() for a in inputs]
    calls = [lambda x=x, a=a: (x.copy_(a), matmuls.matmul_(x, b)) for x, a in zip(xs, inputs, strict=True)]
    runs = [graph_of([calls[0]]).replay, graph_of([calls[1]]).replay, calls[2]]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                run()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(xs, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("width", [768, 1024, 2048, 4096, 4224])
def test_in_a_graph(width):
    a = draw(3000, width, device="cuda", dtype=torch.bfloat16)
    b = draw(width, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    x = a.clone()
    graph = graph_of([lambda: matmuls.matmul_(x, b)])
    for seed in range(5):
        a = draw(3000, width, device="cuda", dtype=torch.bfloat16, seed=seed)
        x.copy_(a)
        graph.replay()
        assert torch.equal(x, matmuls.matmul_(a, b))


@pytest.mark.parametrize("b", [torch.randn(4), torch.tensor(1.0)], ids=["a vector", "a number"])
def test_operands_are_checked_before_autograd_records(b):
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="matmul_: expected b of two dimensions"):
        matmuls.matmul_(x * 1, b)


@pytest.mark.parametrize("name", ["up", "up_bias", "down", "down_bias", "weight", "bias"])
def test_a_feed_forward_networks_operands_are_named(name):
    given = {"up": (6, 4), "up_bias": (6,), "down": (4, 6), "down_bias": (4,), "weight": (4,), "bias": (4,)}
    given = {n: torch.randn(*shape, dtype=torch.float64 if n == name else None) for n, shape in given.items()}
    with pytest.raises(RuntimeError, match=f"feed_forward_: expected {name} of dtype Float as a is, got Double"):
        matmuls.feed_forward_(torch.randn(3, 4), **given)


@pytest.mark.cuda
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_kernel_in_place(dtype, transb):
    seen = set()
    for m, k in ((200, 1024), (4096, 512), (8192, 1024), (8192, 1001)):
        torch.manual_seed(m)
        a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, k, device="cuda").to(dtype)
        bias = torch.randn(k, device="cuda").to(dtype)
        wide = a.double() @ (b.mT if transb else b).double() + bias.double()
        scale = wide.abs().max()
        chosen = custom_mm.explain("matmul_", a, b, transb, bias).kernel
        for kernel in custom_mm._C.inplace_kernels():
            out = a.clone()
            try:
                with custom_mm.only_kernel(kernel):
                    torch.ops.custom_mm.matmul_(out, b, transb, bias)
            except ValueError:  # it does not take the product
                assert kernel != chosen
                continue
            seen.add(kernel)
            assert (out.double() - wide).abs().max() <= 2 * torch.finfo(dtype).eps * scale, kernel
    if hopper():
        assert seen == {"few_rows", "panels", "workspace"}
