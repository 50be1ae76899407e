"""Attention inside models that generate, with caches, packed sequences and other masks; which models are taken."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import IGNORING, IMAGES, MODELS, SMALL, WAYS, batch_of, model_of, t  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    VerificationError,
    attention,
    attention_mask,
    takes,
    verify,
)


def test_generation_with_a_cache():
    torch.manual_seed(0)
    model = t.BertLMHeadModel(t.BertConfig(**SMALL, is_decoder=True)).eval()
    ids = torch.randint(3, 60, (2, 4))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = []
    for implementation in ("eager", *WAYS):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert all(torch.equal(found[0], x) for x in found[1:])


DECODERS = {
    "bert": lambda: t.BertLMHeadModel(t.BertConfig(**SMALL, is_decoder=True)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60)),
    "sliding window": lambda: t.MistralForCausalLM(t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=20)),
}


def decoder_of(name):
    torch.manual_seed(0)
    return DECODERS[name]().eval(), torch.randint(3, 60, (2, 9))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_several_tokens_at_once_with_a_cache(name, way):
    """The causal mask is aligned to the end of the keys, not to their start; also in assisted generation."""
    model, ids = decoder_of(name)
    model.set_attn_implementation(way)
    with torch.no_grad():
        whole = model(ids).logits
        for mask in (None, torch.ones(2, 9, dtype=torch.long)):
            cache = model(ids[:, :4], use_cache=True).past_key_values
            rest = model(ids[:, 4:], past_key_values=cache, attention_mask=mask).logits
            torch.testing.assert_close(rest, whole[:, 4:], atol=1e-5, rtol=1e-5)
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    repeated = ids[:1].repeat(1, 3)
    ours = model.generate(repeated, attention_mask=torch.ones_like(repeated), **drafts)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(repeated, attention_mask=torch.ones_like(repeated), **drafts))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_static_cache_with_unused_keys(name, way):
    """A static cache has room for more keys than have been written."""
    model, ids = decoder_of(name)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        whole = model(ids, use_cache=False).logits
        model.set_attn_implementation(way)
        cache = t.StaticCache(config=model.config, max_cache_len=20)
        for part in (ids[:, :4], ids[:, 4:8], ids[:, 8:]):
            begin = int(cache.get_seq_length())
            some = model(part, past_key_values=cache).logits
            torch.testing.assert_close(some, whole[:, begin : begin + part.shape[1]], atol=1e-5, rtol=1e-5)


T5_LIKE = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 60,
}
BESIDE_SDPA = {  # models to which transformers passes only eager's masks
    "decoders of modules that say they are not causal": lambda: t.NllbMoeForConditionalGeneration(
        t.NllbMoeConfig(**T5_LIKE, num_experts=4)
    ),
    "pegasus x": lambda: t.PegasusXForConditionalGeneration(
        t.PegasusXConfig(**T5_LIKE, block_size=8, num_global_tokens=4)
    ),
    "layers that add masks themselves": lambda: t.GitForCausalLM(
        t.GitConfig(**SMALL, vision_config=IMAGES, bos_token_id=1, eos_token_id=2)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BESIDE_SDPA)
def test_models_without_sdpa_masks_get_eagers(name, way):
    torch.manual_seed(0)
    model = BESIDE_SDPA[name]().eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.15)
    ids = torch.randint(3, 60, (2, 9))
    others = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found = []
    for implementation in ("eager", way):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(input_ids=ids, **others).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_do_not_attend_to_each_other(way):
    torch.manual_seed(0)
    model = DECODERS["llama"]().eval()
    model.set_attn_implementation(way)
    ids, positions = torch.randint(3, 60, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(part).logits for part in (ids[:, :4], ids[:, 4:])], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_the_padding_mask_is_not_expanded():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ours = attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=mask)
    assert ours.shape == (2, 1, 1, 3)
    assert torch.equal(ours[:, 0, 0], mask.bool())
    assert attention_mask(batch_size=2, q_length=3, kv_length=3, allow_is_bidirectional_skip=True) is None
    # nothing is masked: without a mask sdpa uses its fastest kernel; models that combine masks request one nevertheless
    full = {"batch_size": 2, "q_length": 3, "kv_length": 3, "attention_mask": torch.ones(2, 3)}
    assert attention_mask(**full, allow_is_bidirectional_skip=True) is None
    assert attention_mask(**full).shape == (2, 1, 1, 3)


@pytest.mark.parametrize("name", ["s_aux", "sinks", "indices", "block_indices"])
def test_unsupported_features_of_a_model_raise(name):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=f"expected a model without {name}"):
        attention(torch.nn.Module(), q, q, q, None, **{name: torch.ones(2)})


@pytest.mark.parametrize("sdpa", [True, False])
def test_fewer_queries_than_keys_are_the_last_positions(sdpa):
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (3, 7, 7))
    module = torch.nn.Module().eval()
    context, _ = attention(module, q, k, v, None, is_causal=True, sdpa=sdpa)
    whole = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([torch.randn(2, 2, 4, 8, dtype=torch.float64), q], 2), k, v, is_causal=True
    )
    torch.testing.assert_close(context, whole[:, :, 4:].transpose(1, 2))


@pytest.mark.parametrize("name", MODELS)
def test_takes_accepts_models_that_use_attention_functions(name):
    """According to the code of their classes, and to the calls of a forward pass."""
    model = model_of(name)
    before = model.config._attn_implementation
    found = takes(model)
    assert found
    assert found.modules
    assert not found.ignoring
    assert takes(model, batch_of(model)) == found
    assert model.config._attn_implementation == before
    assert "custom_mm_counting" not in transformers.AttentionInterface._global_mapping


@pytest.mark.parametrize("name", IGNORING)
def test_takes_rejects_models_that_ignore_attention_functions(name):
    make, own = IGNORING[name]
    model = make().eval()
    batch = {"input_ids": torch.randint(3, 60, (2, 7))}
    found = takes(model)
    assert not found
    assert not found.modules
    assert list(found.ignoring.values()) == [own, own]
    assert str(found) == f"call the attention function that is set: none; compute attention themselves: 2 x {own}"
    assert takes(model, batch) == found
    model.set_attn_implementation("custom_mm")
    with pytest.raises(VerificationError, match=f"verify: expected layers that optimize .*2 x {own}"):
        verify(model, batch)


def test_takes_of_a_model_that_partly_uses_attention_functions():
    encoder = IGNORING["mpnet"][0]()
    decoder = t.BertLMHeadModel(t.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))
    found = takes(t.EncoderDecoderModel(encoder=encoder, decoder=decoder))
    assert set(found.modules.values()) == {"BertSelfAttention", "BertCrossAttention"}
    assert set(found.ignoring) == {f"encoder.encoder.layer.{i}.attention.attn" for i in (0, 1)}


def test_verify_rejects_a_model_that_ignores_attention_functions():
    model = model_of("bert")
    for stock in ("eager", "sdpa"):
        model.set_attn_implementation(stock)
        with pytest.raises(VerificationError, match=r"got BertModel without any .*2 x BertSelfAttention"):
            verify(model, batch_of(model))
    model.set_attn_implementation("always")
    assert verify(model, batch_of(model)).hidden_states < 1e-5
