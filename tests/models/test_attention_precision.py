"""Attention's operator, the one kernel and 16-bit products: accuracy against float64, bad operands."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.attention_cases import MASKS, B, D, E, H, K, Q, drawer, operands, plain
from matmuls import attention
from matmuls.device import has_hopper_kernels

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
