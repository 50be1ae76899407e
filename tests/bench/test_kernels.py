"""`matmuls bench --kernels`: cases of kernels, what they gain, and what the command says."""

import json

import pytest
import torch
from typer.testing import CliRunner

from matmuls_bench import machine, matrices
from matmuls_bench.cli import kernels
from matmuls_bench.cli.kernels import show_kernels
from matmuls_bench.kernels import Case, gains, save, sparse
from matmuls_bench.spmm import Operands
from matmuls_bench.timing import Timing
from matmuls_cli import app as cli


def case(chosen, seconds, label="4096 x 4096"):
    return Case("sparse products", "plan @ b", label, "float32", chosen, seconds, dict.fromkeys(seconds, 0.0))


CASES = [
    case("dense", {"dense": 2e-6, "by_rows": 4e-6, "chunks": 8e-6}),
    case("dense", {"dense": 4e-6, "by_rows": 2e-6}, "slower"),
    case("dense", {"dense": 4e-6, "by_rows": 3.95e-6}, "as fast"),
    case("dense", {"dense": 1e-6}, "alone"),
    case("by_rows", {"by_rows": 1e-6}),
]


def test_gains_are_ratios_over_the_fastest_other_kernel():
    dense, by_rows = gains(CASES)
    assert (dense.family, dense.kernel, dense.cases) == ("sparse products", "dense", 4)
    assert dense.mean == pytest.approx((2 * 0.5 * 3.95 / 4) ** (1 / 3))
    assert dense.least == 0.5
    assert [c.label for c in dense.slower] == ["slower"]
    assert (by_rows.cases, by_rows.mean, by_rows.least, by_rows.slower) == (1, None, None, [])


def test_results_are_written_with_their_environment(tmp_path):
    save(tmp_path / "kernels.json", CASES, {"device": "H100"})
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["environment"] == {"device": "H100"}
    assert [Case(**c) for c in result["cases"]] == CASES


def test_the_table_has_a_row_for_each_kernel_and_names_what_is_slower(capsys):
    show_kernels(gains(CASES))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("dense", "by_rows", "0.50", "gain, min"))
    assert "plan @ b slower, float32: by_rows 2.0 us, dense 4.0 us" in shown


def test_every_kernel_of_a_cpu_is_timed(dense_rounds):
    """Where only two kernels run: by_rows and dense."""
    m = Operands(matrices.load("pruned:256x512:0.5"), torch.float32, "cpu")
    found = sparse.of_matrix(m, (2, 3))
    assert [c.label for c in found] == ["pruned:256x512:0.5 x 2", "pruned:256x512:0.5 x 3"]
    for c in found:
        assert (c.family, c.operation, c.dtype) == ("sparse products", "plan @ b", "float32")
        assert set(c.seconds) == set(c.spread) == {"by_rows", "dense"}
        assert c.chosen == "by_rows"  # too small to select
        assert c.seconds == {"by_rows": 1.0, "dense": 9.0}


@pytest.fixture
def dense_rounds(monkeypatch):
    """dense takes 9 s, by_rows 1 s: it is far behind, and has one round."""
    rounds_of = []

    def time_warm(rivals, device, rounds, own_before=0):
        for run in rivals:
            run()
        rounds_of.append((len(rivals), rounds))
        return [Timing(seconds, 0.0, seconds) for seconds in (1.0, 9.0)[: len(rivals)]]

    monkeypatch.setattr(sparse.timing, "time_warm", time_warm)
    yield
    assert rounds_of == [(2, 1), (1, sparse.ROUNDS[0])] * 2


def test_the_drawn_matrices_are_those_of_the_benchmark():
    for name in sparse.DRAWN[-2:]:
        assert matrices.load(name).nnz > 0
    assert len(set(sparse.DRAWN)) == 13
    assert sparse.steps(["a", "b"]) == 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kernels", "--device", "cpu"], "matmuls: --kernels needs a GPU"),
        (
            ["softmax_", "--kernels"],
            "matmuls: no family of kernels named softmax_; there are rows, dense products, sparse products",
        ),
        (["--matrices", "."], "matmuls: --matrices is a folder, with --kernels, got ."),
        (["--kernels", "--matrices", "nothing"], "matmuls: --matrices is a folder, with --kernels, got nothing"),
    ],
    ids=str,
)
def test_what_the_command_cannot_do_is_said_in_a_sentence(args, message):
    run = CliRunner().invoke(cli.app, ["bench", *args])
    assert run.exit_code == 2
    assert message in run.stderr


def test_the_command_measures_files_first_and_writes_the_cases(tmp_path, monkeypatch):
    read = []

    def cases(names, part):
        read.extend(names)
        for found in CASES:
            yield found
            part(found.label)

    monkeypatch.setattr(kernels, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(machine, "environment", lambda device: {"device": device})
    monkeypatch.setattr(sparse, "cases", cases)
    (tmp_path / "b.mtx").touch(), (tmp_path / "a.npz").touch(), (tmp_path / "other.txt").touch()
    args = ["sparse products", "--kernels", "--matrices", str(tmp_path), "--out", str(tmp_path)]
    run = CliRunner().invoke(cli.app, ["bench", *args])
    assert run.exit_code == 0, run.output
    assert read == [str(tmp_path / "a.npz"), str(tmp_path / "b.mtx"), *sparse.DRAWN]
    result = json.loads((tmp_path / "kernels-cuda.json").read_text())
    assert result["environment"] == {"device": "cuda", "complete": True}
    assert len(result["cases"]) == len(CASES)


@pytest.mark.cuda
def test_kernels_are_timed_on_a_gpu():
    m = Operands(matrices.load("pruned:1024x1024:0.9"), torch.float16, "cuda")
    planned, planless = sparse.of_matrix(m, (64,))
    assert (planned.operation, planless.operation) == ("plan @ b", "spmm")
    for c in (planned, planless):
        assert {"by_rows", "split_rows", "shares", "chunks", "dense"} <= set(c.seconds)
        assert c.chosen in c.seconds
        assert min(c.seconds.values()) > 0
