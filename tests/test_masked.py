"""Tests of the masked products beyond the table: masks, plans, frozen experts, graphs, modules."""

import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import matmuls
from matmuls import mask_plan, masked_ffn, masked_linear
from matmuls.nn import MaskedFFN, MaskedLinear

ROWS = (1, 7, 64, 127, 129, 8192)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def masks(m, device="cpu"):
    r = torch.arange(m, device=device)
    yield from (r < 0, r >= 0, r == m // 2, (r >= m // 5) & (r < m // 5 + m // 2), r * 32 // m % 2 == 1)
    yield torch.rand(m, generator=torch.Generator().manual_seed(m)).to(device) < 0.5


def draw(*shape, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).div_(shape[-1] ** 0.5).to(dtype).to(device)


def close(x, truth, dtype, terms=0):
    """Within four roundings; in float32, for sequential sums of `terms` terms, sqrt(terms) more."""
    assert x.isfinite().all()
    off = (x.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    assert off <= (4 + (terms**0.5 if dtype == torch.float32 else 0)) * torch.finfo(dtype).eps


@pytest.fixture
def poisoned():
    """Every torch.empty starts as NaN: an unwritten row fails the comparison."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("m", [0, *ROWS, 1 << 21])
def test_plan_is_a_stable_partition(m, device):
    for mask in masks(m, device) if m else [torch.zeros(0, dtype=torch.bool, device=device)]:
        plan = mask_plan(mask)
        assert torch.equal(plan.rows.long(), torch.cat([mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1)]))
        assert plan.counts.tolist() == [mask.sum().item(), m - mask.sum().item()]
        assert plan.rows.dtype == plan.counts.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_every_mask(m, dtype, device, poisoned):
    """Each row gets its own expert's product and does not affect others; 40 and 33 are not multiples of 16."""
    k, n = 40, 33
    x, w1, w2 = draw(m, k), draw(n, k), draw(n, k)
    b1, b2 = draw(n), draw(n)
    given = [t.to(dtype).to(device).requires_grad_() for t in (x, w1, w2, b1, b2)]
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    for mask in masks(m):
        y = masked_linear(*given[:3], mask_plan(mask.to(device)), *given[3:])
        truth = torch.where(mask[:, None], F.linear(wide[0], wide[1], wide[3]), F.linear(wide[0], wide[2], wide[4]))
        close(y.cpu(), truth, dtype)
        grad = draw(m, n, dtype=dtype)
        found = torch.autograd.grad(y, given, grad.to(device))
        for ours, expected in zip(found, torch.autograd.grad(truth, wide, grad.double()), strict=True):
            close(ours.cpu(), expected, dtype, terms=m)
            assert ours.dtype == dtype
            if not expected.any():
                assert ours.count_nonzero() == 0  # exactly 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [7, 129])
def test_every_mask_of_an_ffn(m, dtype, recompute, device, poisoned):
    d, h = 24, 40
    up, down = (h, d), (d, h)
    given = [draw(m, d), *(draw(*s) for s in (up, down, up, up, down, up))]
    given = [t.to(dtype).to(device).requires_grad_() for t in given]
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    for mask in masks(m):
        y = masked_ffn(*given, mask.to(device), recompute)
        x, *w = wide
        truth = torch.where(
            mask[:, None],
            F.linear(F.silu(F.linear(x, w[0])) * F.linear(x, w[2]), w[1]),
            F.linear(F.silu(F.linear(x, w[3])) * F.linear(x, w[5]), w[4]),
        )
        grad = draw(m, d, dtype=dtype)
        found = torch.autograd.grad(y, given, grad.to(device))
        expected = torch.autograd.grad(truth, wide, grad.double())
        for ours, t in zip((y, *found), (truth, *expected), strict=True):
            close(ours.detach().cpu(), t.detach(), dtype)
            if not t.any():
                assert ours.count_nonzero() == 0


def test_a_plan_serves_many_calls(device):
    x, w1, w2 = (draw(*s, device=device).requires_grad_() for s in ((12, 8), (8, 8), (8, 8)))
    mask = torch.arange(12, device=device) % 3 == 0
    plan = mask_plan(mask)
    y = masked_linear(masked_linear(x, w1, w2, plan), w2, w1, plan)
    expected = masked_linear(masked_linear(x, w1, w2, mask), w2, w1, mask)
    assert torch.equal(y, expected)
    for n in (0, 12):  # counts known to the host change no value and no gradient
        mask = torch.full((12,), n == 12, device=device)
        pair = [masked_linear(x, w1, w2, p) for p in (mask_plan(mask), mask_plan(mask, known=n))]
        grads = [torch.autograd.grad(y.square().sum(), (x, w1, w2)) for y in pair]
        for a, b in zip((pair[0], *grads[0]), (pair[1], *grads[1]), strict=True):
            torch.testing.assert_close(a, b)
        assert grads[1][1 if n == 0 else 2].count_nonzero() == 0


@pytest.mark.parametrize("frozen", range(7))
def test_the_gradient_of_a_frozen_weight_is_not_computed(frozen, device):
    args = [draw(*s, device=device) for s in ((9, 4), (5, 4), (4, 5), (5, 4), (5, 4), (4, 5), (5, 4))]
    mask = torch.arange(9, device=device) % 2 == 0

    def flops(requires):
        leaves = [a.clone().requires_grad_(r) for a, r in zip(args, requires, strict=True)]
        y = masked_ffn(*leaves, mask)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert [a.grad is not None for a in leaves] == requires
        return counter.get_total_flops()

    one = 2 * 9 * 4 * 5  # FLOPs of the gradient of a weight, for both experts
    alone = flops([n == frozen for n in range(7)])
    assert alone == (3 if frozen == 0 else 2) * one  # G and the requested gradients: two products for x's, else one


def test_frozen_weights_of_a_linear(device):
    x, w1, w2 = (draw(*s, device=device) for s in ((9, 4), (5, 4), (5, 4)))
    mask = torch.arange(9, device=device) % 2 == 0
    for requires in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [a.clone().requires_grad_(r) for a, r in zip((x, w1, w2), requires, strict=True)]
        masked_linear(*leaves, mask).sum().backward()
        assert [a.grad is not None for a in leaves] == list(requires)


def test_nan_stays_in_its_row_and_expert(device):
    for dtype in (torch.float64, torch.float32):
        x, w1, w2 = (draw(*s, dtype=dtype, device=device) for s in ((40, 16), (24, 16), (24, 16)))
        x[0] = float("nan")
        for t in (x, w1, w2):
            t.requires_grad_()
        y = masked_linear(x, w1, w2, torch.arange(40, device=device) % 2 == 0)
        y.sum().backward()
        assert y[0].isnan().all()
        assert y[1:].isfinite().all()
        assert w1.grad.isnan().all()
        assert w2.grad.isfinite().all()


@pytest.mark.parametrize("make", [lambda: MaskedLinear(8, 6), lambda: MaskedFFN(8, 12), lambda: MaskedFFN(8, 12, True)])
def test_modules(make, device):
    torch.manual_seed(0)
    module = make().to(device)
    x, mask = torch.randn(2, 5, 8, device=device), torch.rand(2, 5, device=device) < 0.5
    y = module(x, mask)
    torch.testing.assert_close(module(x, mask_plan(mask)), y)
    if isinstance(module, MaskedLinear):
        expected = torch.where(mask[..., None], module.first(x), module.second(x))
    else:
        w, u = (
            b(F.silu(a(x)) * c(x)) for a, b, c in ((module.w1, module.w2, module.w3), (module.u1, module.u2, module.u3))
        )
        expected = torch.where(mask[..., None], w, u)
    torch.testing.assert_close(y, expected)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), y)
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    copy = make().to(device)
    copy.load_state_dict(module.state_dict())
    torch.testing.assert_close(copy(x, mask), y)


def test_a_module_of_two_layers():
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    module = MaskedLinear.from_linear(first, second)
    x, mask = torch.randn(6, 4), torch.arange(6) < 2
    torch.testing.assert_close(module(x, mask), torch.where(mask[:, None], first(x), second(x)))
    assert {id(p) for p in module.parameters()} == {id(p) for m in (first, second) for p in m.parameters()}
    with pytest.raises(ValueError, match="MaskedLinear: expected two layers of one shape"):
        MaskedLinear.from_linear(first, torch.nn.Linear(4, 3, bias=False))


def test_compiles_without_graph_breaks_or_recompilations(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(x, w1, w2, mask):
        plan = mask_plan(mask)
        return masked_linear(masked_linear(x, w1, w2, plan), w2, w1, plan)

    x, w1, w2 = (draw(*s, dtype=torch.float32, device=device).requires_grad_() for s in ((12, 8), (8, 8), (8, 8)))
    for mask in masks(12, device):
        y = layer(x, w1, w2, mask)
        y.sum().backward()
        plan = mask_plan(mask)
        torch.testing.assert_close(y, masked_linear(masked_linear(x, w1, w2, plan), w2, w1, plan))
    assert counter.frame_count == 1


@pytest.mark.parametrize("tied", ["weights", "made of another"])
def test_differentiable_gradients_equal_plain_gradients(tied):
    x = torch.randn(9, 6, dtype=torch.float64)
    w1, w2, w3 = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((8, 6), (6, 8), (8, 6)))
    mask = torch.arange(9) % 3 == 0

    def gradients(create_graph):
        others = (w1, w2, w3) if tied == "weights" else (w1.tanh(), w2, w1 * w3)
        y = masked_ffn(x, w1, w2, w3, *others, mask)
        return torch.autograd.grad(y.square().sum(), (w1, w2, w3), create_graph=create_graph)

    torch.testing.assert_close([g.detach() for g in gradients(True)], list(gradients(False)))


def test_forward_mode_is_refused_not_dropped():
    x, w = torch.randn(5, 4), torch.randn(3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="masked_linear: expected inputs without forward-mode tangents"):
            masked_linear(dual, w, w, torch.arange(5) < 2)


def test_any_number_of_rows_is_compiled_once():
    w1, w2 = torch.randn(5, 4), torch.randn(5, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(masked_linear, backend=counter, dynamic=True, fullgraph=True)
    for rows in range(3, 15):
        x, mask = torch.randn(rows, 4, requires_grad=True), torch.arange(rows) % 2 == 0
        torch.testing.assert_close(compiled(x, w1, w2, mask), masked_linear(x, w1, w2, mask))
    assert counter.frame_count == 1


def test_products_with_inner_size_0():
    for lead in ((), (2, 3)):
        x, w = torch.randn(*lead, 0), torch.randn(5, 0)
        assert torch.equal(masked_linear(x, w, w, torch.ones(lead, dtype=torch.bool)), torch.zeros(*lead, 5))


@pytest.mark.parametrize("wanted", [(1, 4), (2,), (4, 6), (1, 2, 3)], ids=str)
def test_gradients_of_some_weights_have_their_shapes_while_tracing(wanted):
    """If one gradient of a pair is needed, the kernels return both, one of them empty."""
    x, w, v = (torch.randn(*s) for s in ((6, 4), (5, 4), (4, 5)))
    rows, counts, _ = mask_plan(torch.arange(6) < 2)
    needs = [n in (0, *wanted) for n in range(7)]
    args = (torch.randn(6, 4), x, w, v, w, w, v, w, rows, counts, None, needs)
    op = torch.ops.custom_mm.masked_ffn_backward.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_invalid_masks_raise():
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    for mask, kind in (([True, False], "list"), ((torch.zeros(2), torch.zeros(2)), "tuple"), (None, "NoneType")):
        with pytest.raises(RuntimeError, match=f"masked_linear: expected a mask of torch.bool, .* got {kind}"):
            masked_linear(x, w, w, mask)


def test_bad_plans_and_masks():
    x, w = torch.randn(6, 4), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match=r"mask_plan: expected a strided mask of torch.bool, got torch.float32"):
        mask_plan(torch.ones(6))
    with pytest.raises(RuntimeError, match=r"mask_plan: expected known from 0 to the mask's 6 elements, got 7"):
        mask_plan(torch.ones(6, dtype=torch.bool), known=7)
    apart = torch.ones(2, 3, 4), w[:, :1].expand(-1, 4), w[:, :1].expand(-1, 4)
    with pytest.raises(RuntimeError, match=r"masked_linear: expected a mask of shape \[2, 3\] .*, got \[3, 2\]"):
        masked_linear(*apart, torch.ones(3, 2, dtype=torch.bool))
    for fits in ((2, 3), (2, 3, 1), (6,)):
        masked_linear(*apart, torch.ones(fits, dtype=torch.bool))
    plan = mask_plan(torch.ones(5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"masked_linear: expected a mask or plan of 6 rows, .* got 5"):
        masked_linear(x, w, w, plan)
    wrong = matmuls.MaskPlan(torch.arange(6), torch.tensor([3, 3]))
    with pytest.raises(RuntimeError, match=r"masked_linear: expected a plan made by mask_plan, got torch.int64"):
        masked_linear(x, w, w, wrong)


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1000, 256, 512), (512, 2048, 4096)])  # uses the kernels for few rows
def test_a_graph_replays_with_changed_masks(m, k, n, training):
    x, w1, w2 = (
        draw(*s, dtype=torch.bfloat16, device="cuda").requires_grad_(training) for s in ((m, k), (n, k), (n, k))
    )
    mask = torch.zeros(m, dtype=torch.bool, device="cuda")
    grad = draw(m, n, dtype=torch.bfloat16, device="cuda")

    def step():
        y = masked_linear(x, w1, w2, mask)
        return (y, *torch.autograd.grad(y, (x, w1, w2), grad)) if training else (y,)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for n_ in range(100):
        share = (0.0, 1.0, 0.05, 0.5)[n_ % 4]
        mask.copy_(torch.rand(m, device="cuda") < share)
        for r in results:
            r.detach().fill_(float("nan"))
        graph.replay()
        for ours, eager in zip(results, step(), strict=True):
            assert torch.equal(ours, eager)
        truth = torch.where(mask[:, None], F.linear(x.double(), w1.double()), F.linear(x.double(), w2.double()))
        close(results[0].detach(), truth.detach(), torch.bfloat16)


@pytest.mark.cuda
def test_no_call_synchronizes_with_the_gpu():
    x, w1, w2 = (draw(*s, dtype=torch.float16, device="cuda").requires_grad_() for s in ((300, 64), (48, 64), (48, 64)))
    b1, b2 = (draw(48, dtype=torch.float16, device="cuda").requires_grad_() for _ in range(2))
    ffn = [draw(*s, dtype=torch.float16, device="cuda").requires_grad_() for s in ((96, 64), (64, 96), (96, 64)) * 2]
    mask = torch.rand(300, device="cuda") < 0.5

    def step():
        masked_linear(x, w1, w2, mask, b1, b2).sum().backward()
        masked_ffn(x, *ffn, mask).sum().backward()
        masked_linear(*(t.detach().double() for t in (x, w1, w2)), mask)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_large(dtype):
    m, k, n = 40000, 1024, 1000
    x, w1, w2 = (draw(*s, dtype=dtype, device="cuda") for s in ((m, k), (n, k), (n, k)))
    for mask in masks(m, "cuda"):
        y = masked_linear(x, w1, w2, mask)
        truth = torch.where(mask[:, None], F.linear(x.double(), w1.double()), F.linear(x.double(), w2.double()))
        close(y, truth, dtype, terms=k)


@pytest.mark.cuda
@pytest.mark.parametrize("m", [1, 300, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows(dtype, m, poisoned, monkeypatch):
    """One wave of tiles, remaining rows of both experts in strips; gradients from sorted copies."""
    from matmuls.triton import configs, few
    from matmuls.triton import masked_gradients as kernels

    ran = []
    real = kernels.launch

    def counted(kernel, *args):
        ran.append(kernel)
        real(kernel, *args)

    for module in ("masked_linear", "masked_weights", "masked_gradients"):
        monkeypatch.setattr(f"matmuls.triton.{module}.launch", counted)
    monkeypatch.setattr(kernels, "FEW", 1)
    tiles = configs.Tiles(128, 128, 64, warps=4, stages=5, tma=True, split=2)
    monkeypatch.setattr(configs, "forced", {"masked_linear": tiles, "masked_linear_t": tiles})
    k, n = 2048, 2304
    x, w1, w2 = (draw(*s, dtype=dtype, device="cuda") for s in ((m, k), (n, k), (n, k)))
    b1, b2, g = (draw(*s, dtype=dtype, device="cuda") for s in ((n,), (n,), (m, n)))
    for mask in masks(m, "cuda"):
        rows, counts, _ = mask_plan(mask)
        y = kernels.product(x, w1, w2, rows, counts, b1, b2)
        wide = [F.linear(x.double(), w.double(), b.double()) for w, b in ((w1, b1), (w2, b2))]
        close(y, torch.where(mask[:, None], *wide), dtype, terms=k)
        dx, d1, d2 = kernels.gradients(g, x, w1, w2, rows, counts)
        wide = [g.double() @ w.double() for w in (w1, w2)]
        close(dx, torch.where(mask[:, None], *wide), dtype, terms=n)
        for ours, mine in ((d1, mask), (d2, ~mask)):
            close(ours, torch.where(mine[:, None], g, 0).double().T @ x.double(), dtype, terms=m)
            assert mine.any() or ours.count_nonzero() == 0
        again = kernels.gradients(g, x, w1, w2, rows, counts, ordered=few.in_order(x, rows, counts))
        assert all(map(torch.equal, again, (dx, d1, d2)))
        frozen = kernels.gradients(g, x, w1, w2, rows, counts, False, True)
        assert frozen[1].numel() == 0
        assert torch.equal(frozen[2], d2)
    assert set(ran) == {few.few_product_kernel, few.few_weights_kernel}


@pytest.mark.cuda
def test_the_second_stream_is_not_shared():
    """torch's stream pool hands out a stream several times: another thread may capture a graph on it."""
    from matmuls.triton import masked_gradients as kernels

    pool = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    found = []

    def work(stream):
        with torch.cuda.stream(stream):
            x, y = (torch.zeros(1 << 16, device="cuda") for _ in range(2))

            def other():
                found.append(torch.cuda.current_stream().cuda_stream)
                y.add_(1)

            for n in range(2):
                kernels._beside(x.device, lambda: x.add_(1), other)
                assert (x + y).eq(2 * n + 2).all()

    streams = [torch.cuda.Stream() for _ in range(3)]
    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert not pool & set(found)
    work(streams[0])  # in this thread, on a stream that an ended thread has used
    assert len(set(found)) <= 4
    assert not pool & set(found)


@pytest.mark.cuda
def test_the_second_stream_during_a_capture_in_another_thread():
    """For every stream of torch's pool that the other thread captures on."""
    from matmuls.triton import masked_gradients as kernels

    begun, tried, failures = threading.Event(), threading.Event(), []
    x, y = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
    graph, pool = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(32)]

    def capture():
        try:
            with torch.cuda.graph(graph, stream=pool[0], capture_error_mode="thread_local"):
                for stream in pool[1:]:  # the whole pool
                    stream.wait_stream(pool[0])
                y.add_(1)
                begun.set()
                tried.wait(60)
                for stream in pool[1:]:
                    pool[0].wait_stream(stream)
        except RuntimeError as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)

    def work():
        try:
            kernels._beside(x.device, lambda: x + 1, lambda: x.add_(1))
        except RuntimeError as error:
            failures.append(error)

    other = threading.Thread(target=work)  # a new thread has no second stream yet
    other.start()
    other.join()
    tried.set()
    thread.join()
    assert not failures
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(1).all()
    assert y.eq(1).all()


@pytest.mark.cuda
def test_backward_of_few_rows_reuses_the_sorted_copy_of_forward(monkeypatch):
    from matmuls.triton import few

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("rows are ordered from sm_90 on")
    copied = []
    real = few.launch
    monkeypatch.setattr(few, "launch", lambda *args, **options: (copied.append(args), real(*args, **options)))
    x, w1, w2 = (draw(*s, dtype=torch.bfloat16, device="cuda") for s in ((512, 2048), (2304, 2048), (2304, 2048)))
    leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
    rows, counts, known = plan = mask_plan(torch.rand(512, device="cuda") < 0.5)
    grad = draw(512, 2304, dtype=torch.bfloat16, device="cuda")
    y = masked_linear(leaves[0].view(2, 256, 2048), *leaves[1:], plan)
    found = torch.autograd.grad(y, leaves, grad.view(y.shape))
    assert len(copied) == 2  # x once, grad once
    alone = torch.ops.custom_mm.masked_linear_backward(grad, x, w1, w2, rows, counts)
    assert all(map(torch.equal, found, alone))
    forward = torch.ops.custom_mm.masked_linear_forward.default
    args = x, w1, w2, rows, counts, None, None, known, 512 + 64 + 128
    torch.library.opcheck(forward, args, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="masked_linear_forward: expected 0 or 704 rows to be kept, got 5"):
        forward(*args[:8], 5)
    y, ordered = forward(*args)
    assert torch.equal(y, masked_linear(x, w1, w2, plan))
    assert torch.equal(ordered[: 512 + 64], few.in_order(x, rows, counts)[: 512 + 64])


@pytest.mark.cuda
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_sorted_rows(dtype, split, poisoned, monkeypatch):
    """The kernel for large weights, which loads one operand by TMA: partial tiles, experts without rows, NaN."""
    from matmuls.triton import configs
    from matmuls.triton import masked_weights as kernels

    tiles = configs.Tiles(128, 256, 64, tma=True, pieces=4, split=split)
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.WEIGHTS, tiles))
    for m in (1, 64, 129, 2000):
        g, x = draw(m, 512, dtype=dtype, device="cuda"), draw(m, 256, dtype=dtype, device="cuda")
        for mask in masks(m, "cuda"):
            rows, counts, _ = mask_plan(mask)
            order = rows.long()
            wide = [torch.where(mine[:, None], g, 0).double().T @ x.double() for mine in (mask, ~mask)]
            for a, b in ((g, x), (x, g)):  # either operand may have fewer columns
                truth = wide if a is g else [t.T for t in wide]
                for sorted_a, sorted_b in ((False, False), (True, False), (False, True)):
                    found = kernels.weight_gradients(
                        a[order] if sorted_a else a, b[order] if sorted_b else b, rows, counts,
                        gather_g=not sorted_a, gather_x=not sorted_b,
                    )  # fmt: skip
                    for ours, expected in zip(found, truth, strict=True):
                        close(ours, expected, dtype)
                        if not expected.any():
                            assert ours.count_nonzero() == 0
    x[0] = float("nan")  # stays in its expert
    first = torch.arange(m, device="cuda") % 2 == 0
    d1, d2 = kernels.weight_gradients(g, x, *mask_plan(first)[:2])
    assert d1.isnan().all()
    assert d2.isfinite().all()


@pytest.mark.parametrize("change", ["a wrapper", "a class", "a hook"])
def test_layers_that_do_more_than_multiply_are_refused(change):
    module, x, mask = MaskedLinear(8, 6), torch.randn(5, 8), torch.tensor([True, False, True, True, False])
    if change == "a hook":
        torch.nn.utils.parametrizations.weight_norm(module.second)  # computes its weight at each access
        module.first.register_forward_pre_hook(lambda *args: None)
    elif change == "a class":
        module.first.__class__ = type("Lora", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x})
    else:
        module.first = torch.nn.Sequential(module.first)
        module.first.weight, module.first.bias = module.first[0].weight, None
    with pytest.raises(TypeError, match=r"MaskedLinear: expected layers that are nn\.Linear without hooks, got "):
        module(x, mask)
    whole = MaskedFFN(8, 12)
    whole.u2.register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match=r"MaskedFFN: expected layers that are nn\.Linear without hooks"):
        whole(x, mask)


def test_export_with_a_dynamic_number_of_rows():
    class Layer(torch.nn.Module):
        def forward(self, x, w, mask):
            return matmuls.masked_linear(x, w, 2 * w, mask)

    rows = torch.export.Dim("rows", min=2)
    args = torch.randn(4, 5), torch.randn(3, 5), torch.tensor([True, False, True, True])
    exported = torch.export.export(Layer(), args, dynamic_shapes=({0: rows}, None, {0: rows})).module()
    args = torch.randn(9, 5), args[1], torch.arange(9) % 2 == 0
    torch.testing.assert_close(exported(*args), Layer()(*args))
