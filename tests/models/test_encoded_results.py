"""Vectors of SentenceTransformer.encode on a GPU: the order, dtype and device of rows that come batch by batch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from common.sentence_cases import small, texts
from matmuls.integrations.sentence_transformers import optimize, results
from matmuls.integrations.transformers import graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("to_cpu", [False, True])
def test_rows_are_in_the_order_of_the_inputs(to_cpu, dtype, device, monkeypatch):
    monkeypatch.setattr(results, "AHEAD", 3)
    rows = torch.randn(1000, 65).to(device, dtype)
    order = torch.randperm(len(rows))
    found = results.Collected(len(rows), to_cpu)
    parts = [(numbers.tolist(), numbers.to(device)) for numbers in order.split(37)]
    coming = []
    for numbers, places in parts:  # nothing here waits for the GPU
        some = rows[places]
        if device == "cuda":
            torch.cuda._sleep(2_000_000)  # the rows come about a millisecond later
        found.add(some, numbers, places)
        coming.append(len(found._coming))
    assert max(coming) == (3 if to_cpu and device == "cuda" else 0)
    result = found.all()
    assert result.device.type == ("cpu" if to_cpu else device)
    assert not result.is_pinned()  # the memory that was pinned goes back to torch
    assert result.dtype == (torch.float32 if to_cpu and dtype == torch.bfloat16 else dtype)
    assert torch.equal(result, rows.to(result))


def test_no_rows():
    assert results.Collected(0, True).all() is None


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_vectors_on_a_gpu(dtype, tmp_path, monkeypatch):
    """With captured passes in the dtypes that have them, tokenized in another thread."""
    monkeypatch.setattr(results, "AHEAD", 2)
    given = texts(1500)
    exact, stock, ours = (small("bert", tmp_path) for _ in range(3))
    for st in (stock, ours):
        st.to("cuda").to(dtype)
    handle = optimize(ours, tokens_per_batch=1024)
    right = exact.encode(given)
    allowed = 2 * np.abs(stock.encode(given) - right).max() + 1e-6
    for _ in range(3):
        found = ours.encode(given)
        assert (type(found), found.dtype) == (np.ndarray, stock.encode(given[:2]).dtype)
        assert np.abs(found - right).max() <= allowed
        before = found.copy()
        ours.encode(given[::-1])
        assert np.array_equal(found, before)
    kept = ours.encode(given, convert_to_tensor=True)
    assert (kept.device.type, kept.dtype) == ("cuda", dtype)
    assert np.abs(kept.float().cpu().numpy() - right).max() <= allowed
    assert (handle.encoder.graphs > 0) == (dtype != torch.float32)
    handle.undo()


@pytest.mark.cuda
def test_vectors_while_another_thread_captures(tmp_path):
    """In torch's default mode of capture, in which other threads may not ask for events, as pinned memory does."""
    ours, given = small("bert", tmp_path).to("cuda").to(torch.bfloat16), texts(600)
    optimize(ours, tokens_per_batch=1024)
    for _ in range(2):
        right = ours.encode(given)  # captures the model's passes
    begun, encoded, x = threading.Event(), threading.Event(), torch.zeros(8).cuda()
    graph, pools, ended = torch.cuda.CUDAGraph(), graphs.Graphs(), []
    pools._pool = torch.cuda.graph_pool_handle()

    def capture():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            graph.capture_begin(pool=pools._pool, capture_error_mode="global")
            try:
                x.add_(1)
                begun.set()
                ended.append(encoded.wait(60))
            finally:
                pools._end(graph)  # torch is left as it was, also if the capture has failed

    with ThreadPoolExecutor(1) as other:
        captured = other.submit(capture)
        try:
            assert begun.wait(60)
            found = ours.encode(given)
        finally:
            encoded.set()
        captured.result()
    assert ended == [True]  # the capture lasted as long as encode
    graph.replay()
    assert x.tolist() == [1.0] * 8
    assert np.array_equal(found, right)
