"""`matmuls embed`: formats, records without a text, runs that are killed, and what it says of wrong arguments."""

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import matmuls
from common.sentence_cases import minilm, saved, sentence_transformers, texts
from matmuls import embed
from matmuls.embed import formats
from matmuls.embed import job as job_of
from matmuls_cli.app import app

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")
safetensors = pytest.importorskip("safetensors.numpy")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved("bert", tmp_path_factory.mktemp("model"))


def called(*args):
    return CliRunner().invoke(app, ["embed", *map(str, args)])


def written(path, given):
    """The texts in a file of the format that its suffix names."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"n": range(len(given)), "text": given}), path, row_group_size=7)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("n", "text"), *enumerate(given)])
    elif path.suffix == ".tsv":
        path.write_text("".join(f"{n}\t{text}\n" for n, text in [("n", "text"), *enumerate(given)]), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"n": n, "text": x}) + "\n" for n, x in enumerate(given)))
    else:
        path.write_text("\n".join(given), encoding="utf-8")
    return path


def vectors(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".safetensors":
        return safetensors.load_file(path)["embeddings"]
    return np.array(parquet.read_table(path)["embeddings"].to_pylist(), np.float32)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("out", [".npy", ".safetensors", ".parquet"])
def test_every_format_gives_the_vectors_of_stock(tmp_path, model, suffix, out):
    given = ["word1 word2", 'word3, "word4"', '"word3" word4', "", "word5 ünknown word6", *texts(20)]
    file = written(tmp_path / f"in{suffix}", given)
    run = called(file, "--model", model, "--out", tmp_path / f"v{out}", "--device", "cpu")
    assert run.exit_code == 0, run.output
    assert f"v{out}, 25 x 32, in 0:0" in run.output.replace("\n", "")
    stock = sentence_transformers.SentenceTransformer(str(model), device="cpu").encode(given)
    found = vectors(tmp_path / f"v{out}")
    assert found.dtype == np.float32
    assert abs(found - stock).max() < 1e-5
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([file.name, f"v{out}"])


def test_options_are_those_of_encode(tmp_path):
    st = minilm()
    given = ["How old are you?", "A cat sat on the mat."]
    file = written(tmp_path / "in.jsonl", given)
    options = ["--field", "text", "--normalize", "--truncate-dim", 100, "--prompt", "say: ", "--tokens-per-batch", 9]
    folder = st[0].model.config._name_or_path
    run = called(file, file, "--model", folder, "--out", tmp_path / "v.npy", "--device", "cpu", *options)
    assert run.exit_code == 0, run.output
    stock = st.encode(given * 2, normalize_embeddings=True, truncate_dim=100, prompt="say: ")
    assert abs(np.load(tmp_path / "v.npy") - stock).max() < 1e-5


def test_half_precision_is_written_as_encode_gives_it(tmp_path, model):
    file = written(tmp_path / "in.txt", texts(5))
    for dtype, kept in (("float16", np.float16), ("bfloat16", np.float32)):
        out = tmp_path / f"{dtype}.safetensors"
        assert called(file, "--model", model, "--out", out, "--dtype", dtype, "--device", "cpu").exit_code == 0
        assert vectors(out).dtype == kept


BAD = {
    "in.txt": (b"\xef\xbb\xbfword1\r\nb\xff\nword2", {2: "no valid UTF-8"}, 3),
    "in.jsonl": (
        b'{"text": "word1"}\n{"text": 1}\n{"other": "a"}\nnot JSON\n\n[1]\n{"text": "\\ud800"}\n\xff\n'
        b'{"text": "word2"}\n',
        {
            **dict.fromkeys((2, 3, 6), "no text in field text"),
            **dict.fromkeys((4, 5), "no valid JSON"),
            **dict.fromkeys((7, 8), "no valid UTF-8"),
        },
        9,
    ),
    "in.csv": (
        b'n,text\n1,word1\n2\n3,"a\nb"\n\n4,\xff\n5,word2\n',
        {2: "line 3: expected 2 fields as in the header, got 1", 4: "line 7: no valid UTF-8"},
        5,
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("out", ["v.npy", "v.parquet"])
def test_records_without_a_text_are_named_and_have_a_row(tmp_path, model, name, out):
    content, bad, count = BAD[name]
    (tmp_path / name).write_bytes(content)
    run = called(tmp_path / name, "--model", model, "--out", tmp_path / out, "--device", "cpu")
    assert run.exit_code == 1
    for number, why in bad.items():
        assert f"{name}:{number}: {why}" in run.output
    assert f"{len(bad)} records have no text" in run.output
    if out.endswith("npy"):
        rows = np.load(tmp_path / out)
        assert rows.shape == (count, 32)
        empty = np.isnan(rows)
        assert (empty.any(1) == empty.all(1)).all()
        empty = empty.any(1)
    else:
        empty = np.array([row is None for row in parquet.read_table(tmp_path / out)["embeddings"].to_pylist()])
    assert empty.sum() == len(bad)
    assert not empty[0]
    assert not empty[-1]


def test_a_null_of_parquet_has_no_text(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "in.parquet")
    found = list(embed.Source(tmp_path / "in.parquet"))
    assert [(r.number, r.text) for r in found] == [(1, "a"), (2, None), (3, "b")]
    assert found[1].why == "no text in column text"
    assert found[-1].done == 1


@pytest.mark.parametrize("out", ["v.npy", "v.safetensors", "v.parquet"])
def test_no_records_give_no_rows(tmp_path, model, out):
    (tmp_path / "in.txt").touch()
    run = called(tmp_path / "in.txt", "--model", model, "--out", tmp_path / out, "--device", "cpu")
    assert run.exit_code == 0, run.output
    if out != "v.parquet":
        assert vectors(tmp_path / out).shape == (0, 32)
    else:
        assert parquet.read_table(tmp_path / out).num_rows == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.txt", "--out", "v.npy"], "no file named none.txt"),
        (["in.txt", "--out", "v.bin"], "--out is a .npy, .safetensors or .parquet file, got v.bin"),
        (["in.txt", "--out", "none.txt/v.npy"], "--out: expected a folder that can be written"),
        (["in.txt", "--out", "old.npy"], "--out: old.npy exists"),
        (["in.txt", "--out", "v.npy", "--dtype", "int8"], "--dtype is float64, float32"),
        (["in.txt", "--out", "v.npy", "--model", "./none"], "--model: no folder named ./none"),
        (["in.txt", "--out", "v.npy", "--model", "."], "--model: cannot load .: "),
        (["in.csv", "--out", "v.npy"], "expected one column text in in.csv, got the columns a, b"),
        (["in.csv", "--out", "v.npy", "--column", "a"], None),
        (["in.parquet", "--out", "w.npy"], "cannot read in.parquet: "),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_line(tmp_path, model, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("word1")
    (tmp_path / "none.txt2").touch()
    (tmp_path / "old.npy").touch()
    (tmp_path / "in.csv").write_text("a,b\nword1,word2\n")
    (tmp_path / "in.parquet").write_text("no parquet")
    if args[2].startswith("none.txt"):
        (tmp_path / "none.txt").touch()
    run = called(*args, "--device", "cpu", *([] if "--model" in args else ["--model", model]))
    assert run.exit_code == (0 if message is None else 2), run.output
    if message:
        assert run.output.startswith(f"matmuls: {message}"), run.output
        assert len(run.output.splitlines()) == 1


# A run that shows each chunk and waits, so that it can be stopped anywhere; the encoder is exact and quick.
SLOW = """
import sys, time, types, zlib
from pathlib import Path
import numpy as np
sys.modules["matmuls"] = package = types.ModuleType("matmuls")  # without torch, which takes seconds
package.__path__ = [sys.argv.pop(1)]
from matmuls import embed
from matmuls.embed import job
job.KEEP_SECONDS = 0.0
files, out, pause = [Path(p) for p in sys.argv[1].split(",")], Path(sys.argv[2]), float(sys.argv[3])
def encode(texts):
    time.sleep(pause)
    return np.array([[zlib.crc32(t.encode()), len(t), 1.0] for t in texts], np.float32)
def news(progress):
    print(progress.rows, flush=True)
print(embed.run(embed.Job([embed.Source(file) for file in files], out, 7, {}), encode, news))
"""


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("out", ["v.npy", "v.safetensors", "v.parquet"])
def test_a_run_that_is_killed_goes_on_without_a_lost_or_doubled_row(tmp_path, out):
    """Killed six times at random moments of the two seconds that it takes, then left to end."""
    draw = random.Random(0)
    first = written(tmp_path / "a.jsonl", texts(150))
    with first.open("ab") as file:
        file.write(b"not JSON\n")
    second = written(tmp_path / "b.csv", texts(150, seed=1))
    command = [sys.executable, "-c", SLOW, Path(matmuls.__file__).parent, f"{first},{second}"]
    whole = subprocess.run([*command, tmp_path / f"whole-{out}", "0"], capture_output=True, text=True, check=True)
    resumed = []
    for kill in (True,) * 6 + (False,):
        process = subprocess.Popen([*command, tmp_path / out, "0.05"], stdout=subprocess.PIPE, text=True)
        resumed.append(int(process.stdout.readline()))  # where it goes on
        if kill:
            time.sleep(draw.uniform(0.05, 0.15))
            process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        if process.returncode == 0:
            break
    assert len(resumed) > 2
    assert resumed == sorted(resumed)
    assert resumed[-1] > 0
    assert (tmp_path / out).read_bytes() == (tmp_path / f"whole-{out}").read_bytes()
    assert rest.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert "bad_count=1" in rest
    assert f"{first}:151: no valid JSON" in rest
    left = {"a.jsonl", "b.csv", out, f"whole-{out}"}
    assert {p.name for p in tmp_path.iterdir()} == left


def test_rows_behind_the_journal_are_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(job_of, "KEEP_SECONDS", math.inf)  # an entry only at the end
    file = written(tmp_path / "in.txt", texts(30))
    out = tmp_path / "v.npy"
    job = embed.Job([embed.Source(file)], out, 10, {})

    def encode(given):
        return np.array([[len(x), 2.0] for x in given], np.float32)

    def stops(progress):
        if progress.rows == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed.run(job, encode, stops)
    part, journal = tmp_path / "v.npy.part", tmp_path / "v.npy.journal"
    assert part.stat().st_size == 128 + 20 * 8
    assert not journal.exists()
    embed.run(job, encode)
    assert (np.load(out)[:, 0] == [len(x) for x in texts(30)]).all()


def test_files_are_read_and_written_while_texts_are_encoded(tmp_path, monkeypatch):
    given, out = texts(40), tmp_path / "v.npy"
    read, appended, calls = [], [], []

    class Noted(embed.Source):
        def __iter__(self):
            for record in super().__iter__():
                read.append(record)
                yield record

    job = embed.Job([Noted(written(tmp_path / "in.txt", given))], out, 10, {})
    append = job_of.Rows.append
    monkeypatch.setattr(job_of.Rows, "append", lambda *args: (append(*args), appended.append(len(args[1]))))

    def encode(some):
        n, end = len(calls), time.monotonic() + 30  # n = 0: a text of no chunk, for the width
        while n and (len(read) < min(10 * (n + 1), 40) or len(appended) < n - 1):
            assert time.monotonic() < end
            time.sleep(0.001)
        calls.append(len(some))
        return np.array([[len(x), 2.0] for x in some], np.float32)

    embed.run(job, encode)
    assert (calls, appended) == ([1, 10, 10, 10, 10], [10, 10, 10, 10])
    assert (np.load(out)[:, 0] == [len(x) for x in given]).all()


def test_errors_leave_no_thread_and_keep_what_was_encoded(tmp_path):
    job = embed.Job([embed.Source(written(tmp_path / "in.txt", texts(40)))], tmp_path / "v.npy", 10, {})
    calls = []

    def fails(some):
        calls.append(some)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return np.zeros((len(some), 2), np.float32)

    with pytest.raises(RuntimeError, match="no memory"):
        embed.run(job, fails)
    assert not any(thread.name.startswith("matmuls-files") for thread in threading.enumerate())
    assert (tmp_path / "v.npy.part").stat().st_size == 128 + 20 * 8


def test_another_run_is_not_continued(tmp_path):
    file, out = written(tmp_path / "in.txt", texts(30)), tmp_path / "v.npy"

    def encode(given):
        return np.ones((len(given), 2), np.float32)

    def stops(progress):
        if progress.rows:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_of, "KEEP_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            embed.run(embed.Job([embed.Source(file)], out, 10, {"--model": "a"}), encode, stops)
    with pytest.raises(embed.Foreign, match="of a run with other --model"):
        embed.run(embed.Job([embed.Source(file)], out, 10, {"--model": "b"}), encode)
    (tmp_path / "v.npy.journal").write_text("{}")
    with pytest.raises(embed.Foreign, match="expected the journal of a run"):
        embed.run(embed.Job([embed.Source(file)], out, 10, {"--model": "a"}), encode)


def test_one_process_at_a_time(tmp_path):
    file, out = written(tmp_path / "in.txt", texts(30)), tmp_path / "v.npy"
    job = embed.Job([embed.Source(file)], out, 10, {})

    def encode(given):
        return np.ones((len(given), 2), np.float32)

    def again(progress):
        with pytest.raises(embed.Foreign, match="another process writes"):
            embed.run(job, encode)

    embed.run(job, encode, again)
    with pytest.raises(embed.Foreign, match="exists"):
        embed.run(job, encode)


def test_headers_keep_their_length():
    for suffix in (".npy", ".safetensors"):
        made = [formats.header(suffix, rows, 4096, np.dtype("float16")) for rows in (0, 10**12)]
        assert len(made[0]) == len(made[1])
        assert len(made[0]) % 64 == 0


@pytest.mark.exhaustive  # 20 s; another test kills runs that go on
def test_ctrl_c_is_one_line_and_the_command_goes_on(tmp_path, model):
    file = written(tmp_path / "in.txt", texts(2000))
    code = """
import os, signal, sys
from matmuls.embed import job
append = job.Rows.append
def stops(rows, *args):
    append(rows, *args)
    if rows.count > 1000:
        os.kill(os.getpid(), signal.SIGINT)
if sys.argv.pop(1) == "stop":
    job.KEEP_SECONDS, job.Rows.append = 0.0, stops
from matmuls_cli import main
main()
"""
    args = ["embed", str(file), "--model", str(model), "--out", str(tmp_path / "v.npy"), "--device", "cpu"]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    run = [
        subprocess.run([sys.executable, "-c", code, how, *args], capture_output=True, text=True, env=environment)
        for how in ("stop", "go on")
    ]
    assert run[0].returncode == 130
    assert run[0].stderr.splitlines()[-1] == "matmuls: stopped"
    assert "Traceback" not in run[0].stderr
    assert run[1].returncode == 0, run[1].stderr
    stock = sentence_transformers.SentenceTransformer(str(model), device="cpu").encode(texts(2000))
    assert abs(np.load(tmp_path / "v.npy") - stock).max() < 1e-5
