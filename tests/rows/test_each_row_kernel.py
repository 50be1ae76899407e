"""Every row kernel that takes a call gives the truth, also where another one is chosen; the switch that forces one."""

import pytest
import torch

import custom_mm
from custom_mm import _C
from matmuls_bench.kernels import rows

ROW_KERNELS = _C.row_kernels()


def as_truth(x):
    """A float64 copy on the CPU."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def results(call, args, returned):
    """What the call computes: the tensor that it writes to, or those that it returns."""
    return [args[0]] if returned is None else [t for t in returned if t.numel()]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("call", rows.CALLS, ids=lambda call: call.name)
def test_each_kernel(call, dtype):
    seen = set()
    operator = getattr(torch.ops.custom_mm, call.operation)
    for columns in (
        7,
        33,
        64,
        77,
        128,
        136,
        257,
        512,
        577,
        785,
        1024,
        1032,
        2049,
        4096,
        8191,
        8192,
        16384,
        32003,
        50264,
        131072,
    ):
        torch.manual_seed(columns)
        args, options = rows.drawn(call, max(130, 2**19 // columns), columns, dtype)
        wide = [as_truth(a) for a in args]
        truth = results(call, wide, operator(*wide, **options))
        for kernel in rows.runs_of(call, args, options):
            given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            with custom_mm.only_kernel(kernel):
                got = results(call, given, operator(*given, **options))
            seen.add(kernel)
            for x, y in zip(got, truth, strict=True):
                # A sum over the rows is in float32: its error grows with its terms, not with their sum.
                scale = y.abs().max() + (args[0].shape[0] ** 0.5 if y.dim() == 1 else 0)
                bound = 4 * max(torch.finfo(x.dtype).eps, 2e-6) * scale
                assert (x.cpu().double() - y).abs().max() <= bound, (kernel, columns)
    assert "reread" in seen
    assert len(seen) >= 3


def kernel_of(x):
    return custom_mm.explain("softmax_", x, gpu="H100").kernel


def test_a_kernel_that_is_off_is_not_chosen():
    x = torch.zeros(64, 50257, dtype=torch.bfloat16)
    order = []
    for _ in range(2):
        with custom_mm.without_kernels(*order):
            order.append(kernel_of(x))
    assert order == ["two_pass", "reread"]
    with custom_mm.without_kernels(*order), pytest.raises(ValueError, match="these rows of 50257 elements is switched"):
        kernel_of(x)
    assert kernel_of(x) == "two_pass"


def test_switches_nest_and_end():
    x = torch.zeros(64, 8192, dtype=torch.bfloat16)
    before = kernel_of(x)
    try:
        with custom_mm.without_kernels(before):
            with custom_mm.only_kernel("reread"):
                assert kernel_of(x) == "reread"
            assert kernel_of(x) not in ("reread", before)
            raise KeyError
    except KeyError:
        pass
    assert kernel_of(x) == before
    with pytest.raises(ValueError, match="one of one_pass, even_rows"), custom_mm.only_kernel("no kernel"):
        pass


@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_every_kernel_can_be_forced(kernel):
    """On an H100 some row of some operation goes to it."""
    for call in rows.CALLS:
        for dtype in (torch.bfloat16, torch.float32):
            for columns in (64, 77, 136, 577, 785, 1000, 4096, 8192, 16384, 50257, 131072):
                args, options = rows.drawn(call, 2, columns, dtype, "cpu")
                try:
                    with custom_mm.only_kernel(kernel):
                        found = custom_mm.explain(call.operation, *args, gpu="H100", **options).kernel
                except ValueError:
                    continue
                assert found == kernel
                return
    if kernel == "column_sums":  # norm_backward without dx
        x = torch.zeros(2, 64)
        with custom_mm.only_kernel(kernel):
            explained = custom_mm.explain(
                "norm_backward", x, x, torch.ones(2), torch.ones(64), False, False, gpu="H100"
            )
        assert explained.kernel == kernel
        return
    pytest.fail("no call takes it")
