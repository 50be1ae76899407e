"""What the tests of sparse products share."""

import pytest
import torch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["csr", "csc", "coo", "bsr", "bsc"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def draw_sparse(rows, columns, density, dtype=torch.float32, device="cpu", seed=0, empty=()):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    dense *= torch.rand(rows, columns, generator=generator) < density
    dense[list(empty)] = 0
    return dense.to(dtype).to(device)


def in_layout(dense, layout, index=torch.int64):
    if layout == "coo":
        return dense.to_sparse()
    blocks = next(n for n in (3, 2, 1) if dense.shape[0] % n == 0 and dense.shape[1] % n == 0)
    sizes = ((blocks, blocks),) if layout in ("bsr", "bsc") else ()
    sparse = getattr(dense, f"to_sparse_{layout}")(*sizes)
    if index == torch.int64:
        return sparse
    by_rows = layout in ("csr", "bsr")
    offsets = sparse.crow_indices() if by_rows else sparse.ccol_indices()
    inner = sparse.col_indices() if by_rows else sparse.row_indices()
    return torch.sparse_compressed_tensor(
        offsets.to(index), inner.to(index), sparse.values(), sparse.shape, layout=sparse.layout
    )


def assert_close(ours, truth, torchs, scale=None):
    """At most twice torch's error in the same dtype, plus one rounding, relative to the sum of the terms'
    magnitudes.
    """
    scale = torch.linalg.vector_norm(truth).item() if scale is None else scale
    error, theirs = (torch.linalg.vector_norm(x.double() - truth).item() for x in (ours, torchs))
    roundings = 4 if ours.dtype == torch.float64 else 1
    assert error <= 2 * theirs + roundings * torch.finfo(ours.dtype).eps * scale


def long_rows(device="cpu", index=torch.int64):
    """Rows of every length in 20,000 columns: longer than a work share, empty, a single nonzero."""
    lengths = torch.tensor([0, 1, 12000, 3, 0, 20000, 7, 65, 9000, 129, 0, 0, 2, 15000, 64, 4097, 1])
    crow = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    col = torch.cat([torch.randperm(20000, generator=generator)[:n] for n in lengths.tolist()])
    values = torch.randn(col.numel(), generator=generator, dtype=torch.float64)
    return crow.to(index).to(device), col.to(index).to(device), values.to(device), (len(lengths), 20000)
