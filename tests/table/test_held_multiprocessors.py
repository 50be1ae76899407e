"""Kernels whose blocks wait for each other make progress while another stream holds most of the GPU."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import custom_mm
import matmuls
from common.held import held, seconds_beside
from common.row_cases import draw
from custom_mm import _C
from matmuls.timing import graph_of

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120, method="thread")]  # a signal cannot end a wait for the GPU
ops = torch.ops.custom_mm
SHAPES = [
    *((5632, 768), (6000, 768), (9000, 640), (8192, 1024), (20000, 256), (1024, 1024), (300, 1024), (300, 2048)),
    *((2048, 2048), (2000, 4096), (3000, 4224)),
]
HELD = [66, 116, 128]


@pytest.fixture(autouse=True)
def whole_h200():
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the numbers of held multiprocessors are those of a GPU with 132")


@pytest.mark.parametrize("multiprocessors", HELD)
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_products_in_place(rows, width, dtype, transb, multiprocessors):
    """They end, with the bits of a product that has the whole GPU."""
    torch.set_float32_matmul_precision("high")
    try:
        a, b = draw(rows, width, device="cuda", dtype=dtype), draw(width, width, device="cuda", dtype=dtype, seed=1)
        b, bias = b / width**0.5, draw(width, device="cuda", dtype=dtype, seed=2)
        expected, x = matmuls.matmul_(a.clone(), b, transb=transb, bias=bias), a.clone()
        again = matmuls.matmul_(a.clone(), b, transb=transb, bias=bias)
        torch.cuda.synchronize()
        with held(multiprocessors):
            assert seconds_beside(lambda: matmuls.matmul_(x, b, transb=transb, bias=bias)) is not None
        assert torch.equal(again, expected)
        assert torch.equal(x, expected)
        # The counters are as they were.
        assert torch.equal(matmuls.matmul_(a, b, transb=transb, bias=bias), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("multiprocessors", HELD)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [65536 + 8, 100_352, 262_144])
def test_norm_backward_of_long_rows(columns, dtype, rms, multiprocessors):
    rows = 256
    x, weight = draw(rows, columns, device="cuda", dtype=dtype), draw(columns, device="cuda", dtype=dtype, seed=1)
    grad, rstd = draw(rows, columns, device="cuda", dtype=dtype, seed=2), draw(rows, device="cuda", seed=3).abs() + 1
    expected = ops.norm_backward(grad, x, rstd, weight, rms)
    found = []
    torch.cuda.synchronize()
    with held(multiprocessors):
        assert seconds_beside(lambda: found.append(ops.norm_backward(grad, x, rstd, weight, rms))) is not None
    for got, wanted in zip(found[0], expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("multiprocessors", [66, 124])
def test_graphs_and_streams(multiprocessors):
    """Products in a graph and on three streams, while two products of each are given up in turn."""
    q = torch.linalg.qr(draw(1024, 1024, device="cuda"))[0].to(torch.bfloat16)  # orthogonal: preserves norms
    inputs = [draw(m, 1024, device="cuda", dtype=torch.bfloat16, seed=m) for m in (300, 1024, 5000)]

    def four(x):
        for _ in range(4):
            matmuls.matmul_(x, q)

    expected = [a.clone() for a in inputs]
    for x in expected:
        four(x)
    xs, ys = [a.clone() for a in inputs], [a.clone() for a in inputs]
    graph = graph_of([lambda y=y: four(y) for y in ys])
    for y, a in zip(ys, inputs, strict=True):
        y.copy_(a)
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    with held(multiprocessors):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                four(x)
        assert seconds_beside(graph.replay) is not None
        for stream in streams:
            assert seconds_beside(lambda stream=stream: torch.cuda.current_stream().wait_stream(stream)) is not None
    for x, y, wanted in zip(xs, ys, expected, strict=True):
        assert torch.equal(x, wanted)
        assert torch.equal(y, wanted)


def test_two_ranks_that_wait_for_each_other():
    """Rank 0 sends rows and waits for those of rank 1, which runs a product in place first. Both are streams here."""
    from matmuls.distributed import peers

    rows, width = 9000, 64
    counts, row_bytes = [[0, rows], [rows, 0]], width * 4
    buffers = [torch.zeros(_C.PeerRows.header + row_bytes * rows, dtype=torch.uint8, device="cuda") for _ in range(2)]
    ranks = []
    for rank in range(2):
        starts, slots = peers.places(counts, rank)
        index = torch.randint(50, (rows,), device="cuda")
        addresses = [b.data_ptr() for b in buffers]
        ranks.append(
            _C.PeerRows(
                buffer=buffers[rank], addresses=addresses, rank=rank, index=index, starts=starts, slots=slots,
                sources=[1 - rank], row_bytes=row_bytes, seconds=5.0,
            )
        )  # fmt: skip
    x = torch.randn(50, width, device="cuda")
    a, b = (
        draw(5632, 768, device="cuda", dtype=torch.bfloat16),
        draw(768, 768, device="cuda", dtype=torch.bfloat16) / 28,
    )
    expected = matmuls.matmul_(a.clone(), b)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        ranks[0].send(x)
    with torch.cuda.stream(second):
        matmuls.matmul_(a, b)
        ranks[1].send(x)
    torch.cuda.synchronize()
    assert torch.equal(a, expected)


def test_counters_of_destroyed_graphs_are_given_back():
    """A captured product uses no memory of its own, however many graphs there were before."""
    a, b = (
        draw(6000, 768, device="cuda", dtype=torch.bfloat16),
        draw(768, 768, device="cuda", dtype=torch.bfloat16) / 28,
    )
    matmuls.matmul_(a, b)
    for _ in range(3000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            matmuls.matmul_(a, b)
            allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert allocations == 0


def test_launches_after_a_first_call_in_a_green_context():
    """Tiles and grids are those of the whole GPU: what fits was asked for each context."""
    code = """
        import json, sys, torch, custom_mm, matmuls
        shapes = [(5632, 768), (6000, 768), (9000, 640), (8192, 1024), (300, 1024), (20000, 256)]
        def drawn(*shape):
            return torch.randn(*shape, device="cuda").bfloat16()
        cases = [(drawn(m, k), drawn(k, k)) for m, k in shapes]
        if sys.argv[1] == "green":
            from torch.cuda.green_contexts import GreenContext
            try:
                context = GreenContext.create(num_sms=16, device_id=0)
            except RuntimeError as error:
                print("skipped:", error)
                raise SystemExit
            context.set_context()
            for a, b in cases:
                matmuls.matmul_(a.clone(), b)
            torch.cuda.synchronize()
            context.pop_context()
        found = []
        for a, b in cases:
            e = custom_mm.explain("matmul_", a, b)
            matmuls.matmul_(a, b)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                matmuls.matmul_(a, b)
                torch.cuda.synchronize()
            grids = [x for x in json.loads(trace(profile))["traceEvents"] if x.get("cat") == "kernel"]
            found.append([e.kernel, e.launch, [g["args"]["grid"] for g in grids]])
        print(json.dumps(found))
    """
    trace = """
        import tempfile
        def trace(profile):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                profile.export_chrome_trace(file.name)
                return open(file.name).read()
    """
    results = []
    for which in ("fresh", "green"):
        script = textwrap.dedent(trace) + textwrap.dedent(code)
        run = subprocess.run([sys.executable, "-c", script, which], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        if run.stdout.startswith("skipped"):
            pytest.skip(run.stdout)
        results.append(json.loads(run.stdout.splitlines()[-1]))
    assert results[0] == results[1]
    assert any(kernel == "panels" for kernel, _, _ in results[0])
    assert custom_mm.build_info()["hopper_kernels"]
