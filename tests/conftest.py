import functools
import importlib
import os
from collections import Counter

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


NOT_NAMED = "not slow"  # the -m of pyproject.toml
left_out: Counter[str] = Counter()  # of a short run: "left out" and "all", the numbers of tests


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run also what `pytest` alone leaves out")


def _names_tests(config):
    """Whether the command names tests: by a path, -k, -m, --lf or --exhaustive."""
    option = config.option
    by_options = option.exhaustive or option.keyword or option.markexpr != NOT_NAMED or getattr(option, "lf", False)
    return config.args_source is config.ArgsSource.ARGS or bool(by_options)


def pytest_configure(config):
    told = getattr(config, "workerinput", None)  # a process of xdist sees other arguments than the one that started it
    config.option.exhaustive = told["exhaustive"] if told else _names_tests(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["exhaustive"] = node.config.option.exhaustive


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Processes of `-n auto`: where tests are named, this one alone; else one for each core and 8 GiB of a GPU."""
    if _names_tests(config):
        return 0
    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return cores
    return max(1, min(cores, torch.cuda.get_device_properties(0).total_memory >> 33))


def _value(value):
    """A key of a parameter's value: equal values have the same, but for values without a hash."""
    try:
        return type(value), hash(value), value
    except TypeError:
        return type(value), id(value)


def _short(items):
    """The tests of a short run: of each test, as few parametrizations as together take each value of each parameter.
    The next has the most new values, and then the least used ones. The mark `exhaustive` leaves out a test, and
    `exhaustive(keep=n)` leaves n of these parametrizations, evenly spaced.
    """
    tests = {}
    for item in items:
        mark = item.get_closest_marker("exhaustive")
        keep = mark.kwargs.get("keep", 0) if mark else len(items)
        if keep:
            values = item.callspec.params.items() if hasattr(item, "callspec") else ()
            test = tests.setdefault((item.nodeid.split("[")[0], "cuda" in item.keywords, keep), [])
            test.append((item, [(name, *_value(value)) for name, value in values]))
    kept = set()
    for (_, _, keep), rest in tests.items():
        covering = _covering(rest)
        chosen = [item for item, _ in rest if item in covering]
        kept.update(chosen[:: -(-len(chosen) // keep)])
    return [item for item in items if item in kept]


def _covering(test):
    if len(test) in map(len, map(set, zip(*(values for _, values in test), strict=True))):
        return {item for item, _ in test}  # each has a value of its own
    used, rest, found = Counter(), list(test), set()
    while rest:
        news = [sum(not used[v] for v in values) for _, values in rest]
        if used and not max(news):
            break
        worth = [(new, -sum(used[v] for v in values)) for new, (_, values) in zip(news, rest, strict=True)]
        item, values = rest.pop(worth.index(max(worth)))
        found.add(item)
        used.update(values)
    return found


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if not config.option.exhaustive:
        kept = _short(items)
        left_out.update({"left out": len(items) - len(kept), "all": len(items)})
        items[:] = kept
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if not left_out:  # every process collects all tests
        left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter):
    if left_out["left out"]:
        terminalreporter.write_line(
            f"A short run: {left_out['left out']} of {left_out['all']} tests were left out, which are longer or combine"
            " the same parameters otherwise. `pytest --exhaustive` runs all; a test or folder that you name runs whole."
        )


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
