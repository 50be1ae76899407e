import functools
import importlib
import os

# Set before torch reads it. Spinning OpenMP threads take cores from tests that run in parallel: with -n 2 on two cores,
# 130 s instead of 6.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# Fills every torch.empty, including our results, with NaN: an unwritten element fails the comparison.
# compute-sanitizer's initcheck needs it because it does not see the writes of Hopper's bulk copies (TMA).
if os.environ.get("MATMULS_POISON"):
    torch.use_deterministic_algorithms(True)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


def pytest_generate_tests(metafunc):
    """Parametrizes `device`: the CPU and, marked `cuda`, a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


pytest.register_assert_rewrite("common")  # before its first import
share = functools.cache(importlib.import_module("common.gpu_share").share_of_environment)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """With several processes, limits each to a fair share of GPU memory, or to the test's `gpu_memory` mark (GiB)."""
    if "cuda" not in pyfuncitem.keywords or share() is None:
        return (yield)
    function, mark = pyfuncitem.obj, pyfuncitem.get_closest_marker("gpu_memory")
    pyfuncitem.obj = functools.wraps(function)(lambda **given: share().run(lambda: function(**given), needs))
    needs = mark.args[0] * 2**30 if mark else 0
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function
