"""Test processes that share a GPU divide its memory into parts."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from common import gpu_share


def test_a_part_has_one_holder_at_a_time(tmp_path):
    """Three processes log what they take; together never more than there is, whatever they request."""
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from gpu_share import Parts
        parts = Parts(sys.argv[2], 3)
        with open(sys.argv[3], "a", buffering=1) as file:
            for n in range(8):
                with parts.take(4 if n % 3 == int(sys.argv[4]) else 1 + n % 2) as held:
                    file.write(f"+{held}\\n")
                    time.sleep(0.01)
                    file.write(f"-{held}\\n")
    """
    log = tmp_path / "log"
    arguments = [str(Path(__file__).resolve().parents[1] / "common"), str(tmp_path / "parts"), str(log)]
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    processes = [subprocess.Popen([*command, str(n)]) for n in range(3)]
    assert [p.wait(timeout=120) for p in processes] == [0, 0, 0]
    held, changes = 0, [int(line) for line in log.read_text().split()]
    for change in changes:
        held += change
        assert 0 <= held <= 3
    assert len(changes) == 48
    assert {1, 2, 3} <= set(changes)


@pytest.fixture
def share(monkeypatch, tmp_path):
    """One of four processes on a simulated GPU of 80 GiB; also the list of memory fractions that it sets."""
    fractions = []
    made = gpu_share.Share.__new__(gpu_share.Share)
    made.total, made.fair, made.parts = 80 * 2**30, 18.5 * 2**30, gpu_share.Parts(tmp_path, 4)
    made._limit = fractions.append
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    return made, fractions


def test_a_test_gets_a_fair_share_or_what_it_needs(share):
    made, fractions = share
    assert made.run(lambda: 7) == 7
    made.run(lambda: None, needs=30 * 2**30)
    made.run(lambda: None, needs=200 * 2**30)
    assert fractions == [18.5 / 80, 37 / 80, 1]


def test_a_call_that_runs_out_of_memory_is_repeated_alone(share):
    made, fractions = share

    def work():
        if len(fractions) < 2:
            raise torch.OutOfMemoryError("no")
        return len(fractions)

    assert made.run(work) == 2
    assert fractions == [18.5 / 80, 1]

    def never():
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError):
        made.run(never)
