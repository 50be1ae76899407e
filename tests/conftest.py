import functools
import os

# Before torch reads it. Threads that wait for work by spinning take the cores from the tests beside: -n 2 on two cores
# took 130 s for what takes 6 alone.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gpu_share
import pytest
import torch

# Every torch.empty, our results among them, starts as NaN: an element that nobody wrote fails the comparison.
# compute-sanitizer's initcheck needs it: it does not see what Hopper's bulk copies (TMA) write.
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
    """A test that asks for `device` runs on the CPU and, marked `cuda`, on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


share = functools.cache(gpu_share.share_of_environment)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Of several processes each has a fair share of the GPU's memory, or what a test's `gpu_memory` says, in GiB."""
    if "cuda" not in pyfuncitem.keywords or share() is None:
        return (yield)
    function, mark = pyfuncitem.obj, pyfuncitem.get_closest_marker("gpu_memory")
    pyfuncitem.obj = functools.wraps(function)(lambda **given: share().run(lambda: function(**given), needs))
    needs = mark.args[0] * 2**30 if mark else 0
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function
