"""Calls every registered operator with invalid arguments; test_hostile_arguments.py runs this in a separate process.

Usage: python hostile_calls.py LOG FIRST COUNT. Makes calls FIRST to FIRST + COUNT - 1; each depends on its number only.
LOG gets a line before each call, so that its last line names the call that crashed the process.
"""

import faulthandler
import random
import resource
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import matmuls
from matmuls.nn import SparseLinear
from matmuls_bench import table
from matmuls_bench.table.spec import Draw

# limit of additional address space: larger sizes raise instead of exhausting the machine's memory
EXTRA_BYTES = 3 << 30
INTEGERS = -1, 0, 1, 2, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1
CONTENTS = -1, 2**31 - 1, -(2**31), 2**40, 10**6, 65, 3, 0
FLOATS = float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e300
DTYPES = torch.float64, torch.float16, torch.bool, torch.int8, torch.int32, torch.int64, torch.complex64, torch.float32
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, MemoryError, NotImplementedError, OverflowError)
CANARY = 16  # calls between two valid ones
LONGEST = 60  # seconds per call; a call that hangs ends the process


@dataclass
class Base:
    """A recorded valid call with its result, or its arguments if it returns nothing."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None


def copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone(memory_format=torch.preserve_format)
    if isinstance(x, list | tuple):
        return type(x)(copied(one) for one in x)
    return {name: copied(one) for name, one in x.items()} if isinstance(x, dict) else x


class Recorder(TorchDispatchMode):
    """Records up to `most` calls of every operator of ours, with distinct argument shapes and types."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.bases, self._seen = most, {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "custom_mm":
            kept = self.bases.setdefault(str(func), [])
            kind = str(func) + repr([signature(x) for x in (*args, *kwargs.values())])
            if len(kept) < self.most and kind not in self._seen:
                self._seen.add(kind)
                kept.append(Base(func, copied(args), copied(kwargs)))
        return func(*args, **kwargs)


def signature(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape)
    return [signature(one) for one in x] if isinstance(x, list | tuple) else x


def layouts() -> None:
    """Calls that the table does not make on a CPU: layouts of a GPU's plans, as meta tensors, and other operators."""
    ops = torch.ops.custom_mm
    dense = torch.randn(64, 64) * (torch.rand(64, 64) < 0.3)
    s = dense.to_sparse_csr()
    crow, col, values, b = s.crow_indices().int(), s.col_indices().int(), s.values(), torch.randn(64, 16)
    ops.csr_check_copied(crow, col, 64)
    of_a_gpu(*meta_matrix())
    ops.csr_spmm_arg(crow, col, values, b, 64, "max")
    ops.csr_linear(crow, col, values, b.mT.contiguous(), torch.randn(64))
    triangle = (dense.tril(-1) + torch.eye(64)).to_sparse_csr()
    parts = triangle.crow_indices(), triangle.col_indices(), triangle.values(), b
    ops.csr_solve_triangular(*parts, False)
    ops.csr_solve_triangular(*parts, False, True, True, None, *ops.csr_transpose(*parts[:2], 64))
    ops.csr_solve_triangular(*parts, True, state=ops.csr_solve_state(*parts[:2]), version=1)
    pattern = [crow, col, crow.new_empty(0)]
    offsets, state = ops.csr_spgemm_size(pattern, pattern, 64)
    sizes = offsets, state, int(offsets[-1])
    ops.csr_spgemm_pattern(pattern, pattern, 64, *sizes)
    product = ops.csr_spgemm_pattern(pattern, pattern, 64, *sizes, values, values)
    ops.csr_spgemm_pattern(pattern, pattern, 64, pattern[2], state, -1, values, values)
    both = [*pattern, *ops.csr_transpose(crow, col, 64)]
    ops.csr_spgemm(values, values, pattern, both, list(product[:2]), 64)
    ops.csr_spgemm_sampled(product[2], values, both, list(product[:2]), pattern, 64)
    parts = s.crow_indices(), s.col_indices(), values, b, 64, 64
    ops.cusparse_prepare(*parts)
    ops.cusparse_spmm.out(*parts, out=torch.empty(64, 16))
    ops.cusparse_sddmm(s.crow_indices(), s.col_indices(), torch.randn(64, 8), torch.randn(8, 64))
    coo = dense.to_sparse()
    ops.cusparse_spmm(coo.indices()[0].contiguous(), coo.indices()[1].contiguous(), values, b, 64, 64, "coo")
    csc = dense.to_sparse_csc()
    ops.cusparse_spmm(csc.ccol_indices(), csc.row_indices(), csc.values(), b, 64, 64, "csc")
    bsr = dense.to_sparse_bsr((16, 16))
    ops.cusparse_spmm(bsr.crow_indices(), bsr.col_indices(), bsr.values(), b, 64, 64, "bsr")
    ops.bsr_spmm(bsr.crow_indices(), bsr.col_indices(), bsr.values(), b, 64)
    ops.bsr_sddmm(bsr.crow_indices(), bsr.col_indices(), torch.randn(64, 8), torch.randn(64, 8), 64, 16, 16)
    ops.csr_spmm.out(crow, col, values, b, 64, out=torch.empty(64, 16))
    x, y, bias = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    ops.matmul.out(x, y, out=torch.empty(8, 8))
    ops.cublaslt_matmul.out(x, y, bias, "relu", out=torch.empty(8, 8))
    ops.kept(x)
    ops.softmax.out(x, out=torch.empty(8, 8))
    ops.softmax_backward.out(x.softmax(-1), y, out=torch.empty(8, 8))
    xhat, rstd = ops.norm_keep_(x.clone(), bias, bias, 1e-5, None, False)
    ops.norm_backward(y, xhat, rstd, bias, False)
    rows, counts = ops.mask_plan(torch.rand(8) < 0.5)
    ops.masked_linear_forward(x, y, y, rows, counts, bias, bias, -1, 0)
    ops.masked_weights(x, y, rows, counts)
    layer = SparseLinear.from_linear(torch.nn.Linear(16, 8), sparsity=0.5)
    layer(torch.randn(4, 16)).sum().backward()


def meta_matrix() -> list[torch.Tensor]:
    """Indices and values of a matrix of 64 x 64, 16 columns of B, and an order of rows."""
    ints, sizes = {"dtype": torch.int32, "device": "meta"}, ((1200,), (64, 16))
    values, b = (torch.empty(size, device="meta") for size in sizes)
    return [torch.empty(65, **ints), torch.empty(1200, **ints), values, b, torch.empty(64, **ints)]


def of_a_gpu(crow, col, values, b, order) -> None:
    """Every operator without a CPU kernel, with meta tensors."""
    ops, narrow = torch.ops.custom_mm, values.half()
    chunks = ops.csr_chunks(crow, col, 16, 8)
    ops.csr_spmm_chunks(*chunks[:4], crow, col, values, b, 64, 5)
    tiles = ops.csr_tiles(crow, col, 64, 1, 2, 4)
    entries = ops.csr_tile_entries(*tiles, crow, col, values, 64, 4, 100)
    ops.csr_spmm_tiles(*tiles, *entries, crow, col, values, b, 64, 4)
    ops.csr_packed_units(crow, col, 64)
    packed = ops.csr_packed(crow, col, narrow, 64, 100)
    ops.csr_spmm_packed(packed, crow, col, narrow, b.half(), 64)
    ops.csr_linear_packed(packed, crow, col, narrow, b.half().T.contiguous(), 64, None, -1, order.half())
    ops.csr_filled(crow, col, narrow, 64)
    ops.csr_spmm_halves(*ops.csr_halves(crow, col, values, 64), crow, col, values, b, 64)
    ops.csr_regions(crow, col, 64, 8, 3)
    ops.csr_reads(crow, col, 64, 8, 1, order)
    ops.csr_reorder(crow, col, order)


def composite() -> list[Base]:
    """Calls of composite operators, which are decomposed before a dispatch mode sees them."""
    ops = torch.ops.custom_mm
    q, x = torch.randn(1, 2, 8, 16), torch.randn(8, 8)
    return [
        Base(ops.attention_at_once.default, (q, q, q, None, 0.25), {}),
        Base(ops.attention.default, (q, q, q, None, 0.25, False, True, False, 1 << 20), {}),
        Base(ops.matmul_backward.default, (x, x, x, [8, 8], [8, 8], False, False), {}),
    ]


def recorded(most: int = 6) -> dict[str, list[Base]]:
    """Valid calls of every operator, with their results."""
    torch.manual_seed(0)
    with Recorder(most) as recorder:
        layouts()
        for spec in table.TABLE:
            for dtype in spec.dtypes:
                for call in (*spec.samples(Draw(dtype)), *spec.empty(Draw(dtype))):
                    grads = spec.gradient and dtype in (torch.float64, torch.float32)
                    call = call.map(lambda t: t.clone().requires_grad_(grads and t.is_floating_point()))  # noqa: B023
                    try:
                        y = spec.call(*call.args, **call.kwargs)
                        if grads and isinstance(y, torch.Tensor) and y.requires_grad:
                            y.square().sum().backward()
                    except RuntimeError:  # in place on a leaf that requires grad
                        with torch.no_grad():
                            spec.call(*call.args, **call.kwargs)
    for base in composite():
        recorder.bases[str(base.operator)] = [base]
    for bases in recorder.bases.values():
        for base in bases:
            base.result = run(base.operator, copied(base.args), copied(base.kwargs))
    return recorder.bases


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorded = any(t.requires_grad for t in tensors_in([args, kwargs]))
    with torch.set_grad_enabled(recorded):
        result = operator(*args, **kwargs)
        if recorded:
            ends = [t for t in tensors_in(args if result is None else result) if t.grad_fn is not None]
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    return (args, kwargs) if result is None else result


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for one in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(one)


def same(x: Any, y: Any) -> bool:
    pairs = zip(tensors_in(x), tensors_in(y), strict=True)
    return all(
        a.shape == b.shape and (a.is_meta or torch.allclose(a, b, atol=1e-2, rtol=1e-2, equal_nan=True))
        for a, b in pairs
    )


def longer(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    dim = rng.randrange(t.dim())
    return torch.cat([t, t if rng.random() < 0.5 else t.narrow(dim, 0, min(1, t.shape[dim]))], dim)


def shorter(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    dim = rng.randrange(t.dim())
    return t.narrow(dim, 0, max(t.shape[dim] - rng.choice((1, 1, 2, t.shape[dim])), 0))


def other_contents(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    info = torch.iinfo(t.dtype)
    flat = t.reshape(-1)
    for _ in range(rng.choice((1, 1, 5))):
        if len(flat):
            flat[rng.randrange(len(flat))] = min(max(rng.choice(CONTENTS), info.min), info.max)
    return flat.reshape(t.shape)


def other_rank(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return t.select(0, 0) if t.dim() and len(t) and rng.random() < 0.5 else t.unsqueeze(rng.randrange(t.dim() + 1))


ANY = {
    "dtype": lambda t, rng: t.to(rng.choice(DTYPES)),
    "rank": other_rank,
    "flat": lambda t, rng: t.reshape(-1),
    "empty": lambda t, rng: t.new_empty(0),
    "meta": lambda t, rng: t.to("meta"),
    "gradient": lambda t, rng: t.requires_grad_(t.is_floating_point()),
    "none": lambda t, rng: None,
    "sparse": lambda t, rng: t.to_sparse(),
}
OF_DIMENSIONS = {
    "shorter": shorter,
    "longer": longer,
    "strides": lambda t, rng: torch.stack([t, t], -1)[..., 1],
    "expanded": lambda t, rng: t[:1].expand(t.shape) if len(t) else t,
}


def changed_tensor(t: torch.Tensor, rng: random.Random) -> Any:
    if t.layout != torch.strided or t.is_meta:  # changed by an earlier mutation
        return t
    ways = {**ANY, **OF_DIMENSIONS} if t.dim() else ANY
    if t.dtype in (torch.int32, torch.int64, torch.int8) and rng.random() < 0.4:
        return other_contents(t, rng)
    return ways[rng.choice(sorted(ways))](t, rng)


def changed(x: Any, rng: random.Random) -> Any:
    if isinstance(x, torch.Tensor):
        return changed_tensor(x, rng)
    if isinstance(x, bool):
        return rng.choice((not x, None, 7))
    if isinstance(x, int):
        return rng.choice((*INTEGERS, x + 1, x - 1, 2 * x, None))
    if isinstance(x, float):
        return rng.choice((*FLOATS, None))
    if isinstance(x, str):
        return rng.choice(("nonsense", "", "sum", "csr", "gelu", None))
    if isinstance(x, list | tuple):
        x = list(x)
        kind = rng.randrange(4)
        if kind == 0 or not x:
            return x + (x[:1] or [0])
        if kind == 1:
            return x[:-1]
        at = rng.randrange(len(x))
        x[at] = changed(x[at], rng)
        return x
    return rng.choice((None, torch.zeros(3), torch.zeros(3, dtype=torch.int64), 5))


def told(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        where = f"{x.device if x.is_meta else ''}{' with gradient' if x.requires_grad else ''}"
        if x.layout != torch.strided:
            return f"{x.dtype}{list(x.shape)}{x.layout}{where}"
        return f"{x.dtype}{list(x.shape)}{'' if x.is_contiguous() else f' by {x.stride()}'}{where}"
    return repr([told(one) for one in x]) if isinstance(x, list | tuple) else repr(x)


def main(log_path: str, first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    bases = recorded()
    names = sorted(bases)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, now + EXTRA_BYTES))
    refused = 0
    with open(log_path, "w") as log:
        for number in range(first, first + count):
            rng = random.Random(number)
            base = rng.choice(bases[rng.choice(names)])
            args, kwargs = list(copied(base.args)), copied(base.kwargs)
            valid = number % CANARY == 0
            for _ in range(0 if valid else rng.choice((1, 1, 1, 2, 3))):
                places = [(args, i) for i in range(len(args))] + [(kwargs, name) for name in kwargs]
                if places:
                    where, at = rng.choice(places)
                    where[at] = changed(where[at], rng)
            log.write(f"{number} {base.operator} {told(args)} {told(list(kwargs.items()))}\n")
            log.flush()
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            try:
                result = run(base.operator, tuple(args), kwargs)
            except REFUSALS as error:
                refused += 1
                if valid:
                    raise AssertionError(f"a valid call was refused: {base.operator} {told(args)}") from error
                continue
            if valid and not same(result, base.result):
                raise AssertionError(f"a valid call gave another result: {base.operator} {told(args)}")
    print(f"{count} calls of {len(names)} operators, {refused} refused")


if __name__ == "__main__":
    assert matmuls.__version__
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
