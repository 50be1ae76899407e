"""Times the kernels of products with a bias or an activation in 16 bits: linear_rows, linear_tiles, and cuBLASLt."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from custom_mm import _C, only_kernel
from custom_mm.kernel_switch import FAMILIES

from .. import timing
from . import Case

FAMILY = "dense products"
ROWS = (1, 16, 48, 64, 96, 128, 200, 320, 512, 1000, 1024, 2048, 3000, 4096, 8192, 16384)
# Columns and inner size of layers of transformers, with the activation.
LAYERS = (
    *((1536, 384, "gelu"), (3072, 768, "gelu"), (4096, 1024, "gelu"), (5120, 1280, "gelu"), (8192, 2048, "gelu")),
    *(
        (768, 768, None),
        (2304, 768, None),
        (384, 1536, None),
        (768, 3072, None),
        (1024, 4096, None),
        (3072, 1024, None),
    ),
)
SETS = 8  # of weights, one a call: layers follow each other
BUDGET = 0.02  # seconds of measurement per kernel; at least 20 rounds


def _product(kernel: str, x: Tensor, w: Tensor, bias: Tensor, activation: str | None) -> Tensor:
    with only_kernel(kernel):
        y: Tensor = torch.ops.custom_mm.cublaslt_matmul.default(x, w, bias, activation, False, True)
    return y


def case(m: int, n: int, k: int, activation: str | None) -> Case:
    """Time one product of [m, k] and [n, k] by every kernel that takes it."""
    x, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((m, k), (n,)))
    weights = [(torch.randn(n, k, device="cuda") / k**0.5).bfloat16() for _ in range(SETS)]
    runs = {}
    for kernel in FAMILIES[FAMILY].kernels:
        calls = [partial(_product, kernel, x, w, bias, activation) for w in weights]
        try:
            calls[0]()
        except ValueError:  # it does not take the product
            continue
        runs[kernel] = calls
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen, _ = _C.choose_product(m, n, k, activation, multiprocessors)
    timings = timing.time_on_gpu(list(runs.values()), BUDGET)
    return Case(
        family=FAMILY,
        operation="cublaslt_matmul",
        label=f"{m} x {n} x {k}, {activation or 'no activation'}",
        dtype="bfloat16",
        chosen=chosen if chosen in runs else "cublaslt",
        seconds={name: t.seconds for name, t in zip(runs, timings, strict=True)},
        spread={name: t.spread for name, t in zip(runs, timings, strict=True)},
    )


def jobs() -> list[tuple[int, int, int, str | None]]:
    """Every number of rows with every layer; few rows alone without an activation."""
    return [(m, *layer) for layer in LAYERS for m in ROWS if layer[2] or m <= 256]


@torch.no_grad()
def cases(part: Callable[[str], object] = lambda now: None) -> Iterator[Case]:
    """The cases of all `jobs`. part: called at the end of each, with its name."""
    torch.manual_seed(0)
    for m, n, k, activation in jobs():
        yield case(m, n, k, activation)
        part(f"{m} x {n} x {k}")
