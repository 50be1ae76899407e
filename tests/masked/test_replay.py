"""Recorded calls of operators with Triton kernels: what is recorded; on a GPU, that a repeated call gives the same."""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import custom_mm
from common.masked_cases import draw
from matmuls import mask_plan, masked_ffn, masked_linear

record = pytest.importorskip("matmuls.triton.record")
launch = pytest.importorskip("matmuls.triton.launch")


def launched(*args, kinds, stream=0, **changed):
    """Notes a launch of a kernel with these arguments, as matmuls.triton.launch does after Triton's launcher."""
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 512, "launch_pdl": True, "launch_cooperative_grid": False}
    facts |= {"global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": None} | changed
    source = SimpleNamespace(signature=dict(enumerate(kinds)))
    compiled = SimpleNamespace(function=99, metadata=SimpleNamespace(**facts), src=source)
    launch._log.steps.append(launch.Launched(compiled, (5, 1, 1), args, stream))


def test_a_call_is_described():
    def kernel(x, w, number):
        part, y = x.new_empty(2, 3, dtype=torch.float64), torch.empty(12, 1)
        launched(
            x.t(),
            w,
            part[1],
            None,
            7,
            1 << 40,
            1,
            y,
            kinds=("*fp32",) * 3 + ("constexpr", "i32", "i64") + ("constexpr", "*fp32"),
        )
        return y.view(3, 4), x.new_empty(0, 5)

    x, w = torch.rand(3, 4), torch.rand(4, 3)
    (y, none), found = record.record(kernel, (x, w, 3))
    assert (y.shape, none.shape) == ((3, 4), (0, 5))
    assert [(b["sizes"], b["strides"], b["dtype"]) for b in found["buffers"]] == [
        ([2, 3], [3, 1], torch.float64),
        ([3, 4], [4, 1], torch.float32),  # as the result that it is
        ([0, 5], [5, 1], torch.float32),
    ]
    (one,) = found["launches"]
    assert [one[f] for f in ("function", "grid", "threads", "shared", "early")] == [99, (5, 1, 1), 128, 512, True]
    pointers = [{"tensor": t, "delta": delta} for t, delta in [(0, 0), (1, 0), (3, 24), (4, 0)]]  # buffers from 3 on
    assert one["parameters"] == [*pointers[:3], (7, 4), (1 << 40, 8), pointers[3]]
    assert [(o["buffer"], o["sizes"], o["strides"], o["offset"]) for o in found["outputs"]] == [
        (1, [3, 4], [4, 1], 0), (2, [0, 5], [5, 1], 0)
    ]  # fmt: skip


def one_launch(x, **changed):
    y = torch.empty_like(x)
    launched(x, y, kinds=("*fp32", "*fp32"), **changed)
    return y


def on_two_streams(x, second=1, third=1, after=0):
    y = one_launch(x)
    with launch.concurrently():
        launched(y, kinds=("*fp32",), stream=second)
        launched(y, kinds=("*fp32",), stream=third)
    launched(y, kinds=("*fp32",), stream=after)
    return y


def test_launches_on_a_second_stream_are_described():
    _, found = record.record(on_two_streams, (torch.rand(4, 4),))
    steps = [step if isinstance(step, str) else step["second"] for step in found["launches"]]
    assert steps == [False, "fork", True, True, "join", False]


REFUSED = {
    "a copy": lambda x: one_launch(x.t().contiguous()),
    "zeros": lambda x: (one_launch(x), torch.zeros(3)),
    "a write": lambda x: one_launch(x.add_(1)),
    "a number read": lambda x: one_launch(x) if x.sum().item() < 1e9 else x,
    "three streams": lambda x: on_two_streams(x, third=2),
    "a second stream without a join": lambda x: on_two_streams(x, after=1),
    "no launch": torch.empty_like,
    "scratch memory": lambda x: one_launch(x, global_scratch_size=128),
    "a cluster": lambda x: one_launch(x, num_ctas=2),
    "a pointer into an argument": lambda x: one_launch(x[1:]),
    "a result that is an argument": lambda x: (one_launch(x), x)[1],
    "an unknown parameter": lambda x: (one_launch(x), launched(2.0, kinds=("fp32",)))[0],
}


@pytest.mark.parametrize("kernel", REFUSED.values(), ids=REFUSED)
def test_what_is_more_than_allocations_and_launches_is_not_recorded(kernel):
    x = torch.rand(4, 4)
    assert record.record(one_launch, (x,))[1] is not None
    result, found = record.record(kernel, (x,))
    assert found is None
    assert result is not None
    assert launch._log.steps is None


def test_buffers_are_freed_before_a_call_without_memory_for_its_recording_is_repeated():
    alive = []

    def kernel(x):
        alive.append([ref() is not None for ref in made])
        y = x.new_empty(4, 4)
        made.append(weakref.ref(y))
        if launch._log.steps is not None:
            launched(x, y, kinds=("*fp32", "*fp32"))
            raise torch.OutOfMemoryError("no memory")
        return y.fill_(7)

    made = []
    result, found = record.record(kernel, (torch.rand(4, 4),))
    assert found is None
    assert (result == 7).all()
    assert alive == [[], [False]]


# ------------------------------------------------------------------------------------------------------------ on a GPU


def calls(dtype):
    """name -> a function of a mask, and how many operators it repeats."""
    x, *w = (draw(*s, dtype=dtype, device="cuda").requires_grad_() for s in ((2, 35, 64), (48, 64), (48, 64)))
    biases = [draw(48, dtype=dtype, device="cuda").requires_grad_() for _ in range(2)]
    ffn = [draw(*s, dtype=dtype, device="cuda").requires_grad_() for s in ((96, 64), (64, 96), (96, 64)) * 2]
    grad, grad_x = draw(2, 35, 48, dtype=dtype, device="cuda"), draw(2, 35, 64, dtype=dtype, device="cuda")

    def gradients(y, leaves, grad):
        return (y, *torch.autograd.grad(y, leaves, grad))

    return {
        "plan": (lambda mask: mask_plan(mask)[:2], 1),
        "linear": (lambda mask: gradients(masked_linear(x, *w, mask), (x, *w), grad), 3),
        "biases": (lambda mask: gradients(masked_linear(x, *w, mask, *biases), (x, *w, *biases), grad), 4),
        "frozen": (lambda mask: gradients(masked_linear(x.detach(), *w, mask), w[:1], grad), 3),
        "expanded": (lambda mask: torch.autograd.grad(masked_linear(x, *w, mask).sum(), (x, *w)), 3),
        "twice": (lambda mask: gradients(masked_linear(x, w[0], w[0], mask), w[:1], grad), 3),
        "ffn": (lambda mask: gradients(masked_ffn(x, *ffn, mask), (x, *ffn), grad_x), 3),
        "recomputed": (lambda mask: gradients(masked_ffn(x, *ffn, mask, recompute=True), (x, *ffn), grad_x), 3),
    }


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plan", "linear", "biases", "frozen", "expanded", "twice", "ffn", "recomputed"])
def test_a_repeated_call_gives_the_same_bits(name, dtype, poisoned):
    call, operators = calls(dtype)[name]
    torch._C._functorch.peek_interpreter_stack()  # as sparse products do; no transform is active
    some = [torch.rand(2, 35, device="cuda") < share for share in (0.0, 0.3, 0.6, 1.1)]
    custom_mm._C.forget_recordings()
    expected = []
    for mask in some:
        custom_mm._C.forget_recordings()  # the first call runs in Python
        expected.append(call(mask))
    for mask in some[:2]:
        call(mask)
    for mask, truth in zip(some, expected, strict=True):
        before = custom_mm._C.replays()
        found = call(mask)
        assert custom_mm._C.replays() - before == operators
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, truth, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize(("m", "k", "n"), [(1300, 256, 512), (512, 2048, 2304)], ids=["many rows", "few rows"])
def test_a_repeated_backward_uses_its_second_stream(m, k, n, poisoned):
    """On Hopper the copies of sorted rows, or the weights' products, run while the product for x does."""
    x, *w = (draw(*s, dtype=torch.bfloat16, device="cuda").requires_grad_() for s in ((m, k), (n, k), (n, k)))
    grad = draw(m, n, dtype=torch.bfloat16, device="cuda")
    masks = [torch.rand(m, device="cuda") < share for share in (0.3, 0.6)]

    def call(mask):
        y = masked_linear(x, *w, mask)
        return y, *torch.autograd.grad(y, (x, *w), grad)

    expected = []
    for mask in masks:
        custom_mm._C.forget_recordings()
        expected.append(call(mask))
    call(masks[0])
    for repeat in range(6):
        for mask, truth in zip(masks, expected, strict=True):
            before = custom_mm._C.replays()
            found = call(mask)
            assert custom_mm._C.replays() - before == 3
            assert all(map(torch.equal, found, truth)), repeat
    graph, plan, held = torch.cuda.CUDAGraph(), mask_plan(masks[1]), []
    leaves = [t.detach().requires_grad_() for t in (x, *w)]  # those of before belong to another stream
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = masked_linear(*leaves, plan)
        held += [y, *torch.autograd.grad(y, leaves, grad)]
    for t in held:
        t.detach().fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, held, expected[1]))


@pytest.mark.cuda
def test_a_repeated_backward_in_equal_shares(poisoned, monkeypatch):
    """On Hopper the weights' gradients of many rows are two kernels with a buffer of partial sums between them."""
    from matmuls.triton import configs, masked_weights

    tiles = configs.Tiles(128, 256, 64, tma=True, pieces=4)
    monkeypatch.setattr(configs, "forced", dict.fromkeys(configs.WEIGHTS, tiles))
    monkeypatch.setattr(masked_weights, "saves", lambda *args: True)
    m, k, n = 1500, 1024, 512
    x, *w = (draw(*s, dtype=torch.bfloat16, device="cuda").requires_grad_() for s in ((m, k), (n, k), (n, k)))
    grad = draw(m, n, dtype=torch.bfloat16, device="cuda")
    masks = [torch.rand(m, device="cuda") < share for share in (0.0, 0.05, 0.5, 1.0)]

    def call(mask):
        y = masked_linear(x, *w, mask)
        return y, *torch.autograd.grad(y, (x, *w), grad)

    try:
        expected = []
        for mask in masks:
            custom_mm._C.forget_recordings()
            expected.append(call(mask))
        call(masks[0])
        for mask, truth in zip(masks * 2, expected * 2, strict=True):
            before = custom_mm._C.replays()
            found = call(mask)
            assert custom_mm._C.replays() - before == 3
            assert all(map(torch.equal, found, truth))
    finally:
        custom_mm._C.forget_recordings()


@pytest.mark.cuda
def test_a_thread_that_has_not_used_the_gpu_repeats_a_call():
    x, w1, w2 = (draw(*s, dtype=torch.float16, device="cuda") for s in ((40, 64), (48, 64), (48, 64)))
    plan = mask_plan(torch.rand(40, device="cuda") < 0.5)
    for _ in range(3):
        expected = masked_linear(x, w1, w2, plan)
    torch.cuda.synchronize()
    found = []
    before = custom_mm._C.replays()
    thread = threading.Thread(target=lambda: found.append(masked_linear(x, w1, w2, plan)))
    thread.start()
    thread.join()
    assert custom_mm._C.replays() - before == 1
    assert torch.equal(found[0], expected)


@pytest.mark.cuda
def test_repeated_calls_free_what_they_no_longer_need():
    x, *ffn = (
        draw(*s, dtype=torch.float16, device="cuda") for s in ((4096, 256), *((512, 256), (256, 512), (512, 256)) * 2)
    )
    plan = mask_plan(torch.rand(4096, device="cuda") < 0.5)
    peaks = []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        masked_ffn(x, *ffn, plan)
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert peaks[-1] <= peaks[0]
