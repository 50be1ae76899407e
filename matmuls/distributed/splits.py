"""Row ranges for the ranks of a distributed matrix, balanced by nonzeros, with an order that sends less on request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
import torch

from .group import even, starts_of

NAME = "distributed.split"
Order = Literal["rcm", "metis"]


@dataclass(frozen=True)
class Split:
    """Which rows of a matrix each rank has.

    Attributes:
        sizes: how many rows each rank has, one range after another.
        permutation: [rows] or None; row i of the reordered matrix is row permutation[i] of the given one. Its columns
            are reordered alike, and so are the rows of x and y.

    Examples:
        >>> import torch, matmuls.distributed
        >>> a = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]).to_sparse_csr()
        >>> matmuls.distributed.split(a, 2).sizes
        (1, 2)
    """

    sizes: tuple[int, ...]
    permutation: torch.Tensor | None = None


def split(
    A: torch.Tensor,
    parts: int,
    by: Literal["nonzeros", "rows"] = "nonzeros",
    reorder: Order | None = None,
) -> Split:
    """Cuts the rows of a sparse matrix into ranges, one for each rank.

    Args:
        A: [M, K] a sparse tensor. Only its indices are used.
        parts: how many ranges.
        by: "nonzeros" gives each rank about equally many nonzeros, "rows" as many rows as Shard(0) of DTensor does.
        reorder: "rcm" orders a square matrix by reverse Cuthill-McKee first, which puts neighbours next to each other;
            "metis" cuts its graph by METIS into parts with few edges between them (pip install pymetis), and orders
            each part by reverse Cuthill-McKee.

    Returns:
        A `Split`, for `local_rows`.

    Raises:
        ValueError: on another `by` or `reorder`, parts below 1, and if a matrix to reorder is not square.
        TypeError: if A is not a sparse tensor.
        ImportError: if reorder is "metis" and pymetis is not installed.

    Examples:
        >>> import torch, matmuls.distributed
        >>> path = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]).to_sparse_csr()
        >>> matmuls.distributed.split(path, 2, reorder="rcm")
        Split(sizes=(2, 1), permutation=tensor([1, 2, 0]))
    """
    if parts < 1:
        raise ValueError(f"{NAME}: expected at least one part, got {parts}")
    if by not in ("nonzeros", "rows"):
        raise ValueError(f'{NAME}: expected by to be "nonzeros" or "rows", got {by!r}')
    if reorder not in (None, *_ORDERS):
        raise ValueError(f'{NAME}: expected reorder to be "rcm", "metis" or None, got {reorder!r}')
    csr = _csr(NAME, A)
    crow = csr.crow_indices()
    permutation = None
    if reorder is not None:
        if A.shape[0] != A.shape[1]:
            raise ValueError(f"{NAME}: expected a square matrix to reorder, got {list(A.shape)}")
        order, sizes = _ORDERS[reorder](csr, parts)
        permutation = torch.from_numpy(np.ascontiguousarray(order).astype(np.int64))
        if sizes is not None:
            return Split(tuple(sizes), permutation)
        counts = crow.diff().cpu()[permutation]
        crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if by == "rows":
        return Split(tuple(even(A.shape[0], parts)), permutation)
    return Split(tuple(balanced(crow, parts)), permutation)


def balanced(crow: torch.Tensor, parts: int) -> list[int]:
    """Sizes of ranges of rows of about equally many nonzeros. crow [rows + 1]: offsets of the rows."""
    crow = crow.cpu().long()
    wanted = torch.arange(1, parts) * int(crow[-1]) // parts
    upper = torch.searchsorted(crow, wanted).clamp_(max=crow.shape[0] - 1)
    lower = (upper - 1).clamp_(min=0)
    cuts = torch.where(wanted - crow[lower] < crow[upper] - wanted, lower, upper)  # the nearer end of the row
    rows: list[int] = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), crow.shape[0] - 1)]).diff().tolist()
    return rows


def local_rows(A: torch.Tensor, rank: int, split: Split) -> torch.Tensor:
    """Returns one rank's rows of a sparse matrix. This process must have the whole matrix.

    Args:
        A: [M, K] the sparse tensor that `split` was made of, or another of its size.
        rank: whose rows.
        split: made by `matmuls.distributed.split`. With a permutation the columns are renumbered too.

    Returns:
        [sizes[rank], K] in CSR, without a gradient.

    Raises:
        ValueError: if the split is of another number of rows, or has no such rank.
        TypeError: if A is not a sparse tensor.

    Examples:
        >>> import torch, matmuls.distributed
        >>> a = torch.tensor([[1.0, 1.0], [0.0, 2.0], [0.0, 3.0]]).to_sparse_csr()
        >>> split = matmuls.distributed.split(a, 2)
        >>> matmuls.distributed.local_rows(a, 1, split).to_dense()
        tensor([[0., 2.],
                [0., 3.]])
    """
    name = "distributed.local_rows"
    csr = _csr(name, A)
    if sum(split.sizes) != A.shape[0] or not 0 <= rank < len(split.sizes):
        raise ValueError(
            f"{name}: expected a split of {A.shape[0]} rows with rank {rank}, "
            f"got one of {sum(split.sizes)} rows for {len(split.sizes)} ranks"
        )
    begin, end = starts_of(split.sizes)[rank : rank + 2]
    crow, col, values = csr.crow_indices(), csr.col_indices(), csr.values()
    if split.permutation is None:
        first, last = int(crow[begin]), int(crow[end])
        return csr_tensor(crow[begin : end + 1] - first, col[first:last], values[first:last], (end - begin, A.shape[1]))
    order = split.permutation.to(crow.device)
    new = torch.empty_like(order)
    new[order] = torch.arange(order.shape[0], device=order.device)
    taken = order[begin:end]
    counts = crow.diff()[taken].long()
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total = int(offsets[-1])
    place = torch.arange(total, device=crow.device) + torch.repeat_interleave(crow[taken].long() - offsets[:-1], counts)
    return csr_tensor(offsets, new[col[place].long()], values[place], (end - begin, A.shape[1]))


def csr_tensor(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A sparse CSR tensor of copies of these, with indices of the dtype of col."""
    return torch.sparse_csr_tensor(crow.to(col.dtype), col.clone(), values.clone(), shape, check_invariants=False)


def _csr(name: str, a: torch.Tensor) -> torch.Tensor:
    if not isinstance(a, torch.Tensor) or a.layout == torch.strided or a.dim() != 2:
        got = f"{a.layout} of shape {list(a.shape)}" if isinstance(a, torch.Tensor) else type(a).__name__
        raise TypeError(f"{name}: expected a sparse matrix, got {got}")
    return a.detach().to_sparse_csr()


def _symmetric(csr: torch.Tensor) -> Any:
    """The graph of A + A^T for scipy, without values."""
    crow, col = (t.cpu().numpy() for t in (csr.crow_indices(), csr.col_indices()))
    a = scipy.sparse.csr_array((np.ones(col.shape, np.int8), col, crow), shape=tuple(csr.shape))
    return scipy.sparse.csr_array((a + a.T) > 0)


def _rcm(csr: torch.Tensor, parts: int) -> tuple[Any, None]:
    return scipy.sparse.csgraph.reverse_cuthill_mckee(_symmetric(csr), symmetric_mode=True), None


def _metis(csr: torch.Tensor, parts: int) -> tuple[Any, list[int]]:
    try:
        import pymetis  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(f'{NAME}: expected pymetis for reorder="metis" (pip install pymetis), got none') from error
    graph = _symmetric(csr)
    graph.setdiag(False)
    graph.eliminate_zeros()
    _, membership = pymetis.part_graph(parts, pymetis.CSRAdjacency(graph.indptr.tolist(), graph.indices.tolist()))
    member = np.asarray(membership)
    return parts_in_order(graph, member), np.bincount(member, minlength=parts).tolist()


def parts_in_order(graph: Any, member: Any) -> Any:
    """The rows of part 0, then of part 1 and so on, each part in the RCM order of its own graph, so that neighbouring
    rows read the same rows of x. graph: symmetric. member [rows]: the part of each row."""
    found = []
    for part in range(int(member.max(initial=-1)) + 1):
        rows = np.flatnonzero(member == part)
        if not rows.size:  # METIS may leave a part empty
            continue
        order = scipy.sparse.csgraph.reverse_cuthill_mckee(graph[rows][:, rows].tocsr(), symmetric_mode=True)
        found.append(rows[order])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


_ORDERS: dict[str, Callable[[torch.Tensor, int], tuple[Any, list[int] | None]]] = {"rcm": _rcm, "metis": _metis}
