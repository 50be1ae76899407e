"""The timers of commands and plans: launches queued before the GPU runs, and more rounds on a disturbed host."""

import pytest
import torch

from matmuls import measure


class Event:
    """A CUDA event of a simulated GPU that has woken, when queried, according to `woken`."""

    woken = iter(())

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def query(self):
        return next(Event.woken)


@pytest.mark.parametrize(("woken", "slept"), [([False], 1), ([True, False], 2), ([True] * 3, 3)])
def test_a_measurement_is_repeated_if_the_gpu_wakes_too_early(woken, slept, monkeypatch):
    sleeps, calls = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.append)
    monkeypatch.setattr(Event, "woken", iter(woken))
    measure._around_two(lambda: calls.append(0))
    assert len(sleeps) == slept
    assert sleeps == sorted(sleeps)
    assert len(calls) == 2 * slept


@pytest.mark.cuda
def test_the_time_of_a_call_excludes_its_launch():
    """Launching 30 products of small matrices takes the host far longer than the first sleep."""
    x = torch.randn(64, 64, device="cuda")

    def run():
        for _ in range(30):
            torch.mm(x, x)

    graph = measure.graph_of([run])
    (launched,) = measure.time_warm([run], "cuda", 5)
    (replayed,) = measure.time_warm([graph.replay], "cuda", 5)
    assert launched.seconds < 3 * replayed.seconds


@pytest.mark.parametrize(("disturbed", "rounds"), [(0, 5), (7, None), (10**9, 20)])
def test_more_rounds_while_the_host_is_disturbed(disturbed, rounds, monkeypatch):
    calls, now = [], [0.0]

    def run():
        calls.append(0)
        now[0] += 2.0 if len(calls) <= disturbed and len(calls) % 2 else 1.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    (timing,) = measure.time_of_whole([run], "cpu", 5)
    assert 5 <= len(calls) - 1 <= 20
    assert rounds is None or len(calls) - 1 == rounds
    assert timing.seconds <= 2.0


@pytest.mark.parametrize("timed", ["on a CPU", "warm"])
def test_rounds_alternate(timed):
    """So that changes of the machine's speed affect all rivals equally."""
    order = []
    first, second = (lambda: order.append("first")), (lambda: order.append("second"))
    if timed == "warm":
        measure.time_warm([first, second], "cpu", 4)
    else:
        measure.time_on_cpu([[first], [second]], restore=lambda: None)
        del order[:2]  # the calls that estimate the duration
    assert order[:8] == ["first", "second", "second", "first"] * 2
