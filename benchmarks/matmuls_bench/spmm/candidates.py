"""The ways to compute A @ B that `matmuls spmm` compares: matmuls, cuSPARSE, torch.sparse, scipy and dense products."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import custom_mm
from matmuls import sparse

from ..matrices import Matrix
from .cases import DENSE, PLAN, PLANLESS, SCIPY, SEMI, TORCH

CUSPARSE = ("csr_alg1", "csr_alg2", "csr_alg3", "coo_alg1", "coo_alg2", "coo_alg3", "coo_alg4")
RIVALS = (*(f"cusparse {algorithm}" for algorithm in CUSPARSE), TORCH, SCIPY, DENSE, SEMI)
PREPARED = ("csr_alg1", "csr_alg3")  # algorithms that cusparseSpMM_preprocess speeds up
DENSE_ELEMENTS = 2**26  # largest rows * columns of A for which the dense product is timed
Product = Callable[[], Any]


def rivals_named(names: Sequence[str]) -> tuple[str, ...]:
    """The entries of RIVALS with these names; a first word such as cusparse selects all of a library's. ValueError on
    others."""
    for name in names:
        if not any(name in (rival, rival.split()[0]) for rival in RIVALS):
            raise ValueError(f"one of cusparse, {', '.join(RIVALS)}, got {name}")
    return tuple(rival for rival in RIVALS if rival in names or rival.split()[0] in names)


class Operands:
    """A matrix on a device in a dtype, as CSR, as COO rows and (`full`) dense."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, device: str) -> None:
        self.matrix, self.dtype, self.device = matrix, dtype, device
        self.crow, self.col = matrix.crow.to(device), matrix.col.to(device)
        generator = torch.Generator().manual_seed(0)
        values = matrix.values
        if values is None:
            values = torch.randn(matrix.nnz, generator=generator)
        self.values = values.to(dtype).to(device)
        self.csr = self.as_csr(self.values)
        self.row = torch.repeat_interleave(
            torch.arange(matrix.shape[0], dtype=self.col.dtype, device=device), self.crow.diff().long()
        )

    def as_csr(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.crow, self.col, values, self.matrix.shape, check_invariants=False)

    def dense_side(self, n: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randn(self.matrix.shape[1], n, generator=generator, device=self.device).to(self.dtype)

    def floor_bytes(self, n: int) -> int:
        rows, touched = self.matrix.shape[0], int(torch.bincount(self.col).count_nonzero())
        indices = self.crow.nbytes + self.col.nbytes
        return indices + self.values.nbytes + (touched + rows) * n * self.dtype.itemsize

    @property
    def fits_dense(self) -> bool:
        return self.matrix.shape[0] * self.matrix.shape[1] <= DENSE_ELEMENTS

    def full(self) -> Tensor:
        """The dense matrix; duplicates are summed."""
        full = torch.zeros(self.matrix.shape, dtype=self.dtype, device=self.device)
        return full.index_put_((self.row.long(), self.col.long()), self.values, accumulate=True)


def _cusparse(m: Operands, b: Tensor, algorithm: str) -> Product:
    layout = algorithm[:3]
    arguments = m.crow if layout == "csr" else m.row, m.col, m.values, b, *m.matrix.shape
    options: dict[str, Any] = {"layout": layout, "algorithm": algorithm}
    if algorithm in PREPARED:
        options["prepared"] = custom_mm.cusparse_prepare(*arguments, **options)
    return partial(custom_mm.cusparse_spmm, *arguments, **options)


def _scipy(m: Operands, b: Tensor) -> Product:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    a = csr_array((m.values.numpy(), m.col.numpy(), m.crow.numpy()), shape=m.matrix.shape)
    other = b.numpy()
    return lambda: torch.from_numpy(a @ other)


def _full(m: Operands, made: sparse.SparsePlan) -> Tensor:
    """The dense matrix: the plan's copy of it, if it has one, lest places in memory be compared. One kernel took .95 to
    1.05 of its time by another copy of 4096 x 4096 numbers, and by each the same again within half a percent (H100)."""
    kept = made._selector.tensors if made._selector else []
    own = (t for t in kept if (t.shape, t.dtype) == (m.matrix.shape, m.dtype) and t.is_contiguous())
    found = next(own, None)
    return m.full() if found is None else found


def _candidates(m: Operands, b: Tensor, made: sparse.SparsePlan) -> Iterator[tuple[str, Callable[[], Product]]]:
    """Pairs of a candidate's name and a function that prepares its product; that one may raise."""
    yield PLAN, lambda: partial(made.__matmul__, b)
    yield PLANLESS, lambda: partial(sparse.spmm, m.csr, b)
    if m.device == "cuda":
        for algorithm in CUSPARSE:
            yield f"cusparse {algorithm}", partial(_cusparse, m, b, algorithm)
    elif m.dtype in (torch.float32, torch.float64):
        yield SCIPY, partial(_scipy, m, b)
    yield TORCH, lambda: partial(torch.matmul, m.csr, b)
    if m.fits_dense:
        yield DENSE, lambda: partial(torch.matmul, _full(m, made), b)
        if m.device == "cuda" and m.dtype.itemsize == 2 and made._pattern.beyond_two == 0:
            yield SEMI, lambda: partial(torch.matmul, torch.sparse.to_sparse_semi_structured(m.full()), b)
