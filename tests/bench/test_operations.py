"""What `matmuls bench` measures and records."""

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import common.cli_cases  # noqa: F401
from matmuls_bench import machine, operations
from matmuls_bench import timing as timers
from matmuls_bench.cli.bench import show_bench
from matmuls_bench.operations import jobs, timing
from matmuls_bench.table import REAL, Call, Case, Spec, drawn

ROOFS = machine.Roofs(copy=1e10, product={})
MIB = 2**20
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def made_up(**changes) -> Spec:
    """A Spec that only the benchmark uses."""
    nothing = {name: lambda draw: iter(()) for name in ("samples", "bad", "empty")}
    row = {"name": "neg_", "summary": "", "call": torch.neg_, "reference": torch.neg, "operators": ()}
    return Spec(**(row | nothing | {"flops": False, "gradient": False} | changes))


def ones(*shape, **changes) -> Case:
    return Case(
        f"ones {shape}", lambda draw: Call((torch.ones(shape, dtype=draw.dtype, device=draw.device),)), **changes
    )


def job_of(case, kind="cpu", device="cpu", **changes) -> operations.Job:
    return operations.Job(made_up(**changes), case, torch.float32, device, kind)


def test_bench_records_every_rival_and_compares_with_the_fastest(monkeypatch):
    def slow(x):
        time.sleep(2e-3)
        return -x

    monkeypatch.setattr(
        operations.Job, "rivals", lambda job: {"slow": slow, "wrong": lambda x: -0.5 * x, "slower": slow}
    )
    (row,) = operations.measure_job(job_of(ones(100)), ROOFS, 0.01)
    assert list(row.rivals_us) == ["slow", "wrong", "slower"]
    assert row.rivals_us["slow"] > 2000 > row.rival_us == row.rivals_us["wrong"]
    assert (row.rival, row.ratio) == ("wrong", row.rival_us / row.ours_us)
    assert (row.error, row.rival_error) == (0, 0.5)


def test_torch_compile_is_a_rival_on_a_gpu_without_graph_breaks(monkeypatch):
    case = ones(4, reference=lambda x: (torch._dynamo.graph_break(), -x)[1])
    assert list(job_of(case, "cpu", compiled=True).rivals()) == ["torch"]
    assert list(job_of(case, "gpu").rivals()) == ["torch"]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    broken = job_of(case, "gpu", compiled=True).rivals()
    assert list(broken) == ["torch", "torch.compile"]
    with pytest.raises(Exception, match="graph_break"):
        broken["torch.compile"](torch.ones(4))


def test_torch_compile_stays_compiled_from_case_to_case(monkeypatch):
    """One reference with more shapes than the recompilation limit."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs[0].shape)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    shapes = range(2, torch._dynamo.config.recompile_limit + 4)
    for n in shapes:
        job = job_of(ones(n), "gpu", compiled=True)
        job.rivals()["torch.compile"](*job.draw().args)
    assert compiled == [(n,) for n in shapes]


def test_bench_uses_the_functions_of_its_case_and_counts_every_tensor_of_a_tuple():
    case = ones(
        1000,
        call=lambda x: (x.neg(), None, x.exp2()),
        reference=lambda x: (x.neg(), None, x.abs()),
        rival="the other",
        in_place=False,
    )
    (row,) = operations.measure_job(job_of(case), ROOFS, 0.01)
    assert (row.rival, row.error, row.rival_error, row.extra_bytes) == ("the other", 1, 0, 0)
    assert row.tbps * row.ours_us * 1e6 == pytest.approx(3 * 4000)
    assert row.roof == pytest.approx(3 * 4000 / ROOFS.copy / (row.ours_us * 1e-6))
    with pytest.raises(ValueError, match="zip"):
        operations.measure_job(job_of(ones(4, call=lambda x: (x, None), reference=lambda x: (x, x))), ROOFS, 0.01)


@pytest.mark.parametrize(("moved", "nbytes"), [(None, 8000), (lambda call: call.tensors[0].nbytes // 2, 2000)])
def test_bytes_that_must_move(moved, nbytes):
    """Inputs and results once each, unless the case says otherwise."""
    (row,) = operations.measure_job(job_of(ones(1000, moved=moved)), ROOFS, 0.01)
    assert row.tbps * row.ours_us * 1e6 == pytest.approx(nbytes)


def test_masks_stay_bool_in_the_float64_reference():
    case = Case("mask", lambda draw: Call((draw(4, 4), draw(4, 4) > 0)), lambda x, mask: x.masked_fill(mask, 0))
    (row,) = operations.measure_job(
        job_of(case, reference=lambda x, mask: torch.where(mask, 0, x), name="f"), ROOFS, 0.01
    )
    assert row.error == row.rival_error == 0


def test_an_in_place_operation_is_timed_on_restored_inputs():
    seen, theirs = [], []

    def ours(x):
        seen.append(x[0].item())
        return x.neg_()

    def reference(x):
        theirs.append(x[0].item())
        return -x

    job = job_of(ones(8), call=ours, reference=reference)
    timing.times_of(job, job.draw(), job.rivals(), 0.01)
    assert len(seen) > 5
    assert set(seen) == set(theirs) == {1.0}


def test_a_gpu_case_has_times_as_called_beside_those_of_the_gpu():
    """The same path on a CPU: the host's share of a call is in the one and, on a GPU, not in the other."""

    def slow(x):
        time.sleep(1e-3)
        return -x

    case = ones(100, others={"slow": slow}, drawn=True)
    (row,) = operations.measure_job(job_of(case, "gpu"), ROOFS, 0.01)
    assert row.drawn
    assert list(row.called_rivals_us) == list(row.rivals_us) == ["torch", "slow"]
    assert row.called_rivals_us["slow"] > 1000 > row.called_us > 0
    assert row.called_rival == "torch"
    assert row.called_ratio == row.called_rivals_us["torch"] / row.called_us
    (row,) = operations.measure_job(job_of(case, "cpu"), ROOFS, 0.01)
    assert (row.called_us, row.called_rival, row.called_ratio, row.called_rivals_us) == (None, None, None, {})


def without_graphs(function, mode=None, **_):
    """Replaces torch.compile: its CUDA graphs need a GPU."""
    return function


def test_a_chain_has_torch_compile_with_cuda_graphs_as_a_rival(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", without_graphs)
    steps = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(0))
    case = Case("chain", lambda draw: Call((draw(8, 4), draw(4))), parameters=(1,))
    changes = {"call": lambda x, w: x * w + x, "reference": lambda x, w: x * w + x, "name": "chain"}
    (row,) = operations.measure_job(job_of(case, "gpu", **changes), ROOFS, 0.01)
    assert list(row.called_rivals_us) == ["torch", operations.COMPILED, operations.REPLAYED]
    assert list(row.rivals_us) == ["torch", operations.COMPILED]  # no graph can record a replay
    assert len(steps) > 10
    call = job_of(case, "gpu").draw()
    static = [getattr(t, "_dynamo_static_input_type", None) for t in call.args]
    assert static == [None, "unguarded"]
    assert list(job_of(case).rivals()) == ["torch"]

    def fail():
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", fail)
    (row,) = operations.measure_job(job_of(case, "gpu", **changes), ROOFS, 0.01)
    assert list(row.called_rivals_us) == ["torch", operations.COMPILED]
    assert f"chain chain float32: without {operations.REPLAYED}: no graph" in capsys.readouterr().err


def test_rows_of_every_version_load(tmp_path):
    """The committed files are of older versions, without times as called."""
    old = operations.load(RESULTS / "bench-cuda.json")
    assert old[0].ours_us > 0
    assert (old[0].called_us, old[0].called_rivals_us, old[0].drawn) == (None, {}, False)
    new = replace(old[0], called_us=3.5, called_rival="torch", called_rivals_us={"torch": 7.0}, called_ratio=2.0)
    operations.save(tmp_path / "new.json", [old[0], new], ROOFS, "cpu")
    assert operations.load(tmp_path / "new.json") == [old[0], new]


def test_drawn_sizes_are_those_of_the_seed():
    assert drawn.draw(drawn.SEED) == drawn.SIZES


@pytest.mark.parametrize("spec", [s for s in jobs.TABLE if s.cases], ids=lambda s: s.name)
def test_half_of_the_sizes_on_a_gpu_are_drawn(spec):
    cases = {case.label: case.drawn for case in spec.cases if case.device != "cpu"}
    assert 0.4 <= sum(cases.values()) / len(cases) <= 0.6


def test_restoring_is_not_timed():
    restored = []

    def restore():
        restored.append(time.sleep(0.02))

    timings = timers.time_on_cpu([[lambda: None], [lambda: time.sleep(1e-3)]], 0.01, restore)
    assert len(restored) >= 12
    assert timings[0].seconds < 1e-3 <= timings[1].seconds < 0.01


@pytest.mark.cuda
def test_restoring_on_a_gpu():
    x, y = torch.zeros(2, 1000, device="cuda")
    timings = timers.time_on("cuda", [[lambda: x.add_(1)], [lambda: y.add_(1)]], 0.01, lambda: (x.zero_(), y.zero_()))
    assert sorted((x.max().item(), y.max().item())) == [0, 1]  # the last round ran one of them, on restored inputs
    assert all(0 < timing.seconds < 1e-3 for timing in timings)


@pytest.mark.cuda
def test_bench_on_a_gpu_with_torch_compile():
    (row,) = operations.measure_job(job_of(ones(4096, 4096), "gpu", "cuda", compiled=True), ROOFS, 0.01)
    assert list(row.rivals_us) == ["torch", "torch.compile"] == list(row.called_rivals_us)
    assert min(row.rivals_us.values()) == row.rival_us > 0
    assert (row.error, row.rival_error, row.extra_bytes) == (0, 0, 0)
    assert row.called_us > 0.9 * row.ours_us  # the host adds to the GPU's time, at this size not much
    assert row.called_rivals_us["torch"] > 0.9 * row.rivals_us["torch"]


@pytest.mark.cuda
def test_cuda_graphs_of_a_chain_as_called():
    """Several sets of parameters: each has its own recorded graph, and the results are right."""
    case = Case("chain", lambda draw: Call((draw(4096, 1024), draw(1024), draw(1024))), parameters=(1, 2))

    def chain(x, w, b):
        return torch.softmax(x * w + b, -1)

    job = job_of(case, "gpu", "cuda", call=chain, reference=chain, name="chain")
    (row,) = operations.measure_job(job, ROOFS, 0.01)
    assert list(row.called_rivals_us) == ["torch", operations.COMPILED, operations.REPLAYED]
    assert all(us > 0 for us in row.called_rivals_us.values())
    call, other = job.draw(0), job.draw(1)
    replayed = job.rivals()[operations.REPLAYED]
    with torch.no_grad():
        for c in (call, other, call, other, call):
            assert torch.allclose(replayed(*c.args), chain(*c.args))


@pytest.mark.cuda
def test_a_case_in_place_as_called():
    (row,) = operations.measure_job(job_of(ones(64, 64), "gpu", "cuda"), ROOFS, 0.01)
    assert row.called_us > row.ours_us > 0  # so small that the host takes longer


def double_with_scratch(x):
    return torch.cat([x, x]).view(2, -1).sum(0)


def test_memory_rows(device):
    case = ones(MIB // 4, in_place=False)
    (row,) = operations.measure_job(
        job_of(case, "memory", device, call=torch.neg, reference=double_with_scratch, rival="two", compiled=True), ROOFS
    )
    assert (row.kind, row.rival, row.ours_mib, row.rival_mib, row.ratio) == ("memory", "two", 1, 3, 3)
    assert row.ours_us is row.rival_us is row.roof is None
    (row,) = operations.measure_job(job_of(ones(MIB // 4), "memory", device), ROOFS)
    assert (row.ours_mib, row.rival_mib, row.ratio) == (0, 1, None)


@pytest.mark.parametrize(
    ("call", "extra"), [(double_with_scratch, 2), (lambda x: x.copy_(x.neg()), 1), (torch.neg_, 0)]
)
def test_extra_memory_excludes_the_results(call, extra):
    case = ones(MIB // 4, call=call, in_place=call is not double_with_scratch)
    (row,) = operations.measure_job(job_of(case), ROOFS, 0.01)
    assert row.extra_bytes == extra * MIB


def test_plan_takes_the_dtypes_and_devices_of_a_row(monkeypatch):
    cases = (ones(4), ones(5, device="cpu"), ones(6, device="cuda"))
    spec = made_up(
        cases=cases,
        memory_cases=(ones(7),),
        host_case=ones(1),
        dtypes=(torch.float64, torch.float32, torch.bfloat16),
        bench_dtypes=(torch.bfloat16,),
        cpu_bench_dtypes=(torch.float32, torch.float16),
    )
    monkeypatch.setattr(jobs, "TABLE", (spec,))

    def planned(device, *dtypes):
        return [(job.kind, job.case.label, job.dtype) for job in operations.plan([], device, list(dtypes), False)]

    def expected(kind, sizes, dtype):
        labels = [(kind, n) for n in sizes] + [("memory", 7), ("host", 1)]
        return [(kind, f"ones ({n},)", dtype) for kind, n in labels]

    assert planned("cuda") == expected("gpu", (4, 6), torch.bfloat16)
    assert planned("cpu") == expected("cpu", (4, 5), torch.float32)
    assert planned("cuda", torch.float64) == expected("gpu", (4, 6), torch.float64)
    assert planned("cuda", torch.float16) == []
    monkeypatch.setattr(jobs, "TABLE", (made_up(cases=(ones(4),)),))
    assert [job.dtype for job in operations.plan([], "cuda", [], False)] == list(jobs.GPU_DTYPES)


def test_plan_takes_the_cases_whose_label_contains_a_text():
    def labels(*texts):
        return [job.case.label for job in operations.plan(["matmul_"], "cuda", [torch.float16], False, texts)]

    assert labels("30000x1280") == ["30000x1280"] * 2  # time and memory
    assert set(labels("9000x", "24000x1536")) == {"9000x640", "24000x1536"}
    assert len(labels()) > 30
    with pytest.raises(ValueError, match="no case of these operations has a label with '3x3' or 'y'"):
        labels("3x3", "y")


@pytest.mark.parametrize("spec", [s for s in jobs.TABLE if s.cases or s.memory_cases], ids=lambda s: s.name)
def test_every_case_for_a_gpu_has_a_cost_without_one(spec):
    assert operations.plan([spec.name], "cuda", [], False)


def compiles_dies_or_hangs(share, *_):
    """Replaces the body of a process of `precompile`; top-level, so that the child can import it."""
    if share == 1:
        os._exit(3)
    time.sleep(60 * (share - 1) if share else 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("workers", "seconds"), [(2, 100), (1, 100), (9, 0.1)])
def test_precompile_continues_if_a_process_fails(monkeypatch, workers, seconds):
    monkeypatch.setattr(jobs, "TABLE", (made_up(cases=(ones(4), ones(5)), bench_dtypes=REAL[:1], compiled=True),))
    monkeypatch.setattr(jobs, "_compile_share", compiles_dies_or_hangs)
    monkeypatch.setattr(jobs, "PRECOMPILE_SECONDS", seconds)
    begin = time.monotonic()
    assert operations.precompile(workers, [], "cuda", [], False) == {2: 1, 1: 0, 9: 2}[workers]
    assert time.monotonic() - begin < 60
    assert operations.precompile(workers, [], "cpu", [], False) == 0


def test_precompile_continues_if_a_case_fails(monkeypatch, capsys):
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs[0].shape)
        if inputs[0].shape == (5,):
            raise ValueError("too odd")
        return graph.forward

    cases = tuple(ones(n) for n in (3, 4, 5, 6, 7))
    monkeypatch.setattr(jobs, "TABLE", (made_up(cases=cases, bench_dtypes=REAL[:1], compiled=True),))
    monkeypatch.setattr(operations.Job, "draw", lambda job: Call((torch.ones(int(job.case.label[6])),)))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    # monkeypatch would remove the setting at its end.
    with torch._inductor.config.patch(compile_threads=2), pytest.raises(SystemExit, match="1"):
        jobs._compile_share(0, 2, [], "cuda", [], False)
    assert compiled == [(3,), (5,), (7,)]
    told = capsys.readouterr().err
    assert "neg_ ones (5,) float64: " in told
    assert "too odd" in told


def test_rows_of_memory_are_shown(capsys):
    rows = [
        operations.Row("a", "case", "float32", "memory", "torch", 1.5, ours_mib=12.25, rival_mib=18.375),
        operations.Row("b", "case", "float32", "memory", "torch", None, ours_mib=0.0, rival_mib=1.0),
    ]
    show_bench(rows, ROOFS)
    shown = capsys.readouterr().out
    assert "12.2" in shown
    assert "memory: geometric mean 1.500, lowest 1.500, 1 cases" in shown
