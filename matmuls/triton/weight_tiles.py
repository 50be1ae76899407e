"""Shared by the kernels of the weights' gradients: the order of the tiles, a tile's product and its stores."""

import triton
import triton.language as tl


@triton.jit
def part_of(tile, height_of_all, wide, GROUP: tl.constexpr):
    """A program's piece, and its tile's row and column."""
    within = tile % (wide * height_of_all)
    group = within // (GROUP * wide) * GROUP
    height = tl.minimum(height_of_all - group, GROUP)
    row = group + within % (GROUP * wide) % height
    return tile // (wide * height_of_all), row, within % (GROUP * wide) // height


@triton.jit
def product_of_rows(
    p, q, of_p, of_q, rows, sp, sq, row, column, start, end,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p[row:]^T @ q[column:], a tile [BM, BN], over the rows at places start to end of the plan.

    q is in the plan's order and loads by TMA through its descriptor of_q; so does p through of_p, or with GATHER its
    rows are gathered by pointers.
    """
    ms, ns, rs = row + tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BR)
    acc = tl.zeros((BM, BN), tl.float32)
    whole = end - (end - start) % BR
    if GATHER:
        ahead = tl.load(rows + start + rs, mask=start + rs < end, other=0)  # loaded one step ahead
    for place in range(start, whole, BR):
        if GATHER:
            listed = ahead.to(tl.int64)
            ahead = tl.load(rows + place + BR + rs, mask=place + BR + rs < end, other=0)
            left = tl.load(p + listed[None, :] * sp + ms[:, None])
        else:
            left = of_p.load([place, row]).T
        acc = tl.dot(left, of_q.load([place, column]), acc, input_precision=PRECISION)
    if whole < end:  # TMA would also read rows of the other expert past the end
        there = whole + rs < end
        places = (whole + rs).to(tl.int64)
        listed = places
        if GATHER:
            listed = tl.load(rows + places, mask=there, other=0).to(tl.int64)
        left = tl.load(p + listed[None, :] * sp + ms[:, None], mask=there[None, :], other=0.0)
        right = tl.load(q + places[:, None] * sq + ns[None, :], mask=there[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_sum(
    to, acc, row, column, height, wide, si, sj, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Stores acc[i, j] to to[(row + i) * si + (column + j) * sj], through shared memory, piece by piece."""
    if PIECES == 1:
        rows, columns = (row + tl.arange(0, BM)).to(tl.int64), (column + tl.arange(0, BN)).to(tl.int64)
        at = to + rows[:, None] * si + columns[None, :] * sj
        if EVEN:
            tl.store(at, acc.to(to.dtype.element_ty))
        else:
            tl.store(at, acc.to(to.dtype.element_ty), mask=(rows < height)[:, None] & (columns < wide)[None, :])
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_sum(to, left, row, column, height, wide, si, sj, BM, BN // 2, EVEN, PIECES // 2)
        store_sum(to, right, row, column + BN // 2, height, wide, si, sj, BM, BN // 2, EVEN, PIECES // 2)


@triton.jit
def slots_sum(part, low, high, at, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """part[low, at] + ... + part[high - 1, at]; with at most SPLIT slots all loads are issued at once."""
    total = tl.zeros((BLOCK,), tl.float32)
    if SPLIT > 0:
        for n in tl.static_range(SPLIT):
            slot = tl.cast(low + n, tl.int64)
            total += tl.load(part + slot * size + at, mask=at < tl.where(high > slot, size, 0), other=0.0)
    else:
        for n in range(low, high):
            total += tl.load(part + tl.cast(n, tl.int64) * size + at, mask=at < size, other=0.0)
    return total
