"""benchmarks/scripts/traffic.py: a wrong result, an exception and a thread that stands still end the run."""

import random
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("tokenizers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/scripts"))
import traffic

from matmuls.integrations.sentence_transformers import optimize


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An optimized model and an eager one with equal weights."""
    folder = tmp_path_factory.mktemp("traffic")
    traffic.save("cpu", folder)
    ours, eager = (traffic.made("cpu", torch.float32, folder) for _ in range(2))
    eager[0].model.set_attn_implementation("eager")
    optimize(ours)
    return ours, eager


def sent(pair, tolerance, requests):
    """What a thread leaves after some requests, each of which is checked."""
    found = traffic.Traffic([0.0])
    right = traffic.answer

    def counting(*args, **kwargs):
        if len([*found.latencies["encode"], *found.latencies["packed"]]) >= requests:
            found.stop.set()
        return right(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "answer", counting)
        traffic.sends(0, found, *pair, "cpu", 1, tolerance)
    return found


def test_right_results_pass(pair):
    found = sent(pair, 1e-5, 8)
    assert found.failure is None
    assert found.counts["checked"] >= 8
    assert 0 < max(found.worst.values()) < 1e-5
    assert traffic.percentiles(found.latencies["encode"])["p99"] > 0


def test_a_wrong_result_fails(pair):
    weight = pair[0][0].model.encoder.layer[0].output.dense.weight
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        found = sent(pair, 1e-5, 50)
    finally:
        with torch.no_grad():
            weight.div_(1.5)
    assert "from eager in request 1 of thread 0" in found.failure
    assert found.counts["checked"] == 1


def test_an_exception_fails():
    found = traffic.Traffic([0.0])
    traffic.sends(0, found, None, None, "cpu", 1, 1.0)
    assert "thread 0, request 1: Traceback" in found.failure
    assert found.stop.is_set()


def test_a_thread_that_stands_still_fails(monkeypatch):
    monkeypatch.setattr(traffic, "STILL", 0.3)
    found = traffic.Traffic([time.monotonic(), time.monotonic() + 100])
    rows = traffic.watched(found, 1.0, "cpu", time.monotonic())
    assert found.failure == "threads [0] stand still since 0.3 s"
    assert len(rows) == 2
    assert all(row["rss_bytes"] > 1 << 20 for row in rows)


def test_requests_are_of_all_kinds():
    draw = random.Random(0)
    requests = [traffic.drawn(draw, "cuda", n) for n in range(1, 401)]
    lengths = [[len(ids) for ids in r.texts] for r in requests]
    assert {r.kind for r in requests} == {*traffic.KINDS}
    assert sum(max(n) == 512 for n in lengths) >= 10
    assert min(map(min, lengths)) >= 2
    assert max(map(max, lengths)) == 512
    assert {len(n) for n in lengths} >= {1, 2, 8, 32}
