"""Tile configurations and the search for them; with a simulated timer, real files and real processes."""

import json
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from matmuls import cli, tune
from matmuls.triton import configs
from matmuls.triton.configs import Entry, Gpu, Tiles
from matmuls.tune import Failed, Journal, Problem

H200 = Gpu("NVIDIA H200", (9, 0), 132)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108)
OTHERS = [
    ("T4", (7, 5), 40),
    ("A10", (8, 6), 72),
    ("L4", (8, 9), 58),
    ("B200", (10, 0), 148),
    ("RTX 5090", (12, 0), 170),
]
GPUS = [H200, A100, *(Gpu(*facts) for facts in OTHERS)]
PROBLEM = Problem("masked_linear", 8192, 1024, 1024, "bfloat16")
SMALL = [Tiles(128, 256, 64), Tiles(128, 128, 64), Tiles(64, 64, 64), Tiles(64, 128, 64, warps=4)]


def entry(**changes):
    e = Entry("masked_linear", 1024, 1024, 8192, "bfloat16", "3.6.0", SMALL[0], 30.0, 31.0)
    return e._replace(**changes)


# ------------------------------------------------------------------------------------------------------------- look-up


def choose(mine=(), shipped=(), operator="masked_linear", m=8192, n=1024, k=1024, dtype="bfloat16", version="3.6.0"):
    return configs.choose(list(mine), list(shipped), operator, m, n, k, dtype, version, 132)


def test_order_of_look_up():
    mine, shipped, near = (entry(tiles=t) for t in SMALL[1:4])
    near = near._replace(k=2048)
    assert choose([mine], [shipped, near]) == mine.tiles
    assert choose([mine], [shipped, near], m=16384) == mine.tiles  # the user's entry with the nearest M
    # the user's entry is of another Triton version
    assert choose([mine], [near, shipped], version="3.7.0") == shipped.tiles
    assert choose([], [shipped, near], k=2048) == near.tiles
    assert choose([], [shipped, near], k=4096) == near.tiles
    assert choose([], [shipped, near], k=65536) is None  # no entry is close enough
    assert choose([mine], [shipped], dtype="float16") is None
    assert choose([mine], [shipped], operator="masked_weights") is None


def test_a_users_entry_does_not_displace_a_shipped_one_of_a_nearer_number_of_rows():
    mine, shipped = entry(m=65536, tiles=SMALL[1]), entry(m=8192, tiles=SMALL[2])
    chosen = {m: choose([mine], [shipped], m=m) for m in (512, 8192, 16384, 32768, 65536)}
    assert chosen == {512: None, 8192: SMALL[2], 16384: SMALL[2], 32768: SMALL[1], 65536: SMALL[1]}
    assert choose([mine], [], m=8192) == SMALL[1]
    assert choose([mine], [], m=4096) is None  # the default, which differs for few rows


def test_a_users_entry_without_a_time_is_ignored():
    """Earlier versions wrote the default as one if no trial had a time."""
    mine, shipped = entry(us=0.0, default_us=0.0), entry(tiles=SMALL[1])
    assert choose([mine], [shipped]) == shipped.tiles
    assert choose([mine]) is None


def test_chunks_of_rows_follow_the_shape_and_not_the_nearest_entry():
    tuned = entry(operator="masked_ffn_weights", k=1024, n=2048, tiles=Tiles(128, 256, 64, tma=True, split=2))

    def split(**shape):
        return choose([], [tuned], operator="masked_ffn_weights", **shape).split

    assert split(k=1024, n=2048) == 2  # as it was tuned
    assert split(k=1536, n=6144) == 1  # 288 tiles
    assert split(k=512, n=1024) == 8
    assert split(k=512, n=1024, m=4096) == 4  # chunks of a thousand rows


def test_buckets():
    assert [configs.bucket(m) for m in (1, 16, 17, 512, 513, 40000, 10**6)] == [16, 16, 32, 512, 1024, 65536, 65536]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
@pytest.mark.parametrize("operator", configs.OPERATORS)
def test_default_tiles_fit_the_gpu(operator, gpu):
    for m in (1, 16, 64, 512, 8192, 65536):
        for n, k in ((1024, 1024), (4096, 11008), (24, 40)):
            for dtype, size in (("bfloat16", 2), ("float32", 4)):
                t = configs.default(operator, m, n, k, size, gpu)
                huge = Problem(operator, 1 << 20, 1 << 20, 1 << 20, dtype)
                assert tune._fits(t, huge, gpu) or m <= 64, t
                assert t.split == 1 or m // t.split >= 1024


def test_large_tiles_are_for_gpus_with_as_much_shared_memory_as_hopper():
    tiles = {g.name: configs.default("masked_linear", 4096, 4096, 4096, 2, g) for g in GPUS}
    large = tiles[H200.name]
    assert (large.rows, large.columns, large.tma) == (128, 256, True)
    assert {name for name, t in tiles.items() if t == large} == {H200.name, "B200"}
    assert not any(t.tma for t in tiles.values() if t != large)


def test_gpus_of_one_capability_share_the_shipped_file(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "user_folder", lambda: tmp_path)
    configs.reload()
    entries = {g.name: configs._entries(g)[1] for g in (H200, H200._replace(name="NVIDIA H100 PCIe"), A100)}
    assert entries[H200.name] == entries["NVIDIA H100 PCIe"] != []
    assert entries[A100.name] == []
    configs.reload()


def test_files(tmp_path, recwarn):
    path = configs.file_of(tmp_path, H200.name)
    assert path.name == "NVIDIA_H200.json"
    assert configs.read(path, H200.name) == []
    configs.write(path, H200.name, [entry(), entry(k=2048)])
    assert configs.read(path, H200.name) == [entry(), entry(k=2048)]
    tune.merge(path, H200.name, [entry(us=20.0)])
    assert configs.read(path, H200.name) == [entry(us=20.0), entry(k=2048)]
    assert not recwarn.list
    assert configs.read(configs.file_of(configs.SHIPPED, H200.name), H200.name) is not None
    assert not recwarn.list


def test_concurrent_searches_keep_each_others_entries(tmp_path):
    path = configs.file_of(tmp_path, H200.name)
    found = [entry(k=k) for k in range(1, 61)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda e: tune.merge(path, H200.name, [e]), found))
    assert configs.read(path, H200.name) == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["NVIDIA_H200.json", "NVIDIA_H200.lock"]


def test_a_search_keeps_unknown_entries(tmp_path):
    path = configs.file_of(tmp_path, H200.name)
    later = {**entry(operator="masked_later")._asdict(), "tiles": {"cubes": 3}}
    configs.write(path, H200.name, [entry()], [later])
    tune.merge(path, H200.name, [entry(k=2048)])
    with pytest.warns(UserWarning, match="is ignored: 1 of 3 entries, the first: expected a known operator"):
        assert configs.read(path, H200.name) == [entry(), entry(k=2048)]
    assert json.loads(path.read_text())["entries"][2] == json.loads(json.dumps(later))


def test_a_search_renames_an_unreadable_file(tmp_path):
    path = configs.file_of(tmp_path, H200.name)
    path.write_text('{"schema": 2}')
    with pytest.warns(UserWarning, match=r"is ignored, and is now .*\.bad: expected an object with schema 1"):
        tune.merge(path, H200.name, [entry()])
    assert path.with_suffix(".bad").read_text() == '{"schema": 2}'
    assert configs.read(path, H200.name) == [entry()]


def broken(change):
    content = {
        "schema": 1,
        "gpu": H200.name,
        "entries": [{**entry()._asdict(), "tiles": {"rows": 64, "columns": 64, "depth": 64}}],
    }
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not JSON", "Expecting value"),
        ("[" * 100000, "recursion|Expecting"),
        ("[]", "expected an object with schema 1"),
        (broken(lambda c: c.update(schema=2)), "expected an object with schema 1"),
        (broken(lambda c: c.update(gpu="NVIDIA A100")), "expected entries for NVIDIA H200, got 'NVIDIA A100'"),
        (broken(lambda c: c.update(entries={})), "expected a list of entries"),
        (broken(lambda c: c["entries"].append(3)), "expected an entry of operator, k"),
        (broken(lambda c: c["entries"][0].update(extra=1)), "expected an entry of operator, k"),
        (broken(lambda c: c["entries"][0].update(operator="rm")), "expected a known operator and sizes"),
        (broken(lambda c: c["entries"][0].update(k="1024")), "expected a known operator and sizes"),
        (broken(lambda c: c["entries"][0].update(m=0)), "expected a known operator and sizes"),
        (broken(lambda c: c["entries"][0].update(us=None)), "expected a dtype, a Triton version and times"),
        (broken(lambda c: c["entries"][0].update(us=10**400)), "expected a dtype, a Triton version and times"),
        (broken(lambda c: c["entries"][0].update(tiles=[])), "expected tiles"),
        (broken(lambda c: c["entries"][0]["tiles"].update(shell="rm")), "expected tiles"),
        (broken(lambda c: c["entries"][0]["tiles"].pop("rows")), "missing"),
        (broken(lambda c: c["entries"][0]["tiles"].update(rows=96)), "expected powers of two"),
        (broken(lambda c: c["entries"][0]["tiles"].update(rows=1 << 20)), "expected powers of two"),
        (broken(lambda c: c["entries"][0]["tiles"].update(rows=64.0)), "expected whole numbers"),
        (broken(lambda c: c["entries"][0]["tiles"].update(tma=1)), "expected whole numbers, and true or false"),
        (broken(lambda c: c["entries"][0]["tiles"].update(stages=100)), "expected at most 16 warps"),
        (broken(lambda c: c["entries"][0]["tiles"].update(split=10**9)), "expected a group and a split"),
        (broken(lambda c: c.update(gpu=H200.name, note="x" * configs.LARGEST_FILE)), "expected at most 1048576 bytes"),
    ],
    ids=lambda x: "" if x[:1] in "{[n" else x[:40],
)
def test_a_bad_file_is_reported_and_ignored(text, words, tmp_path):
    path = configs.file_of(tmp_path, H200.name)
    path.write_text(text)
    with pytest.warns(UserWarning, match=f"is ignored: .*({words})"):
        assert configs.read(path, H200.name) == []


def test_a_bad_file_is_reported_once_and_a_missing_shape_names_the_command(tmp_path, monkeypatch):
    path = configs.file_of(tmp_path, H200.name)
    path.write_text("[]")
    monkeypatch.setattr(configs, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(configs, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(configs, "gpu", lambda index: H200)
    monkeypatch.setattr(configs, "INTERPRETED", False)
    configs.reload()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (1024, 2048, 1024):
            t = configs.tiles("masked_linear_t", 8192, n, 512, torch.bfloat16, 0)
            assert t == configs.default("masked_linear_t", 8192, n, 512, 2, H200)
    text = [str(w.message) for w in told]
    assert sum("is ignored" in t for t in text) == 1
    assert sum("matmuls tune masked_linear --m 8192 --k 2048 --n 512 --dtype bfloat16" in t for t in text) == 1
    configs.reload()


# -------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda g: g.name)
def test_candidates(gpu):
    for problem in (*tune.problems("masked_linear", 1024, 1024, [1, 512, 65536], "bfloat16"),
                    *tune.problems("masked_ffn", 1024, 2048, [8192], "float32")):  # fmt: skip
        found = tune.candidates(problem, gpu)
        assert 20 < len(found) < 6000
        assert len(set(found)) == len(found)
        assert all(tune._fits(t, problem, gpu) for t in found[1:])
        assert gpu is H200 or not any(t.tma for t in found)
    with pytest.raises(ValueError, match="there is nothing to tune named matmul; there are masked_linear, masked_ffn"):
        tune.problems("matmul", 1, 1, [1], "bfloat16")


def test_every_kernel_of_training_is_tuned():
    todo = tune.problems("masked_linear", 4096, 2048, [16, 512, 8192], "bfloat16")
    assert [p[:4] for p in todo if p.operator not in ("masked_linear", "masked_linear_t", "masked_weights")] == [
        ("masked_few_weights", 512, 2048, 4096),
        ("masked_ffn_weights", 8192, 4096, 2048),
    ]
    assert len(todo) == 3 * 3 + 2
    few = tune.candidates(todo[-2], H200)
    assert len(few) > 20
    assert all(t.tma and t.split == 1 for t in few)


def speed(tiles):
    """A simulated time: larger tiles are faster; flatten and TMA help."""
    return 1e-3 / (tiles.rows * tiles.columns) * (1 - 0.1 * tiles.flatten - 0.1 * tiles.tma) + 1e-9 * tiles.group


class FakeClock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_the_search_finds_the_best_within_its_budget_and_resumes(tmp_path):
    calls = []

    def timer(problem, tiles):
        calls.append(tiles)
        if len(tiles) == 1 and tiles[0].stages == 4:
            raise Failed("out of resources")
        return [speed(t) for t in tiles]

    tried = tune.candidates(PROBLEM, H200)
    journal = Journal(tmp_path / "trials")
    first = list(tune.search(PROBLEM, tried, timer, journal, 30, FakeClock()))
    assert len(first) == len(calls) == 30
    assert first[0][0] == tried[0]
    assert any(seconds is None for _, seconds in first)

    (tmp_path / "trials").open("a").write("[" * 100000 + '\n{"problem": {"operator"')  # a truncated last line
    again = Journal(tmp_path / "trials")
    assert again.seconds == journal.seconds
    second = list(tune.search(PROBLEM, tried, timer, again, 100, FakeClock()))
    assert not {t for t, _ in first} & {t for t, _ in second}

    winner = tune.best(PROBLEM, tried[0], tried[0], timer, again).entry
    # two fields away from the default; found in 128 of thousands of trials
    assert (winner.tiles.flatten, winner.tiles.tma) == (True, True)
    assert winner.us < winner.default_us == round(speed(tried[0]) * 1e6, 3)
    assert Journal(tmp_path / "trials", version="other").seconds == {}


def test_never_worse_than_the_default_and_the_tiles_in_use(tmp_path):
    """Tiles that were faster alone lose if they are slower when timed together with those."""
    journal = Journal(tmp_path / "trials")
    for n, t in enumerate(SMALL):
        journal.note(PROBLEM, t, 4e-5 - n * 1e-6)

    def timer(problem, tiles):
        return [1e-5 + n for n, _ in enumerate(tiles)]

    for before, default in (SMALL[:2], SMALL[1::-1], SMALL[:1] * 2):
        found = tune.best(PROBLEM, before, default, timer, journal)
        assert (found.before, found.before_us) == (before, 10.0)
        assert (found.entry.tiles, found.entry.us) == (before, 10.0)
        assert found.entry.default_us == (10.0 if before == default else 1000010.0)


def test_one_finalist_that_fails_does_not_hide_the_times_of_the_others(tmp_path):
    journal = Journal(tmp_path / "trials")
    for t in SMALL:
        journal.note(PROBLEM, t, 1e-6)
    seconds = dict(zip(SMALL, (3e-5, 2e-5, None, 2.5e-5), strict=True))

    def timer(problem, tiles):
        if any(seconds[t] is None for t in tiles):
            raise Failed("died")
        return [seconds[t] for t in tiles]

    assert tune.best(PROBLEM, SMALL[0], SMALL[3], timer, journal) == tune.Found(
        SMALL[0], 30.0, entry(tiles=SMALL[1], us=20.0, default_us=25.0, triton=journal.version)
    )
    found = tune.best(PROBLEM, SMALL[2], SMALL[3], timer, journal)  # those in use fail
    assert (found.before_us, found.entry.tiles) == (0.0, SMALL[1])


# ----------------------------------------------------------------------------------------------- what is in use before


def in_use(problem, folder):
    """The tiles that the library runs with on an H200."""
    own, shipped = configs.entries(H200, folder)
    version, m = tune.triton.__version__, configs.bucket(problem.m)
    chosen = configs.choose(own, shipped, problem.operator, m, *problem[2:], version, H200.multiprocessors)
    return chosen or configs.default(problem.operator, m, problem.n, problem.k, 2, H200)


SHIPPED = configs.read(configs.file_of(configs.SHIPPED, H200.name), H200.name)


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("budget", [0, 3, 40])
def test_the_shipped_tiles_stay_unless_others_are_faster(budget, tmp_path):
    """With the times that the shipped file states, and slower ones for all other tiles."""
    better = [e for e in SHIPPED if e.tiles != configs.default(e.operator, e.m, e.n, e.k, 2, H200)]
    assert better
    for e in better:
        problem = Problem(e.operator, e.m, e.n, e.k, e.dtype)
        default = configs.default(e.operator, e.m, e.n, e.k, 2, H200)
        known, tried = {e.tiles: e.us, default: e.us * 1.5}, []

        def timer(problem, tiles, known=known, tried=tried, rest=e.us * 2):
            tried.extend(tiles)
            return [known.get(t, rest) * 1e-6 for t in tiles]

        (found,) = tune.tune([problem], H200, tmp_path, timer, budget, clock=FakeClock())
        assert found.before == found.entry.tiles == in_use(problem, tmp_path) == e.tiles
        assert found.before_us == found.entry.us == pytest.approx(e.us, abs=1e-3)
        assert found.entry.default_us == pytest.approx(e.us * 1.5, abs=1e-3)
        assert tried[:2] == [e.tiles, default]


@pytest.mark.exhaustive
def test_nothing_is_written_if_no_trial_has_a_time(tmp_path):
    def fails(problem, tiles):
        raise Failed("is off by nan")

    todo = [Problem(e.operator, e.m, e.n, e.k, e.dtype) for e in SHIPPED]
    before = [in_use(p, tmp_path) for p in todo]
    found = tune.tune(todo, H200, tmp_path, fails, 200, clock=FakeClock())
    assert found == [(t, 0.0, None) for t in before]
    assert not configs.file_of(tmp_path, H200.name).exists()
    assert [in_use(p, tmp_path) for p in todo] == before


def test_an_earlier_winner_stays_without_the_journal_and_if_a_later_search_fails(tmp_path):
    """One row shares its entry with 16."""
    problem = PROBLEM._replace(operator="masked_weights", m=16)
    default = tune.candidates(problem, H200)[0]

    def timer(problem, tiles, slow=1e-5):
        if problem.m == 1:
            raise Failed("is off by nan")
        return [slow if t == default else slow / (1 + tune.differences(t, default)) for t in tiles]

    (first,) = tune.tune([problem], H200, tmp_path, timer, 400, clock=FakeClock())
    assert first.entry.us < first.before_us
    (failed,) = tune.tune([problem._replace(m=1)], H200, tmp_path, timer, 400, clock=FakeClock())
    assert (failed.before, failed.entry) == (first.entry.tiles, None)
    configs.file_of(tmp_path, H200.name).with_suffix(".trials.jsonl").unlink()
    (again,) = tune.tune([problem], H200, tmp_path, timer, 0, clock=FakeClock())  # time for no trial
    assert again == (first.entry.tiles, first.entry.us, first.entry)
    assert in_use(problem, tmp_path) == first.entry.tiles


def in_a_process(problem, tiles):
    """A trial that may crash its process, hang, fail or give a wrong result."""
    rows = tiles[0].rows
    if rows == 16:
        os._exit(3)
    if rows == 32:
        time.sleep(60)
    if rows == 64:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if rows == 256:
        raise Failed("is off by 1.0")
    return [1e-5 * len(tiles)] * len(tiles)


@pytest.mark.exhaustive
def test_a_crash_loses_only_its_own_trial(tmp_path):
    process = tune.Process(in_a_process, limit=90.0)
    process(PROBLEM, [Tiles(128, 64, 64)])  # starts the process
    process._limit = 3.0
    pids = set()
    journal = Journal(tmp_path / "trials")

    def timer(problem, tiles):
        if process._process is None:
            process._limit = 90.0 if tiles[0].rows != 32 else 3.0
        elif tiles[0].rows == 32:
            process._limit = 3.0
        try:
            return process(problem, tiles)
        finally:
            pids.add(process._process.pid if process._process else None)

    tried = [Tiles(rows, 64, 64) for rows in (128, 16, 256, 32, 64)] + [Tiles(128, 128, 64)]
    found = dict(tune.search(PROBLEM, tried, timer, journal, 1000))
    process.close()
    assert {t.rows for t, s in found.items() if s is None} == {16, 32, 64, 256}
    assert len([s for s in found.values() if s]) == 2
    why = [json.loads(line).get("why", "") for line in (tmp_path / "trials").read_text().splitlines()]
    for words in ("exit code", "no result in 3 s", "illegal memory access", "is off by 1.0"):
        assert any(words in w for w in why), why


def compiles(problem, tiles):
    """Creates a file for each of the tiles; one crashes."""
    for t in tiles:
        if t.rows == 16:
            os._exit(3)
        Path(problem.operator, str(hash(t))).touch()
    return [0.0] * len(tiles)


@pytest.mark.exhaustive  # 12 s, as the crash of a trial below
def test_trials_are_compiled_in_advance_and_a_crash_there_is_ignored(tmp_path):
    problem = PROBLEM._replace(operator=str(tmp_path))
    tried = [Tiles(rows, 64, depth) for rows in (128, 16, 256) for depth in (32, 64)]
    compilers = tune.Compilers(compiles, 4)
    compiled = {}

    def timer(problem, tiles):
        compiled[tiles[0]] = (tmp_path / str(hash(tiles[0]))).exists()
        return [1e-5]

    found = list(tune.search(problem, tried, timer, Journal(tmp_path / "trials"), 1000, ahead=compilers))
    compilers.close()
    assert found[0][0] == tried[0]
    assert len(found) == len(tried)
    assert compiled == {t: t.rows != 16 for t in tried}


@pytest.mark.exhaustive
def test_look_up_reads_what_tune_writes(tmp_path):
    todo = tune.problems("masked_ffn", 512, 1024, [512, 8192], "float16")
    told = []
    found = tune.tune(
        todo, H200, tmp_path, lambda p, ts: [speed(t) for t in ts], 600, lambda *a: told.append(a), FakeClock()
    )
    assert len(found) == len(todo) == 10
    assert {p for p, _, _ in told} == set(todo)
    entries = configs.read(configs.file_of(tmp_path, H200.name), H200.name)
    assert entries == sorted((f.entry for f in found), key=lambda e: e[:6])
    for p, (_, _, e) in zip(todo, found, strict=True):
        assert configs.choose(entries, [], p.operator, configs.bucket(p.m), p.n, p.k, p.dtype, e.triton, 132) == e.tiles


def test_the_command_needs_a_gpu():
    import torch
    from typer.testing import CliRunner

    if torch.cuda.is_available():
        pytest.skip("has one")
    run = CliRunner().invoke(cli.app, ["tune", "masked_linear", "--k", "64", "--n", "64"])
    assert run.exit_code == 2
