"""masked_ffn: (silu(x w1) * (x w3)) w2 for the masked rows, the same with u for the others.

Between the two products the hidden rows are in the plan's order: only the first product gathers and only the second
scatters, also in backward. t [M, 2H] holds T1 = x w1 and T2 = x w3 side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Tiles, run
from .launch import launch, wait_for_earlier
from .masked_linear import described, oriented, precision_of, product, programs, read_rows
from .masked_weights import weight_gradients
from .tiles import accumulate, load_rows, load_weight, rows_at, store_tile, tile_at, tiles_of, weight_of


@triton.jit
def halves(t, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(t, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def store_swiglu(
    c, t, gate, up, offsets, there, column, H,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    if PIECES == 1:
        store_tile(c, gate * tl.sigmoid(gate) * up, offsets * H, there, column, H, BN, EVEN)
        if KEEP:
            store_tile(t, gate, offsets * 2 * H, there, column, H, BN, EVEN)
            store_tile(t + H, up, offsets * 2 * H, there, column, H, BN, EVEN)
    else:
        gate_left, gate_right = halves(gate, BM, BN)
        up_left, up_right = halves(up, BM, BN)
        store_swiglu(c, t, gate_left, up_left, offsets, there, column, H, BM, BN // 2, EVEN, KEEP, PIECES // 2)
        store_swiglu(
            c, t, gate_right, up_right, offsets, there, column + BN // 2, H, BM, BN // 2, EVEN, KEEP, PIECES // 2
        )


@triton.jit(do_not_specialize=["M"])
def gate_up_kernel(
    x, w1, w3, u1, u3, c, t, rows, counts, N, K, sxm, sw1, sw3, su1, su3, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WALK: tl.constexpr, TMA: tl.constexpr,
    PIECES: tl.constexpr, K_INNER: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """c = silu(x w1) * (x w3), and t if KEEP, in the plan's order; x's rows are read once for both products."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    for tile in tl.range(tl.program_id(0), tiles_of(n1, M, N, BM, BN), tl.num_programs(0), flatten=WALK == 2):
        start, end, column, first = tile_at(tile, n1, M, N, BM, BN, GROUP)
        places = start + tl.arange(0, BM)
        at = x + (rows_at(rows, places, start, M, True) * sxm)[:, None] + tl.arange(0, BK)[None, :]
        gates, sa = weight_of(first, w1, u1, sw1, su1, column, BN, BK, K_INNER, TMA)
        ups, sb = weight_of(first, w3, u3, sw3, su3, column, BN, BK, K_INNER, TMA)
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            tile_x = load_rows(at, k, K, BK, EVEN_K)
            tile_a = load_weight(gates, sa, column, k, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N)
            gate = tl.dot(tile_x, tile_a, gate, input_precision=PRECISION)
            tile_b = load_weight(ups, sb, column, k, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N)
            up = tl.dot(tile_x, tile_b, up, input_precision=PRECISION)
            at += BK
        store_swiglu(c, t, gate, up, places.to(tl.int64), places < end, column, N, BM, BN, EVEN_N, KEEP, PIECES)


@triton.jit
def store_gradients(
    t, dt, c, g, offsets, there, column, H, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr
):
    """Stores dT1 = G T2 (s + T1 s (1 - s)) and dT2 = G T1 s, s = sigmoid(T1), side by side; recomputes c = T1 s T2."""
    if PIECES == 1:
        columns = column + tl.arange(0, BN)
        inside = there[:, None] if EVEN else there[:, None] & (columns < H)[None, :]
        at = t + offsets[:, None] * 2 * H + columns[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + H, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        store_tile(c, silu * up, offsets * H, there, column, H, BN, EVEN)
        store_tile(dt, g * up * (s + silu * (1 - s)), offsets * 2 * H, there, column, H, BN, EVEN)
        store_tile(dt + H, g * silu, offsets * 2 * H, there, column, H, BN, EVEN)
    else:
        left, right = halves(g, BM, BN)
        store_gradients(t, dt, c, left, offsets, there, column, H, BM, BN // 2, EVEN, PIECES // 2)
        store_gradients(t, dt, c, right, offsets, there, column + BN // 2, H, BM, BN // 2, EVEN, PIECES // 2)


@triton.jit(do_not_specialize=["M"])
def gradient_kernel(
    dy, w2, u2, t, dt, c, rows, counts, N, K, sdy, sw2, su2, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WALK: tl.constexpr, TMA: tl.constexpr,
    PIECES: tl.constexpr, K_INNER: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """G = dy w2^T for the rows in the plan's order, never stored: the gradients of T1 and T2 are its epilogue."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    for tile in tl.range(tl.program_id(0), tiles_of(n1, M, N, BM, BN), tl.num_programs(0), flatten=WALK == 2):
        start, end, column, first = tile_at(tile, n1, M, N, BM, BN, GROUP)
        places = start + tl.arange(0, BM)
        w, sw = weight_of(first, w2, u2, sw2, su2, column, BN, BK, K_INNER, TMA)
        g = tl.zeros((BM, BN), tl.float32)
        offsets = rows_at(rows, places, start, M, True) * sdy
        g = accumulate(g, dy, offsets, w, sw, column, 0, K, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION)
        store_gradients(t, dt, c, g, places.to(tl.int64), places < end, column, N, BM, BN, EVEN_N, PIECES)


def gate_up(
    x: Tensor, w1: Tensor, w3: Tensor, u1: Tensor, u3: Tensor, rows: Tensor, counts: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """c = silu(x w1^T) * (x w3^T), [M, H], and with keep t, [M, 2H], in the plan's order; weights [H, D]."""
    x, M, (N, K) = read_rows(x), x.shape[0], w1.shape
    weights, strides, k_inner = oriented(w1, w3, u1, u3)
    c = x.new_empty(M, N)
    t = x.new_empty(M, 2 * N) if keep else c[:0]
    precision = precision_of(x.dtype)

    def attempt(s: Tiles) -> None:
        given = described(s, weights, strides, k_inner)
        args = (x, *given, c, t, rows, counts, N, K, x.stride(0), *strides)
        shape = (s.rows, s.columns, s.depth, s.group, s.walk, given is not weights, s.pieces)
        layout = (k_inner, K % s.depth == 0, N % s.columns == 0, keep, precision)
        launch(gate_up_kernel, programs(s, M, N, x.device.index), args, (M,), (*shape, *layout), s.warps, s.stages)

    run("masked_ffn_gate_up", M, N, K, x, precision == "tf32", attempt)
    return c, t


def hidden_gradients(
    dy: Tensor, w2: Tensor, u2: Tensor, t: Tensor, rows: Tensor, counts: Tensor, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of t, [M, 2H], and c recomputed, [M, H], in the plan's order, for dy [M, D]; weights [D, H].

    With c given both are written over t and c: a tile writes exactly what it reads of t, and reads it first.
    """
    dy, M, (K, N) = read_rows(dy), dy.shape[0], w2.shape
    weights, strides, k_inner = oriented(w2.T, u2.T)
    dt, c = (torch.empty_like(t), t.new_empty(M, N)) if c is None else (t, c)
    precision = precision_of(dy.dtype)

    def attempt(s: Tiles) -> None:
        given = described(s, weights, strides, k_inner)
        args = (dy, *given, t, dt, c, rows, counts, N, K, dy.stride(0), *strides)
        shape = (s.rows, s.columns, s.depth, s.group, s.walk, given is not weights, s.pieces)
        layout = (k_inner, K % s.depth == 0, N % s.columns == 0, precision)
        launch(gradient_kernel, programs(s, M, N, dy.device.index), args, (M,), (*shape, *layout), s.warps, s.stages)

    run("masked_ffn_gradient", M, N, K, dy, precision == "tf32", attempt)
    return dt, c


def forward(
    x: Tensor,
    w: tuple[Tensor, Tensor, Tensor],
    u: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    counts: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y [M, D] and, with keep, t for backward; w1, w3 [H, D], w2 [D, H]; M, D, H > 0."""
    c, t = gate_up(x, w[0], w[2], u[0], u[2], rows, counts, keep)
    return product(c, w[1], u[1], rows, counts, operator="masked_ffn_down"), t


def backward(
    dy: Tensor,
    x: Tensor,
    w: tuple[Tensor, Tensor, Tensor],
    u: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    counts: Tensor,
    t: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of x, w1, w2, w3, u1, u2, u3; empty tensors where none is needed. Without t it is recomputed."""
    c = None
    if t is None:
        c, t = gate_up(x, w[0], w[2], u[0], u[2], rows, counts, True)
    dt, c = hidden_gradients(dy, w[1], u[1], t, rows, counts, c)
    H = c.shape[1]
    grads = [x.new_empty(0) for _ in needs]
    if needs[2] or needs[5]:
        grads[2], grads[5] = weight_gradients(dy, c, rows, counts, needs[2], needs[5], gather_x=False)
    del c  # frees a sixth of the live memory
    for at, g in ((1, dt[:, :H]), (3, dt[:, H:])):
        if needs[at] or needs[at + 3]:
            grads[at], grads[at + 3] = weight_gradients(g, x, rows, counts, needs[at], needs[at + 3], gather_g=False)
    if needs[0]:
        pair = (w[2].T, u[2].T)
        grads[0] = product(dt, w[0].T, u[0].T, rows, counts, pair=pair, operator="masked_ffn_input")
    return grads
