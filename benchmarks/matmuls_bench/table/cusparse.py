"""Table rows of the custom_mm functions that call one cuSPARSE routine each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import custom_mm
from custom_mm.indices import check_parts

from .sparse import SPARSE
from .spec import Bad, Call, Draw, Spec

_ops = torch.ops.custom_mm
DETERMINISTIC = {"csr": "csr_alg3", "csc": "default", "coo": "coo_alg2", "bsr": "bsr_alg1"}  # csc has none
WIDE = (torch.float64, torch.float32)


@dataclass(frozen=True)
class _Matrix:
    """A sparse matrix without its values; places: row and column of each value."""

    layout: str
    offsets: Tensor
    indices: Tensor
    shape: tuple[int, int]
    places: tuple[Tensor, Tensor]
    values_shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.offsets, self.indices

    def places_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`places` on the device where a reference computes, which may differ from the matrix's."""
        return self.places[0].to(device), self.places[1].to(device)


def _matrix(draw: Draw, rows: int, columns: int, layout: str) -> _Matrix:
    """A random matrix, about a third full. BSR: blocks of 2 x 2 if both sizes are even, else 1 x 1."""
    block = (2, 2) if layout == "bsr" and rows % 2 == columns % 2 == 0 else (1, 1)
    chosen = Draw(torch.float64, "cpu", rows * 1000 + columns)(rows // block[0], columns // block[1]) > 0.4
    stored = chosen.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1).to(draw.device)
    numbered = torch.where(stored, torch.arange(1.0, rows * columns + 1, device=draw.device).view(rows, columns), 0)
    if layout == "coo":
        sparse = numbered.to_sparse().coalesce()
        offsets, indices = (t.contiguous() for t in sparse.indices())
    else:
        sparse = getattr(numbered, f"to_sparse_{layout}")(*((block,) if layout == "bsr" else ()))
        by_rows = layout != "csc"
        offsets = sparse.crow_indices() if by_rows else sparse.ccol_indices()
        indices = sparse.col_indices() if by_rows else sparse.row_indices()
    values = sparse.values()
    place = values.reshape(-1).long() - 1
    places = (place // max(columns, 1), place % max(columns, 1))
    made = _Matrix(layout, offsets, indices, (rows, columns), places, tuple(values.shape))
    block = made.values_shape[1:] if layout == "bsr" else (1, 1)
    # later calls reuse this check without a sync
    check_parts("_matrix", layout, offsets, indices, rows, columns, *block)
    return made


def _dense_of(values: Tensor, m: _Matrix) -> Tensor:
    return values.new_zeros(m.shape).index_put(m.places_on(values.device), values.reshape(-1))


def _spmm(values: Tensor, b: Tensor, m: _Matrix, **kwargs: Any) -> Tensor:
    algorithm = "default" if kwargs.get("transa") else DETERMINISTIC[m.layout]
    return custom_mm.cusparse_spmm(*m.parts, values, b, *m.shape, layout=m.layout, algorithm=algorithm, **kwargs)


def _spmm_reference(
    values: Tensor, b: Tensor, m: _Matrix, transa: bool = False, transb: bool = False, alpha: float = 1
) -> Tensor:
    a = _dense_of(values, m)
    return alpha * ((a.mT if transa else a) @ (b.mT if transb else b))


SHAPES = [(6, 4, 3), (1, 1, 1), (9, 17, 8), (34, 20, 64)]


def _spmm_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in SHAPES:
        for layout in DETERMINISTIC:
            if layout == "bsr" and draw.device != "cpu":
                continue  # cuSPARSE may not support this block size and dtype: see tests/sparse/test_cusparse.py
            m = _matrix(draw, rows, columns, layout)
            yield Call((draw(*m.values_shape), draw(columns, n), m), {"alpha": 0.5})
            yield Call((draw(*m.values_shape), draw(n, columns), m), {"transb": True})
        if draw.device == "cpu" or draw.dtype in WIDE:  # cuSPARSE may accumulate op(A) = A^T in 16 bits
            m = _matrix(draw, rows, columns, "csr")
            yield Call((draw(*m.values_shape), draw(rows, n), m), {"transa": True})


def _spmm_bad(draw: Draw) -> Iterator[Bad]:
    m = _matrix(draw, 6, 5, "csr")
    values = draw(*m.values_shape)
    yield Bad(Call((values, draw(6, 3), m)), r"cusparse_spmm: expected dense of shape \[5, n\]")
    yield Bad(Call((values, draw(2, 5, 3), m)), "cusparse_spmm: expected dense to be a matrix")
    yield Bad(Call((values, draw(5, 3).long(), m)), "cusparse_spmm: expected dense of a floating-point dtype")
    other = torch.float32 if draw.dtype != torch.float32 else torch.float64
    yield Bad(Call((values.to(other), draw(5, 3), m)), "cusparse_spmm: expected values to be a strided tensor in")


def _spmm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    for layout in DETERMINISTIC:
        if layout == "bsr" and draw.device != "cpu":
            continue
        m = _matrix(draw, 6, 4, layout)
        values = draw(*m.values_shape).requires_grad_()
        yield _ops.cusparse_spmm.default, (*m.parts, values, draw(4, 3).requires_grad_(), 6, 4, layout)
        yield _ops.cusparse_spmm.default, (*m.parts, values, draw(4, 3), 6, 4, layout, DETERMINISTIC[layout])
        if layout == "csr":
            yield _ops.cusparse_spmm.default, (*m.parts, values, draw(3, 6), 6, 4, layout, "default", True, True, 0.5)
            yield _ops.cusparse_prepare.default, (*m.parts, values.detach(), draw(4, 3), 6, 4, layout)


def _mmul(values: Tensor, b: Tensor, m: _Matrix) -> Tensor:
    return custom_mm.cusparse_mmul(values, m.indices, m.offsets, m.indices.shape[0], *m.shape, b)


def _mmul_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in SHAPES:
        m = _matrix(draw, rows, columns, "csr")
        yield Call((draw(*m.values_shape), draw(columns, n), m))


def _mmul_bad(draw: Draw) -> Iterator[Bad]:
    m = _matrix(draw, 6, 5, "csr")
    yield Bad(Call((draw(*m.values_shape), draw(6, 3), m)), r"cusparse_spmm: expected dense of shape \[5, n\]")


def _empty(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        m = _matrix(draw, rows, columns, "csr")
        yield Call((draw(*m.values_shape), draw(columns, n), m))


def _sddmm_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in SHAPES:
        yield Call((draw(rows, n), draw(n, columns), _matrix(draw, rows, columns, "csr")), {"alpha": 0.5})


def _sddmm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    m = _matrix(draw, 6, 4, "csr")
    yield _ops.cusparse_sddmm.default, (*m.parts, draw(6, 3).requires_grad_(), draw(3, 4).requires_grad_(), 0.5)


PRODUCT: dict[str, Any] = {"operators": (_ops.cusparse_spmm.default,), "static": True} | SPARSE
TABLE: tuple[Spec, ...] = (
    Spec(
        name="cusparse_spmm",
        summary="`custom_mm.cusparse_spmm(offsets, indices, values, b, rows, columns, ...)`: op(A) @ op(b) by "
        "cusparseSpMM, A as CSR, CSC, COO or BSR",
        call=_spmm,
        reference=_spmm_reference,
        samples=_spmm_samples,
        bad=_spmm_bad,
        empty=_empty,
        opchecks=_spmm_opchecks,
        **PRODUCT | {"operators": (_ops.cusparse_spmm.default, _ops.cusparse_spmm.out, _ops.cusparse_prepare.default)},
    ),
    Spec(
        name="cusparse_mmul",
        summary="`custom_mm.cusparse_mmul(values, columns, offsets, nnz, rows, cols, b, c)`: A @ b by cusparseSpMM, "
        "A as CSR",
        call=_mmul,
        reference=_spmm_reference,
        samples=_mmul_samples,
        bad=_mmul_bad,
        empty=_empty,
        opchecks=_spmm_opchecks,
        **PRODUCT,
    ),
    Spec(
        name="cusparse_sddmm",
        summary="`custom_mm.cusparse_sddmm(offsets, columns, a, b)`: a @ b where A has nonzeros, by cusparseSDDMM",
        call=lambda a, b, m, alpha=1: custom_mm.cusparse_sddmm(m.offsets, m.indices, a, b, alpha=alpha),
        reference=lambda a, b, m, alpha=1: alpha * (a @ b)[m.places_on(a.device)],
        samples=_sddmm_samples,
        bad=lambda draw: iter(
            [
                Bad(
                    Call((draw(5, 3), draw(3, 5), _matrix(draw, 6, 5, "csr"))),
                    r"cusparse_sddmm: expected a of shape \[6, n\]",
                )
            ]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 3), _matrix(draw, 0, 3, "csr")))]),
        opchecks=_sddmm_opchecks,
        # cuSPARSE does not guarantee 16-bit types here: see tests/sparse/test_cusparse.py
        **PRODUCT | {"operators": (_ops.cusparse_sddmm.default,), "dtypes": WIDE, "autocast": False},
    ),
)
