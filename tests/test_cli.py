"""The command, as a user types it."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")


def matmuls(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "matmuls", *args], capture_output=True, text=True, timeout=300, **kwargs
    )


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
    for words in ("Cosine similarity", "largest difference", "custom_mm (ours)", "sdpa (stock)", "MiB", "CPU"):
        assert words in run.stdout


def test_bert_json_and_file(tmp_path):
    (tmp_path / "texts").write_text("How old are you?\n\nWhat is your age?\n")
    run = matmuls("bert", "A cat.", "--file", str(tmp_path / "texts"), "--json", "--device", "cpu")
    result = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert result["texts"] == ["A cat.", "How old are you?", "What is your age?"]
    assert result["similarities"][1][2] > 0.7 > 0.3 > result["similarities"][0][1]
    assert result["difference"] <= 1e-5
    assert all(r["ms"] > 0 and r["peak_mib"] > 0.05 for r in result["runs"])


def test_bert_fails_where_attention_is_wrong(tmp_path):
    """Exit status 1 when an embedding is off: here the scores' scale is."""
    code = """
import sys
from matmuls.integrations import transformers as integration
right = integration._softmax
integration._softmax = lambda scores, mask, scaling, bias: right(scores, mask, 1.001 * scaling, bias)
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
        (["bench", "nothing"], "no benchmark named nothing; there are matmul"),
        (["report", "--readme", "/no/such/file"], "No such file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_calls_are_told_in_one_line(args, words):
    run = matmuls(*args)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert words in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_told():
    run = matmuls("bert", "x", "--device", "cuda")
    assert run.returncode == 2
    assert "no CUDA device to run on; CUDA is off: " in run.stderr


def test_bench_writes_json_and_no_progress_bar_into_a_file(tmp_path):
    run = matmuls("bench", "cublasMM", "bias_act_", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads((tmp_path / "bench-cpu-cublasMM-bias_act_.json").read_text())
    assert {"commit", "torch", "command", "device", "date"} <= result["environment"].keys()
    assert result["roofs"]["copy"] > 1e8
    assert {r["operation"] for r in result["rows"]} == {"cublasMM"}  # bias_act_'s cases are too large to be quick
    for row in result["rows"]:
        assert row["ours_us"] > 0 < row["rival_us"]
        assert abs(row["ratio"] - row["rival_us"] / row["ours_us"]) < 1e-9
        if row["kind"] != "host":
            assert row["error"] < 1e-5
            assert row["roof"] < 1.5


def test_report_is_reproducible(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: operations -->\nold\n<!-- end -->\n")
    assert matmuls("report", "--readme", str(readme), "--check").returncode == 2
    assert "old" in readme.read_text()
    assert matmuls("report", "--readme", str(readme)).returncode == 0
    assert "cublasTransabMM" in readme.read_text()
    assert matmuls("report", "--readme", str(readme), "--check").returncode == 0
