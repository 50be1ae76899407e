"""What the tests of triangular systems share."""

import pytest
import torch

every_way = pytest.mark.parametrize("upper", [False, True])
every_transpose = pytest.mark.parametrize("transpose", [False, True])
every_unit = pytest.mark.parametrize("unit", [False, True])


def square(n, density=0.3, dtype=torch.float64, device="cpu", seed=0):
    """Both triangles, with a diagonal that dominates its row and column."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(n, n, generator=generator, dtype=torch.float64) - 0.5
    dense *= torch.rand(n, n, generator=generator) < density
    dense.diagonal().copy_(2 + torch.rand(n, generator=generator) + dense.abs().sum(0) + dense.abs().sum(1))
    return dense.to(dtype).to(device)


def by_torch(dense, b, upper, transpose, unit):
    triangle = dense.triu() if upper else dense.tril()
    upper, triangle = (not upper, triangle.mT) if transpose else (upper, triangle)
    columns = b.unsqueeze(-1) if b.dim() == 1 else b
    return torch.linalg.solve_triangular(triangle, columns, upper=upper, unitriangular=unit).view(b.shape)


def drawn(n, *columns, dtype=torch.float64, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *columns, generator=generator, dtype=torch.float64).to(dtype).to(device)
