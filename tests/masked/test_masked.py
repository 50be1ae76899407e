"""Tests of the masked products beyond the table: masks, plans, frozen experts, graphs, modules."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import matmuls
from common.masked_cases import close, draw, masks
from matmuls import mask_plan, masked_ffn, masked_linear
from matmuls.nn import MaskedFFN, MaskedLinear

ROWS = (1, 7, 64, 127, 129, 8192)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
