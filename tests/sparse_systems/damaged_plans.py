"""Loads pickled plans with one damaged field and multiplies by them; test_damaged_pickles.py runs this in a separate
process, as a wrong index could end it.

Usage: python damaged_plans.py LOG. LOG gets a line before each load: its last line names what ended the process.
"""

import faulthandler
import io
import pickle
import sys
import warnings

import torch

from matmuls import plan, plan_solve, plan_spgemm
from matmuls.sparse.pickled import reduced
from matmuls.sparse.plan import SparsePlan

ROWS, COLUMNS = 32, 48
REFUSED = (ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError, OverflowError)


def matrix():
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS, dtype=torch.float64) * (torch.rand(ROWS, COLUMNS) < 0.3)


def plans():
    """Plans after products, with all that they keep."""
    a = matrix()
    blocked = a * (torch.rand(2, 3) < 0.7).repeat_interleave(16, 0).repeat_interleave(16, 1)
    made = {
        "csr": plan(a.to_sparse_csr()),
        "constant": plan(a.to_sparse_csr(), constant=True),
        "csc": plan(a.to_sparse_csc(), constant=True),
        "coo": plan(a.to_sparse_coo()),
        "bsr": plan(blocked.to_sparse_bsr((16, 16))),
        "bsc": plan(blocked.to_sparse_bsc((16, 16))),
        "trained": plan(a.to_sparse_csr().requires_grad_()),
        "batch": plan(torch.stack([a, a]).to_sparse_csr()),
    }
    for name, one in made.items():
        b = torch.randn(COLUMNS, 5, dtype=torch.float64, requires_grad=name != "batch")
        (one @ b).sum()
        if name != "batch":
            (one @ b).sum().backward()
            torch.ones(2, ROWS, dtype=torch.float64) @ one
    return made


def damaged_tensors(t):
    """What a file may hold in place of indices or values."""
    yield None
    yield "x"
    yield t.tolist()
    yield t.to("meta")
    yield t.double() if t.dtype != torch.float64 else t.long()
    yield t.to(torch.int64 if t.dtype == torch.int32 else torch.int32)
    for changed in (t[:0], t[:-1], t[1:], torch.cat([t, t[-1:]]), t[None], t.flip(0), torch.zeros_like(t)):
        yield changed
    yield torch.stack([t, t], 1)[:, 0]
    yield t.to_sparse()
    yield t[:1].expand(t.shape)
    for place in (0, t.shape[0] // 2, -1):
        for value in (-1, 0, 1, 31, 47, 48, 10**6, 2**31 - 1, -(2**31)):
            changed = t.clone()
            changed[place] = value
            yield changed


def damaged_sparse(a):
    crow, col, values = (t.detach() for t in (a.crow_indices(), a.col_indices(), a.values()))
    yield a.to_dense().detach()
    yield a.detach().mT
    for wrong_crow, wrong_col in ((crow.flip(0), col), (crow, col + 10**6), (crow, col.flip(0)), (crow * 2, col)):
        made = torch.sparse_csr_tensor(wrong_crow, wrong_col, values, a.shape, check_invariants=False)
        yield made.requires_grad_()


def damaged(value):
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        yield from damaged_sparse(value)
        return
    if isinstance(value, torch.Tensor):
        yield from damaged_tensors(value)
        return
    yield None
    yield "x"
    yield 1.5
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (-1, 0, 1, value - 1, value + 1, 2**31, 2**40, -(2**63))
    elif isinstance(value, tuple):
        yield from ((), (3,), (COLUMNS, ROWS), (ROWS, COLUMNS + 1), (2, ROWS, COLUMNS), (-1, -1))
    yield value


def fields(x, path=()):
    """Every value that a pickle holds, within tuples too, with the way to it."""
    if path:
        yield path, x
    if isinstance(x, tuple):
        for i, one in enumerate(x):
            yield from fields(one, (*path, i))


def replaced(x, path, value):
    if not path:
        return value
    return (*x[: path[0]], replaced(x[path[0]], path[1:], value), *x[path[0] + 1 :])


class Damaging(pickle.Pickler):
    """Pickles an object with a value of the first plan in it replaced."""

    def __init__(self, file, path, value):
        super().__init__(file)
        self._path, self._value, self._done = path, value, False

    def reducer_override(self, found):
        if type(found) is not SparsePlan or self._done:
            return NotImplemented
        self._done = True
        function, given = reduced(found)
        return function, replaced(given, self._path, self._value)


def reloaded(made, path, value):
    file = io.BytesIO()
    Damaging(file, path, value).dump(made)
    return pickle.loads(file.getvalue())


def dense_of(made):
    """The matrix that the plan's indices and values are now, one matrix or a batch on a diagonal."""
    p, values = made._pattern, made.values.detach()
    full = torch.zeros(p.rows, p.columns, dtype=values.dtype)
    full.index_put_((p.row.long(), p.col.long()), values if p.order is None else values[p.order.long()], True)
    return full


def products(made):
    """The products of a loaded plan and their gradients are those of its own indices."""
    if made._pattern.batch is not None:
        b = torch.randn(*made.shape[:-2], made.shape[-1], 3, dtype=made.dtype)
        close((made @ b).flatten(0, -2), dense_of(made) @ b.flatten(0, -2))
        return
    b = torch.randn(made.shape[-1], 5, dtype=made.dtype, requires_grad=True)
    grad = torch.randn(made.shape[-2], 5, dtype=made.dtype)
    for _ in range(2):
        y = made @ b
        close(y, dense_of(made) @ b)
        close(torch.autograd.grad(y, b, grad)[0], dense_of(made).mT @ grad)
        x = torch.randn(2, made.shape[-2], dtype=made.dtype)
        close(x @ made, x @ dense_of(made))


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def main(log):
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    refused = right = 0
    checked = [(kind, made, made, products) for kind, made in plans().items()]
    checked += [(type(made).__name__, made, made.a, check_other) for made in others()]
    for kind, made, inner, check in checked:
        for path, value in fields(reduced(inner)[1]):
            for i, wrong in enumerate(damaged(value)):
                log.write(f"{kind} {path} {i} {wrong!r:.200}\n")
                log.flush()
                try:
                    check(reloaded(made, path, wrong))
                    right += 1
                except REFUSED:
                    refused += 1
    print(f"refused {refused}, right {right}")


def others():
    a = matrix()[:, :ROWS] + 9 * torch.eye(ROWS, dtype=torch.float64)
    yield plan_spgemm(a.to_sparse_csr(), a.to_sparse_csc())
    yield plan_solve(a.to_sparse_csr(), upper=False)


def check_other(made):
    if hasattr(made, "b"):
        close(made().to_dense(), dense_of(made.a) @ dense_of(made.b))
    else:
        b = torch.randn(ROWS, 2, dtype=made.a.dtype)
        close(torch.tril(dense_of(made.a)) @ made(b), b)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as opened:
        main(opened)
