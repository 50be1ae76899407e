"""The masked products on a GPU: graphs, streams, few rows, sorted rows; and export."""

import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import matmuls
from common.masked_cases import close, draw, masks
from matmuls import mask_plan, masked_ffn, masked_linear
from matmuls.nn import MaskedFFN, MaskedLinear

# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1000, 256, 512), (512, 2048, 4096), (1500, 4096, 512)])
def test_a_graph_replays_with_changed_masks(m, k, n, training):
    """By the kernels for many rows, for few, and by a product whose last wave is split."""
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(1500, 4096, 512), (6000, 6144, 1536), (1100, 4096, 300)])
def test_last_wave_split_along_k(dtype, m, k, n, poisoned, monkeypatch):
    """Weights along K and along N, with and without a bias; repeated calls give the same bits."""
    from matmuls.triton import masked_linear as kernels

    ran, real = [], kernels.launch

    def counted(kernel, *args, **options):
        ran.append(kernel)
        real(kernel, *args, **options)

    monkeypatch.setattr(kernels, "launch", counted)
    x, w1, w2 = (draw(*s, dtype=dtype, device="cuda") for s in ((m, k), (n, k), (n, k)))
    b1, b2 = (draw(n, dtype=dtype, device="cuda") for _ in range(2))
    across = [w.T.contiguous().T for w in (w1, w2)]
    for mask in masks(m, "cuda"):
        rows, counts, _ = mask_plan(mask)
        truth = torch.where(mask[:, None], x.double() @ w1.double().T, x.double() @ w2.double().T)
        biased = truth + torch.where(mask[:, None], b1.double(), b2.double())
        for operands, biases, expected in (((w1, w2), (b1, b2), biased), (across, (), truth)):
            y = kernels.product(x, *operands, rows, counts, *biases)
            close(y, expected, dtype, terms=k)
            assert torch.equal(y, kernels.product(x, *operands, rows, counts, *biases))
    assert ran.count(kernels.add_parts_kernel) == ran.count(kernels.product_kernel) > 0


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


@pytest.mark.cuda
@pytest.mark.parametrize("gathers", [(True, True), (False, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize(("m", "p", "q"), [(130, 256, 256), (1500, 512, 1024), (6000, 1536, 6144)])
def test_gradients_in_equal_shares(m, p, q, gathers, poisoned, monkeypatch):
    """Eager, and a CUDA graph that replays with another mask in the same buffers; any number of rows in the first
    expert; one expert alone."""
    from matmuls.triton import configs, launch, stream_k
    from matmuls.triton import masked_weights as kernels

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("shares are of the kernel with TMA")
    tiles = configs.Tiles(128, 256, 64, tma=True, pieces=4)
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.WEIGHTS, tiles))
    monkeypatch.setattr(kernels, "saves", lambda *args: True)
    ran = []
    monkeypatch.setattr(stream_k, "launch", lambda kernel, *args: (ran.append(kernel), launch.launch(kernel, *args)))
    g, x = (draw(m, n, dtype=torch.bfloat16, device="cuda") for n in (p, q))
    order = torch.randperm(m, device="cuda")
    some = [order < n1 for n1 in (m // 2, 0, 1, m // 20, m - 1, m)]
    rows, counts = (t.clone() for t in mask_plan(some[0])[:2])
    gs, xs = (t.clone() for t in (g, x))  # in the plan's order where not gathered

    def change(mask):
        for t, new in zip((rows, counts), mask_plan(mask)[:2], strict=True):
            t.copy_(new)
        for t, source, gather in zip((gs, xs), (g, x), gathers, strict=True):
            t.copy_(source if gather else source[rows.long()])

    def step(first=True, second=True):
        return kernels.weight_gradients(
            gs, xs, rows, counts, first, second, gather_g=gathers[0], gather_x=gathers[1]
        )  # fmt: skip

    change(some[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for mask in some:
        change(mask)
        found = step()
        for ours, mine in zip(found, (mask, ~mask), strict=True):
            close(ours, torch.where(mine[:, None], g, 0).double().T @ x.double(), torch.bfloat16)
            assert mine.any() or ours.count_nonzero() == 0
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, captured, found))
        for wanted in (0, 1):
            one = step(wanted == 0, wanted == 1)
            assert one[1 - wanted].numel() == 0
            mine = mask if wanted == 0 else ~mask
            close(one[wanted], torch.where(mine[:, None], g, 0).double().T @ x.double(), torch.bfloat16)
    assert set(ran) == {stream_k.stream_k_kernel, stream_k.fixup_kernel}


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
