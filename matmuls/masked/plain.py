"""The masked operations with torch's own products: on the CPU, and on a GPU where the Triton kernels do not apply.

On the CPU the counts are known: rows are sorted into the plan's order, where the two experts are two slices of the
operands and of the result, which the products write in place. On a GPU nothing synchronizes on the counts: both
experts' products are computed and blended (float64, and sizes of 0).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from custom_mm import _C

from ..registration import check_permutation

_silu_backward = torch.ops.aten.silu_backward.default


def affine(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x @ w^T + b by torch, or by the product that is independent of the number of rows if that is asked for."""
    if _C.is_batch_invariant():
        y: Tensor = torch.ops.custom_mm.cublaslt_matmul.default(x, w, b, None, False, True)
        return y
    return F.linear(x, w, b)


def affine_into(out: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> None:
    """out <- x @ w^T + b."""
    if _C.is_batch_invariant():
        out.copy_(affine(x, w, b))
    elif b is None:
        torch.mm(x, w.T, out=out)
    else:
        torch.addmm(b, x, w.T, out=out)


class Split:
    """Rows in the plan's order: the first n1 belong to the first expert."""

    def __init__(self, n1: int) -> None:
        self.n1 = n1

    def linear(self, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None) -> Tensor:
        n1 = self.n1
        if n1 in (0, x.shape[0]):
            return affine(x, w1, b1) if n1 else affine(x, w2, b2)
        y = x.new_empty(x.shape[0], w1.shape[0])
        affine_into(y[:n1], x[:n1], w1, b1)
        affine_into(y[n1:], x[n1:], w2, b2)
        return y

    def weights(self, g: Tensor, x: Tensor, first: bool, second: bool) -> tuple[Tensor, Tensor]:
        n1, none = self.n1, x.new_empty(0, x.shape[1])
        return g[:n1].T @ x[:n1] if first else none, g[n1:].T @ x[n1:] if second else none.clone()

    def sums(self, x: Tensor) -> Tensor:
        return torch.stack([x[: self.n1].sum(0), x[self.n1 :].sum(0)])


class Blend:
    """Rows in their original order; `first` [M, 1] marks those of the first expert. Rows of the other expert count as
    0, even if they are NaN."""

    def __init__(self, first: Tensor) -> None:
        self.first = first

    def linear(self, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None) -> Tensor:
        return torch.where(self.first, affine(x, w1, b1), affine(x, w2, b2))

    def weights(self, g: Tensor, x: Tensor, first: bool, second: bool) -> tuple[Tensor, Tensor]:
        def one(mine: Tensor, wanted: bool) -> Tensor:
            return torch.where(mine, g, 0).T @ torch.where(mine, x, 0) if wanted else x.new_empty(0, x.shape[1])

        return one(self.first, first), one(~self.first, second)

    def sums(self, x: Tensor) -> Tensor:
        return torch.stack([torch.where(mine, x, 0).sum(0) for mine in (self.first, ~self.first)])


def plan(mask: Tensor) -> tuple[Tensor, Tensor]:
    """rows and counts of a mask [M]: a stable partition, on a GPU by prefix sums."""
    if mask.is_cpu:
        first, second = mask.nonzero(), mask.logical_not().nonzero()
        counts = torch.tensor([first.shape[0], second.shape[0]], dtype=torch.int32)
        return torch.cat([first, second]).view(-1).int(), counts
    before = mask.cumsum(0, dtype=torch.int32)
    r = torch.arange(mask.shape[0], dtype=torch.int32, device=mask.device)
    n1 = mask.sum(dtype=torch.int32)
    place = torch.where(mask, before - 1, n1 + r - before)
    rows = torch.empty_like(r).scatter_(0, place.long(), r)
    return rows, torch.stack([n1, mask.shape[0] - n1]).to(torch.int32)


class Ordered:
    """Arranges operands for a Split or a Blend, and results back."""

    def __init__(self, rows: Tensor, counts: Tensor) -> None:
        m = rows.shape[0]
        self.rows = self.places = None
        self.by: Split | Blend
        if rows.device.type == "cpu":
            n1 = int(counts[0])
            if not 0 <= n1 <= m:
                raise RuntimeError(f"mask: expected a plan of {m} rows, got one that gives {n1} to the first weight")
            self.by = Split(n1)
            if n1 not in (0, m):  # all rows belong to one expert: no sorting needed
                self.rows = rows.long()
                self.places = check_permutation("mask", "rows", self.rows)
        else:
            first = torch.empty(m, dtype=torch.bool, device=rows.device)
            first[rows.long()] = torch.arange(m, device=rows.device) < counts[0]
            self.by = Blend(first[:, None])

    def take(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x.index_select(0, self.rows)

    def put(self, y: Tensor) -> Tensor:
        return y if self.places is None else y.index_select(0, self.places)


def linear(
    x: Tensor, w1: Tensor, w2: Tensor, rows: Tensor, counts: Tensor, b1: Tensor | None, b2: Tensor | None
) -> Tensor:
    o = Ordered(rows, counts)
    return o.put(o.by.linear(o.take(x), w1, w2, b1, b2))


def weights(g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, first: bool, second: bool) -> tuple[Tensor, Tensor]:
    o = Ordered(rows, counts)
    return o.by.weights(o.take(g), o.take(x), first, second)


def sums(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    o = Ordered(rows, counts)
    return o.by.sums(o.take(x))


def ffn(
    x: Tensor, w: Sequence[Tensor], u: Sequence[Tensor], rows: Tensor, counts: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """y and, if `keep`, t = [T1, T2] in the form that `ffn_backward` takes."""
    o = Ordered(rows, counts)
    ordered = o.take(x)
    t1, t2 = o.by.linear(ordered, w[0], u[0]), o.by.linear(ordered, w[2], u[2])
    t = torch.cat([t1, t2], 1) if keep else None
    return o.put(o.by.linear(F.silu(t1, inplace=True).mul_(t2), w[1], u[1])), t


def ffn_backward(
    dy: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    u: Sequence[Tensor],
    rows: Tensor,
    counts: Tensor,
    t: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, w1, w2, w3, u1, u2, u3; empty tensors where none is needed. Without t it is recomputed."""
    o = Ordered(rows, counts)
    x, dy = o.take(x), o.take(dy)
    if t is None:
        t1, t2 = o.by.linear(x, w[0], u[0]), o.by.linear(x, w[2], u[2])
    else:
        t1, t2 = t.chunk(2, 1)
    silu, g = F.silu(t1), o.by.linear(dy, w[1].T, u[1].T)
    dt1, dt2 = _silu_backward(g * t2, t1), g * silu
    grads = [x.new_empty(0) for _ in needs]
    if needs[0]:
        grads[0] = o.put(o.by.linear(dt1, w[0].T, u[0].T).add_(o.by.linear(dt2, w[2].T, u[2].T)))
    for at, left, right in ((1, dt1, x), (2, dy, silu * t2), (3, dt2, x)):
        if needs[at] or needs[at + 3]:
            grads[at], grads[at + 3] = o.by.weights(left, right, needs[at], needs[at + 3])
    return grads
