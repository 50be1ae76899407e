"""Texts without padding: an optimized encoder leaves masked tokens out, and `encode_tokens` runs packed texts."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import SMALL, batch_of, model_of  # noqa: E402
from common.optimize_cases import KNOWN, TEXTS, hidden  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    can_pack,
    encode_tokens,
    optimize,
    pool,
    register,
    segments,
    verify,
)
from matmuls.integrations.transformers import packed as module_under_test  # noqa: E402
from matmuls.integrations.transformers.families import DECODERS, _kind  # noqa: E402

register()
LENGTHS = [3, 9, 1, 5, 9, 2]
HIDDEN = {  # columns that are hidden, for each of six texts
    "right": [range(n, 9) for n in LENGTHS],
    "left": [range(9 - n) for n in LENGTHS],
    "holes": [(2, 5), (), (0,), (0, 4, 8), (8,), range(1, 8)],
}


@pytest.fixture
def packs(monkeypatch):
    """A list with one entry for each attention by segments."""
    calls, right = [], segments.Segments.attend
    monkeypatch.setattr(segments.Segments, "attend", lambda *args: (calls.append(1), right(*args))[1])
    return calls


def padded(model, kind="right", fill=None):
    torch.manual_seed(1)
    mask = torch.ones(6, 9, dtype=torch.long)
    for row, columns in zip(mask, HIDDEN[kind], strict=True):
        row[list(columns)] = 0
    ids = torch.randint(3, 60, (6, 9))
    ids = ids if fill is None else ids.masked_fill(mask == 0, fill)
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def read(mask, model=None):
    """Where states are as in the stock model: tokens that are not hidden, and the first column, which heads read,
    though not those of decoders."""
    seen = mask.bool().clone()
    seen[:, 0] |= _kind(model) not in DECODERS
    return seen


def check(model, batch, packs, tolerance=1e-5, **wanted):
    """Stock and then optimized; the padding is left out, and what is read agrees."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        stock = model(**batch, **wanted)
        handle = optimize(model)
        packs.clear()
        ours = model(**batch, **wanted)
    handle.undo()
    assert packs
    assert type(ours) is type(stock)
    assert len(ours) == len(stock)
    seen = read(batch["attention_mask"], model)
    torch.testing.assert_close(ours[0][seen], stock[0][seen], atol=tolerance, rtol=tolerance)
    assert not ours[0][~seen].any()
    torch.testing.assert_close(ours[1:], stock[1:], atol=tolerance, rtol=tolerance)  # the pooler's output


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("name", TEXTS)
def test_agrees_with_the_padded_batch(name, kind, packs, device):
    model = model_of(name, device)
    for fill in (None, model.config.pad_token_id):
        check(model, padded(model, kind, fill), packs)


@pytest.mark.parametrize("name", ["XLMRoberta", "Camembert"])
def test_models_related_to_roberta(name, packs):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}Model")(config).eval()
    check(model, padded(model, fill=config.pad_token_id), packs)


def test_bool_masks_tuples_and_positional_arguments(packs):
    model = model_of("bert")
    batch = padded(model)
    batch["attention_mask"] = batch["attention_mask"].bool()
    check(model, batch, packs, return_dict=False)
    expected = hidden(model, batch)
    optimize(model)
    packs.clear()
    with torch.no_grad():
        ours = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    assert packs
    seen = batch["attention_mask"]
    torch.testing.assert_close(ours[seen], expected[seen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "albert"])
@pytest.mark.parametrize("rows", [1, 6], ids=["for all texts", "for each text"])
def test_token_types_and_positions_are_honoured(name, rows, packs):
    model = model_of(name)
    torch.manual_seed(2)
    given = {"token_type_ids": torch.randint(model.config.type_vocab_size, (6, 9))}
    given["position_ids"] = torch.randint(2, 30, (rows, 9))
    check(model, padded(model, "holes") | given, packs)


@pytest.mark.parametrize("name", TEXTS)
def test_embeddings_of_the_caller_are_honoured(name, packs):
    model = model_of(name)
    batch = padded(model)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    check(model, batch, packs)


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("by", ["step", "chunk_bytes"])
def test_steps_of_few_tokens(tokens, by, monkeypatch, packs):
    model = model_of("bert")
    batch = padded(model)
    expected = hidden(model, batch)
    if by == "step":
        monkeypatch.setattr(module_under_test, "TOKENS", tokens)
    optimize(model, chunk_bytes=None if by == "step" else tokens * 3 * 32 * 4)
    seen = read(batch["attention_mask"])
    torch.testing.assert_close(hidden(model, batch)[seen], expected[seen], atol=1e-5, rtol=1e-5)
    assert len(packs) == 2 * {1: 6, 7: 4, 16: 3}[tokens]  # of two layers: 1 2 3, 5, 9, 9 and 1 2 3 5, 9, 9


@pytest.mark.parametrize("name", ["bert", "nomic", "mpnet"])
def test_products_of_packed_texts_by_onednn(name, monkeypatch, packs):
    """As on a CPU with AVX-512: products of 16 rows or more, here of all texts, whose number is rounded up."""
    monkeypatch.setattr(segments, "FEWEST_ROWS", 16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    rows, product = [], torch.ops.mkldnn._linear_pointwise.default
    ours = SimpleNamespace(default=lambda x, *args: (rows.append(x.numel() // x.size(-1)), product(x, *args))[1])
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", ours)
    model = model_of(name)
    check(model, padded(model), packs)
    assert set(rows) == {32}  # 29 or 30 tokens
    rows.clear()
    hidden(model, {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 0]])})
    assert not rows  # so few are for BLAS


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "MPNet", "ModernBert"])
@pytest.mark.parametrize("kind", ["left", "right"])
def test_heads(family, head, kind, packs):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, pad_token_id=1)
    model = getattr(transformers, f"{family}For{head}")(config).eval()
    batch = padded(model, kind)
    with torch.no_grad():
        stock = model(**batch)[0]
        optimize(model)
        ours = model(**batch)[0]
    assert packs
    seen = ... if head == "SequenceClassification" else read(batch["attention_mask"])
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-5, rtol=1e-5)


def test_batches_without_padding_and_hidden_texts(packs):
    model = model_of("bert")
    batches = [padded(model) | {"attention_mask": torch.ones(6, 9).long()}, {"input_ids": torch.tensor([[5, 6, 7]])}]
    batches.append(padded(model))
    batches[-1]["attention_mask"][2] = 0  # a text without a token
    stock = [hidden(model, batch) for batch in batches]
    optimize(model)
    torch.testing.assert_close([hidden(model, batch) for batch in batches], stock, atol=1e-5, rtol=1e-5)
    assert not packs


def test_undo_is_bit_for_bit(packs):
    model = model_of("bert")
    batch = padded(model)
    stock = hidden(model, batch)
    handle = optimize(model)
    hidden(model, batch)
    handle.undo()
    assert packs
    assert torch.equal(hidden(model, batch), stock)


# ----------------------------------------------------------------------------- what asks for the padded batch


ASKING = {  # what a call or a model needs that packed texts do not have
    "attentions": lambda model: model.set_attn_implementation("eager"),
    "hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "probabilities": lambda model: model.set_attn_implementation("always"),
    "a layer in training": lambda model: model.encoder.layer[1].output.dropout.train(),
    "embeddings in training": lambda model: (setattr(model.embeddings.dropout, "p", 0.0), model.embeddings.train()),
    "a hook": lambda model: model.embeddings.register_forward_hook(lambda module, args, output: None),
    "a hook in a layer": lambda model: model.encoder.layer[0].output.register_forward_hook(lambda *args: None),
    "a replaced forward": lambda model: setattr(model.encoder, "forward", partial(model.encoder.forward)),
}


@pytest.mark.parametrize("asking", ASKING)
def test_padded_where_the_model_needs_it(asking, packs):
    model = model_of("bert")
    batch = padded(model)
    optimize(model)
    expected = hidden(model, batch)
    assert packs
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    ASKING[asking](model)
    packs.clear()
    ours = hidden(model, batch)
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], expected[seen], atol=1e-5, rtol=1e-5)
    assert ours[~seen].any()
    if asking != "hidden states":
        with pytest.raises(ValueError, match=r"^encode_tokens: "):
            encode_tokens(model, torch.tensor([4, 5]), [2])
    assert len(packs) <= 1  # the first layer may have run before the second refused


def test_padded_where_the_call_needs_it(packs):
    model = model_of("bert")
    batch = padded(model)
    optimize(model)
    model.set_attn_implementation("custom_mm")
    seen = batch["attention_mask"].bool()
    expected = hidden(model, batch)[seen]
    packs.clear()
    calls = [{"output_hidden_states": True}, {"output_attentions": True}]
    calls.append({"attention_mask": batch["attention_mask"][:, None, None].bool()})
    for call in calls:
        torch.testing.assert_close(hidden(model, batch | call)[seen], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(**batch).last_hidden_state[seen], expected, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(hidden(model, batch)[seen], expected, atol=1e-1, rtol=1e-1)
    head = transformers.BertForSequenceClassification(model.config).eval()
    optimize(head)
    with torch.no_grad():
        states = head(**batch, output_hidden_states=True).hidden_states
    assert states[-1][~seen].any()
    assert not packs


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in TEXTS])
def test_models_that_cannot_be_packed(name, packs):
    model = model_of(name)
    batch = batch_of(model, padded=True)
    optimize(model)
    assert verify(model, batch).hidden_states < 1e-5
    assert not packs
    assert can_pack(model)


def test_texts_longer_than_the_positions(packs):
    torch.manual_seed(0)
    for family, positions in (("Bert", 8), ("Roberta", 10), ("MPNet", 10)):
        config = getattr(transformers, f"{family}Config")(**SMALL, max_position_embeddings=positions, pad_token_id=1)
        model = getattr(transformers, f"{family}Model")(config).eval()
        optimize(model)
        with pytest.raises((RuntimeError, IndexError)):  # as in stock
            hidden(model, padded(model))
        with pytest.raises(ValueError, match=f"^encode_tokens: {family}Model has too few positions for 9 tokens$"):
            encode_tokens(model, torch.full((9,), 5), [9])
        assert encode_tokens(model, torch.full((8,), 5), [8]).shape == (8, 32)


# ----------------------------------------------------------------------------- packed from the start


@pytest.mark.parametrize("name", TEXTS)
def test_packed_texts_agree_with_each_text_alone(name, device):
    model = model_of(name, device)
    torch.manual_seed(3)
    ids = torch.randint(0, 60, (sum(LENGTHS),), device=device)  # with some padding ids
    types = torch.randint(2, ids.shape, device=device) if name in ("bert", "electra", "albert") else None
    exact = model_of(name, device, torch.float64)
    exact.load_state_dict(model.state_dict())
    parts = zip(ids.split(LENGTHS), (ids if types is None else types).split(LENGTHS), strict=True)
    alone = ({"input_ids": x[None]} | ({} if types is None else {"token_type_ids": t[None]}) for x, t in parts)
    expected = torch.cat([hidden(exact, text)[0] for text in alone])
    optimize(model)
    for lengths in (LENGTHS, torch.tensor(LENGTHS)):
        ours = encode_tokens(model, ids, lengths, token_type_ids=types)
        assert not ours.requires_grad
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 2])
def test_local_attention_of_long_texts_is_computed_in_blocks(block, monkeypatch, device):
    monkeypatch.setattr(segments, "BLOCK", block)
    blocks, right = [], segments._local
    monkeypatch.setattr(segments, "_local", lambda *args: (blocks.append(1), right(*args))[1])
    model = model_of("modernbert", device)
    ids = torch.randint(1, 60, (39 + 40,), device=device)
    expected = torch.cat([hidden(model, {"input_ids": x[None]})[0] for x in ids.split([39, 40])])
    optimize(model)
    torch.testing.assert_close(encode_tokens(model, ids, [39, 40]), expected, atol=1e-5, rtol=1e-5)
    assert len(blocks) == 2  # of the second layer
    together = {"input_ids": ids[:78].view(2, 39), "attention_mask": torch.ones(2, 39, dtype=torch.long, device=device)}
    for given in (together, {"input_ids": together["input_ids"]}):  # not padded, but in blocks too
        blocks.clear()
        ours = hidden(model, given)
        assert len(blocks) == 1
        torch.testing.assert_close(ours[0], expected[:39], atol=1e-5, rtol=1e-5)


def test_positions_that_depend_on_the_longest_text(packs):
    model = model_of("nomic")
    model.rotary_emb.rope_type = "dynamic"
    optimize(model)
    hidden(model, padded(model))
    assert not packs
    assert can_pack(model) == "the positions of NomicBertModel depend on the longest text of a batch"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TEXTS)
def test_half_precision_errs_no_more_than_stock(name, dtype, device):
    exact = model_of(name, device, torch.float64)
    model = model_of(name, device, dtype)
    batch = padded(model, "left")
    seen = read(batch["attention_mask"], model)
    right, stock = hidden(exact, batch)[seen], hidden(model, batch)[seen]
    optimize(model)
    ours = hidden(model, batch)[seen]
    error, allowed = ((x.double() - right).square().mean().sqrt() for x in (ours, stock))
    assert error <= 2 * allowed


def test_padding_is_computed_where_unpad_says_so(packs, device):
    model = model_of("bert", device)
    batch = padded(model)
    stock = hidden(model, batch)
    optimize(model, unpad=False)
    torch.testing.assert_close(hidden(model, batch), stock, atol=1e-5, rtol=1e-5)  # masked tokens too
    assert not packs


def test_encode_tokens_of_a_module_that_holds_a_model():
    model = model_of("bert")
    optimize(model)
    ids = torch.tensor([5, 6, 7])
    inside = torch.nn.Sequential(model)
    assert torch.equal(encode_tokens(inside, ids, [1, 2]), encode_tokens(model, ids, [1, 2]))
    assert encode_tokens(model, ids[:0], []).shape == (0, 32)


def test_encode_tokens_says_why_not():
    ids = torch.tensor([5, 6, 7])
    bad = "expected input_ids .T. and lengths of at least 1 with the sum T, got "
    model = model_of("bert")
    assert can_pack(model) == "optimize has not changed BertModel as a whole"
    assert can_pack(torch.nn.Linear(2, 2)) == "Linear contains no model of texts that optimize knows"
    optimize(model)
    assert can_pack(model) is None
    for lengths in ([2], [4], [3, 0], [-1, 4]):
        with pytest.raises(ValueError, match=bad):
            encode_tokens(model, ids, lengths)
    with pytest.raises(ValueError, match=bad):
        encode_tokens(model, ids[None], [1])
    with pytest.raises(ValueError, match=r"expected token_type_ids \[3\], got \[2\]"):
        encode_tokens(model, ids, [3], token_type_ids=ids[:2])
    distil = model_of("distilbert")
    optimize(distil)
    with pytest.raises(ValueError, match="DistilBertModel takes no token_type_ids"):
        encode_tokens(distil, ids, [3], token_type_ids=ids)


@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalize"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_pool(mode, dtype, normalize, device):
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 5, device=device).to(dtype)
    of_one = {
        "mean": lambda part: part.mean(0),
        "cls": lambda part: part[0],
        "lasttoken": lambda part: part[-1],
        "max": lambda part: part.amax(0),
    }[mode]
    expected = torch.stack([of_one(part) for part in x.double().split(LENGTHS)])
    if normalize:
        expected = expected / expected.norm(dim=1, keepdim=True)
    for lengths in (LENGTHS, torch.tensor(LENGTHS)):
        torch.testing.assert_close(pool(x, lengths, mode, normalize), expected.to(dtype))
    assert pool(x[:0], [], mode, normalize).shape == (0, 5)


def test_pool_says_why_not():
    x = torch.randn(3, 2)
    for lengths in ([2], [3, 0]):
        with pytest.raises(ValueError, match=r"pool: expected hidden .T, width. and lengths of at least 1"):
            pool(x, lengths)
    with pytest.raises(ValueError, match="pool: expected mode mean, cls, lasttoken or max, got median"):
        pool(x, [3], "median")
