"""`optimize` of a CrossEncoder: predict and rank give stock's results, for every argument, model and process."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from common.sentence_cases import MODELS, pairs, saved, small_ranker, texts
from matmuls.integrations.sentence_transformers import optimize
from matmuls.integrations.sentence_transformers import tokens as tokens_of
from matmuls.integrations.transformers import VerificationError, verify

PAIRS = [["word1", ""], ["", ""], *pairs(70), ["word4 " * 60, "word9 " * 3]]


@pytest.fixture(scope="module", params=[1, 3], ids=["one label", "three labels"])
def both(request, tmp_path_factory):
    """A ranker twice: as it is, and optimized."""
    stock, ours = (small_ranker("bert", tmp_path_factory.mktemp("ranker"), request.param) for _ in range(2))
    for ranker in (stock, ours):
        ranker.prompts |= {"task": "word7 word8 "}
    return stock, ours, optimize(ours)


def same(ours, stock, tolerance=2e-6):
    assert type(ours) is type(stock)
    if isinstance(stock, list):
        assert len(ours) == len(stock)
        for a, b in zip(ours, stock, strict=True):
            same(a, b, tolerance)
        return
    assert (ours.dtype, ours.shape) == (stock.dtype, stock.shape)
    a, b = (torch.as_tensor(x) for x in (ours, stock))
    assert a.device == b.device
    if a.numel():
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


CALLS = {
    "defaults": {},
    "one batch": {"batch_size": 1000},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "activation": {"activation_fn": torch.nn.Tanh()},
    "no activation": {"activation_fn": torch.nn.Identity()},
    "a function": {"activation_fn": lambda scores: scores.double() * 2},
    "softmax": {"apply_softmax": True, "activation_fn": torch.nn.Identity()},
    "prompt": {"prompt": "word3 "},
    "prompt name": {"prompt_name": "task"},
    "progress": {"show_progress_bar": True},
    "max length": {"processing_kwargs": {"text": {"max_length": 12}}},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_of_stock(both, call):
    stock, ours, handle = both
    before = handle.tokens
    found, wanted = ours.predict(PAIRS, **CALLS[call]), stock.predict(PAIRS, **CALLS[call])
    same(found, wanted)
    assert np.ptp(np.asarray(wanted)) > 0.1  # scores differ
    assert handle.tokens > before


FORMS = {
    "a pair": ["word1 word2", "word3"],
    "a tuple": ("word1 word2", "word3"),
    "a list of one": [("word1 word2", "word3")],
    "none": [],
    "tuples": (("word1", "word2"), ("word3", "")),
    "an array": np.array([["word1", "word2"], ["word3", "word4 word5"]]),
    "a pair as array": np.array(["word1", "word2"]),
    "a text": "word1 word2",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["defaults", "tensor", "list"])
def test_every_form_of_input(both, form, call):
    stock, ours, _ = both
    found, wanted = (model.predict(FORMS[form], **CALLS[call]) for model in (ours, stock))
    if np.isscalar(wanted):
        assert type(found) is type(wanted)
        found, wanted = np.array(found), np.array(wanted)
    same(found, wanted)


def test_rank(both):
    stock, ours, handle = both
    query, documents = "word1 word2", texts(40)
    if stock.num_labels > 1:
        with pytest.raises(ValueError, match="num_labels=1"):
            ours.rank(query, documents)
        return
    for call in ({}, {"top_k": 5, "return_documents": True}, {"prompt": "word9 ", "batch_size": 3}):
        before = handle.tokens
        found, wanted = ours.rank(query, documents, **call), stock.rank(query, documents, **call)
        assert handle.tokens > before
        assert [x.keys() for x in found] == [x.keys() for x in wanted]
        assert [x.get("text") for x in found] == [x.get("text") for x in wanted]
        assert [x["corpus_id"] for x in found] == [x["corpus_id"] for x in wanted]
        assert max(abs(x["score"] - y["score"]) for x, y in zip(found, wanted, strict=True)) < 2e-6


def test_errors_are_those_of_stock(both):
    stock, ours, _ = both
    for message, call in {"batch_size must be": {"batch_size": 0}, "Prompt name": {"prompt_name": "none"}}.items():
        with pytest.raises(ValueError, match=message) as theirs:
            stock.predict(PAIRS, **call)
        with pytest.raises(ValueError, match=message) as found:
            ours.predict(PAIRS, **call)
        assert str(found.value) == str(theirs.value)
    assert inspect.signature(ours.predict) == inspect.signature(stock.predict)


def test_order_over_several_windows_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_of, "FIRST", 8)
    monkeypatch.setattr(tokens_of, "MOST", 16)
    ranker = small_ranker("bert", tmp_path)
    stock = ranker.predict(PAIRS)
    optimize(ranker, tokens_per_batch=40)
    sizes, forward = [], ranker[0].model.forward
    monkeypatch.setattr(
        ranker[0].model, "forward", lambda **given: sizes.append(given["input_ids"].numel()) or forward(**given)
    )
    same(ranker.predict(PAIRS), stock)
    assert max(sizes) <= 40
    assert len(sizes) > len(PAIRS) / 16


RANKERS = [name for name in MODELS if name != "nomic_bert"]  # transformers has no such head for it


@pytest.mark.parametrize("name", RANKERS)
def test_families(name, tmp_path):
    ranker = small_ranker(name, tmp_path)
    given = pairs(60)
    stock = ranker.predict(given)
    handle = optimize(ranker)
    assert handle.reason is None
    assert ("pairs" if name == "ernie" else "texts are scored without padding") in f"pairs {handle}"
    assert len(handle.encoder.layers) == (0 if name == "ernie" else 2)
    same(ranker.predict(given), stock)
    assert handle.tokens > 60


def test_half_precision(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        ranker = small_ranker("bert", tmp_path / str(dtype)).to(dtype)
        stock = ranker.predict(PAIRS, activation_fn=torch.nn.Identity())
        optimize(ranker)
        same(ranker.predict(PAIRS, activation_fn=torch.nn.Identity()), stock, tolerance=5e-2)


def test_a_pooled_ranker(tmp_path):
    """Transformer without a head, Pooling, and a Dense that computes the scores."""
    first = Transformer(str(saved("bert", tmp_path)))
    dense = Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    ranker = CrossEncoder(modules=[first, Pooling(32, "mean"), dense], device="cpu").eval()
    stock = ranker.predict(PAIRS)
    handle = optimize(ranker)
    assert handle.reason is None
    same(ranker.predict(PAIRS), stock)
    assert handle.tokens > 0


def test_a_pair_without_tokens_is_for_stock(tmp_path):
    ranker = small_ranker("bert", tmp_path, special=False)
    given = [["word1", "word2"], ["", ""]]
    stock = ranker.predict(given)
    optimize(ranker)
    same(ranker.predict(given), stock)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ce: ce.append(torch.nn.Identity()), "Identity is not one of"),
        (lambda ce: ce[0].register_forward_hook(lambda *args: None), "hooks"),
        (lambda ce: setattr(ce, "preprocess", ce.preprocess), "preprocess is not of CrossEncoder"),
        (lambda ce: setattr(ce[0].model.config, "output_hidden_states", True), "returns all hidden states"),
        (lambda ce: setattr(ce.tokenizer, "padding_side", "left"), "depend on padding on their left"),
        (lambda ce: setattr(ce.tokenizer, "model_input_names", ["input_ids"]), "no attention mask"),
    ],
)
def test_what_is_not_covered_is_for_stock(tmp_path, change, reason):
    ranker = small_ranker("bert", tmp_path)
    handle = optimize(ranker)
    change(ranker)
    assert reason in handle.reason
    assert reason in str(handle)
    assert ranker.predict([["word1", "word2"]]).shape == (1,)
    assert handle.tokens == 0


def test_undo_gives_stock_again(tmp_path):
    ranker = small_ranker("bert", tmp_path)
    stock = ranker.predict(PAIRS)
    handle = optimize(ranker)
    with pytest.raises(ValueError, match="call undo"):
        optimize(ranker)
    ranker.predict(PAIRS)
    handle.undo()
    handle.undo()
    before = handle.tokens
    assert (ranker.predict(PAIRS) == stock).all()
    assert handle.tokens == before
    assert "_inference" not in ranker.__dict__
    optimize(ranker).undo()


def test_verify(tmp_path):
    ranker = small_ranker("bert", tmp_path)
    with pytest.raises(VerificationError, match="BertForSequenceClassification without any"):
        verify(ranker, PAIRS)
    optimize(ranker)
    assert verify(ranker, PAIRS).hidden_states < 1e-5
    weight = ranker[0].model.bert.encoder.layer[0].output.dense.weight
    forward = type(ranker[0].model).forward
    ranker[0].model.forward = lambda *args, **given: (weight.mul_(2), forward(ranker[0].model, *args, **given))[1]
    with torch.no_grad(), pytest.raises(VerificationError, match="at most"):
        verify(ranker, PAIRS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_score_alike(tmp_path, copied):
    ranker = small_ranker("bert", tmp_path)
    optimize(ranker)
    other = copied(ranker)
    assert other.__dict__["_inference"].args[0] is other
    same(other.predict(PAIRS), ranker.predict(PAIRS))


def test_threads_predict_at_once(both):
    stock, ours, _ = both
    parts = [PAIRS[n : n + 20] for n in range(8)]
    wanted = [stock.predict(part) for part in parts]
    with ThreadPoolExecutor(8) as threads:
        for found, want in zip(threads.map(ours.predict, parts), wanted, strict=True):
            same(found, want)


@pytest.mark.exhaustive  # 18 s; test_sentence_transformers.py has processes too
def test_processes(tmp_path):
    stock, ours = (small_ranker("bert", tmp_path) for _ in range(2))
    handle = optimize(ours)
    wanted = stock.predict(PAIRS)
    pool = ours.start_multi_process_pool(["cpu", "cpu"])
    try:
        same(ours.predict(PAIRS, pool=pool), wanted)
        same(ours.predict(PAIRS, pool=pool, chunk_size=7, convert_to_tensor=True), torch.from_numpy(wanted))
        assert handle.tokens == 0  # counted in the other processes
        same(ours.predict(PAIRS), wanted)  # in this one, whose weights are in shared memory now
        assert handle.tokens > 0
    finally:
        ours.stop_multi_process_pool(pool)
    handle.undo()
    same(ours.predict(PAIRS), wanted)
