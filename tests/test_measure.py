"""What the commands and plans measure with: launched ahead of the GPU, and for as long as the host is disturbed."""

import pytest
import torch

from matmuls import measure


class Event:
    """A GPU that has woken, when asked, by what `woken` says."""

    woken = iter(())

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def query(self):
        return next(Event.woken)


@pytest.mark.parametrize(("woken", "slept"), [([False], 1), ([True, False], 2), ([True] * 3, 3)])
def test_calls_are_launched_again_where_the_gpu_woke_before_the_host_was_done(woken, slept, monkeypatch):
    sleeps, calls = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.append)
    monkeypatch.setattr(Event, "woken", iter(woken))
    measure._around_two(lambda: calls.append(0))
    assert len(sleeps) == slept
    assert sleeps == sorted(sleeps)
    assert len(calls) == 2 * slept


@pytest.mark.cuda
def test_a_call_is_timed_without_the_time_of_its_launch():
    """30 products of small matrices take the host far longer than the sleep before the first try."""
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
    """So that what changes on the machine while they run changes for all alike."""
    order = []
    first, second = (lambda: order.append("first")), (lambda: order.append("second"))
    if timed == "warm":
        measure.time_warm([first, second], "cpu", 4)
    else:
        measure.time_on_cpu([[first], [second]], restore=lambda: None)
        del order[:2]  # a look at how long they take
    assert order[:8] == ["first", "second", "second", "first"] * 2
