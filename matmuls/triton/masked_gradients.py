"""All gradients of masked_linear from one call: x's and the weights' share the work on the gradient's rows."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from custom_mm import _C

from .configs import Tiles, gpu, run
from .few import PAD, TAIL, few_weights_kernel, in_order, of_rows, room
from .launch import INTERPRETED, concurrently, launch
from .masked_linear import precision_of, product, read_rows
from .masked_weights import sorted_rows, weight_gradients

FEW, LITTLE, WIDE = 256, 1024, 2048


def from_copies(m: int, n: int, k: int, size: int) -> str | None:
    """The training kernel that computes the weights' gradients from copies in the plan's order, on sm_90; or None."""
    if size != 2 or n % 256 or k % 256:
        return None
    if m > LITTLE:
        return "masked_ffn_weights"
    return "masked_few_weights" if m >= FEW and min(n, k) >= WIDE else None


def rows_kept(m: int, n: int, k: int, x: Tensor) -> int:
    """Rows of x `in_order` to save for backward, [m, k] @ [k, n], if both forward and backward read them; else 0."""
    if gpu(x.device.index).capability < (9, 0) or from_copies(m, n, k, x.dtype.itemsize) != "masked_few_weights":
        return 0
    return m + int(PAD.value) + TAIL


def _beside(device: torch.device, one: Callable[[], Tensor], other: Callable[[], None]) -> Tensor:
    """Runs one() and, concurrently on a second stream, other(), which allocates nothing."""
    if INTERPRETED:
        y = one()
        other()
        return y
    main = torch.cuda.current_stream(device)
    side = torch.cuda.ExternalStream(_C.second_stream(device.index), device)
    with concurrently():
        side.wait_stream(main)
        try:
            y = one()
            with torch.cuda.stream(side):
                other()
        finally:  # work already started may still use memory that would be reused
            main.wait_stream(side)
    return y


def gradients(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool = True,
    second: bool = True,
    ordered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and of the weights for g [M, N], x [M, K], w1, w2 [N, K]; M, N, K > 0. ordered: x `in_order`,
    if available.

    On sm_90 loading sorted rows by TMA is worth a copy of g and x if the copy is free: while the product for x
    computes, it leaves registers for two small programs per multiprocessor, which copy on a second stream. With few
    rows it leaves room for the weights' products too.
    """
    device, M, sides = gpu(x.device.index), len(x), (g.shape[1], x.shape[1])
    kernel = from_copies(M, *sides, x.dtype.itemsize) if device.capability >= (9, 0) else None
    if kernel == "masked_few_weights" and (first or second):
        return _few_gradients(read_rows(g), read_rows(x), w1, w2, rows, counts, first, second, ordered)
    if kernel != "masked_ffn_weights":
        return product(g, w1.T, w2.T, rows, counts), *weight_gradients(g, x, rows, counts, first, second)
    g, x = read_rows(g), read_rows(x)
    gs, xs = g.new_empty(g.shape), x.new_empty(x.shape)

    def copies() -> None:
        for t, ordered in ((g, gs), (x, xs)):
            sorted_rows(t, rows, ordered, 2 * device.multiprocessors)

    dx = _beside(x.device, lambda: product(g, w1.T, w2.T, rows, counts), copies)
    return dx, *weight_gradients(gs, xs, rows, counts, first, second, gather_g=False, gather_x=False)


def _few_gradients(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool,
    second: bool,
    ordered: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gradients`. Both products need the copy of g; the weights' products run concurrently with the one for x."""
    M, N, K = len(x), g.shape[1], x.shape[1]
    d1, d2 = (x.new_empty(N if wanted else 0, K) for wanted in (first, second))
    gs, xs, last = in_order(g, rows, counts), room(x) if ordered is None else ordered, M + int(PAD.value)
    precision = precision_of(x.dtype)

    def weights(t: Tiles) -> None:
        if ordered is None:
            in_order(x, rows, counts, xs)
        one, other = (of_rows(d, t.rows, t.columns // t.pieces) for d in (d1 if first else d2, d2 if second else d1))
        operands = of_rows(gs[:last], t.depth, t.rows), of_rows(xs[:last], t.depth, t.columns)
        constants = (t.rows, t.columns, t.depth, t.group, first, second, t.pieces, precision)
        args = (counts, one, other, *operands, N, K)
        launch(few_weights_kernel, 2 * (N // t.rows) * (K // t.columns), args, (M,), constants, t.warps, t.stages)

    def attempt(t: Tiles) -> Tensor:
        t = replace(t, depth=min(t.depth, int(PAD.value)))
        return _beside(x.device, lambda: product(g, w1.T, w2.T, rows, counts, ordered=gs), lambda: weights(t))

    return run("masked_few_weights", M, N, K, x, precision == "tf32", attempt), d1, d2
