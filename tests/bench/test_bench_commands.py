"""`matmuls bench` and `bench-bert`, and what the commands of matmuls-bench show."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import common.cli_cases  # noqa: F401
from common.in_process import matmuls
from matmuls import cli
from matmuls_bench import figures, machine
from matmuls_bench import spmm as products
from matmuls_bench.cli.spmm import show_spmm


@pytest.mark.parametrize("args", [("--rounds", "0"), ("--rounds", "-1"), ("--piece", "-2"), ("--chunk", "-3")])
def test_bench_bert_rejects_counts_below_the_minimum(args):
    run = CliRunner().invoke(cli.app, ["bench-bert", "--tiny", *args])
    assert run.exit_code == 2
    assert f"Invalid value for '{args[0]}'" in run.stderr


def test_bench_writes_json_and_no_progress_bar_into_a_file(tmp_path):
    run = matmuls("bench", "cublasMM", "matmul_", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    result = json.loads((tmp_path / "bench-cpu-cublasMM-matmul_.json").read_text())
    assert {"commit", "torch", "command", "device", "date"} <= result["environment"].keys()
    assert result["roofs"]["copy"] > 1e8
    assert {r["operation"] for r in result["rows"]} == {"cublasMM"}  # the cases of matmul_ are too large for --quick
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


@pytest.mark.exhaustive
def test_a_signal_ends_a_bench_and_keeps_its_results(tmp_path):
    """The second of two cases sends SIGTERM to its own process."""
    code = """
import os, signal
from matmuls_bench import operations
right, calls = operations.measure_job, []
def measure(job, *args):
    calls.append(job)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return right(job, *args)
operations.measure_job = measure
from matmuls.cli import main
main()
"""
    args = ("bench", "cublasMM", "--quick", "--device", "cpu", "--out", str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert run.returncode == 143
    assert "stopped" in run.stderr
    result = json.loads((tmp_path / "bench-cpu-cublasMM.json").read_text())
    assert (len(result["rows"]), result["environment"]["complete"]) == (1, False)


@pytest.mark.exhaustive
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


def made_up(**results):
    return products.Case("m", 9, 9, 9, 3, "float32", 4, 1.0, results, "by_rows", 1.0, 1, calls=5, calls_us=1.0)


def test_candidates_without_a_time_have_their_reason(capsys):
    def lacks():
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    def refuses():
        raise RuntimeError("no kernel for this layout\nmore")

    run, scipy = products.measured._checked(lacks, torch.ones(1))
    assert (run, scipy) == (None, products.Result(refused="not installed"))
    _, torchs = products.measured._checked(refuses, torch.ones(1))
    show_spmm([made_up(plan=products.Result(1.0, 0.0), scipy=scipy, torch=torchs)])
    shown = capsys.readouterr().out
    assert re.search(r"scipy +│ +not installed", shown)
    assert "\nscipy: not installed\ntorch: refused: no kernel for this layout\n" in shown


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were finished, with their captions, which are written as well."""
    kept, finish = [], figures.finish

    def keep(figure, path, caption, **options):
        kept.append((figure, caption))
        finish(figure, path, caption, **options)

    monkeypatch.setattr(figures, "finish", keep)
    return kept


@pytest.mark.parametrize("sweep", [False, True])
def test_plots_of_products_name_axes_and_machine(drawn, tmp_path, sweep):
    cases = [made_up(plan=products.Result(us, 0.0), scipy=products.Result(2 * us, 0.0)) for us in (1.0, 2.0)]
    facts = {"device": "some CPU", "torch": "2.13.0", "date": "2026-01-01", "commit": None}
    products.plot(tmp_path / "spmm.png", cases, sweep, facts)
    ((figure, caption),) = drawn
    (axes,) = figure.axes
    assert caption == "some CPU, torch 2.13.0, 2026-01-01"
    assert axes.get_ylabel() == "time of A @ B, µs (lower is better)"
    assert axes.get_xlabel() == ("share of zeros in A" if sweep else "matrix A")
    assert axes.get_title() == "float32, B of 4 columns"
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["plan", "scipy", "floor: a copy of the bytes that must move"]


@pytest.mark.parametrize(
    ("arguments", "processes", "command"),
    [
        (["/bin/matmuls", "spmm", "grid:4"], None, "matmuls spmm grid:4"),
        (["/x/matmuls/__main__.py", "spmm"], "2", "torchrun --nproc-per-node=2 -m matmuls spmm"),
        (["/x/scripts/blocks.py", "/home/me/out"], None, "python benchmarks/scripts/blocks.py out"),
        (["/x/scripts/a.py", "o", "--small"], "4", "torchrun --nproc-per-node=4 benchmarks/scripts/a.py o --small"),
    ],
)
def test_a_result_has_its_command(monkeypatch, tmp_path, arguments, processes, command):
    """Without the folders of the machine."""
    monkeypatch.setattr(sys, "argv", arguments)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    machine.save(tmp_path / "new/a.json", "cpu", {"more": 1}, rows=[2])
    result = json.loads((tmp_path / "new/a.json").read_text())
    assert (list(result), result["rows"], result["environment"]["more"]) == (["environment", "rows"], [2], 1)
    assert result["environment"]["command"] == command


def test_the_cpu_of_a_measurement_is_named():
    named, facts = machine.environment("cpu")["device"], Path("/proc/cpuinfo")
    assert named
    models = re.findall(r"model name\s*: (.*)", facts.read_text()) if facts.exists() else []
    assert named in models or not models
