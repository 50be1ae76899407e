"""What every test of PyTorch Geometric's integration begins and ends with."""

import pytest


@pytest.fixture(autouse=True)
def counted():
    """Counts from zero, and nothing is left enabled."""
    pytest.importorskip("torch_geometric")
    from matmuls.integrations import pyg

    pyg.stats(reset=True)
    yield
    assert not pyg.is_enabled()
