"""The checks of a trial of `matmuls tune`, its memory and inputs, and the output of the command; without a GPU."""

import weakref

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from matmuls import cli, timing, tune
from matmuls.triton import configs
from matmuls.triton.configs import Gpu, Tiles
from matmuls.tune import Failed, Problem

H200 = Gpu("NVIDIA H200", (9, 0), 132)
PROBLEM = Problem("masked_weights", 512, 64, 64, "float16")
TILES = [Tiles(64, 64, 64), Tiles(64, 64, 32), Tiles(32, 64, 64)]
ALLOWED = 4 * torch.finfo(torch.float16).eps


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("part", [1 << 24, 3 * 64])  # the last part is smaller
def test_results_may_differ_by_rounding(part, monkeypatch):
    monkeypatch.setattr(tune, "PART", part)
    for dtype in (torch.float16, torch.float32):
        truth = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        kept, last = truth.clone(), truth.float().clone()
        tune.check(PROBLEM, TILES[0], (truth.float() * (1 + 0.9 * ALLOWED),), (truth,))
        with pytest.raises(Failed, match="is off by"):
            tune.check(PROBLEM, TILES[0], (truth.float() * (1 + 1.1 * ALLOWED),), (truth,))
        last[-1] += 2 * ALLOWED * truth.norm() / 8
        with pytest.raises(Failed, match="is off by"):
            tune.check(PROBLEM, TILES[0], (truth, last), (truth, truth))
        assert torch.equal(truth, kept)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e-6])
def test_a_zero_result_must_be_exactly_zero(wrong):
    zero, one = torch.zeros(8, 64, dtype=torch.float16), torch.ones(8, 64, dtype=torch.float16)
    tune.check(PROBLEM, TILES[0], (one, -zero), (one, zero))
    bad = zero.clone()
    bad[3, 5] = wrong
    for ours, truth in ((bad, zero), (one + bad * 1e6, one), (one, one + bad * 1e6)):
        with pytest.raises(Failed, match="is off by"):
            tune.check(PROBLEM, TILES[0], (one, ours), (one, truth))


def test_a_check_converts_one_part_at_a_time(monkeypatch):
    monkeypatch.setattr(tune, "PART", 1 << 14)
    results = (torch.ones(1024, 1024, dtype=torch.float16),) * 2
    peak = timing.peak_memory(lambda: tune.check(PROBLEM, TILES[0], results, results), "cpu")
    # in float32: a part of each, which a GPU converts as it subtracts, and their difference
    assert 4 * tune.PART < peak < 16 * tune.PART


def test_one_truth_and_one_result_are_alive(monkeypatch):
    alive, most, timed = weakref.WeakSet(), [], []

    def result(kind):
        t = torch.ones(PROBLEM.n, PROBLEM.k, dtype=torch.float16)
        t.kind = kind
        alive.add(t)
        most.append(sorted(x.kind for x in alive))
        return (t,)

    def time_on_gpu(rivals, budget):
        timed.extend(rivals)
        assert not alive
        return [timing.Timing(1e-5, 0.0, 1e-5)] * len(rivals)

    monkeypatch.setattr(tune, "_call", lambda p, seed: (lambda: result("ours"), lambda: result("truth")))
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 1 << 18)
    monkeypatch.setattr(timing, "time_on_gpu", time_on_gpu)
    assert tune.measure_on_gpu(PROBLEM, TILES) == [1e-5] * 3
    assert most == [["truth"], *[["ours", "truth"]] * 3] * 2
    assert [len(calls) for calls in timed] == [4] * 3
    assert not torch.are_deterministic_algorithms_enabled()
    assert PROBLEM.operator not in configs.forced


@pytest.mark.parametrize("l2", [4 << 20, 50 << 20, 126 << 20])
def test_sets_of_inputs_exceed_the_cache_unless_there_are_as_many_as_allowed(l2):
    seen = set()
    for m in (1, 512, 8192, 65536):
        for k in (16, 256, 1024, 8192):
            problem = Problem("masked_linear", m, k, k, "bfloat16")
            sets, size = tune.sets_of_inputs(problem, l2), 2 * (2 * m * k + 2 * k * k)
            assert sets % 2 == 0
            assert 2 <= sets <= tune.SETS
            assert sets * size >= 2 * l2 or sets == tune.SETS
            assert sets == 2 or (sets - 2) * size < 2 * l2
            seen.add(sets)
    assert {2, tune.SETS} <= seen


# --------------------------------------------------------------------------------------------------------- the command


class Timer:
    """Stands for the child process: the default takes 20 us, other tiles 10 us."""

    def __init__(self, *_):
        pass

    def __call__(self, problem, tiles):
        if problem.operator == "masked_linear_t":
            raise Failed("died")
        default = configs.default(problem.operator, configs.bucket(problem.m), problem.n, problem.k, 2, H200)
        return [2e-5 if t == default else 1e-5 for t in tiles]

    def close(self):
        pass


class Compilers(Timer):
    width = 4

    def __call__(self, problem, tiles):
        pass


def test_the_command_compares_with_the_tiles_in_use(monkeypatch, tmp_path):
    from matmuls_cli import tune as command

    monkeypatch.setattr(command, "pick_device", lambda device: device)
    monkeypatch.setattr(tune, "Process", Timer)
    monkeypatch.setattr(tune, "Compilers", Compilers)
    monkeypatch.setattr(configs, "gpu", lambda index: H200)
    monkeypatch.setattr(configs, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(tune, "candidates", lambda p, gpu, all_=tune.candidates: all_(p, gpu)[:6])

    def shown():
        run = CliRunner().invoke(
            cli.app, ["tune", "masked_linear", "--k", "80", "--n", "48", "--m", "64", "--budget", "300"]
        )
        assert run.exit_code == 1
        end = "no tile sizes could be timed, and those in use are kept, for masked_linear_t 64x48x80 bfloat16"
        assert end in " ".join(run.output.split())
        assert "written: " in run.output
        rows = [[cell.strip() for cell in line.split("│")] for line in run.output.splitlines() if "64x80x48 b" in line]
        assert [row[1].split()[0] for row in rows] == ["masked_linear", "masked_weights"]
        return [row[3:7] for row in rows]

    assert shown() == [["10.0", "20.0", "2.000", "20.0"]] * 2
    assert shown() == [["10.0", "10.0", "1.000", "20.0"]] * 2  # the first search's winner is in use
    configs.reload()


def test_products_in_tf32_do_not_use_what_was_timed_without(monkeypatch, tmp_path):
    tiles = Tiles(32, 32, 32, warps=4)
    entry = configs.Entry("masked_linear", 64, 64, 8192, "float32", tune.triton.__version__, tiles, 1.0, 2.0)
    configs.write(configs.file_of(tmp_path, H200.name), H200.name, [entry])
    monkeypatch.setattr(configs, "gpu", lambda index: H200)
    monkeypatch.setattr(configs, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(configs, "INTERPRETED", False)
    configs.reload()
    shape = ("masked_linear", 8192, 64, 64)
    assert configs.tiles(*shape, torch.float32, 0) == tiles
    assert configs.tiles(*shape, torch.float32, 0, True) == configs.default(*shape, 4, H200, True)
    configs.reload()
