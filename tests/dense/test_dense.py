"""Tests of dense products beyond the table: outputs, overlaps, memory, unusual batches, threads, graphs."""

import gc
import threading

import pytest
import torch

import custom_mm
import matmuls
from matmuls_bench.table import Draw


def draw(*shape, device="cpu", dtype=torch.float32, seed=0):
    return Draw(dtype, device, seed)(*shape)


# --------------------------------------------------------------------------------------------------------------- out


def row_major(*shape, device):
    return torch.full(shape, float("nan"), device=device)


def column_major(*shape, device):
    return row_major(*shape, device=device).mT.contiguous().mT


def every_other_column(*shape, device):
    return row_major(*shape[:-1], 2 * shape[-1], device=device)[..., ::2]


def left_half(*shape, device):
    return row_major(*shape[:-1], 2 * shape[-1], device=device)[..., : shape[-1]]


@pytest.mark.parametrize("layout", [row_major, column_major, every_other_column, left_half], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "kwargs", [{}, {"bias": True}, {"bias": True, "activation": "gelu_tanh"}, {"activation": "relu"}], ids=str
)
@pytest.mark.parametrize(
    "shapes", [((6, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5))], ids=str
)
def test_out_is_written_fully_and_nothing_else(layout, kwargs, shapes, device):
    a, b = (draw(*s, device=device, seed=i) for i, s in enumerate(shapes))
    kwargs = kwargs | ({"bias": draw(5, device=device, seed=2)} if "bias" in kwargs else {})
    expected = matmuls.matmul(a, b, **kwargs)
    if expected.dim() == 1 and layout is column_major:
        pytest.skip("a vector has no columns")
    out = layout(*expected.shape, device=device)
    poisoned = torch.isnan(out._base).sum() if out._base is not None else out.numel()
    assert matmuls.matmul(a, b, out=out, **kwargs) is out
    torch.testing.assert_close(out, expected)
    whole = out._base if out._base is not None else out
    assert torch.isnan(whole).sum() == poisoned - out.numel()


@pytest.mark.parametrize("lt", [False, True], ids=["cublas", "cublaslt"])
def test_out_must_fit(lt, device):
    kwargs = {"activation": "relu"} if lt else {}
    op = "cublaslt_matmul" if lt else "matmul"
    a, b = draw(3, 4, device=device), draw(4, 5, device=device)

    def refused(match, out, a=a, b=b):
        before = out.clone()
        with pytest.raises(RuntimeError, match=match):
            matmuls.matmul(a, b, out=out, **kwargs)
        assert torch.equal(out, before)

    refused(rf"{op}: expected out of shape \[3, 5\], got \[5, 3\]", draw(5, 3, device=device))
    refused(f"{op}: expected out of dtype Float as a is, got Double", draw(3, 5, device=device).double())
    refused(f"{op}: expected out to have one memory location per element", draw(3, 1, device=device).expand(3, 5))
    square = draw(4, 4, device=device)
    refused(f"{op}: expected out and a not to overlap in memory", square, a=square, b=square.clone())
    refused(f"{op}: expected out and b not to overlap in memory", square, a=square.clone(), b=square)
    if device == "cuda":
        refused(f"{op}: expected out on cuda:0 as a is, got cpu", draw(3, 5))


def test_overlap_is_exact(device):
    """Whether interleaved views of one storage overlap is decided by element addresses, not by ranges."""
    memory = draw(8, 12, device=device)
    left, right = memory[:, :4], memory[:, 4:8]
    expected = left[:4] @ right[:4, :4].contiguous()
    result = matmuls.matmul(left[:4], right[4:], out=memory[:4, 8:])
    torch.testing.assert_close(result, left[:4] @ right[4:])
    matmuls.matmul(left[:4], right[:4], out=memory[4:, ::3])
    torch.testing.assert_close(memory[4:, ::3], expected)
    with pytest.raises(RuntimeError, match="out and a not to overlap"):
        matmuls.matmul(memory[:4, 0:4], draw(4, 4, device=device), out=memory[:4, 3:7])
    with pytest.raises(RuntimeError, match="out and b not to overlap"):
        matmuls.matmul(draw(4, 4, device=device), memory[::2, 8:], out=memory[2:6, 5:9])


def test_overlap_of_large_interleaved_views_is_decided_fast(device):
    memory = torch.zeros(200_000, 8, device=device)
    eye = torch.eye(4, device=device)
    matmuls.matmul(memory[:, :4], eye, out=memory[:, 4:])
    square = torch.zeros(512, 512, device=device)
    matmuls.matmul(square[:256, ::2], square[256:, ::2], out=square[:256, 1::2])
    with pytest.raises(RuntimeError, match="out and a not to overlap"):
        matmuls.matmul(memory[:, :4], eye, out=memory[:, 3:7])


def test_lazy_conjugation_and_out(device):
    a, b = (draw(*s, device=device, dtype=torch.complex64) for s in ((3, 4), (4, 5)))
    out = torch.zeros(3, 5, device=device, dtype=torch.complex64)
    torch.testing.assert_close(matmuls.matmul(a.conj(), b, out=out), a.conj() @ b)
    torch.testing.assert_close(matmuls.matmul(a.conj(), b, bias=b[0].conj(), out=out), a.conj() @ b + b[0].conj())
    torch.testing.assert_close(matmuls.matmul(a.conj().imag, b.real, out=out.real), a.conj().imag @ b.real)
    for bad in (out.conj(), torch._neg_view(out)):
        with pytest.raises(RuntimeError, match="matmul: expected out without a lazy conjugation or negation"):
            matmuls.matmul(a, b, out=bad)
    with pytest.raises(RuntimeError, match="bias_act_: expected x without a lazy conjugation or negation"):
        custom_mm.bias_act_(out.conj().imag, None, "relu")


def test_writing_in_inference_mode_is_seen_by_autograd(device):
    x = draw(3, 3, device=device).requires_grad_()
    for write in (
        lambda s: matmuls.matmul(s.clone(), s.clone(), out=s),
        lambda s: custom_mm.bias_act_(s, None, "relu"),
    ):
        saved = draw(3, 3, device=device)
        y = x * saved
        with torch.inference_mode():
            write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


PRODUCTS = [matmuls.matmul, matmuls.cublasMM.apply, lambda a, b: matmuls.matmul(a, b, bias=b[0].detach())]


@pytest.mark.parametrize("product", PRODUCTS, ids=["matmul", "cublasMM", "bias"])
def test_only_tensors_that_a_gradient_needs_are_saved(product, device):
    """With a frozen weight the input may be overwritten and is not kept alive, and vice versa."""
    leaf, frozen = draw(3, 3, device=device).requires_grad_(), draw(3, 3, device=device, seed=1)
    for order in (lambda x: (x, frozen), lambda x: (frozen, x)):
        x = leaf * 1
        y = product(*order(x))
        x.detach().add_(1)
        x.add_(1)
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        ones = torch.ones(3, 3, device=device)
        torch.testing.assert_close(grad, ones @ frozen.mT if order(0)[1] is frozen else frozen.mT @ ones)


@pytest.mark.cuda
def test_compile_with_cuda_graph_trees():
    a, b = draw(64, 32, device="cuda"), draw(32, 48, device="cuda").requires_grad_()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(a, b):
        return matmuls.matmul(a, b, bias=a[0, :1].expand(48).contiguous()) + matmuls.cublasMM.apply(a, b)

    for seed in range(5):
        a.copy_(draw(64, 32, device="cuda", seed=seed))
        torch.compiler.cudagraph_mark_step_begin()
        y = step(a, b)
        torch.testing.assert_close(y, 2 * (a @ b) + a[0, 0], atol=1e-4, rtol=1e-4)
        (grad,) = torch.autograd.grad(y.sum(), b)
        torch.testing.assert_close(grad, 2 * a.mT @ torch.ones(64, 48, device="cuda"), atol=1e-4, rtol=1e-4)


def test_out_with_a_gradient_is_refused(device):
    a, b = draw(3, 4, device=device).requires_grad_(), draw(4, 5, device=device)
    out = torch.zeros(3, 5, device=device)
    with pytest.raises(RuntimeError, match="matmul: expected no gradient to be recorded through out="):
        matmuls.matmul(a, b, out=out)
    assert not out.any()
    with torch.no_grad():
        matmuls.matmul(a, b, out=out)
    torch.testing.assert_close(out, a.detach() @ b)


def test_writing_out_is_seen_by_autograd(device):
    x, saved = draw(3, 3, device=device).requires_grad_(), draw(3, 3, device=device)
    y = x * saved
    matmuls.matmul(draw(3, 3, device=device), draw(3, 3, device=device), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(64, 256), (2, 3, 60_000, 8), (300_000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bias_and_activation_are_rounded_once(shape, dtype, device):
    x, bias = draw(*shape, device=device).to(dtype), draw(shape[-1], device=device, seed=1).to(dtype)
    ours = custom_mm.bias_act_(x.clone(), bias, "gelu")
    truth = torch.nn.functional.gelu(x.double() + bias.double())
    share = torch.finfo(dtype).eps / 2 + 4e-5  # error bound of the 16-bit gelu on a GPU
    assert ((ours.double() - truth).abs() <= share * truth.abs() + 1e-6).all()


def test_a_bias_is_added_before_rounding(device):
    x, w, bias = (draw(*s, device=device).bfloat16() for s in ((64, 256), (256, 256), (256,)))
    truth = x.double() @ w.double().T + bias.double()
    out = torch.empty_like(x)
    for y in (matmuls.matmul(x, w, transb=True, bias=bias, out=out), matmuls.matmul(x, w, transb=True, bias=bias)):
        error = (y.double() - truth).abs() - 2**-18 * (x.double().abs() @ w.double().abs().T)
        assert (error <= 2**-8 * truth.abs()).all()


def test_bias_act_is_seen_by_autograd_and_refuses_a_gradient(device):
    x, saved = draw(3, 3, device=device).requires_grad_(), draw(3, 3, device=device)
    y = x * saved
    custom_mm.bias_act_(saved, None, "relu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="bias_act_: expected no gradient to be recorded"):
        custom_mm.bias_act_(x, None, "relu")


# ------------------------------------------------------------------------------------------------- batches and strides


def attention_views(device, batch=3, length=8, heads=4, width=6):
    """[B, H, S, D] views of [B, S, H, D] memory, as in attention."""
    return (draw(batch, length, heads, width, device=device, seed=i).transpose(1, 2) for i in range(2))


@pytest.mark.parametrize("batch", [2, 9], ids=["few outer batches", "many"])
def test_attention_views(device, batch):
    q, k = attention_views(device, batch=batch)
    torch.testing.assert_close(matmuls.matmul(q, k, transb=True), q @ k.mT)
    scores = draw(batch, 4, 8, 8, device=device)
    torch.testing.assert_close(matmuls.matmul(scores, q), scores @ q)
    out = torch.empty(batch, 8, 4, 6, device=device)
    matmuls.matmul(scores, q, out=out.transpose(1, 2))
    torch.testing.assert_close(out.transpose(1, 2), scores @ q)


@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 1, 3, 4), (1, 6, 4, 2)), ((7, 1, 5, 1, 3, 4), (2, 1, 3, 4, 2)), ((1, 3, 4), (9, 4, 2)), ((9, 1, 4), (4, 2))],
    ids=str,
)
def test_broadcast_batches(a, b, device):
    a, b = draw(*a, device=device), draw(*b, device=device, seed=1)
    torch.testing.assert_close(matmuls.matmul(a, b), a @ b)
    torch.testing.assert_close(matmuls.matmul(b, a, transa=True, transb=True), b.mT @ a.mT)


def test_expanded_operands(device):
    a, b = draw(1, 4, device=device).expand(3, 4), draw(4, 1, device=device).expand(4, 5)
    torch.testing.assert_close(matmuls.matmul(a, b), a @ b)
    c = draw(3, 4, device=device).expand(6, 3, 4)
    torch.testing.assert_close(matmuls.matmul(c, b), c @ b)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_views(dtype, device):
    a, b = draw(3, 4, device=device, dtype=dtype), draw(5, 4, device=device, dtype=dtype, seed=1)
    torch.testing.assert_close(matmuls.matmul(a.conj(), b.mH), a.conj() @ b.mH)


def test_random_layouts_agree_with_torch(device):
    """Randomly permuted, sliced and expanded batches against torch."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    sizes = st.integers(1, 4)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data):
        batch = data.draw(st.lists(sizes, max_size=3))
        m, k, n = data.draw(sizes), data.draw(sizes), data.draw(sizes)

        def operand(rows, cols, seed):
            shape = [data.draw(st.sampled_from([size, 1])) for size in batch] + [rows, cols]
            order = data.draw(st.permutations(range(len(shape))))
            steps = [data.draw(st.integers(1, 2)) for _ in shape]
            memory = draw(*(shape[i] * steps[i] for i in order), device=device, dtype=torch.float64, seed=seed)
            view = memory.permute([order.index(i) for i in range(len(shape))])
            return view[tuple(slice(None, None, step) for step in steps)]

        a, b = operand(m, k, 0), operand(k, n, 1)
        torch.testing.assert_close(matmuls.matmul(a, b), torch.matmul(a, b))
        torch.testing.assert_close(matmuls.matmul(b, a, transa=True, transb=True), torch.matmul(b.mT, a.mT))

    check()


@pytest.mark.cuda
def test_strided_operands_are_not_copied():
    x = draw(512, 2048, device="cuda")
    a, b = x[:, :1024], draw(1024, 2048, device="cuda")[:, 1024:].mT
    out = torch.empty(512, 1024, device="cuda")
    matmuls.matmul(a, b, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    matmuls.matmul(a, b, out=out)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [65_535, 65_536, 70_001])
def test_large_batches(batch):
    a, b = draw(batch, 2, 3, device="cuda"), draw(batch, 3, 2, device="cuda", seed=1)
    torch.testing.assert_close(matmuls.matmul(a, b), a @ b)


@pytest.mark.cuda
@pytest.mark.gpu_memory(18)
def test_more_than_2_31_elements():
    rows = 2**31 // 64 + 3
    a = torch.ones(rows, 64, dtype=torch.bfloat16, device="cuda")
    a[-1] = 2
    b = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    c = matmuls.matmul(a, b)
    assert torch.equal(c[-2:], a[-2:])
    assert torch.equal(c[:2], a[:2])
    d = matmuls.matmul(a, b, bias=torch.ones(64, dtype=torch.bfloat16, device="cuda"), activation="gelu")
    torch.testing.assert_close(d[-2:], torch.nn.functional.gelu(a[-2:] + 1))


@pytest.mark.cuda
def test_tf32_only_if_torch_allows_it():
    a, b = draw(512, 512, device="cuda"), draw(512, 512, device="cuda", seed=1)
    truth = a.double() @ b.double()

    def error(**kwargs):
        return ((matmuls.matmul(a, b, **kwargs) - truth).norm() / truth.norm()).item()

    bias = torch.zeros(512, device="cuda")
    assert error() < 1e-6 > error(bias=bias)
    torch.set_float32_matmul_precision("high")
    try:
        assert error() > 1e-5 < error(bias=bias)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_out_keeps_its_dtype_under_autocast():
    a, b = draw(2, 64, 64, device="cpu", dtype=torch.float32), draw(64, 64, device="cpu", dtype=torch.float32)
    for out in (torch.empty(2, 64, 64).mT, torch.empty(2, 64, 64)):
        with torch.autocast("cpu", torch.bfloat16):
            matmuls.matmul(a, b, out=out)
        torch.testing.assert_close(out, a @ b)


def test_forward_mode_is_refused_not_dropped(device):
    a = draw(3, 3, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        with pytest.raises(RuntimeError, match="matmul: expected inputs without forward-mode tangents"):
            matmuls.matmul(dual, a)


# ------------------------------------------------------------------------------------- threads, streams, graphs (GPU)


@pytest.mark.cuda
def test_threads_and_streams_are_bitwise_equal_to_sequential_calls():
    products = 1000  # per stream
    a, b = draw(8, 4, 96, 160, device="cuda"), draw(8, 4, 160, 64, device="cuda", seed=1)
    bias = draw(64, device="cuda", seed=2)
    expected = [
        [(matmuls.matmul(a[t, s], b[t, s]), matmuls.matmul(a[t, s], b[t, s], bias=bias)) for s in range(4)]
        for t in range(8)
    ]
    torch.cuda.synchronize()
    wrong = []

    def work(t):
        streams = [torch.cuda.Stream() for _ in range(4)]
        count = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
        torch.cuda.synchronize()
        for n in range(4 * products):
            s = n % 4
            with torch.cuda.stream(streams[s]):
                c, d = matmuls.matmul(a[t, s], b[t, s]), matmuls.matmul(a[t, s], b[t, s], bias=bias)
                count[s] += (c != expected[t][s][0]).sum() + (d != expected[t][s][1]).sum()
        torch.cuda.synchronize()
        wrong.append(sum(c.item() for c in count))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 8


def step(x, w, bias):
    """A forward and a backward pass through every kind of product."""
    for t in (x, w, bias):
        t.grad = None
    y = matmuls.matmul(x, w, transb=True, bias=bias, activation="gelu_tanh")
    z = matmuls.cublasTransbMM.apply(y, y)
    loss = matmuls.matmul(z, y).square().mean()
    loss.backward()
    return loss


@pytest.mark.cuda
def test_graph_of_forward_and_backward():
    """100 replays with new inputs are correct; neither they nor 50 captures leak memory."""
    x, w, bias = (
        t.requires_grad_() for t in (draw(64, 48, device="cuda"), draw(32, 48, device="cuda"), draw(32, device="cuda"))
    )
    gc.collect()  # tensors of earlier tests
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(x, w, bias)
    torch.cuda.synchronize()

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(x, w, bias)
        return graph, loss, (x.grad, w.grad, bias.grad)

    graph, loss, grads = capture()
    memory = None
    for n in range(100):
        with torch.no_grad():
            for i, t in enumerate((x, w, bias)):
                t.copy_(draw(*t.shape, device="cuda", seed=10 * n + i))
        graph.replay()
        got = loss.clone(), *(g.clone() for g in grads)
        copies = [t.detach().clone().requires_grad_() for t in (x, w, bias)]
        expected = step(*copies), *(t.grad for t in copies)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        del got, copies, expected, ours, theirs
        torch.cuda.synchronize()
        memory = memory or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == memory

    del graph, loss, grads
    sizes = []
    for _ in range(50):
        kept = capture()
        del kept
        x.grad = w.grad = bias.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(sizes[3:])) == 1


@pytest.mark.cuda
def test_everything_works_after_out_of_memory():
    a = torch.empty(1, device="cuda").expand(2**20, 1)
    b = torch.empty(1, device="cuda").expand(1, 2**20)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        matmuls.matmul(a, b)  # 4 TiB
    x = draw(8, 8, device="cuda")
    torch.testing.assert_close(matmuls.matmul(x, x), x @ x)
