"""The timers of commands and plans: launches queued before the GPU runs, and more rounds on a disturbed host."""

from functools import partial

import pytest
import torch

from matmuls.timing import _around_two
from matmuls_bench import timing


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
    _around_two(lambda: calls.append(0))
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

    graph = timing.graph_of([run])
    (launched,) = timing.time_warm([run], "cuda", 5)
    (replayed,) = timing.time_warm([graph.replay], "cuda", 5)
    assert launched.seconds < 3 * replayed.seconds


@pytest.mark.parametrize(("disturbed", "rounds"), [(0, 5), (7, None), (10**9, 20)])
def test_more_rounds_while_the_host_is_disturbed(disturbed, rounds, monkeypatch):
    calls, now = [], [0.0]

    def run():
        calls.append(0)
        now[0] += 2.0 if len(calls) <= disturbed and len(calls) % 2 else 1.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    (found,) = timing.time_of_whole([run], "cpu", 5)
    assert 5 <= len(calls) - 1 <= 20
    assert rounds is None or len(calls) - 1 == rounds
    assert found.seconds <= 2.0


@pytest.mark.parametrize("timed", ["on a CPU", "warm", "as called", "in loops"])
def test_rounds_alternate(timed, monkeypatch):
    """So that changes of the machine's speed affect all rivals equally."""
    order = []
    first, second = (lambda: order.append("first")), (lambda: order.append("second"))
    if timed == "as called":
        monkeypatch.setattr(timing, "CALLS", 1)
        timing.time_as_called("cpu", [[first], [second]])
        assert order[:6] == ["first"] * 3 + ["second"] * 3  # warm-up
        del order[:6]
    elif timed == "in loops":
        found = timing.rounds_of({"a": first, "b": second}, 4, 1, "cpu")
        assert [(name, len(seconds)) for name, seconds in found.items()] == [("a", 4), ("b", 4)]
    elif timed == "warm":
        timing.time_warm([first, second], "cpu", 4)
    else:
        timing.time_on_cpu([[first], [second]], restore=lambda: None)
        del order[:2]  # the calls that estimate the duration
    assert order[:8] == ["first", "second", "second", "first"] * 2


class Clock:
    """A GPU and its host on a clock of their own: a call takes the host `host` seconds and the GPU `gpu` seconds."""

    def __init__(self, monkeypatch):
        self.now = self.idle = 0.0
        self.waits = 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def run(self, host, gpu):
        self.now += host
        self.idle = max(self.idle, self.now) + gpu

    def wait(self):
        self.now = max(self.now, self.idle)
        self.waits += 1


@pytest.mark.parametrize(("host", "gpu", "expected"), [(5e-6, 2e-6, 5e-6), (5e-6, 40e-6, 40e-6), (5e-6, 30e-3, 30e-3)])
def test_a_call_takes_as_long_as_the_slower_of_host_and_gpu(host, gpu, expected, monkeypatch):
    clock, calls = Clock(monkeypatch), []

    def run(k):
        calls.append(k)
        clock.run(host, gpu)

    sets = [partial(run, k) for k in range(3)]
    (found,) = timing.time_as_called("cuda", [sets])
    assert found.seconds == pytest.approx(expected, rel=0.02)
    assert calls == [0, 1, 2] * (len(calls) // 3)  # in turn
    per_round = (len(calls) - 9) / 7  # without the warm-up
    assert per_round * expected > 0.8 * timing.ROUND
    assert clock.waits == 2 * (3 + 7)  # before and after each round, never between two calls


def test_a_round_is_bounded_and_restores_what_it_overwrites(monkeypatch):
    """Untimed, before every round of every rival."""
    clock, x, seen, rounds = Clock(monkeypatch), [0], [], []

    def overwrite():
        x[0] += 1
        seen.append(x[0])
        clock.run(1e-7, 0)

    def restore():
        rounds.append(x[0])
        x[0] = 0
        clock.run(1.0, 1.0)

    ours, rival = timing.time_as_called("cuda", [[overwrite], [partial(clock.run, 3e-7, 0)]], restore)
    assert max(seen) == timing.OVERWRITES
    assert len(rounds) == 2 * (3 + 7)
    assert (ours.seconds, rival.seconds) == (pytest.approx(1e-7), pytest.approx(3e-7))
    del seen[:]
    timing.time_as_called("cuda", [[overwrite]])
    assert len(seen) == 3 + 7 * timing.CALLS


@pytest.mark.parametrize(("alone", "expected", "waits"), [(False, 41e-6 / 3, 2), (True, 15e-6, 5)])
def test_a_loop_waits_at_its_end_or_after_each_call(alone, expected, waits, monkeypatch):
    """Calls of 2 us on the host and 13 us on the GPU: in a row the host is ahead, one by one it waits."""
    clock = Clock(monkeypatch)
    found = timing.seconds_of(partial(clock.run, 2e-6, 13e-6), 3, alone=alone)
    assert found == pytest.approx(expected)
    assert clock.waits == waits
