"""`optimize` of Qwen3, Gemma3 and EuroBERT: fewer heads of k and v, RMS norms, causal attention of packed texts."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import DECODER, SMALL, model_of  # noqa: E402
from common.optimize_cases import DECODERS, hidden  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    can_pack,
    encode_tokens,
    layers,
    optimize,
    segments,
    verify,
)

NEW = ("eurobert", *DECODERS)
LENGTHS = [40, 1, 7, 40, 2]  # 40: the longest


def batch_of(side):
    """Texts of LENGTHS with padding on one side, or None on both."""
    torch.manual_seed(1)
    mask = torch.zeros(5, 40, dtype=torch.long)
    for row, n in zip(mask, LENGTHS, strict=True):
        first = {"left": 40 - n, "right": 0, "both": (40 - n) // 2}[side]
        row[first : first + n] = 1
    return {"input_ids": torch.randint(1, 60, (5, 40)) * mask, "attention_mask": mask}


@pytest.fixture
def packs(monkeypatch):
    calls, right = [], segments.Segments.attend
    monkeypatch.setattr(segments.Segments, "attend", lambda *args: (calls.append(1), right(*args))[1])
    return calls


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", NEW)
def test_agrees_with_eager(name, side, packs):
    model, batch = model_of(name), batch_of(side)
    model.set_attn_implementation("eager")
    expected = hidden(model, batch)
    model.set_attn_implementation("sdpa")
    optimize(model)
    ours = hidden(model, batch)
    assert len(packs) >= 2
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], expected[seen], atol=1e-5, rtol=1e-5)
    texts = [batch["input_ids"][i][seen[i]] for i in range(5)]
    together = encode_tokens(model, torch.cat(texts), LENGTHS)
    torch.testing.assert_close(together, expected[seen], atol=1e-5, rtol=1e-5)


def test_windows_of_a_bidirectional_decoder_run_the_stock_code(packs):
    """transformers counts them otherwise than those of a causal one."""
    config = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "is_causal": False}
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SMALL, **DECODER, **config)).eval()
    batch = batch_of("right")
    expected = hidden(model, batch)
    optimize(model)
    assert "is_causal=False" in can_pack(model)
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)
    assert not packs


def test_layers_run_as_planned(monkeypatch):
    calls = []
    for name in ("rms_norm_", "rotate_", "_product"):
        right = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *a, r=right, n=name: (calls.append(n), r(*a))[1])
    model = model_of("gemma3")
    optimize(model)
    hidden(model, batch_of("left"))
    one = ["rms_norm_", "_product", "rms_norm_", "rms_norm_", "rotate_", "rms_norm_"]
    one += ["rms_norm_", "_product", "_product", "_product", "rms_norm_"]  # q, k and v of three widths in one product
    assert calls == one * 2


def test_a_cache_is_for_stock(packs):
    """With use_cache the model returns one, which only the stock code fills."""
    for name in ("qwen3", "gemma3"):
        model = model_of(name)
        model.config.use_cache = True
        given = {"input_ids": torch.randint(1, 60, (2, 8))}
        with torch.no_grad():
            stock = model(**given)
            optimize(model)
            ours = model(**given)
            later = model(input_ids=given["input_ids"][:, :1], cache=ours.cache).last_hidden_state
            without = model(**batch_of("left"), use_cache=False)
        assert torch.equal(ours.last_hidden_state, stock.last_hidden_state)
        assert ours.cache.get_seq_length() == 9
        assert later.shape == (2, 1, 32)
        assert without.cache is None
        assert packs  # of the last call only
        packs.clear()


def test_generation_is_equal():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SMALL, **DECODER | {"use_cache": True}, eos_token_id=None)
    model = transformers.Qwen3ForCausalLM(config).eval()
    wanted = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    ids = torch.randint(1, 60, (2, 5))
    stock = model.generate(ids, **wanted)
    optimize(model)
    assert torch.equal(model.generate(ids, **wanted), stock)


@pytest.mark.parametrize("name", NEW)
def test_embeddings_of_the_caller_are_not_overwritten(name, packs):
    model = model_of(name)
    batch = batch_of("left")
    given = model.get_input_embeddings()(batch["input_ids"]).detach()
    before, mask = given.clone(), batch["attention_mask"]
    with torch.no_grad():
        wanted = [model(inputs_embeds=given).last_hidden_state, model(None, mask, None, inputs_embeds=given)[0]]
        optimize(model)
        assert len(packs) == 0
        found = [model(inputs_embeds=given).last_hidden_state, model(None, mask, None, inputs_embeds=given)[0]]
    assert torch.equal(given, before)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-5)
    seen = mask.bool()
    torch.testing.assert_close(found[1][seen], wanted[1][seen], atol=1e-5, rtol=1e-5)


def test_attention_that_the_call_makes_bidirectional(packs):
    model, batch = model_of("qwen3"), batch_of("left")
    causal = hidden(model, batch)
    stock = hidden(model, batch, is_causal=False)
    optimize(model)
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden(model, batch, is_causal=False)[seen], stock[seen], atol=1e-5, rtol=1e-5)
    assert not packs
    model.config.is_causal = False  # for all calls: packed
    torch.testing.assert_close(hidden(model, batch)[seen], stock[seen], atol=1e-5, rtol=1e-5)
    assert packs
    assert (stock - causal)[seen].abs().max() > 1e-2


def test_positions_of_the_caller_are_for_stock(packs):
    model, batch = model_of("qwen3"), batch_of("left")
    batch["position_ids"] = batch["attention_mask"].cumsum(1) * 3
    stock = hidden(model, batch)
    optimize(model)
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden(model, batch)[seen], stock[seen], atol=1e-5, rtol=1e-5)
    assert not packs


@pytest.mark.parametrize("name", ["qwen3 window", "gemma3", "gemma3 causal"])
def test_windows_of_long_texts_are_computed_in_blocks(name, monkeypatch):
    monkeypatch.setattr(segments, "BLOCK", 1)
    blocks, right = [], segments._local
    monkeypatch.setattr(segments, "_local", lambda *args: (blocks.append(1), right(*args))[1])
    model = model_of(name)
    ids = torch.randint(1, 60, (79,))
    expected = torch.cat([hidden(model, {"input_ids": x[None]})[0] for x in ids.split([39, 40])])
    optimize(model)
    torch.testing.assert_close(encode_tokens(model, ids, [39, 40]), expected, atol=1e-5, rtol=1e-5)
    assert len(blocks) == 2  # of the layer with a window
    ours = hidden(model, {"input_ids": ids[:39][None]})  # without a mask
    torch.testing.assert_close(ours[0], expected[:39], atol=1e-5, rtol=1e-5)
    assert len(blocks) == 3


@pytest.mark.parametrize("head", ["Qwen3ForSequenceClassification", "Gemma3TextForSequenceClassification"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_heads(head, side, packs):
    torch.manual_seed(0)
    kind = getattr(transformers, head)
    model = kind(kind.config_class(**SMALL, **DECODER, num_labels=3)).eval()
    batch = batch_of(side)
    with torch.no_grad():
        stock = model(**batch).logits
        optimize(model)
        torch.testing.assert_close(model(**batch).logits, stock, atol=1e-5, rtol=1e-5)
    assert packs
    assert verify(model, batch).hidden_states < 1e-5


def test_layers_called_by_themselves():
    """By position, as transformers' signatures allow."""
    for name in ("eurobert", "qwen3", "gemma3"):
        model = model_of(name)
        layer, x = model.layers[0], torch.randn(2, 5, 32)
        turns = torch.rand(1, 5, 8), torch.rand(1, 5, 8)
        given = (turns, None) if name == "gemma3" else (None, None, None, False, turns)
        with torch.no_grad():
            stock, named = layer(x, *given), layer(x, position_embeddings=turns)
            optimize(model)
            assert torch.equal(layer(x, *given), stock)
            torch.testing.assert_close(layer(x, position_embeddings=turns), named)


def test_norms_that_were_replaced():
    model = model_of("qwen3")
    model.layers[1].self_attn.q_norm = torch.nn.Identity()
    handle = optimize(model)
    assert len(handle.layers) == 1
    assert "nn.Linear and RMS norms" in handle.left["layers.1"]
    assert "as a whole" in can_pack(model)
