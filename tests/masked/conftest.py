"""Fixtures of the tests of masked products."""

import pytest
import torch


@pytest.fixture
def poisoned():
    """Every torch.empty starts as NaN: an unwritten row fails the comparison."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
