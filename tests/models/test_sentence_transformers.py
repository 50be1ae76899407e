"""`optimize` of a SentenceTransformer: its results are stock's, for every argument, model and number of threads."""

import copy
import inspect
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from common.sentence_cases import MODELS, minilm, small, texts
from matmuls.integrations.sentence_transformers import Optimized, optimize
from matmuls.integrations.sentence_transformers import tokens as tokens_of

PROSE = [
    "How old are you?",
    "",
    "What is your age? " * 200,  # over the maximum of 256 tokens
    "A cat sat on the mat.",
    "x",
    *(f"Sentence {n} is about {'a cat and ' * (n % 13)}a mat." for n in range(60)),
]


@pytest.fixture(scope="module")
def pair():
    """MiniLM twice: as it is, and optimized."""
    stock, ours = minilm(), minilm()
    for st in (stock, ours):
        st.prompts |= {"query": "query: ", "document": "", "long": "find what is like this text: "}
    return stock, ours, optimize(ours)


def same(ours, stock, tolerance=2e-6):
    """The same type, dtype, shape and values; integers may differ by one step of quantization."""
    assert type(ours) is type(stock)
    if isinstance(stock, list):
        assert len(ours) == len(stock)
        for a, b in zip(ours, stock, strict=True):
            same(a, b, tolerance)
        return
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        return
    assert (ours.dtype, ours.shape) == (stock.dtype, stock.shape)
    a, b = (torch.as_tensor(x) for x in (ours, stock))
    assert a.device == b.device
    if a.is_floating_point():
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()) if a.numel() else True
    else:
        assert ((a.int() - b.int()).abs() > 1).float().mean() < 0.01


CALLS = {
    "defaults": {},
    "one batch": {"batch_size": 1000},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "normalized": {"normalize_embeddings": True},
    "truncated": {"truncate_dim": 100},
    "truncated and normalized": {"truncate_dim": 64, "normalize_embeddings": True},
    "prompt": {"prompt": "say: "},
    "prompt name": {"prompt_name": "long"},
    "token embeddings": {"output_value": "token_embeddings"},
    "everything": {"output_value": None},
    "int8": {"precision": "int8"},
    "uint8": {"precision": "uint8"},
    "binary": {"precision": "binary"},
    "ubinary": {"precision": "ubinary"},
    "int8 tensor": {"precision": "int8", "convert_to_tensor": True},
    "progress": {"show_progress_bar": True},
    "max length": {"processing_kwargs": {"text": {"max_length": 12}}},
    "device": {"device": "cpu"},
}


@pytest.mark.exhaustive(keep=3)
@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_of_stock(pair, call):
    stock, ours, handle = pair
    before = handle.tokens
    same(ours.encode(PROSE, **CALLS[call]), stock.encode(PROSE, **CALLS[call]))
    assert (handle.tokens > before) == (call != "everything")  # which stock computes


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
def test_queries_and_documents(pair, method):
    stock, ours, handle = pair
    before = handle.tokens
    same(getattr(ours, method)(PROSE), getattr(stock, method)(PROSE))
    assert handle.tokens > before


@pytest.mark.parametrize("inputs", ["one text", ["one text"], [], ("a", "b"), np.array(["a", "bc"])], ids=repr)
@pytest.mark.parametrize("call", ["defaults", "tensor", "list", "token embeddings", "everything"])
def test_every_form_of_input(pair, inputs, call):
    stock, ours, _ = pair
    same(ours.encode(inputs, **CALLS[call]), stock.encode(inputs, **CALLS[call]))


def test_errors_are_those_of_stock(pair):
    stock, ours, _ = pair
    calls = {
        "batch_size must be": {"batch_size": 0},
        "Prompt name": {"prompt_name": "none"},
        "Precision": {"precision": "int3"},
        "additional keyword": {"other": 1},
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message) as theirs:
            stock.encode(PROSE, **call)
        with pytest.raises(ValueError, match=message) as found:
            ours.encode(PROSE, **call)
        assert str(found.value) == str(theirs.value)
    assert inspect.signature(ours.encode) == inspect.signature(stock.encode)


def test_order_and_cosine_over_several_windows(pair, monkeypatch):
    monkeypatch.setattr(tokens_of, "FIRST", 8)
    monkeypatch.setattr(tokens_of, "MOST", 16)
    stock, ours, _ = pair
    a, b = ours.encode(PROSE), stock.encode(PROSE)
    same(a, b)
    assert ((a * b).sum(1) >= 0.99999).all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooling", [*Pooling.POOLING_MODES, ("cls", "mean")], ids=str)
def test_families_and_poolings(name, pooling, tmp_path):
    st = small(name, tmp_path, pooling=pooling)
    given = texts(90)
    stock = st.encode(given)
    tokens = st.encode(given[:9], output_value="token_embeddings")
    handle = optimize(st)
    assert handle.reason is None
    assert ("without padding" in str(handle)) == (name != "ernie")
    same(st.encode(given), stock)
    same(st.encode(given[:9], output_value="token_embeddings"), tokens)
    assert handle.tokens > 90


def test_dense_normalize_and_prompts_left_out_of_the_mean(tmp_path):
    st = small("bert", tmp_path, Dense(32, 20), Normalize())
    st.set_pooling_include_prompt(False)
    given, prompt = texts(50), "word1 word2 word3 "
    stock = st.encode(given, prompt=prompt)
    handle = optimize(st)
    same(st.encode(given, prompt=prompt), stock)
    assert abs(st.encode(given) - stock).max() > 1e-2
    assert handle.reason is None


def test_half_precision(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        st = small("bert", tmp_path / str(dtype)).to(dtype)
        stock = st.encode(texts(40))
        optimize(st)
        same(st.encode(texts(40)), stock, tolerance=3e-2)


def test_a_text_without_tokens_is_for_stock(tmp_path):
    st = small("bert", tmp_path, special=False)
    given = ["word1 word2", "", "word3"]
    stock = st.encode(given)
    optimize(st)
    same(st.encode(given), stock)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda st: st.append(torch.nn.Identity()), "Identity is not one of"),
        (lambda st: st[0].register_forward_hook(lambda *args: None), "hooks"),
        (lambda st: st.register_forward_pre_hook(lambda *args: None), "hooks"),
        (lambda st: setattr(st, "preprocess", st.preprocess), "preprocess is not of"),
        (lambda st: setattr(st[0], "module_output_name", "other"), "computes no token embeddings"),
        (lambda st: setattr(st[0].model.config, "output_hidden_states", True), "returns all hidden states"),
        (lambda st: st.pop(1), "no Pooling"),
    ],
)
def test_what_is_not_covered_is_for_stock(tmp_path, change, reason):
    st = small("bert", tmp_path)
    handle = optimize(st)
    change(st)
    assert reason in handle.reason
    assert reason in str(handle)
    if reason not in ("no Pooling", "computes no token embeddings"):  # which stock cannot run either
        assert st.encode(texts(5)).shape == (5, 32)
    assert handle.tokens == 0


def test_autocast_is_for_stock(tmp_path):
    st = small("bert", tmp_path)
    handle = optimize(st)
    with torch.autocast("cpu", torch.bfloat16):
        st.encode(texts(5))
    assert handle.tokens == 0


def test_undo_gives_stock_again(tmp_path):
    st = small("bert", tmp_path)
    stock = st.encode(texts(20))
    handle = optimize(st)
    assert isinstance(handle, Optimized)
    with pytest.raises(ValueError, match="call undo"):
        optimize(st)
    st.encode(texts(20))
    handle.undo()
    handle.undo()
    assert "_inference" not in st.__dict__
    before = handle.tokens
    assert (st.encode(texts(20)) == stock).all()
    assert handle.tokens == before
    optimize(st).undo()


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="expected a SentenceTransformer or CrossEncoder, got BertModel"):
        optimize(MODELS["bert"]())
    with pytest.raises(ValueError, match="positive tokens_per_batch, got 0"):
        optimize(small("bert", tmp_path), tokens_per_batch=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda st: pickle.loads(pickle.dumps(st))], ids=["copy", "pickle"])
def test_copies_encode_alike(tmp_path, copied):
    st = small("bert", tmp_path)
    optimize(st)
    other = copied(st)
    assert other.__dict__["_inference"].args[0] is other
    same(other.encode(texts(20)), st.encode(texts(20)))


def test_batches_have_a_number_of_tokens():
    lengths = [5, 1, 9, 3, 3, 20, 2]
    ids = np.arange(sum(lengths))
    tokens = tokens_of.Tokens(ids, None, lengths, None)
    batches = list(tokens.batches(10, padded=False))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert [[lengths[i] for i in batch] for batch in batches] == [[20], [9], [5, 3], [3, 2, 1]]
    assert all(len(b) * lengths[b[0]] <= 10 or len(b) == 1 for b in tokens.batches(10, padded=True))
    assert [x.tolist() for x in tokens.of([1, 3])[0]] == [[5], [15, 16, 17]]


@pytest.mark.parametrize("types", [False, True])
def test_a_part_leaves_its_last_batch_to_the_next(types):
    lengths = [5, 1, 9, 3, 3, 4, 2, 8, 2, 1]
    parts = [slice(0, 5), slice(5, 6), slice(6, 10)]

    def made(part):
        ids = np.repeat(np.arange(part.start, part.stop), lengths[part])  # of a text: its number
        return part, tokens_of.Tokens(ids, -ids if types else None, lengths[part], None)

    found, given = [], iter(map(made, parts))
    for tokens, batches in tokens_of.batched(given, len(lengths), 10, padded=False):
        for batch in batches:
            numbers = tokens.numbers[batch].tolist()
            found.append(numbers)
            of_texts, of_types = tokens.of(batch)
            for i, ids in zip(numbers, of_texts, strict=True):
                assert ids.tolist() == [i] * lengths[i]
            assert types == (of_types is not None)
            assert not types or [x.tolist() for x in of_types] == [(-x).tolist() for x in of_texts]
        found.append("part")
    assert found == [[2], [0, 3], "part", [5, 4, 1], "part", [7, 6], [8, 9], "part"]


def test_the_first_batch_of_a_short_part_does_not_wait():
    given = [(slice(0, 2), tokens_of.Tokens(np.arange(5), None, [2, 3], None))]
    (_, batches), *_ = tokens_of.batched(iter(given), 100, 10, padded=False)
    assert batches == [[1, 0]]


def test_windows_grow():
    parts = tokens_of.windows(5_000)
    assert [p.stop - p.start for p in parts] == [128, 128, 256, 256, 512, 512, 1024, 1024, 1024, 136]
    assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]]
    assert [tokens_of.windows(n) for n in (0, 1, 256)] == [[], [slice(0, 1)], [slice(0, 256)]]
    assert tokens_of.windows(257) == [slice(0, 128), slice(128, 256), slice(256, 257)]


@pytest.mark.parametrize("prompt", [None, "say: "])
def test_the_first_text_sets_the_tokenizer_for_all(pair, prompt, monkeypatch):
    stock, _, _ = pair
    ragged = {"text": {"padding": False}, "common": {"return_tensors": None}}
    wanted = stock.preprocess(PROSE, prompt=prompt, processing_kwargs=ragged)
    kind = type(stock[0])
    counts, added, preprocess = [], [""], kind.preprocess

    def counting(self, some, **options):
        counts.append(len(some))
        return preprocess(self, [text + added[0] for text in some], **options)

    monkeypatch.setattr(kind, "preprocess", counting)
    tokens = tokens_of.tokenized(stock, PROSE, prompt, {})
    assert counts == [1]
    found = [tokens.of([i]) for i in range(len(PROSE))]
    assert [ids.tolist() for (ids,), _ in found] == wanted["input_ids"]
    assert [types.tolist() for _, (types,) in found] == wanted["token_type_ids"]
    assert tokens.prompt == wanted.get("prompt_length")
    short = {"processing_kwargs": {"text": {"max_length": 5}}}
    assert max(tokens_of.tokenized(stock, PROSE, prompt, short).lengths) == 5
    added[0] = "!"  # what the tokenizer of the tokenizer does not know
    assert tokens_of.tokenized(stock, PROSE, prompt, {}).lengths != tokens.lengths
    assert counts == [1] + 2 * [1, len(PROSE)]
    added[0] = ""
    monkeypatch.setattr(stock[0], "preprocess", lambda some, **options: counting(stock[0], some, **options))
    tokens_of.tokenized(stock, PROSE, prompt, {})
    assert counts[-2:] == [1, len(PROSE)]  # a replaced method may do more to the other texts


@pytest.mark.parametrize(
    "call", [{}, {"prompt": "no other test has it: "}, {"output_value": "token_embeddings"}], ids=str
)
def test_one_text_is_tokenized_once(pair, call, monkeypatch):
    stock, ours, _ = pair
    expected = stock.encode(PROSE[3:4], **call)
    calls, kind = [], type(ours[0].processor)
    encode = kind._encode_plus
    monkeypatch.setattr(kind, "_encode_plus", lambda *args, **given: (calls.append(1), encode(*args, **given))[1])
    monkeypatch.setattr(tokens_of, "_by_backend", lambda *args: calls.append(2))
    same(ours.encode(PROSE[3:4], **call), expected)
    assert calls == [1] * (2 if "prompt" in call else 1)  # and the prompt once, for its length


def test_one_text_takes_no_thread(pair, monkeypatch):
    _, ours, _ = pair
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self))
    ours.encode("How old are you?")
    ours.encode(PROSE)
    assert not started


def test_an_exception_of_the_tokenizer_reaches_the_caller(tmp_path, device, monkeypatch):
    st = small("bert", tmp_path).to(device)
    optimize(st)
    threads, preprocess = [], type(st[0]).preprocess

    def fails(self, inputs, **options):
        threads.append(threading.current_thread().name)
        if len(threads) == 3:
            raise RuntimeError("no more tokens")
        return preprocess(self, inputs, **options)

    monkeypatch.setattr(type(st[0]), "preprocess", fails)
    with pytest.raises(RuntimeError, match="no more tokens"):
        st.encode(texts(2000))
    assert len(threads) == 3
    assert all(name.startswith("matmuls-tokenizer") for name in threads)


@pytest.mark.exhaustive
def test_threads_encode_at_once(pair):
    stock, ours, _ = pair
    parts = [PROSE[n : n + 20] for n in range(8)]
    wanted = [stock.encode(part) for part in parts]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            for found, want in zip(threads.map(ours.encode, parts), wanted, strict=True):
                same(found, want)


@pytest.mark.exhaustive
def test_a_pool_of_processes_runs_the_optimized_model(pair):
    stock, ours, handle = pair
    pool = ours.start_multi_process_pool(["cpu", "cpu"])
    try:
        same(ours.encode(PROSE, pool=pool), stock.encode(PROSE))
    finally:
        ours.stop_multi_process_pool(pool)
    before = handle.tokens
    same(ours.encode(PROSE), stock.encode(PROSE))  # here, whose weights are in shared memory now
    assert handle.tokens > before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "call",
    [
        {"normalize_embeddings": True, "truncate_dim": 8},
        {"output_value": "token_embeddings", "chunk_size": 7, "convert_to_tensor": True},
    ],
    ids=str,
)
def test_processes_for_a_call(call, tmp_path):
    st = small("bert", tmp_path)
    given = texts(20)
    wanted = st.encode(given, device=["cpu", "cpu"], **call)
    handle = optimize(st)
    same(st.encode(given, device=["cpu", "cpu"], **call), wanted)
    assert handle.tokens == 0  # counted in the other processes
    with pytest.raises(ValueError, match="chunk_size must be"):
        st.encode(given, device=["cpu", "cpu"], chunk_size=0)


@pytest.mark.exhaustive
def test_processes_run_the_optimized_model(tmp_path):
    """They fail by a setting that only matmuls' code reads."""
    st = small("bert", tmp_path)
    optimize(st)
    st._inference.args[1].tokens_per_batch = "none"
    with pytest.raises(TypeError, match="not supported between"):
        st.encode(texts(3), device=["cpu", "cpu"], chunk_size=3)
