"""The command line, run as a user runs it."""

import json
import re

import pytest
import torch

import common.cli_cases  # noqa: F401
from common.in_process import matmuls
from matmuls import attention, files, info
from matmuls_cli.bert import ON_A_CPU


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


@pytest.mark.exhaustive  # 12 to 17 s, as the run of the command above
def test_texts_are_shown_as_they_are():
    run = matmuls("bert", "one [/b] of [bold]two[/bold]", ":cat:", "--device", "cpu")
    assert (run.returncode, run.stderr) == (0, "")
    assert "one [/b] of [bold]two[/bold]" in run.stdout
    assert ":cat:" in run.stdout


@pytest.mark.exhaustive  # 12 to 17 s, as the run of the command above
def test_bert_json_and_file(tmp_path):
    (tmp_path / "texts").write_text("How old are you?\n\nWhat is your age?\n")
    run = matmuls("bert", "A cat.", "--file", str(tmp_path / "texts"), "--json", "--device", "cpu")
    result = json.loads(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert result["texts"] == ["A cat.", "How old are you?", "What is your age?"]
    assert result["similarities"][1][2] > 0.7 > 0.3 > result["similarities"][0][1]
    assert result["difference"] <= 1e-5
    assert all(r["ms"] > 0 and r["peak_mib"] > 0.05 for r in result["runs"])


@pytest.mark.exhaustive  # 12 to 17 s, as the run of the command above
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


@pytest.mark.exhaustive  # 11 s
def test_bert_names_a_model_that_it_cannot_optimize(tmp_path):
    import transformers

    save(transformers.LayoutLMModel(transformers.LayoutLMConfig(**SMALL)), tmp_path)
    run = matmuls("bert", "x", "--model", str(tmp_path), "--optimize", "--device", "cpu")
    assert run.returncode == 2
    assert run.stderr.startswith("matmuls: optimize: expected a model of one of BERT, RoBERTa, ")
    assert run.stderr.endswith(", Whisper, got LayoutLMModel\n")


def clip():
    import transformers as t

    parts = {name: {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1} for name in ("text", "vision")}
    config = t.CLIPConfig(text_config=parts["text"] | {"vocab_size": 60}, vision_config=parts["vision"])
    return t.CLIPModel(config)


def gemma2():
    import transformers as t

    return t.Gemma2Model(t.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8))


@pytest.mark.exhaustive(keep=1)
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


@pytest.mark.exhaustive  # 9 s each
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


@pytest.mark.exhaustive
def test_bert_fails_if_attention_is_wrong(monkeypatch):
    """Exit status 1 if an embedding is off, here because of a wrong scale of the scores."""
    right = attention._forward
    monkeypatch.setattr(
        attention, "_forward", lambda q, k, v, mask, scale, *rest: right(q, k, v, mask, 1.001 * scale, *rest)
    )
    run = matmuls("bert", "How old are you?", "--device", "cpu")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error():
    run = matmuls("bert", "x", "--device", "cuda")
    assert run.returncode == 2
    assert "no CUDA device to run on; CUDA is off: " in run.stderr


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
