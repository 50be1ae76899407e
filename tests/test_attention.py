"""Attention with its probabilities: values and gradients against plain torch, saved tensors, memory, unmodified
inputs.
"""

from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from matmuls import attention, measure
from matmuls.device import has_hopper_kernels

B, H, Q, K, D, E = 3, 4, 6, 7, 5, 3
MASKS = {
    "none": lambda draw: None,
    "padding": lambda draw: draw(B, 1, 1, K) > 0.5,
    "queries": lambda draw: draw(B, 1, Q, K) > 0.5,
    "keys alone": lambda draw: draw(K) > 0.5,
    "heads": lambda draw: draw(H, 1, K),
}
PIECES = {"whole": 1 << 30, "two heads": 2 * Q * K * 8, "two of the batch": 2 * H * Q * K * 8, "least": 1}


def operands(dtype=torch.float64, device="cpu", strided=True):
    """q, k, v as models pass them: [B, H, S, D] views of [B, S, H, D]."""
    torch.manual_seed(0)
    shapes = ((B, Q, H, D), (B, K, H, D), (B, K, H, E))
    drawn = [torch.randn(s, dtype=dtype, device=device).transpose(1, 2) for s in shapes]
    return [x if strided else x.contiguous() for x in drawn]


def plain(q, k, v, mask, scale, causal=False):
    scores = q @ k.mT * scale
    dropped = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        dropped = dropped.logical_not().triu(1)
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    elif mask is not None:
        dropped = dropped | mask
    y = scores.masked_fill(dropped, -torch.inf).softmax(-1).nan_to_num(0)
    return (y @ v).transpose(1, 2), y


def drawer(device):
    return lambda *shape: torch.randn(shape, dtype=torch.float64, device=device)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients(device, mask, pieces, recompute, monkeypatch):
    monkeypatch.setattr(attention, "PIECE_BYTES", PIECES[pieces])
    for causal, probabilities in product((False, True), repeat=2):
        inputs = [x.requires_grad_() for x in operands(device=device)]
        m = MASKS[mask](drawer(device))
        truth = plain(*inputs, m, 0.3, causal)
        with torch.no_grad():
            untracked = attention.attend(*inputs, m, 0.3, causal=causal, probabilities=probabilities)
        ours = attention.attend(*inputs, m, 0.3, causal=causal, probabilities=probabilities, recompute=recompute)
        assert ours[0].is_contiguous()
        assert (ours[1] is None) == (untracked[1] is None) == (not probabilities)
        for x, y, z in list(zip(ours, truth, untracked, strict=True))[: 1 + probabilities]:
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(z, y)
        # gradients of the context only, the probabilities only, both
        for wanted in [(0,), (1,), (0, 1)] if probabilities else [(0,)]:
            losses = (sum((i + 1) * o[i].sin().sum() for i in wanted) for o in (ours, truth))
            found, true = (torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in losses)
            assert [x is None for x in found] == [x is None for x in true]
            torch.testing.assert_close(*([x for x in gradients if x is not None] for gradients in (found, true)))


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives(recompute):
    inputs = [x[:1, :2].requires_grad_() for x in operands()]
    mask = torch.randn(1, 1, 1, K) > 0.5

    def run(*inputs):
        return attention.attend(*inputs, mask, 0.3, recompute=recompute)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_second_derivatives_if_only_v_requires_grad():
    q, k, v = operands()
    v.requires_grad_()
    for given in ((0,), (0, 1)):
        grads = []
        for attend in (attention.attend, plain):
            results = attend(q, k, v, None, 0.3)
            (grad,) = torch.autograd.grad(sum(results[i].pow(2).sum() for i in given), v, create_graph=True)
            grads.append((grad, *torch.autograd.grad(grad.sin().sum(), v)))
        torch.testing.assert_close(*grads)
    probabilities = attention.attend(q, k, v, None, 0.3)[1].sum()
    assert torch.autograd.grad(probabilities, v, create_graph=True, allow_unused=True) == (None,)


def test_one_tensor_as_query_key_and_value_compiles():
    x = operands()[0].requires_grad_()
    grads = []
    for attend in (attention.attend, torch.compile(attention.attend, fullgraph=True, backend="aot_eager")):
        grads.append(torch.autograd.grad(attend(x, x, x, None, 0.3)[0].sin().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_only_needed_gradients_are_computed():
    for needed in product((False, True), repeat=3):
        inputs = [x.requires_grad_(need) for x, need in zip(operands(), needed, strict=True)]
        if any(needed):
            attention.attend(*inputs, None, 0.3)[0].sum().backward()
        assert [x.grad is not None for x in inputs] == list(needed)


def kept(**options):
    """The tensors saved for backward, one per storage."""
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.shape
        return t

    inputs = [x.requires_grad_() for x in operands()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = attention.attend(*inputs, None, 0.3, **options)  # noqa: F841 keeps its memory from being reused
    return sorted(tuple(shape) for shape in memory.values())


def test_at_most_one_score_sized_tensor_is_saved():
    rest = sorted([(B, H, Q, D), (B, H, K, D), (B, H, K, E)])
    assert kept() == kept(probabilities=False) == sorted([*rest, (B, H, Q, K)])
    assert kept(recompute=True) == kept(recompute=True, probabilities=False) == rest


@pytest.mark.parametrize(("recompute", "scores"), [(False, 1), (True, 0)])
def test_peak_memory(device, recompute, scores, monkeypatch):
    """Backward allocates pieces, no further tensors of the scores' size."""
    length = 128
    matrix = length * length * 4
    monkeypatch.setattr(attention, "PIECE_BYTES", matrix)
    q, k, v = (torch.randn(2, 8, length, 4, device=device, requires_grad=True) for _ in range(3))

    def step():
        context, _ = attention.attend(q, k, v, None, 0.5, probabilities=False, recompute=recompute)
        torch.autograd.grad(context.sum(), (q, k, v))

    step()
    small = 12 * q.nbytes  # copies, gradients, contexts
    assert scores * 16 * matrix <= measure.peak_memory(step, device) <= (scores * 16 + 2) * matrix + small


def test_backward_does_not_change_the_probabilities():
    inputs = [x.requires_grad_() for x in operands()]
    context, y = attention.attend(*inputs, None, 0.3)
    before = y.clone()
    first = torch.autograd.grad(context.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(context.sum(), inputs)
    assert torch.equal(y, before)
    assert all(map(torch.equal, first, second))


def test_overwritten_probabilities_raise_in_backward():
    inputs = [x.requires_grad_() for x in operands()]
    context, y = attention.attend(*inputs, None, 0.3)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        context.sum().backward()


def test_fewer_key_heads_and_a_mask_with_a_gradient():
    q, k, v = operands()
    k, v = k[:, :2], v[:, :2]
    mask = torch.randn(1, H, Q, K, dtype=torch.float64, requires_grad=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ours = attention.attend(*inputs, mask, 0.3)
    truth = plain(q, *(x.repeat_interleave(2, 1) for x in (k, v)), mask, 0.3)
    leaves = [*inputs, mask]
    grads = [torch.autograd.grad(sum(x.sin().sum() for x in pair), leaves) for pair in (ours, truth)]
    for x, y in zip((*ours, *grads[0]), (*truth, *grads[1]), strict=True):
        torch.testing.assert_close(x, y)


def test_dropout_matches_torch():
    q, k, v = operands()
    torch.manual_seed(1)
    context, y = attention.attend(q, k, v, None, 0.3, dropout=0.5)
    torch.manual_seed(1)
    dropped = torch.nn.functional.dropout(plain(q, k, v, None, 0.3)[1], 0.5)
    torch.testing.assert_close(context, (dropped @ v).transpose(1, 2))
    torch.testing.assert_close(y, plain(q, k, v, None, 0.3)[1])


def test_autocast_runs_the_products_in_16_bits(device):
    q, k, v = (x.requires_grad_() for x in operands(torch.float32, device))
    with torch.autocast(device, torch.bfloat16):
        context, y = attention.attend(q, k, v, None, 0.3)
        context.float().sum().backward()
    assert context.dtype == y.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(context.float(), plain(q, k, v, None, 0.3)[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("empty", ["batch", "queries", "head size"])
def test_empty(empty):
    b, n, d = (0 if empty == name else size for name, size in (("batch", B), ("queries", Q), ("head size", D)))
    q, k, v = (torch.randn(s, requires_grad=True) for s in [(b, H, n, d), (b, H, K, d), (b, H, K, E)])
    context, y = attention.attend(q, k, v, None, 0.3)
    context.sum().backward()
    assert (context.shape, y.shape) == ((b, n, H, E), (b, H, n, K))
    torch.testing.assert_close(y, torch.full_like(y, 1 / K if empty == "head size" else 0))
    assert q.grad.shape == q.shape


def test_probabilities_into_a_given_tensor(device):
    q, k, v = operands(device=device)
    room = torch.full((B, H, Q, K), torch.nan, dtype=q.dtype, device=device)
    context, y = attention.attend(q, k, v, None, 0.3, into=room)
    assert y is room
    torch.testing.assert_close((context, y), plain(q, k, v, None, 0.3))


def test_a_mask_of_another_dtype_raises_before_any_write():
    q, k, v = operands()
    room = torch.full((B, H, Q, K), 7.0, dtype=q.dtype)
    with pytest.raises(RuntimeError, match="expected a strided mask in Bool, Byte, Double or Float, got Long"):
        attention.attend(q, k, v, torch.zeros(K, dtype=torch.int64), 0.3, into=room)
    with pytest.raises(RuntimeError, match="expected q of a floating-point dtype, got ComplexDouble"):
        attention.attend(*(t.to(torch.complex128) for t in (q, k, v)), None, 0.3)
    assert (room == 7).all()


def test_probabilities_of_fewer_key_heads_into_a_given_tensor():
    q, k, v = operands()
    room = torch.full((B, H, Q, K), torch.nan, dtype=q.dtype)
    context, y = attention.attend(q, k[:, :2], v[:, :2], None, 0.3, into=room)
    assert y is room
    torch.testing.assert_close((context, y), attention.attend(q, k[:, :2], v[:, :2], None, 0.3))


@pytest.mark.parametrize("made", ["given twice", "of another"])
def test_differentiable_gradients_equal_plain_gradients(made):
    x = operands()[0].requires_grad_()

    def gradient(create_graph):
        k = x if made == "given twice" else x.tanh()
        context, y = attention.attend(x, k, k, None, 0.3)
        return torch.autograd.grad(context.square().sum() + y.square().sum(), x, create_graph=create_graph)[0]

    torch.testing.assert_close(gradient(True).detach(), gradient(False))


OPERATOR = torch.ops.custom_mm.attention_forward.default


@pytest.mark.parametrize("mask", MASKS)
def test_the_operator_and_its_written_arguments(mask, device):
    q, k, v = operands(device=device)
    for given in (None, torch.full((B, H, Q, K), torch.nan, dtype=q.dtype, device=device)):
        torch.library.opcheck(OPERATOR, (q, k, v, MASKS[mask](drawer(device)), 0.3, True, 1 << 10, given))
    with FlopCounterMode(display=False) as counter:
        OPERATOR(q, k, v, None, 0.3, False, 1, None)
    assert counter.get_total_flops() == 2 * B * H * Q * K * (D + E)


BAD = {
    "three dimensions": ({"q": (H, Q, D)}, "q, k and v of four dimensions"),
    "heads": ({"k": (B, 2, K, D)}, r"q \[B, H, Q, D\], k \[B, H, K, D\] and v"),
    "keys": ({"v": (B, H, 5, E)}, r"q \[B, H, Q, D\], k \[B, H, K, D\] and v"),
    "mask": ({"mask": (B, 1, 1, 5)}, r"a mask on cpu whose shape broadcasts to the scores' \[3, 4, 6, 7\], got"),
    "probabilities": ({"probabilities": (B, H, K, Q)}, r"probabilities \[B, H, Q, K\] of q's dtype"),
    "sums": ({"sums": (B, H, Q)}, r"contiguous sums \[B, H, Q\] in Float"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_operands_raise_before_any_write(bad):
    q, k, v = operands()
    given = {"q": q, "k": k, "v": v, "mask": None, "probabilities": torch.full((B, H, Q, K), 7.0, dtype=q.dtype)}
    given["sums"] = None
    changed, words = BAD[bad]
    given |= {name: torch.full(shape, 7.0, dtype=q.dtype) for name, shape in changed.items()}
    with pytest.raises(RuntimeError, match=words):
        OPERATOR(*(given[n] for n in ("q", "k", "v", "mask")), 0.3, False, 1, given["probabilities"], given["sums"])
    assert (given["probabilities"] == 7).all()
    with pytest.raises(RuntimeError, match="expected sums only with contiguous probabilities and where"):
        OPERATOR(*operands(), None, 0.3, False, 1, None, torch.empty(B, H, Q))
    inputs = [x.requires_grad_() for x in operands()]
    with pytest.raises(RuntimeError, match="expected no gradient to be recorded"):
        OPERATOR(*inputs, None, 0.3, False, 1, None)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 6, 5), None, None),
        ((5,), None, None),
        (None, (3, 3, 7, 5), (3, 3, 7, 5)),
        (None, None, (3, 2, 7, 5)),
        (None, (1, H, K, 5), None),
        (None, (1, H, K, 5), (1, H, K, 5)),
        (None, (B, 0, K, 5), (B, 0, K, 5)),
        (None, (B, H, K + 1, 5), None),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mismatched_operands_raise(shapes, dropout):
    given = [x if s is None else torch.randn(s) for x, s in zip(operands(torch.float32), shapes, strict=True)]
    for recorded in (False, True):
        inputs = [x.detach().requires_grad_(recorded) for x in given]
        with pytest.raises(RuntimeError, match=r"attention(_forward)?: expected q .* got shapes"):
            attention.attend(*inputs, None, 0.3, dropout=dropout)


# queries and keys: full and partial tiles, one row, more keys than queries and fewer
LENGTHS = [(128, 128), (64, 512), (200, 264), (1, 8), (300, 72), (384, 640), (130, 1024)]
HIDDEN = {
    "none": lambda b, h, q, k: None,
    "padding": lambda b, h, q, k: torch.arange(k)[None, :] >= torch.tensor([k, 0, k // 2])[:b, None],
    "queries": lambda b, h, q, k: torch.rand(b, 1, q, k) > 0.5,
    "everything": lambda b, h, q, k: (torch.rand(b, h, q, k) > 0.5).byte(),
}


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask", HIDDEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_one_kernel_is_as_accurate_as_torch(dtype, mask, causal, lengths):
    """Against float64: at most twice the error of the same steps in torch, plus one rounding."""
    torch.manual_seed(0)
    b, h, (n, m), d = 3, 2, lengths, 64
    whole = torch.randn(b, max(n, m), 3, h, d, device="cuda").to(dtype)
    q, k, v = (whole[:, :size, i].transpose(1, 2) for i, size in enumerate((n, m, m)))  # slices of one product's result
    hidden = HIDDEN[mask](b, h, n, m)
    if hidden is not None:
        hidden = (hidden[:, None, None] if hidden.dim() == 2 else hidden).cuda()
    scale = d**-0.5
    room = torch.full((b, h, n, m), torch.nan, device="cuda", dtype=dtype)
    once = torch.ops.custom_mm.attention_at_once(q, k, v, hidden, scale)
    assert once == has_hopper_kernels(torch.device("cuda"))
    sums = torch.full((b, h, n), torch.nan, device="cuda") if once else None
    ours = OPERATOR(q, k, v, hidden, scale, causal, 1 << 20, room, sums), room
    dropped = torch.zeros(n, m, dtype=torch.bool, device="cuda")
    if causal:
        dropped = dropped.logical_not().triu(1)
    if hidden is not None:
        dropped = dropped | hidden.bool()

    def plainly(q, k, v):
        y = (q @ k.mT * scale).masked_fill(dropped, -torch.inf).softmax(-1).nan_to_num(0)
        return (y @ v).transpose(1, 2), y

    truth, torchs = plainly(*(x.double() for x in (q, k, v))), plainly(q, k, v)
    for x, y, z in zip(ours, torchs, truth, strict=True):
        error = [torch.linalg.vector_norm(t.double() - z).item() for t in (x, y)]
        assert error[0] <= 2 * error[1] + torch.finfo(dtype).eps * torch.linalg.vector_norm(z).item()
    assert (room.double()[dropped.expand_as(room)] == 0).all()
    if sums is not None:
        scores = (q.double() @ k.double().mT * scale).masked_fill(dropped, -torch.inf)
        sees = ~dropped.expand_as(scores).all(-1)
        torch.testing.assert_close(sums[sees].double(), scores.logsumexp(-1)[sees], atol=2e-5, rtol=1e-6)


@pytest.mark.cuda
def test_the_one_kernel_on_large_scores_and_nan():
    """Scores of hundreds, and NaN, which stays in its row."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda").mul(15).half() for _ in range(3))
    q[0, 0, 3] = torch.nan
    hidden = torch.zeros(256, dtype=torch.bool, device="cuda")
    hidden[7] = True
    room = torch.empty(1, 2, 256, 256, device="cuda", dtype=torch.half)
    context = OPERATOR(q, k, v, hidden, 0.125, False, 1 << 20, room)
    scores = (q.double() @ k.double().mT * 0.125).masked_fill(hidden, -torch.inf)
    truth = scores.softmax(-1)
    seen = torch.arange(256, device="cuda") != 7
    assert room[0, 0, 3, seen].isnan().all()
    assert (room[..., 7] == 0).all()
    truth[0, 0, 3], room[0, 0, 3] = 0, 0
    torch.testing.assert_close(room.double(), truth, atol=2e-3, rtol=2e-3)
    assert context[0, 3, 0].isnan().all()
    assert context.isnan().sum() == 64


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_gradients_at_16_bits(causal, wanted, recompute):
    """By torch's fused backward, or in pieces if the probabilities have a gradient."""
    torch.manual_seed(0)
    shape = (2, 128, 3, 64)
    inputs = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    truth = plain(*(x.double() for x in inputs), None, 0.125, causal)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        ours = attention.attend(*inputs, None, 0.125, causal=causal, recompute=recompute)
    # with the one kernel, the row sums and the context are saved too
    once = torch.ops.custom_mm.attention_at_once(*inputs, None, 0.125)
    assert sorted(kept) == [(2, 3, 128)] * once + [(2, 3, 128, 64)] * 3 + [(2, 128, 3, 64)] * once
    # random, because a gradient that hardly varies along a row would cancel
    weights = [torch.randn_like(x) for x in truth]
    losses = [sum((o[i].double() * weights[i]).sum() for i in wanted) for o in (ours, truth)]
    found, true = (torch.autograd.grad(x, inputs, allow_unused=True) for x in losses)
    assert [x is None for x in found] == [x is None for x in true]
    for x, y in zip(found, true, strict=True):
        if y is not None:
            assert torch.linalg.vector_norm(x.double() - y) <= 2e-2 * torch.linalg.vector_norm(y)


@pytest.mark.cuda
@pytest.mark.parametrize("needed", ["qkv", "qv", "k"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    "fused", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
)
def test_gradients_by_each_of_torchs_attention_backends(fused, causal, needed):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 128, 3, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
    for name, x in zip("qkv", inputs, strict=True):
        x.requires_grad_(name in needed)
    leaves = [x for x in inputs if x.requires_grad]
    ours = attention.attend(*inputs, None, 0.125, causal=causal)[0]
    truth = plain(*(x.double() for x in inputs), None, 0.125, causal)[0]
    weights = torch.randn_like(truth)
    with sdpa_kernel(fused):
        found = torch.autograd.grad((ours.double() * weights).sum(), leaves)
    for x, y in zip(found, torch.autograd.grad((truth * weights).sum(), leaves), strict=True):
        assert torch.linalg.vector_norm(x.double() - y) <= 2e-2 * torch.linalg.vector_norm(y)


def scaled_first(q, k, v, hidden, scale):
    """Eager attention of models that scale the queries first: the scores are rounded to q's dtype."""
    y = ((q * scale) @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
    return (y @ v).transpose(1, 2), y


HIDDEN_KEYS = {"none": False, "causal": True, "padding": False}


@pytest.mark.parametrize("way", ["attend", "recompute", "compose", "fewer heads"])
@pytest.mark.parametrize("mask", HIDDEN_KEYS)
def test_float16_scores_that_overflow_before_scaling(way, mask, device):
    """q = k, 60 times normal numbers: q @ k.T has 230000 on the diagonal, an eighth of that after scaling."""
    torch.manual_seed(0)
    heads = 2 if way == "fewer heads" else 4
    q = (60 * torch.randn(2, 4, 24, 64, device=device)).half()
    v = torch.randn(2, heads, 24, 64, device=device).half()
    inputs = [q, q[:, :heads].clone(), v]
    hidden = torch.zeros(24, 24, dtype=torch.bool, device=device)
    padding = None
    if mask == "causal":
        hidden = ~hidden.logical_not().tril()
    elif mask == "padding":
        padding = (torch.arange(24, device=device) >= torch.tensor([24, 17], device=device)[:, None])[:, None, None]
        hidden = padding
    assert (q @ q.mT).isinf().any()

    def with_gradients(run, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        context, y = run(*leaves)
        return [context, y, *torch.autograd.grad(context.sin().sum() + y.sin().sum(), leaves)]

    def ours(*leaves):
        if way == "compose":
            return attention.compose(*leaves, padding, 0.125, causal=mask == "causal")
        options = {"causal": mask == "causal", "recompute": way == "recompute"}
        return attention.attend(*leaves, padding, 0.125, **options)

    def plainly(q, k, v):
        k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
        return scaled_first(q, k, v, hidden, 0.125)

    truth = with_gradients(plainly, torch.float64)
    for found, torchs, true in zip(with_gradients(ours, q.dtype), with_gradients(plainly, q.dtype), truth, strict=True):
        error = [torch.linalg.vector_norm(t.double() - true).item() for t in (found, torchs)]
        assert error[0] <= 2 * error[1] + torch.finfo(q.dtype).eps * torch.linalg.vector_norm(true).item()
    with torch.no_grad():
        context = ours(*inputs)[0]
    torch.testing.assert_close(context.double(), truth[0], atol=2e-2, rtol=2e-2)


def test_second_derivatives_of_float16_scores_that_overflow():
    torch.manual_seed(0)
    q = (60 * torch.randn(1, 2, 8, 64)).half().requires_grad_()
    v = torch.randn(1, 2, 8, 64).half().requires_grad_()
    (grad,) = torch.autograd.grad(attention.attend(q, q, v, None, 0.125)[0].sin().sum(), v, create_graph=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(grad.sin().sum(), (q, v)))


@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-30, 1.0, -0.125, 1e6])
def test_float16_at_any_scale(scale, device):
    """The factor applied to q before the product neither underflows to 0 nor overflows in float16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, device=device).half() for _ in range(3))
    k = (k * 1e-3).half() if scale == 1e6 else k
    truth = plain(q.double(), k.double(), v.double(), None, scale)
    for run in (attention.attend, attention.compose):
        for x, y in zip(run(q, k, v, None, scale), truth, strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-1 if scale == 1e6 else 2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "keys", "queries", "added"])
def test_rows_of_minus_infinity_give_nan_and_fully_masked_rows_0(dtype, mask, device):
    """NaN as in torch.softmax. On Hopper at 16 bits by the one kernel, elsewhere in pieces."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 136, 64, device=device).to(dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 0, 1
    q[:, 1, [3, 70, 135], 0] = -torch.inf
    hidden = torch.zeros(2, 1, 136, 136, dtype=torch.bool, device=device)
    if mask == "keys":
        hidden = hidden[:, :, :1].clone()
        hidden[0, ..., 100:] = True
        hidden[1] = True
    elif mask in ("queries", "added"):
        hidden |= torch.rand(hidden.shape, device=device) > 0.9
        hidden[:, :, [70, 71]] = True
        hidden[0, :, 3, 1:], hidden[0, :, 3, 0] = True, False
    given = hidden.to(dtype).masked_fill(hidden, -torch.inf) if mask == "added" else hidden
    given = None if mask in ("none", "causal") else given
    dropped = torch.ones(136, 136, dtype=torch.bool, device=device).triu(1) if mask == "causal" else hidden
    context, y = attention.attend(q, k, v, given, 0.125, causal=mask == "causal")
    blind = dropped.expand(2, 2, 136, 136).all(-1)
    infinite = q[..., 0].isinf() & ~blind
    assert infinite.any()
    assert torch.equal(y.isnan().any(-1), infinite)
    assert torch.equal(context.transpose(1, 2).isnan().all(-1), infinite)
    assert (y[blind] == 0).all()
    assert (context.transpose(1, 2)[blind] == 0).all()
    scores = (q.double() @ k.double().mT * 0.125).masked_fill(dropped, -torch.inf)
    assert torch.equal(scores.softmax(-1).isnan().any(-1), infinite | blind)  # torch's softmax gives NaN for both
