import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


def pytest_generate_tests(metafunc):
    """A test that asks for `device` runs on the CPU and, marked `cuda`, on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)
