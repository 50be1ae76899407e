"""Runs each operation with threads, forks and too little memory; test_threads.py starts one process for each mode:

fork: in a forked child, forked while the parent's worker threads wait for work, with one thread and with two;
starve: as fork, after repeated calls with too little memory, a little more each time;
threads: in four threads at once, each with another order of operations.

Prints a tab-separated line per operation: its name, and "right" or what went wrong.
"""

import ctypes
import os
import random
import resource
import signal
import sys
import threading
import traceback
import warnings
from copy import deepcopy

import torch
from torch import nn

import custom_mm
import matmuls
from matmuls.attention import attend, compose
from matmuls.nn import InplaceLinear, MaskedFFN, MaskedLinear, SparseLinear

MODE = sys.argv[1]
N = 512 if MODE == "starve" else 256  # large enough that torch, MKL and oneDNN use several threads for N x N elements
LIMIT = 20  # seconds per child; 2 after a first child has timed out
LAYOUTS = "csr", "csc", "coo", "bsr"

if MODE == "starve":
    # oneDNN crashes without memory: torch's own product of bfloat16 matrices of this size ends with signal 11 for 62 of
    # the 190 allocations that can fail in it (torch 2.13).
    torch.backends.mkldnn.set_flags(False)

ops = torch.ops.custom_mm
generator = torch.Generator().manual_seed(0)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(dtype)


x, y, grad = drawn(N, N), torch.softmax(drawn(N, N), -1), drawn(N, N)
w, small = drawn(N, N) / N**0.5, drawn(N)
mask = drawn(N) > 0
weights = [drawn(N, N) / N**0.5 for _ in range(6)]
q, k, v = (drawn(2, 4, 256, 64) for _ in range(3))
holes = drawn(N, N).where(drawn(N, N) > 0.5, torch.zeros(()))
blocks = holes * drawn(N // 16, N // 16).gt(0.5).repeat_interleave(16, 0).repeat_interleave(16, 1)
values = {layout: drawn(int(holes.count_nonzero())) for layout in LAYOUTS}
triangle = (holes / N).tril() + torch.eye(N)


def sparse(layout, dense=None):
    """A new tensor that no plan and no index check has seen."""
    if layout == "bsr":
        return (blocks if dense is None else dense).to_sparse_bsr((16, 16))
    return getattr(holes if dense is None else dense, f"to_sparse_{layout}" if layout != "coo" else "to_sparse")()


def trained(call, *inputs):
    """The result and the inputs' gradients."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    result = call(*leaves)
    weight = torch.linspace(-1, 1, result.numel()).view_as(result)
    return result.detach(), *torch.autograd.grad((result.float() * weight).sum(), leaves)


def written(call, first, *inputs):
    """As `trained`, for an operation that overwrites its first argument."""
    return trained(lambda first, *others: call(first.clone(), *others), first, *inputs)


def module_of(module, *args):
    x = args[0].clone().requires_grad_()
    result = module(x.clone(), *args[1:])
    result.square().sum().backward()
    return result.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)


def halved(call):
    """The same in bfloat16, with oneDNN's products and conversions."""
    return call(x.bfloat16(), w.bfloat16(), small.bfloat16())


class _Csr:
    def __init__(self):
        a = sparse("csr")
        self.offsets, self.columns, self.values = a.crow_indices(), a.col_indices(), a.values()


def by_rows(call):
    """With the indices of a new matrix."""
    m = _Csr()
    return call(m.offsets, m.columns, m.values)


ready = [matmuls.plan(sparse(layout), constant=constant) for layout in LAYOUTS for constant in (False, True)]
mask_ready = matmuls.mask_plan(mask)
layers = [nn.Linear(N, N) for _ in range(2)]
with torch.no_grad():
    for layer, weight in zip(layers, weights, strict=False):
        layer.weight.copy_(weight), layer.bias.copy_(small)
experts = MaskedFFN(N, N)
with torch.no_grad():
    for parameter, weight in zip(experts.parameters(), weights, strict=True):
        parameter.copy_(weight)

CALLS = {
    # operations of the table
    "matmul": lambda: trained(lambda a, b, c: matmuls.matmul(a, b, bias=c, activation="gelu"), x, w, small),
    "cublasMM": lambda: trained(matmuls.cublasMM.apply, x, w),
    "cublasTransaMM": lambda: trained(matmuls.cublasTransaMM.apply, x, w),
    "cublasTransbMM": lambda: trained(matmuls.cublasTransbMM.apply, x, w),
    "cublasTransabMM": lambda: trained(matmuls.cublasTransabMM.apply, x, w),
    "cublas_mmul": lambda: trained(custom_mm.cublas_mmul, x, w),
    "cublas_bmm": lambda: trained(custom_mm.cublas_bmm, q, k.mT),
    "cublaslt_matmul": lambda: trained(lambda *given: custom_mm.cublaslt_matmul(*given, "gelu_tanh"), x, w, small),
    "bias_act_": lambda: custom_mm.bias_act_(x.clone(), small, "gelu"),
    "matmul_": lambda: written(lambda a, b: matmuls.matmul_(a, b, keep_input=True), x, w),
    "linear_": lambda: written(lambda a, *b: matmuls.linear_(a, *b, keep_input=True), x, w, small),
    "feed_forward_": lambda: matmuls.feed_forward_(
        x.clone(), w, small, weights[0], small, small, small, activation="gelu"
    ),
    "square_matmul": lambda: written(lambda a, b: matmuls.square_matmul(a, b, N, N), x, w),
    "square_matmul_T": lambda: written(lambda a, b: matmuls.square_matmul_T(a, b, N, N), x, w),
    "softmax_": lambda: written(matmuls.softmax_, x),
    "softmax": lambda: trained(matmuls.softmax, x),
    "softmax_backward": lambda: trained(matmuls.softmax_backward, y, grad),
    "softmax_backward_": lambda: matmuls.softmax_backward_(y.clone(), grad),
    "inplace_softmax": lambda: written(lambda t: matmuls.inplace_softmax(t, N, N), x),
    "inplace_softmax_backward": lambda: matmuls.inplace_softmax_backward(y.clone(), grad, w, N, N, N),
    "layer_norm_": lambda: written(matmuls.layer_norm_, x, small, small),
    "rms_norm_": lambda: written(matmuls.rms_norm_, x, small),
    "layernorm": lambda: written(lambda t: matmuls.layernorm(t, N, N), x),
    "scaled_masked_softmax": lambda: trained(lambda t: matmuls.scaled_masked_softmax(t, mask, 0.5), x),
    "scaled_masked_softmax_forward": lambda: trained(lambda t: matmuls.scaled_masked_softmax_forward(t, x > 1, 0.5), x),
    "scaled_masked_softmax_backward": lambda: trained(
        lambda *given: matmuls.scaled_masked_softmax_backward(*given, 0.5), grad, y
    ),
    "FusedSoftmax": lambda: trained(lambda t: matmuls.FusedSoftmax.apply(t, x > 1, 0.5), x),
    "attention_forward": lambda: attend(q, k, v, None, 0.125, causal=True),
    "masked_linear": lambda: trained(
        lambda a, b, c, d: matmuls.masked_linear(a, b, c, mask, d, d), x, *weights[:2], small
    ),
    "masked_ffn": lambda: trained(lambda a, *b: matmuls.masked_ffn(a, *b, mask), x, *weights),
    "MaskedLinear": lambda: trained(lambda a, b, c: matmuls.MaskedLinear.apply(a, b, c, mask), x, *weights[:2]),
    "MaskedFFN": lambda: trained(lambda a, *b: matmuls.MaskedFFN.apply(a, *b, mask), x, *weights),
    "spmm": lambda: [trained(lambda b, layout=layout: matmuls.spmm(sparse(layout), b), x) for layout in LAYOUTS],
    "spgemm": lambda: trained(
        lambda t: matmuls.spgemm(matmuls.plan(sparse("csr")).with_values(t), sparse("csc")).values(), values["csr"]
    ),
    "solve_triangular": lambda: trained(lambda b: matmuls.solve_triangular(sparse("csr", triangle), b, upper=False), x),
    "sddmm": lambda: trained(lambda a, b: matmuls.sddmm(a, b, sparse("coo")), x, w),
    "sparse_softmax": lambda: trained(lambda t: matmuls.sparse_softmax(t, sparse("coo")), values["coo"]),
    "sparse_attention": lambda: trained(lambda *given: matmuls.sparse_attention(*given, sparse("csr")), x, w, y),
    "cusparseMM": lambda: trained(matmuls.cusparseMM.apply, holes, x),
    "cusparse_spmm": lambda: by_rows(
        lambda offsets, columns, numbers: trained(
            lambda t, b: custom_mm.cusparse_spmm(offsets, columns, t, b, N, N), numbers, x
        )
    ),
    "cusparse_mmul": lambda: by_rows(
        lambda offsets, columns, numbers: custom_mm.cusparse_mmul(numbers, columns, offsets, len(numbers), N, N, x)
    ),
    "cusparse_sddmm": lambda: by_rows(
        lambda offsets, columns, _: trained(lambda a, b: custom_mm.cusparse_sddmm(offsets, columns, a, b), x, w)
    ),
    # modules
    "nn.InplaceLinear": lambda: module_of(InplaceLinear.from_linear(deepcopy(layers[0]), keep_input=True), x),
    "nn.MaskedLinear": lambda: module_of(MaskedLinear.from_linear(*deepcopy(layers)), x, mask),
    "nn.MaskedFFN": lambda: module_of(deepcopy(experts), x, mask),
    "nn.SparseLinear": lambda: module_of(SparseLinear.from_linear(layers[0], sparsity=0.9), x),
    "nn.SparseLinear, frozen": lambda: SparseLinear.from_linear(layers[0], sparsity=0.9).freeze()(x).detach(),
    # operations that the table does not cover
    "plan": lambda: [matmuls.plan(sparse(layout), tune=tune) @ x for layout in LAYOUTS for tune in (True, False, [N])],
    "plan, constant": lambda: [matmuls.plan(sparse(layout), constant=True) @ x for layout in LAYOUTS],
    "plan, ready": lambda: [plan @ x for plan in ready],
    "mask_plan": lambda: [matmuls.masked_linear(x, *weights[:2], p) for p in (mask_ready, matmuls.mask_plan(mask))],
    "attend": lambda: [
        trained(lambda *given, some=some: attend(*given, None, 0.125, probabilities=some)[0], q, k, v)
        for some in (True, False)
    ],
    "compose": lambda: trained(lambda *given: compose(*given, None, 0.125)[0], q, k, v),
    "spmm max": lambda: trained(lambda b: matmuls.spmm(sparse("coo"), b, reduce="max"), x),
    "16 bits": lambda: [
        halved(call)
        for call in (
            lambda a, b, c: trained(lambda *given: matmuls.matmul(*given[:2], bias=given[2]), a, b, c),
            lambda a, b, c: matmuls.linear_(a.clone(), b, c),
            lambda a, b, c: custom_mm.bias_act_(a.clone(), c, "gelu"),
            lambda a, b, c: trained(lambda *given: matmuls.masked_linear(*given, mask), a, b, b),
            lambda a, b, c: matmuls.spmm(sparse("bsr", blocks.bfloat16()), a),
        )
    ],
    "autocast": lambda: autocast(),
    "torch": lambda: trained(lambda *given: torch.nn.functional.gelu(torch.addmm(small, *given)).sort().values, x, w),
}


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return matmuls.matmul(x, w), matmuls.spmm(sparse("csr"), x)


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result if part is not None for t in flat(part)]


def compare(result, expected):
    for ours, theirs in zip(flat(result), expected, strict=True):
        # a new plan may choose another kernel, which sums in another order
        close = {"rtol": 1e-4, "atol": 1e-4} if ours.dtype == torch.float32 else {}
        torch.testing.assert_close(ours, theirs, **close)


def starved(call):
    """Call with more and more memory; returns how many calls failed."""
    call()  # oneDNN caches failures to create a primitive for lack of memory
    failed = 0
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    # up to five float32 matrices, in steps of half a matrix
    for pages in range(0, 5 * N * N // 1024, N * N // 2048):
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as sizes:
            limit = (int(sizes.read().split()[0]) + pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
        try:
            call()
        except (RuntimeError, MemoryError):
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
    return failed


def in_a_child(call, expected, limit):
    """The outcome of the call in a forked child, with one thread and with two."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            signal.alarm(limit)
            failed = starved(call) if MODE == "starve" else 1
            compare(call(), expected)
            torch.set_num_threads(2)
            compare(call(), expected)
            os.write(write, b"right" if failed else b"was never short of memory")
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-2000:])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        said = told.read().decode()
    status = os.waitpid(child, 0)[1]
    return said or ("no result in time" if status == signal.SIGALRM else f"status {status}")


def in_children():
    limit = LIMIT
    for name, call in CALLS.items():
        expected = flat(call())
        torch.exp(x), x @ x  # starts the worker threads in any case
        assert len(os.listdir("/proc/self/task")) > 1
        said = in_a_child(call, expected, limit)
        limit = 2 if said == "no result in time" else limit
        yield name, said


def in_threads():
    expected = {name: flat(call()) for name, call in CALLS.items()}
    said = dict.fromkeys(CALLS, "right")

    def work(seed):
        for name in random.Random(seed).sample(list(CALLS), len(CALLS)):
            try:
                compare(CALLS[name](), expected[name])
            except Exception:
                said[name] = traceback.format_exc()[-2000:]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said.items()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.testing.assert_close(x, x)  # otherwise every child would import what this needs
    torch.set_num_threads(2)
    for name, said in in_threads() if MODE == "threads" else in_children():
        print(name, said.replace("\n", " | "), sep="\t", flush=True)
