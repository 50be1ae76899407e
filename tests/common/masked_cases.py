"""What the tests of masked share."""

import torch
import torch._dynamo.testing


def masks(m, device="cpu"):
    r = torch.arange(m, device=device)
    yield from (r < 0, r >= 0, r == m // 2, (r >= m // 5) & (r < m // 5 + m // 2), r * 32 // m % 2 == 1)
    yield torch.rand(m, generator=torch.Generator().manual_seed(m)).to(device) < 0.5


def draw(*shape, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).div_(shape[-1] ** 0.5).to(dtype).to(device)


def close(x, truth, dtype, terms=0):
    """Within four roundings; in float32, for sequential sums of `terms` terms, sqrt(terms) more."""
    assert x.isfinite().all()
    off = (x.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    assert off <= (4 + (terms**0.5 if dtype == torch.float32 else 0)) * torch.finfo(dtype).eps
