"""masked_linear: y[r] = x[r] @ w[r]^T + b[r], where the plan selects w[r] and b[r] of the first or the second expert.

The load gathers x and the store scatters y: one launch, with the memory traffic of one product. The gradient of x is
the same kernel on transposed weights; the weights' gradients are products over each expert's rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import is_batch_invariant, takes_tf32
from .configs import Tiles, gpu, run
from .few import few_product_kernel, in_order, of_rows
from .last_wave import HEIGHT, add_parts_kernel, is_split, part_at, parts_of
from .launch import launch, wait_for_earlier
from .tiles import accumulate, rows_at, store_product, tile_at, tiles_of, weight_of

# Registers per thread, of 8 warps, that leave room for two programs of sort_kernel on a multiprocessor, which copy
# during the gradient of x. A split last wave takes 228 without this limit, 200 with it, without spills (sm_90a).
ROOM = 216


@triton.jit
def sums_of(
    tile, begin, stop, x, w1, w2, v1, v2, rows, n1, N, K, sxm, sw1, sw2, sv1, sv2, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr,
    PAIRS: tl.constexpr, K_INNER: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile's sums over k from begin to stop, the rows of x that it reads, and its place as by `tile_at`."""
    start, end, column, first = tile_at(tile, n1, M, N, BM, BN, GROUP)
    listed = rows_at(rows, start + tl.arange(0, BM), start, M, GATHER)
    at = listed * sxm
    acc = tl.zeros((BM, BN), tl.float32)
    w, sw = weight_of(first, w1, w2, sw1, sw2, column, BN, BK, K_INNER, TMA)
    acc = accumulate(acc, x, at, w, sw, column, begin, stop, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION)
    if PAIRS == 2:  # x holds two operands side by side, each with its own weights
        v, sv = weight_of(first, v1, v2, sv1, sv2, column, BN, BK, K_INNER, TMA)
        xv = x + K
        acc = accumulate(acc, xv, at, v, sv, column, begin, stop, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION)
    return acc, listed, start, end, column, first


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, w1, w2, v1, v2, b1, b2, y, partial, rows, counts, N, K, sxm, sw1, sw2, sv1, sv2, sym, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WALK: tl.constexpr, TMA: tl.constexpr,
    PIECES: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, PAIRS: tl.constexpr, K_INNER: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """SPLIT: the last wave's tiles are split along K (last_wave.py), and their parts stored to `partial`."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    tiles = tiles_of(n1, M, N, BM, BN)
    whole = tiles
    if SPLIT:
        whole, parts = parts_of(tiles, tl.num_programs(0), tl.cdiv(K, BK))
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=WALK == 2):
        acc, listed, start, end, column, first = sums_of(
            tile, 0, K, x, w1, w2, v1, v2, rows, n1, N, K, sxm, sw1, sw2, sv1, sv2, M,
            BM, BN, BK, GROUP, TMA, GATHER, PAIRS, K_INNER, EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
        bias = b1
        if BIAS:
            bias = b1 if first else b2
        places = start + tl.arange(0, BM)
        target = rows_at(rows, places, start, M, SCATTER) if SCATTER != GATHER else listed
        store_product(y, acc, bias, target * sym, places < end, column, N, BM, BN, EVEN_N, BIAS, PIECES)
    if SPLIT:
        place, begin, stop = part_at(tl.program_id(0), parts, K, BK)
        if whole + place < tiles:
            acc, listed, start, end, column, first = sums_of(
                whole + place, begin, stop, x, w1, w2, v1, v2, rows, n1, N, K, sxm, sw1, sw2, sv1, sv2, M,
                BM, BN, BK, GROUP, TMA, GATHER, PAIRS, K_INNER, EVEN_K, EVEN_N, PRECISION,
            )  # fmt: skip
            own = tl.arange(0, BM)
            to = partial + tl.program_id(0) * BM * BN
            store_product(to, acc, partial, own * BN, own < BM, 0, BN, BM, BN, True, False, PIECES)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def precision_of(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and takes_tf32() else "ieee"


def read_rows(x: Tensor) -> Tensor:
    """x itself if each row is contiguous, with any row stride; else a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def oriented(*weights: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    """Weights [N, K] all contiguous along K, or all along N; their other strides; and True for K."""
    if all(w.stride(1) == 1 for w in weights):
        return weights, tuple(w.stride(0) for w in weights), True
    if all(w.stride(0) == 1 for w in weights):
        return weights, tuple(w.stride(1) for w in weights), False
    weights = tuple(w.contiguous() for w in weights)
    return weights, tuple(w.stride(0) for w in weights), True


def by_tma(tiles: Tiles, weights: tuple[Tensor, ...], strides: tuple[int, ...]) -> bool:
    """True if TMA is to be used and can be: it needs addresses and strides that are multiples of 16 bytes."""
    return (
        tiles.tma
        and gpu(weights[0].device.index).capability >= (9, 0)
        and all(w.data_ptr() % 16 == 0 for w in weights)
        and all(s > 0 and s * w.element_size() % 16 == 0 for w, s in zip(weights, strides, strict=True))
    )


def described(tiles: Tiles, weights: tuple[Tensor, ...], strides: tuple[int, ...], k_inner: bool) -> Sequence[Any]:
    """The weights as kernel arguments: TMA descriptors with a tile as box, or the tensors."""
    if not by_tma(tiles, weights, strides):
        return weights
    sides = 1 if k_inner else -1  # in memory [N, K] or [K, N]
    block = [tiles.columns, tiles.depth][::sides]
    return [TensorDescriptor(w, list(w.shape)[::sides], [s, 1], block) for w, s in zip(weights, strides, strict=True)]


def most_tiles(tiles: Tiles, m: int, n: int) -> int:
    """The largest number of tiles of any mask."""
    return (-(-m // tiles.rows) + 1) * -(-n // tiles.columns)


def programs(tiles: Tiles, m: int, n: int, index: int | None) -> int:
    """Programs to launch: one per tile, or as many as are resident at once."""
    count = most_tiles(tiles, m, n)
    return min(count, gpu(index).multiprocessors) if tiles.persistent else count


def product(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    pair: tuple[Tensor, Tensor] | None = None,
    operator: str | None = None,
    ordered: Tensor | None = None,
) -> Tensor:
    """x[r] @ w[r]^T + b[r] for x [M, K], w1, w2 [N, K]; M, N, K > 0.

    pair: second weights, for a second operand next to the first in x [M, 2K]. operator "masked_ffn_down" and
    "masked_ffn_input" take x in the plan's order. ordered: x `in_order`, if available.
    """
    x, M, (N, K) = read_rows(x), x.shape[0], w1.shape
    weights, strides, k_inner = oriented(w1, w2, *(pair or ()))
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    operator = operator or ("masked_linear" if k_inner else "masked_linear_t")
    gather = operator in ("masked_linear", "masked_linear_t")
    precision, pairs = precision_of(x.dtype), 1 if pair is None else 2
    if b1 is not None and b2 is not None:
        b1, b2 = b1.contiguous(), b2.contiguous()

    def few_product(t: Tiles, xs: Tensor) -> None:
        t = replace(t, rows=min(t.rows, max(64, power(M) // 4)))
        high, wide, rest = -(-M // t.rows), -(-N // t.columns), max(16, t.rows // 2)
        strip = max(16, power(-(-N // (high * wide))))
        stage = (t.rows + t.columns + rest + strip) * t.depth * x.element_size()
        given = (d for n in (t.columns, strip) for d in described(replace(t, columns=n), weights, strides, k_inner))
        of_x = (of_rows(xs, height, t.depth) for height in (t.rows, rest))
        args = (y, *of_x, *given, *weights, b1, b2, rows, counts, N, K, N, *strides)
        constants = (t.rows, t.columns, t.depth, rest, strip, k_inner, N % t.columns == 0, b1 is not None, t.pieces)
        room = (gpu(x.device.index).kilobytes - 1) << 10
        stages = max(1, min(t.stages, room // stage))
        launch(few_product_kernel, high * wide, args, (M, high), (*constants, precision), t.warps, stages)

    def attempt(t: Tiles) -> None:
        given = described(t, weights, strides, k_inner)
        sides, tma, bias = (t.rows, t.columns, t.depth, t.group), given is not weights, b1 is not None
        even = K % t.depth == 0, N % t.columns == 0
        few = t.split > 1 and not is_batch_invariant()  # its tiles depend on the number of rows
        if few and gather and tma and K * x.element_size() % 16 == 0:
            few_product(t, in_order(x, rows, counts) if ordered is None else ordered)
            return
        none = (None, None) if pair is None else ()
        grid, most, sums = programs(t, M, N, x.device.index), gpu(x.device.index).multiprocessors, None
        if is_split(t, most_tiles(t, M, N), K, pairs, most):
            grid, sums = most, x.new_empty(most, t.rows, t.columns, dtype=torch.float32)
        args = (x, *given, *none, b1, b2, y, sums, rows, counts, N, K, x.stride(0), *strides, *none, N)
        layout = (gather, True, pairs, k_inner, *even, bias, sums is not None, precision)
        constants = (*sides, t.walk, tma, t.pieces, *layout)
        registers = ROOM if sums is not None and tma and t.warps == 8 else None
        launch(product_kernel, grid, args, (M,), constants, t.warps, t.stages, registers=registers)
        if sums is not None:
            slices = most // 2 * (t.rows // int(HEIGHT.value))
            args = (sums, b1, b2, y, rows, counts, N, K, N, most)
            launch(add_parts_kernel, slices, args, (M,), (*sides, True, even[1], bias), 4, 1)

    run(operator, M, N, K, x, precision == "tf32", attempt)
    return y
