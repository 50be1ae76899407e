"""`matmuls spmm`: the command, and how it evaluates its measurements."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.in_process import matmuls
from matmuls import sparse
from matmuls.sparse.names import DENSE
from matmuls_bench import matrices
from matmuls_bench import spmm as products
from matmuls_bench.spmm import Case, Result, candidates, measured

MARKET = "%%MatrixMarket matrix coordinate real general\n"


def test_spmm_measures_checks_and_writes(tmp_path):
    np.savez(tmp_path / "own.npz", crow=np.array([0, 1, 1, 3]), col=np.array([1, 0, 2]), shape=np.array([3, 3]))
    sources = str(tmp_path / "own.npz"), "pruned:128x96:0.9"
    run = matmuls("spmm", *sources, "--n", "4,8", "--device", "cpu", "--backward", "--out", str(tmp_path / "out"))
    assert (run.returncode, run.stderr) == (0, "")
    for words in ("own", "torch.sparse", "dense", "plan (by_rows)*", "geometric mean", "forward + backward", "MiB"):
        assert words in run.stdout
    result = json.loads((tmp_path / "out/spmm-cpu.json").read_text())
    assert {"commit", "torch", "command", "device", "date"} <= result["environment"].keys()
    assert [(c["matrix"], c["n"]) for c in result["cases"]] == [(m, n) for m in ("own", sources[1]) for n in (4, 8)]
    for case in products.load(tmp_path / "out/spmm-cpu.json"):
        assert {"plan", "without a plan", "torch.sparse", "dense"} <= case.results.keys()
        assert all(r.us > 0 and r.error < 1e-6 for r in case.results.values())
        assert case.speed() == min(case.rivals.values()) / case.results["plan"].us
        assert case.floor_share > 0 < case.backward_speed
        assert case.backward_mib["plan"] > 0
        assert 5 <= case.calls <= 50
        assert case.pays_back > 0 < case.plan_us
    assert (tmp_path / "out/spmm-cpu.png").stat().st_size > 5000


def test_sweep_reports_where_sparse_beats_dense(tmp_path):
    run = matmuls("spmm", "--sweep", "0.5,0.99", "--shape", "256x256", "--n", "32", "--device", "cpu")
    assert (run.returncode, run.stderr) == (0, "")
    assert "float32, 32 columns: sparse beats dense:" in run.stdout


def test_against_selects_the_rivals(tmp_path):
    run = matmuls("spmm", "grid:8", "--n", "4", "--device", "cpu", "--against", "dense", "--out", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    (case,) = products.load(tmp_path / "spmm-cpu.json")
    assert case.results.keys() == {"plan", "without a plan", "dense"}
    assert products.rivals_named(["cusparse", "torch 2:4"]) == (*products.RIVALS[:7], "torch 2:4")


@pytest.mark.cuda
def test_two_of_four_is_compared_with_torchs_semi_structured(tmp_path):
    sources = "pruned:256x256:2of4", "pruned:256x256:0.5"
    options = "--n", "64", "--device", "cuda", "--dtype", "float16", "--against", "torch 2:4", "--out", str(tmp_path)
    run = matmuls("spmm", *sources, *options)
    assert (run.returncode, run.stderr) == (0, "")
    semi, half = products.load(tmp_path / "spmm-cuda.json")
    assert semi.results["torch 2:4"].refused or semi.results["torch 2:4"].error < 1e-2
    assert half.results.keys() == {"plan", "without a plan"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["spmm"], "no matrix: name files"),
        (["spmm", "/no/such/file.mtx"], "no file named /no/such/file.mtx"),
        (["spmm", "grid:4", "--n", "4,x"], "--n is numbers of columns separated by commas, got 4,x"),
        (["spmm", "grid:4", "--n", f"4,{2**63}"], "--n is numbers of columns separated by commas, got 4,9223372036854"),
        (["spmm", "grid:4", "--dtype", "int8"], "--dtype is"),
        (
            ["spmm", "grid:4", "--against", "dense", "--against", "mkl"],
            "--against is one of cusparse, cusparse csr_alg1",
        ),
        (["spmm", "grid:4:4"], "grid:4:4: expected grid:SIDE"),
        (["spmm", "rmat:x"], "rmat:x: expected rmat:SCALE:EDGES"),
        (["spmm", "pruned:8x8:most"], "pruned:8x8:most: expected pruned:ROWSxCOLUMNS:SPARSITY"),
        (["spmm", "grid:4", "--out", "/proc/x"], "--out: expected a folder that can be written, got /proc/x: No such"),
        (["spmm", "grid:4", "--out", __file__], f"{__file__}: File exists"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_usage_prints_one_line(args, words):
    run = matmuls(*args, "--device", "cpu")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert words in run.stderr


def made_up(n=32, dtype="float32", nnz=100, **us):
    results = {name.replace("_", " "): Result(time, 0.0) for name, time in us.items()}
    return Case("m", 100, 100, nnz, 9, dtype, n, 1.0, results, "dense", 50.0, 1000, 50, 300.0, 450.0, 500.0, 1000.0)


def test_results_before_an_unreadable_file_are_kept(tmp_path):
    (tmp_path / "bad.mtx").write_text("hello")
    named = "grid:8", str(tmp_path / "bad.mtx")
    run = matmuls("spmm", *named, "--n", "4", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert run.returncode == 2
    assert "Not a Matrix Market file" in run.stderr
    assert "grid:8" in run.stdout
    result = json.loads((tmp_path / "out/spmm-cpu.json").read_text())
    assert not result["environment"]["complete"]
    assert [c["matrix"] for c in result["cases"]] == ["grid:8"]


def test_a_file_without_the_arrays_of_a_matrix_is_named(tmp_path):
    np.savez(tmp_path / "arr.npz", np.ones(3))
    run = matmuls("spmm", str(tmp_path / "arr.npz"), "--device", "cpu")
    expected = "expected the arrays of scipy.sparse.save_npz, or crow, col, shape and optionally values"
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"matmuls: {tmp_path / 'arr.npz'}: {expected}, got arr_0\n"


def test_progress_of_a_case_comes_in_parts(tmp_path):
    told = []
    cases = products.measure_all(
        ["grid:4", "grid:5"], [torch.float32], [4, 8], "cpu", [], part=lambda *a: told.append(a)
    )
    assert len(list(cases)) == 4
    done = [share for _, share in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert 0 < done[2] < 0.25  # the time left is known before a tenth of the first of four is done
    assert 3 < done[-1] < 4
    assert told[0][0] == "reading grid:4"
    assert told[-1][0] == "grid:5, float32, 8 columns"


def test_cases_beyond_memory_are_reported_and_the_rest_is_measured(tmp_path):
    (tmp_path / "long.mtx").write_text(f"{MARKET}{10**15} 3 1\n1 1 1\n")
    (tmp_path / "wide.mtx").write_text(f"{MARKET}3 {10**18} 1\n1 1 1\n")
    named = [*(str(tmp_path / name) for name in ("long.mtx", "wide.mtx")), "pruned:100000000x100000000:0.9", "grid:3"]
    refused = []
    cases = list(products.measure_all(named, [torch.float32], [99999999999999, 4], "cpu", refused))
    assert [(c.matrix, c.n) for c in cases] == [("grid:3", 4)]
    assert [line.split(":")[0] for line in refused] == [
        named[0],
        *(f"{named[1]}, float32, {n} columns" for n in (99999999999999, 4)),
        "pruned",
        "grid",
    ]
    assert "grid:3, float32, 99999999999999 columns: " in refused[-1]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_matching_nan_and_overflow_are_no_error(tmp_path, dtype):
    (tmp_path / "a.mtx").write_text(f"{MARKET}5 4 6\n1 1 nan\n2 2 inf\n2 1 -inf\n3 1 1e30\n4 1 65519\n5 2 2\n")
    refused = []
    (case,) = products.measure_all([str(tmp_path / "a.mtx")], [getattr(torch, dtype)], [8], "cpu", refused)
    assert products.wrong([case]) == refused == []


def test_errors_next_to_nan_and_overflow_are_found():
    inf, nan = float("inf"), float("nan")
    truth = torch.tensor([1.0, 1e9, -1e9, inf, nan, 65500.0], dtype=torch.float64)
    right = truth.half()
    assert measured._error(right, truth) == 0
    # differences explained by rounding
    assert measured._error(torch.tensor([1.0, 65504, -inf, 65504, nan, inf]).half(), truth) == 0
    for n, other in ((0, 1.5), (0, inf), (0, nan), (1, -inf), (2, nan), (3, 6e4), (4, 1.0), (5, 4e4)):
        wrong = right.clone()
        wrong[n] = other
        assert not measured._error(wrong, truth) < 0.5


def test_ratios():
    case = made_up(plan=2.0, without_a_plan=4.0, cusparse_csr_alg2=5.0, dense=1.0)
    assert (case.speed(), case.speed("without a plan")) == (2.5, 1.25)
    assert (case.speed_over("dense"), case.floor_share, case.pays_back) == (0.5, 0.5, 1.5)
    assert replace(case, calls_us=0).pays_back is None
    assert (case.pays_back_waited, replace(case, waited_us=0).pays_back_waited) == (2.0, None)
    assert case.backward_speed is None
    refused = made_up(plan=2.0, without_a_plan=None, cusparse_csr_alg2=None)
    assert refused.speed() is None
    lines = products.summary([case, made_up(plan=1.0, without_a_plan=1.0, cusparse_csr_alg2=10.0)])
    assert lines[0] == "float32, plan over the fastest rival: geometric mean 5.00, lowest 2.50, 2 cases"


def test_wrong_results_are_reported():
    case = made_up(plan=1.0, without_a_plan=1.0)
    assert products.wrong([case]) == []
    for bad in (Result(1.0, 1e-3), Result(1.0, float("nan")), Result(refused="no memory")):
        (line,) = products.wrong([replace(case, results=case.results | {"without a plan": bad})])
        assert line.startswith("m, float32, 32 columns: without a plan is off by")


def test_crossover_needs_every_sparser_matrix_to_be_faster():
    def case(sparsity, ratio):
        return made_up(nnz=round(10000 * (1 - sparsity)), plan=1.0, without_a_plan=1.0, dense=ratio)

    sweep = [case(0.5, 2.0), case(0.8, 0.9), case(0.9, 1.5), case(0.99, 3.0)]
    assert products.crossovers(sweep) == ["float32, 32 columns: sparse beats dense: from 90.0% zeros on"]
    assert "never" in products.crossovers([case(0.99, 0.5)])[0]


def test_cusparse_candidates(device):
    m = products.Operands(matrices.load("rmat:7:4"), torch.float32, device)
    b = m.dense_side(9)
    truth = m.csr.to_dense().double() @ b.double()
    for algorithm in products.CUSPARSE:
        torch.testing.assert_close(candidates._cusparse(m, b, algorithm)().double(), truth, atol=1e-4, rtol=1e-4)


def test_the_dense_rival_reads_the_plans_copy(device):
    operands = products.Operands(matrices.load("pruned:64x48:0.1"), torch.float32, device)
    made, b = sparse.plan(operands.csr), operands.dense_side(8)
    made @ b
    before = candidates._full(operands, made)
    made._selector._made(DENSE).prepare(operands.values, b, torch.float32)
    after = candidates._full(operands, made)
    assert any(after is t for t in made._selector.tensors)
    assert torch.equal(after, before)
    assert torch.equal(after, operands.full())


@pytest.mark.cuda
def test_every_candidate_on_a_gpu():
    for dtype in (torch.float32, torch.bfloat16):
        (case,) = products.measure_all(["rmat:12:8"], [dtype], [64], "cuda", [], backward=True)
        bound = (16 + case.longest**0.5) * torch.finfo(dtype).eps
        assert {f"cusparse {a}" for a in products.CUSPARSE} <= case.results.keys()
        for name, r in case.results.items():
            assert r.refused or r.error < bound, (name, r)
        assert case.results["plan"].us > 0 < case.results["without a plan"].us
        assert case.rivals
