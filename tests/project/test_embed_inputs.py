"""What `matmuls embed` reads (tables, pipes, journals, models), and what it shows of names."""

import csv
import io
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.sentence_cases import saved, texts
from matmuls import embed
from matmuls.embed import job as job_of
from matmuls.embed import streams, tables
from matmuls_cli import screen
from matmuls_cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved("bert", tmp_path_factory.mktemp("model"))


def called(*args):
    return CliRunner().invoke(app, ["embed", *map(str, args)])


def told(run):
    """What the command says, without the line breaks of a terminal."""
    return run.output.replace("\n", " ")


def lengths(given):
    return np.array([[len(x), 2.0] for x in given], np.float32)


def read(path, content, **options):
    path.write_bytes(content)
    return [r.text if r.text is not None else r.why for r in embed.Source(path, **options)]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", b'n\ttext\n1\t"a\n2\tb\n3\t"c" d\n4\te"\n5\t\n', ['"a', "b", '"c" d', 'e"', ""]),
        ("a.tsv", b"text\n\nb\n", ["", "b"]),
        ("a.tsv", b"n\ttext\n1\ta\tb\n\n2\tc", ["line 2: expected 2 fields as in the header, got 3", "c"]),
        ("a.csv", b'n,text\n1,a\n2,"b\n3,c\n4,d\n', ["a", "line 3: a quote that does not close", "c", "d"]),
        ("a.csv", b'n,text\n1,a\n2,"b\n3,"c"\n4,d\n', ["a", "line 3: text after a closing quote", "c", "d"]),
        (
            "a.csv",
            b'n,text\n1,"Never again" he said\n2,b\n',
            ["line 2: text after a closing quote", "b"],
        ),
        ("a.csv", b"n,text\n1,hello, world\n2,b\n", ["line 2: expected 2 fields as in the header, got 3", "b"]),
        ("a.csv", b"n,text\n1\n2,b\n", ["line 2: expected 2 fields as in the header, got 1", "b"]),
        (
            "a.csv",
            b'\xef\xbb\xbf"n","text"\r\n1,"a ""b""\r\nc"\r\n\r\n2,5" pipe\r\n3,\xff\r\n4,""',
            ['a "b"\r\nc', '5" pipe', "line 6: no valid UTF-8", ""],
        ),
        ("a.csv", b'text\n""\n\nb\n', ["", "b"]),
    ],
)
def test_no_record_of_a_table_is_lost(tmp_path, name, content, expected):
    assert read(tmp_path / name, content) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'n,text\n1,a\n2,"' + b"b\n" * 100 + b'"\n3,d', ["a", "line 3: longer than 16 MiB", "d"]),
        (b'n,text\n1,a\n"' + b"b\n" * 100 + b'",2\n3,d', ["a", "line 3: longer than 16 MiB", "d"]),
        (b"n,text\n1,a\n2," + b"b" * 100 + b'\n3,d\n"x\ny",' + b"c" * 100 + b"\n5,e", "a||d||e"),
        (b'n,text\n1,a\n2,"' + b"b" * 100 + b"\n3,d\n4,e", ["a", "line 3: a quote that does not close", "d", "e"]),
        (b'n,text\n1,a\n2,"' + b"b" * 100 + b'" c\n3,d', ["a", "line 3: a quote that does not close", "d"]),
        (b'n,text\n1,a\n2,"' + b'""' * 100 + b'"\n3,d', ["a", "line 3: longer than 16 MiB", "d"]),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_a_record_that_is_too_long_costs_no_other(tmp_path, monkeypatch, content, expected, block):
    monkeypatch.setattr(streams, "MOST", 40)
    monkeypatch.setattr(streams, "BLOCK", block)
    found = read(tmp_path / "a.csv", content)
    if isinstance(expected, str):
        assert "|".join("" if "longer" in x else x for x in found) == expected
    else:
        assert found == expected


@given(
    st.lists(st.tuples(*[st.text(st.sampled_from('a,"\n\r é'), max_size=6)] * 2), max_size=6),
    st.sampled_from([1, 2, 5, 1 << 20]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_tables_of_pythons_writer_are_read_back(table, block, whole):
    file = io.StringIO(newline="")
    csv.writer(file).writerows(table)
    content = file.getvalue().encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK", block)
        window = streams.Window(io.BytesIO(content if whole else content.removesuffix(b"\r\n")))
        found = [tuple(field.decode() for field in fields) for fields, _, _ in tables.rows(window, False)]
    assert found == table


def test_the_limit_of_fields_of_csv_stays_as_it_is(tmp_path):
    before = csv.field_size_limit()
    read(tmp_path / "a.csv", b"text\n1\n")
    assert csv.field_size_limit() == before


def test_long_texts_make_small_chunks(tmp_path, monkeypatch):
    """A chunk is no larger than a text may be, however many records it may have."""
    monkeypatch.setattr(job_of, "MOST", 100)
    file = tmp_path / "in.txt"
    file.write_text("\n".join("a" * 40 for _ in range(10)))
    calls = []
    embed.run(embed.Job([embed.Source(file)], tmp_path / "v.npy", 8), lambda t: (calls.append(len(t)), lengths(t))[1])
    assert calls == [1, 3, 3, 3, 1]  # the first, of no chunk, is for the width
    assert np.load(tmp_path / "v.npy")[:, 0].tolist() == [40.0] * 10


def test_a_pipe_is_read_once_and_its_run_begins_anew(tmp_path):
    pipe = tmp_path / "in.csv"
    os.mkfifo(pipe)
    given = texts(30)

    def write():
        with pipe.open("w", encoding="utf-8") as file:
            file.write("".join(f"{text}\n" for text in ["text", *given]))

    def stops(progress):
        if progress.rows:
            raise KeyboardInterrupt

    out = tmp_path / "v.npy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_of, "KEEP_SECONDS", 0.0)
        for news in (stops, lambda progress: None):
            writer = threading.Thread(target=write)
            writer.start()
            source = embed.Source(pipe)
            source.check()
            job = embed.Job([source], out, 10)
            assert not job.goes_on
            if news is stops:
                with pytest.raises(KeyboardInterrupt):
                    embed.run(job, lengths, news)
                assert {p.name for p in tmp_path.iterdir()} == {"in.csv", "v.npy.part"}
            else:
                embed.run(job, lengths, news)
            writer.join()
    assert np.load(out)[:, 0].tolist() == [len(x) for x in given]


def test_a_pipe_that_waits_does_not_hold_up_the_end(tmp_path):
    pipe = tmp_path / "in"
    os.mkfifo(pipe)
    keep_open = os.open(pipe, os.O_RDWR)
    os.write(keep_open, b"a\n" * 10)
    ended = []

    def stops(progress):
        if progress.rows:
            raise KeyboardInterrupt

    def run():
        try:
            embed.run(embed.Job([embed.Source(pipe)], tmp_path / "v.npy", 5), lengths, stops)
        except KeyboardInterrupt:
            ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    os.close(keep_open)
    assert ended


@pytest.mark.exhaustive
def test_pipes_of_the_shell(tmp_path, model):
    code = "from matmuls_cli import main; main()"
    args = [sys.executable, "-c", code, "embed", "--model", model, "--device", "cpu"]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts(5))
    out = tmp_path / "v.npy"
    run = subprocess.run([*args, "/dev/stdin", "--format", "jsonl", "--out", out], input=lines, capture_output=True)
    assert run.returncode == 0, run.stderr
    (tmp_path / "in.jsonl").write_bytes(lines)
    assert (
        called(tmp_path / "in.jsonl", "--model", model, "--out", tmp_path / "w.npy", "--device", "cpu").exit_code == 0
    )
    assert (tmp_path / "w.npy").read_bytes() == out.read_bytes()
    wrong = [*args, "/dev/stdin", "--format", "parquet", "--out", tmp_path / "x.npy"]
    run = subprocess.run(wrong, input=lines, capture_output=True, text=False)
    assert (run.returncode, run.stderr) == (
        2,
        b"matmuls: cannot read /dev/stdin: Parquet is read from a file, not from a pipe\n",
    )


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["embed", "in.txt", "--model", "m", "--out", "v.npy", "--prompt", b"caf\xe9 "], "--prompt"),
        (["embed", "in.txt", "--model", b"caf\xe9", "--out", "v.npy"], "--model"),
        (["bert", b"caf\xe9", "x"], "text"),
    ],
)
def test_an_argument_that_is_no_utf8_is_named(tmp_path, args, what):
    (tmp_path / "in.txt").write_text("a")
    command = [sys.executable, "-c", "from matmuls_cli import main; main()", *args]
    run = subprocess.run(command, capture_output=True, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(f"matmuls: {what}: expected a text in UTF-8, got caf\\udce9".encode())
    assert run.stderr.count(b"\n") == 1


def stopped(tmp_path, out="v.npy", options=None):
    """A job whose run was stopped after 10 of 30 rows."""
    (tmp_path / "in.txt").write_text("\n".join(texts(30)))
    job = embed.Job([embed.Source(tmp_path / "in.txt")], tmp_path / out, 10, options or {})

    def stops(progress):
        if progress.rows:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_of, "KEEP_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            embed.run(job, lengths, stops)
    return job


@pytest.mark.parametrize(
    "change",
    [
        *({name: x} for name in ("rows", "bad_count") for x in (-1, "x", 1.5, None, True, [])),
        *({"bad": x} for x in (None, "x", [1], ["x"])),
        *({"job": x} for x in (None, [], "x")),
        *("", "[]", "null", "{", "[" * 100_000, b"\xff"),
    ],
    ids=str,
)
def test_a_damaged_journal_is_refused(tmp_path, change):
    job = stopped(tmp_path)
    journal, part = tmp_path / "v.npy.journal", tmp_path / "v.npy.part"
    text = json.dumps(json.loads(journal.read_text()) | change) if isinstance(change, dict) else change
    journal.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = part.read_bytes()
    with pytest.raises(embed.Foreign) as caught:
        embed.run(job, lengths)
    assert str(caught.value) == f"expected the journal of a run in {journal}: delete it and {part}"
    assert part.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["v.npy.part", "v.npy.journal", "v.npy.journal.new", "v.parquet.part", "v.parquet.new"]
)
@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_no_link_beside_the_result_is_followed(tmp_path, name, link):
    out = name.split(".")[0] + "." + name.split(".")[1]
    if out.endswith("parquet"):
        pytest.importorskip("pyarrow")
    job = stopped(tmp_path, out)
    other = tmp_path / "other"
    other.write_text("of another user")
    (tmp_path / name).unlink(missing_ok=True)
    (os.symlink if link == "symbolic" else os.link)(other, tmp_path / name)
    if name.endswith(".new"):
        embed.run(job, lengths)
        assert (tmp_path / out).is_file()
    else:
        with pytest.raises(embed.Foreign, match=f"{name} is a symbolic link|{name} to be a file with one name"):
            embed.run(job, lengths)
    assert other.read_text() == "of another user"


def test_a_run_does_not_go_on_with_another_model(tmp_path, model, monkeypatch):
    """Trained on in the same folder, with another tokenizer, or with other settings."""
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "model"
    file = tmp_path / "in.txt"
    file.write_text("\n".join(texts(1500)))
    SentenceTransformer(str(model), device="cpu").save(str(folder))
    args = [file, "--model", folder, "--out", tmp_path / "v.npy", "--device", "cpu"]

    def run_of(st):
        st.save(str(folder))
        return called(*args)

    append = job_of.Rows.append

    def fails(rows, *args):
        append(rows, *args)
        rows.keep()
        raise RuntimeError("stopped here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_of.Rows, "append", fails)
        run = called(*args)
    assert "the rows before are kept, and the same command goes on" in told(run)
    st = SentenceTransformer(str(model), device="cpu")
    weight = st[0].model.encoder.layer[0].output.dense.weight.data
    weight[3, 5] += 1e-3
    run = run_of(st)
    assert run.exit_code == 2
    assert "v.npy.part is of a run with other weights of the model: give the same" in told(run)
    weight[3, 5] -= 1e-3
    st.max_seq_length = 7
    run = run_of(st)
    assert "v.npy.part is of a run with other" in told(run)
    assert "settings of the model" in told(run)
    st = SentenceTransformer(str(model), device="cpu")
    tokenizer = st.tokenizer
    tokenizer.add_tokens(["zzz"])
    st[0].model.resize_token_embeddings(len(tokenizer))
    assert "tokenizer" in told(run_of(st))
    run = run_of(SentenceTransformer(str(model), device="cpu"))
    assert run.exit_code == 0, run.output
    assert len(np.load(tmp_path / "v.npy")) == 1500


def test_dtypes_of_the_model_and_of_the_vectors(tmp_path, model, monkeypatch):
    import torch

    (tmp_path / "in.txt").write_text("word1\nword2")
    args = [tmp_path / "in.txt", "--model", model, "--device", "cpu", "--out"]
    run = called(*args, tmp_path / "a.npy", "--out-dtype", "float16")
    assert (run.exit_code, "several times slower" in told(run)) == (0, False)
    called(*args, tmp_path / "b.npy")
    made, exact = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert (made.dtype, exact.dtype) == (np.float16, np.float32)
    assert (made == exact.astype(np.float16)).all()
    for dtype, wanted in (("float16", "avx512_fp16"), ("bfloat16", "amx_bf16")):
        for has in (False, True):
            about = {"architecture": "x86_64", wanted: has}
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda about=about: about)
            run = called(*args, tmp_path / f"{dtype}{has}.npy", "--dtype", dtype)
            assert run.exit_code == 0, run.output
            assert (f"--dtype {dtype} is several times slower than float32 on a CPU without" in told(run)) != has
    assert np.load(tmp_path / "float16True.npy").dtype == np.float16
    assert np.load(tmp_path / "bfloat16True.npy").dtype == np.float32
    for option, message in (
        (["--out-dtype", "bfloat16"], "--out-dtype is float32 or float16, got bfloat16"),
        (["--format", "json"], "--format is text, jsonl, csv, tsv or parquet, got json"),
        (["--int8", "--dtype", "bfloat16"], "--int8: optimize: expected a model in float32 on a CPU"),
    ):
        run = called(*args, tmp_path / "c.npy", *option)
        assert (run.exit_code, message in told(run)) == (2, True), run.output


def test_int8_is_that_of_optimize(tmp_path, model, monkeypatch):
    import torch
    from sentence_transformers import SentenceTransformer

    from matmuls.integrations.sentence_transformers import optimize

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)  # slow elsewhere, with the same results
    (tmp_path / "in.txt").write_text("\n".join(texts(5)))
    args = [tmp_path / "in.txt", "--model", model, "--device", "cpu", "--out"]
    assert called(*args, tmp_path / "a.npy", "--int8").exit_code == 0
    st = SentenceTransformer(str(model), device="cpu")
    optimize(st, int8=True)
    assert (np.load(tmp_path / "a.npy") == st.encode(texts(5))).all()


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.parquet"])
def test_a_column_is_missed_before_the_model_is_loaded(tmp_path, name):
    if name.endswith("parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.table({"a": [1], "\x1b[31mb": ["x"]}), tmp_path / name)
    else:
        (tmp_path / name).write_text("a,\x1b[31mb\n".replace(",", "\t" if name.endswith("tsv") else ","))
    run = called(tmp_path / name, "--model", "./none", "--out", tmp_path / "v.npy", "--device", "cpu")
    assert run.exit_code == 2
    assert f"expected one column text in {tmp_path / name}, got the columns a, '\\x1b[31mb'" in told(run)


def test_parquet_without_texts_is_refused(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(embed.Unreadable, match="expected texts in column text, got int64"):
        embed.Source(tmp_path / "a.parquet").check()


def test_what_is_shown_is_clean():
    assert screen.clean("a\x1b[2Jb\x9b\x07\r\u202e\udce9é\u200d\n") == "a\\x1b[2Jb\\x9b\\x07\\r\\u202e\\udce9é\u200d\n"
    assert screen.line("a\nb") == "a\\nb"
    with screen.console.capture() as shown:
        screen.console.print("[/c] [red]x[/red] :cat: \x1b[31m")
    assert shown.get() == "[/c] [red]x[/red] :cat: \\x1b[31m\n"


@pytest.mark.parametrize("name", ["d[/c].mtx", "e\x1b[31m.mtx", "$f_{$.mtx"])
def test_a_name_with_markup_or_escape_codes_loses_no_results(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder, _, base = name.rpartition("/")
    os.makedirs(folder or ".", exist_ok=True)
    with open(name, "w") as file:
        file.write("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 2.5\n")
    run = CliRunner().invoke(app, ["spmm", name, "-n", "4", "--device", "cpu", "--out", "r[/results]"])
    assert run.exit_code == 0, run.output
    assert "\x1b[31" not in run.output
    assert base.removesuffix(".mtx").replace("\x1b", "\\x1b") in run.output
    assert json.loads(next((tmp_path / "r[" / "results]").glob("*.json")).read_text())["cases"]


@pytest.mark.parametrize("kind", ["member", "word", "banner"])
def test_words_of_files_reach_the_terminal_clean(tmp_path, kind):
    path = tmp_path / {"member": "a.npz", "word": "a.graph", "banner": "a.mtx"}[kind]
    if kind == "member":
        np.savez(path, **{"\x1b[31mred[/x]": [1]})
    else:
        path.write_text("2 \x1b[31m[/x]\n" if kind == "word" else "%%MatrixMarket matrix \x1b[31m[/x] real general\n")
    run = CliRunner().invoke(app, ["spmm", str(path), "--device", "cpu"])
    assert run.exit_code == 2, run.output
    assert "\x1b[31" not in run.output
    assert "\\x1b[31m" in run.output
    assert "[/x]" in run.output
