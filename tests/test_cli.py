"""The command line, run as a user runs it."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from matmuls import bench, cli, files, info, measure
from matmuls.specs import REAL, Call, Case, Spec
from matmuls_cli.bench import show_bench
from matmuls_cli.bert import ON_A_CPU

pytest.importorskip("transformers")


def matmuls(*args, **kwargs):
    """The command in a process of its own; stderr without the lines of progress, which a slow machine gets."""
    run = subprocess.run(
        [sys.executable, "-m", "matmuls_cli", *args], capture_output=True, text=True, timeout=300, **kwargs
    )
    run.stderr = re.sub(r"^matmuls: \d+:\d\d .*\n", "", run.stderr, flags=re.MULTILINE)
    return run


def test_which_gpus_a_build_runs_on():
    assert all(info.serves("7.5 8.0 8.6+PTX 9.0a", c) for c in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 1)))
    assert not any(info.serves("8.6 9.0a", c) for c in ((7, 5), (8, 0), (9, 1), (10, 0)))
    assert not info.serves("9.0a+PTX", (10, 0))
    assert info.serves("8.0;10.0f", (10, 3))
    assert info.serves("Hopper", (9, 0))


def test_version():
    run = matmuls("--version")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(r"matmuls \d+\.\d+\.\d+\S*\n", run.stdout)


def test_info():
    run = matmuls("info", "--json")
    facts = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert facts["torch"] == torch.__version__
    assert facts["cuda"].startswith("on" if torch.cuda.is_available() else "off: ")
    assert "torch" in matmuls("info").stdout


def test_bert_prints_similarities_difference_time_and_memory():
    run = matmuls("bert", "How old are you?", "What is your age?", "A cat sat on the mat.", "--device", "cpu")
    assert (run.returncode, run.stderr) == (0, "")
    words = (
        "Cosine similarity",
        "largest difference",
        "custom_mm (ours)",
        "sdpa (stock)",
        "eager (stock)",
        "MiB",
        "CPU",
    )
    assert [w for w in words if w not in run.stdout] == []
    assert "optimized" not in run.stdout
    assert run.stdout.splitlines()[-1] == ON_A_CPU


def test_texts_are_shown_as_they_are():
    run = matmuls("bert", "one [/b] of [bold]two[/bold]", ":cat:", "--device", "cpu")
    assert (run.returncode, run.stderr) == (0, "")
    assert "one [/b] of [bold]two[/bold]" in run.stdout
    assert ":cat:" in run.stdout


def test_bert_json_and_file(tmp_path):
    (tmp_path / "texts").write_text("How old are you?\n\nWhat is your age?\n")
    run = matmuls("bert", "A cat.", "--file", str(tmp_path / "texts"), "--json", "--device", "cpu")
    result = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert result["texts"] == ["A cat.", "How old are you?", "What is your age?"]
    assert result["similarities"][1][2] > 0.7 > 0.3 > result["similarities"][0][1]
    assert result["difference"] <= 1e-5
    assert all(r["ms"] > 0 and r["peak_mib"] > 0.05 for r in result["runs"])


def test_bert_optimized_with_all_attentions_and_a_picture(tmp_path):
    picture = tmp_path / "heads.png"
    pytest.importorskip("matplotlib")
    run = matmuls("bert", "How old are you?", "--optimize", "--attn", "eager", "--attentions", str(picture), "--json")
    result = json.loads(run.stdout)
    assert run.returncode == 0
    ways = {(r["attention"], r["optimized"], r["probabilities"]) for r in result["runs"]}
    stock = {("sdpa", False, False), ("eager", False, False), ("eager", False, True)}
    ours = {("eager", True, False), *(("custom_mm", o, p) for o in (False, True) for p in (False, True))}
    assert ways == stock | ours
    assert 0 < result["difference"] <= 1e-5 < result["tolerance"] == 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 60}


def save(model, folder):
    """A model and a tokenizer of six words, as a user has them in a folder."""
    import transformers

    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x"]))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def test_bert_names_a_model_that_it_cannot_optimize(tmp_path):
    import transformers

    save(transformers.LayoutLMModel(transformers.LayoutLMConfig(**SMALL)), tmp_path)
    run = matmuls("bert", "x", "--model", str(tmp_path), "--optimize", "--device", "cpu")
    assert run.returncode == 2
    assert run.stderr.startswith("matmuls: optimize: expected a model of one of BERT, RoBERTa, ")
    assert run.stderr.endswith(", ViT, got LayoutLMModel\n")


def clip():
    import transformers as t

    parts = {name: {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1} for name in ("text", "vision")}
    config = t.CLIPConfig(text_config=parts["text"] | {"vocab_size": 60}, vision_config=parts["vision"])
    return t.CLIPModel(config)


def gemma2():
    import transformers as t

    return t.Gemma2Model(t.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (clip, "expected an encoder of texts, got CLIPModel: "),
        (
            gemma2,
            "the attention of Gemma2Model cannot be replaced: Gemma2Attention needs capped scores (softcap), "
            "which matmuls attention does not support\n",
        ),
    ],
)
def test_bert_names_a_model_that_it_cannot_run(tmp_path, make, words):
    save(make(), tmp_path)
    run = matmuls("bert", "x", "--model", str(tmp_path), "--device", "cpu")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert run.stderr.startswith(f"matmuls: bert: {words}")


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("MPNet", "MPNetSelfAttention"),
        ("Deberta", "DisentangledSelfAttention"),
        ("DebertaV2", "DisentangledSelfAttention"),
    ],
)
def test_bert_rejects_a_model_that_ignores_attention_functions(tmp_path, kind, own):
    """Otherwise it would measure stock attention under our name."""
    import transformers

    save(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SMALL)), tmp_path)
    for options in ([], ["--attn", "eager"], ["--optimize"]):
        run = matmuls("bert", "x", "--model", str(tmp_path), "--device", "cpu", *options)
        assert (run.returncode, run.stdout) == (1, "")
        ignores = f"the attention of {kind}Model was not replaced: its class {own} ignores attn_implementation"
        assert run.stderr == f"matmuls: bert: {ignores}\n"


def test_bert_fails_if_attention_is_wrong(tmp_path):
    """Exit status 1 if an embedding is off, here because of a wrong scale of the scores."""
    code = """
from matmuls import attention
right = attention._forward
attention._forward = lambda q, k, v, mask, scale, *rest: right(q, k, v, mask, 1.001 * scale, *rest)
from matmuls.cli import main
main()
"""
    run = subprocess.run(
        [sys.executable, "-c", code, "bert", "How old are you?", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1
    assert "largest difference" in run.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bert"], "no text"),
        (["bert", "x", "--device", "tpu"], "--device is cpu or cuda"),
        (["bert", "x", "--dtype", "int8"], "--dtype is"),
        (["bert", "--file", "/no/such/file"], "cannot read /no/such/file"),
        (["bert", "x", "--model", "/no/such/model"], "is not a model folder"),
        (["bert", "x", "--attn", "flash"], "--attn is custom_mm, sdpa or eager, got flash"),
        (["bert", "x", "--attentions", "x.pdf"], "--attentions is a .png file in a folder that exists, got x.pdf"),
        (
            ["bert", "x", "--attentions", "/proc/x.png"],
            "--attentions: expected a folder that can be written, got /proc",
        ),
        (["bench", "--out", "/proc/x"], "--out: expected a folder that can be written, got /proc/x"),
        (["bench-bert", "--out", "/proc/x"], "--out: expected a folder that can be written, got /proc/x"),
        (["bench", "nothing"], "no benchmark named nothing; there are matmul"),
        (["report", "--readme", "/no/such/file"], "No such file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_usage_prints_one_line(args, words):
    run = matmuls(*args)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert words in run.stderr


@pytest.mark.parametrize("content", ['{"model_type":"bert"}', "no JSON", '{"model_type":"nothing"}'])
def test_a_folder_without_a_model_is_an_error(content, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)
    run = matmuls("bert", "x", "--model", str(tmp_path), "--device", "cpu")
    assert run.returncode == 2
    assert f"cannot load a model and its tokenizer from {tmp_path}" in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr


def test_weights_that_are_cut_off_are_an_error(tmp_path):
    import transformers

    save(transformers.BertModel(transformers.BertConfig(**SMALL)), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    run = matmuls("bert", "x", "--model", str(tmp_path), "--device", "cpu")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert f"cannot load a model and its tokenizer from {tmp_path}" in run.stderr


@pytest.mark.parametrize("args", [("--rounds", "0"), ("--rounds", "-1"), ("--piece", "-2"), ("--chunk", "-3")])
def test_bench_bert_rejects_counts_below_the_minimum(args):
    run = CliRunner().invoke(cli.app, ["bench-bert", "--tiny", *args])
    assert run.exit_code == 2
    assert f"Invalid value for '{args[0]}'" in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error():
    run = matmuls("bert", "x", "--device", "cuda")
    assert run.returncode == 2
    assert "no CUDA device to run on; CUDA is off: " in run.stderr


def test_bench_writes_json_and_no_progress_bar_into_a_file(tmp_path):
    run = matmuls("bench", "cublasMM", "bias_act_", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads((tmp_path / "bench-cpu-cublasMM-bias_act_.json").read_text())
    assert {"commit", "torch", "command", "device", "date"} <= result["environment"].keys()
    assert result["roofs"]["copy"] > 1e8
    assert {r["operation"] for r in result["rows"]} == {"cublasMM"}  # bias_act_'s cases are too large for --quick
    for row in result["rows"]:
        assert row["ours_us"] > 0 < row["rival_us"]
        assert abs(row["ratio"] - row["rival_us"] / row["ours_us"]) < 1e-9
        if row["kind"] != "host":
            assert row["error"] < 1e-5
            shares = (
                1e12 * row["tflops"] / result["roofs"]["product"]["float32"],
                1e12 * row["tbps"] / result["roofs"]["copy"],
            )
            assert row["roof"] == pytest.approx(max(shares))


def test_a_signal_ends_a_bench_and_keeps_its_results(tmp_path):
    """The second of two cases sends SIGTERM to its own process."""
    code = """
import os, signal
from matmuls import bench
right, calls = bench.measure_job, []
def measure(job, *args):
    calls.append(job)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return right(job, *args)
bench.measure_job = measure
from matmuls.cli import main
main()
"""
    args = ("bench", "cublasMM", "--quick", "--device", "cpu", "--out", str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert run.returncode == 143
    assert "stopped" in run.stderr
    result = json.loads((tmp_path / "bench-cpu-cublasMM.json").read_text())
    assert (len(result["rows"]), result["environment"]["complete"]) == (1, False)


def test_bench_bert_measures_every_way_of_a_tiny_model(tmp_path):
    args = ("--tiny", "--rounds", "2", "--piece", "1", "--piece", "2", "--chunk", "1", "--chunk", "3")
    run = matmuls("bench-bert", *args, "--device", "cpu", "--out", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads((tmp_path / "bert-cpu.json").read_text())
    assert {"commit", "torch", "transformers", "command", "device"} <= result["environment"].keys()
    tasks = {}
    for row in result["rows"]:
        tasks.setdefault(row["task"], []).append((row["way"], row["piece_mib"], row["chunk_mib"]))
        assert row["ms"] > 0 < row["above_mib"] <= row["peak_mib"]
        assert row["error"] < 1e-6
    pieces, chunks = (1, 2), (1, 3)
    optimized = [("custom_mm, optimized", piece, chunk) for chunk in chunks for piece in pieces]
    ours = [("custom_mm", piece, None) for piece in pieces]
    again = [("custom_mm, recompute", piece, None) for piece in pieces]
    hidden = [("sdpa", None, None), ("custom_mm", None, None)]
    hidden += [("custom_mm, optimized", None, chunk) for chunk in chunks]
    assert tasks == {
        "probabilities": [("eager", None, None), *ours, *optimized],
        "hidden states": hidden,
        "hidden states, padded": hidden,
        "training": [("eager", None, None), ("sdpa", None, None), *ours, *again],
        "training, probabilities returned": [("eager", None, None), *ours],
    }
    returned = [row["peak_mib"] - row["above_mib"] for row in result["rows"] if row["task"] == "probabilities"]
    assert returned == [pytest.approx(2 * 3 * 4 * 16 * 16 * 4 / 2**20)] * 7


def test_files_are_written_atomically(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnicodeEncodeError):
        files.write(tmp_path / "link", "new" * 10**5 + "\ud800")
    assert (tmp_path / "file").read_text() == "old"
    files.write(tmp_path / "link", "new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_mode & 0o777) == ("new", 0o640)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


ROOFS = bench.Roofs(copy=1e10, product={})
MIB = 2**20


def made_up(**changes) -> Spec:
    """A Spec that only the benchmark uses."""
    nothing = {name: lambda draw: iter(()) for name in ("samples", "bad", "empty")}
    row = {"name": "neg_", "summary": "", "call": torch.neg_, "reference": torch.neg, "operators": ()}
    return Spec(**(row | nothing | {"flops": False, "gradient": False} | changes))


def ones(*shape, **changes) -> Case:
    return Case(
        f"ones {shape}", lambda draw: Call((torch.ones(shape, dtype=draw.dtype, device=draw.device),)), **changes
    )


def job_of(case, kind="cpu", device="cpu", **changes) -> bench.Job:
    return bench.Job(made_up(**changes), case, torch.float32, device, kind)


def test_bench_records_every_rival_and_compares_with_the_fastest(monkeypatch):
    def slow(x):
        time.sleep(2e-3)
        return -x

    monkeypatch.setattr(bench.Job, "rivals", lambda job: {"slow": slow, "wrong": lambda x: -0.5 * x, "slower": slow})
    (row,) = bench.measure_job(job_of(ones(100)), ROOFS, 0.01)
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
    (row,) = bench.measure_job(job_of(case), ROOFS, 0.01)
    assert (row.rival, row.error, row.rival_error, row.extra_bytes) == ("the other", 1, 0, 0)
    assert row.tbps * row.ours_us * 1e6 == pytest.approx(3 * 4000)
    assert row.roof == pytest.approx(3 * 4000 / ROOFS.copy / (row.ours_us * 1e-6))
    with pytest.raises(ValueError, match="zip"):
        bench.measure_job(job_of(ones(4, call=lambda x: (x, None), reference=lambda x: (x, x))), ROOFS, 0.01)


@pytest.mark.parametrize(("moved", "nbytes"), [(None, 8000), (lambda call: call.tensors[0].nbytes // 2, 2000)])
def test_bytes_that_must_move(moved, nbytes):
    """Inputs and results once each, unless the case says otherwise."""
    (row,) = bench.measure_job(job_of(ones(1000, moved=moved)), ROOFS, 0.01)
    assert row.tbps * row.ours_us * 1e6 == pytest.approx(nbytes)


def test_masks_stay_bool_in_the_float64_reference():
    case = Case("mask", lambda draw: Call((draw(4, 4), draw(4, 4) > 0)), lambda x, mask: x.masked_fill(mask, 0))
    (row,) = bench.measure_job(job_of(case, reference=lambda x, mask: torch.where(mask, 0, x), name="f"), ROOFS, 0.01)
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
    bench._time(job, job.draw(), job.rivals(), 0.01)
    assert len(seen) > 5
    assert set(seen) == set(theirs) == {1.0}


def test_restoring_is_not_timed():
    restored = []

    def restore():
        restored.append(time.sleep(0.02))

    timings = measure.time_on_cpu([[lambda: None], [lambda: time.sleep(1e-3)]], 0.01, restore)
    assert len(restored) >= 12
    assert timings[0].seconds < 1e-3 <= timings[1].seconds < 0.01


@pytest.mark.cuda
def test_restoring_on_a_gpu():
    x, y = torch.zeros(2, 1000, device="cuda")
    timings = measure.time_on("cuda", [[lambda: x.add_(1)], [lambda: y.add_(1)]], 0.01, lambda: (x.zero_(), y.zero_()))
    assert sorted((x.max().item(), y.max().item())) == [0, 1]  # the last round ran one of them, on restored inputs
    assert all(0 < timing.seconds < 1e-3 for timing in timings)


@pytest.mark.cuda
def test_bench_on_a_gpu_with_torch_compile():
    (row,) = bench.measure_job(job_of(ones(4096, 4096), "gpu", "cuda", compiled=True), ROOFS, 0.01)
    assert list(row.rivals_us) == ["torch", "torch.compile"]
    assert min(row.rivals_us.values()) == row.rival_us > 0
    assert (row.error, row.rival_error, row.extra_bytes) == (0, 0, 0)


def double_with_scratch(x):
    return torch.cat([x, x]).view(2, -1).sum(0)


def test_memory_rows(device):
    case = ones(MIB // 4, in_place=False)
    (row,) = bench.measure_job(
        job_of(case, "memory", device, call=torch.neg, reference=double_with_scratch, rival="two", compiled=True), ROOFS
    )
    assert (row.kind, row.rival, row.ours_mib, row.rival_mib, row.ratio) == ("memory", "two", 1, 3, 3)
    assert row.ours_us is row.rival_us is row.roof is None
    (row,) = bench.measure_job(job_of(ones(MIB // 4), "memory", device), ROOFS)
    assert (row.ours_mib, row.rival_mib, row.ratio) == (0, 1, None)


@pytest.mark.parametrize(
    ("call", "extra"), [(double_with_scratch, 2), (lambda x: x.copy_(x.neg()), 1), (torch.neg_, 0)]
)
def test_extra_memory_excludes_the_results(call, extra):
    case = ones(MIB // 4, call=call, in_place=call is not double_with_scratch)
    (row,) = bench.measure_job(job_of(case), ROOFS, 0.01)
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
    monkeypatch.setattr(bench, "TABLE", (spec,))

    def planned(device, *dtypes):
        return [(job.kind, job.case.label, job.dtype) for job in bench.plan([], device, list(dtypes), False)]

    def expected(kind, sizes, dtype):
        labels = [(kind, n) for n in sizes] + [("memory", 7), ("host", 1)]
        return [(kind, f"ones ({n},)", dtype) for kind, n in labels]

    assert planned("cuda") == expected("gpu", (4, 6), torch.bfloat16)
    assert planned("cpu") == expected("cpu", (4, 5), torch.float32)
    assert planned("cuda", torch.float64) == expected("gpu", (4, 6), torch.float64)
    assert planned("cuda", torch.float16) == []
    monkeypatch.setattr(bench, "TABLE", (made_up(cases=(ones(4),)),))
    assert [job.dtype for job in bench.plan([], "cuda", [], False)] == list(bench.GPU_DTYPES)


@pytest.mark.parametrize("spec", [s for s in bench.TABLE if s.cases or s.memory_cases], ids=lambda s: s.name)
def test_every_case_for_a_gpu_has_a_cost_without_one(spec):
    assert bench.plan([spec.name], "cuda", [], False)


def compiles_dies_or_hangs(share, *_):
    """Replaces the body of a process of `precompile`; top-level, so that the child can import it."""
    if share == 1:
        os._exit(3)
    time.sleep(60 * (share - 1) if share else 0)


@pytest.mark.parametrize(("workers", "seconds"), [(2, 100), (1, 100), (9, 0.1)])
def test_precompile_continues_if_a_process_fails(monkeypatch, workers, seconds):
    monkeypatch.setattr(bench, "TABLE", (made_up(cases=(ones(4), ones(5)), bench_dtypes=REAL[:1], compiled=True),))
    monkeypatch.setattr(bench, "_compile_share", compiles_dies_or_hangs)
    monkeypatch.setattr(bench, "PRECOMPILE_SECONDS", seconds)
    begin = time.monotonic()
    assert bench.precompile(workers, [], "cuda", [], False) == {2: 1, 1: 0, 9: 2}[workers]
    assert time.monotonic() - begin < 60
    assert bench.precompile(workers, [], "cpu", [], False) == 0


def test_precompile_continues_if_a_case_fails(monkeypatch, capsys):
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs[0].shape)
        if inputs[0].shape == (5,):
            raise ValueError("too odd")
        return graph.forward

    cases = tuple(ones(n) for n in (3, 4, 5, 6, 7))
    monkeypatch.setattr(bench, "TABLE", (made_up(cases=cases, bench_dtypes=REAL[:1], compiled=True),))
    monkeypatch.setattr(bench.Job, "draw", lambda job: Call((torch.ones(int(job.case.label[6])),)))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 2)
    with pytest.raises(SystemExit, match="1"):
        bench._compile_share(0, 2, [], "cuda", [], False)
    assert compiled == [(3,), (5,), (7,)]
    told = capsys.readouterr().err
    assert "neg_ ones (5,) float64: " in told
    assert "too odd" in told


def test_rows_of_memory_are_shown(capsys):
    rows = [
        bench.Row("a", "case", "float32", "memory", "torch", 1.5, ours_mib=12.25, rival_mib=18.375),
        bench.Row("b", "case", "float32", "memory", "torch", None, ours_mib=0.0, rival_mib=1.0),
    ]
    show_bench(rows, ROOFS)
    shown = capsys.readouterr().out
    assert "12.2" in shown
    assert "memory: geometric mean 1.500, lowest 1.500, 1 cases" in shown
