"""Fixtures of the tests of sparse products."""

import pytest

from common import layout_references
from matmuls import timing
from matmuls.sparse import race, selector


@pytest.fixture
def dense_wins(monkeypatch):
    """The last candidate measures as the fastest; yields the numbers of candidates of each measurement."""
    measured = []

    def time(runs, device, rounds):
        measured.append(len(runs))
        return [timing.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))]

    monkeypatch.setattr(race, "time_warm", time)
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *args: {})
    return measured


@pytest.fixture
def layouts_on_cpu():
    """Layouts that only GPUs have, in torch, for tests of the Python code that calls them."""
    with layout_references.on_cpu():
        yield
