"""Attention inside Hugging Face models: real weights, padding, causality, grouped heads."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from matmuls.bert import Encoder, ModelMissing, model_folder  # noqa: E402
from matmuls.integrations.transformers import attention_mask, register  # noqa: E402

register()

TEXTS = [
    "How old are you?",
    "A cat sat on the mat.",
    "word " * 200,
    "x",
    "The quick brown fox jumps over the lazy dog, again and again, until nobody looks.",
]


@pytest.fixture(scope="module")
def encoder():
    try:
        return Encoder.load(model_folder(), "cpu", torch.float32)
    except ModelMissing as error:
        pytest.skip(str(error))


def test_real_weights_agree_with_stock_attention(encoder):
    batch = encoder.batch(TEXTS)
    ours = encoder.embed(batch, "custom_mm")
    for stock in ("eager", "sdpa"):
        assert (ours - encoder.embed(batch, stock)).abs().max() < 1e-5


def test_a_text_in_a_batch_gives_what_it_gives_alone(encoder):
    together = encoder.embed(encoder.batch(TEXTS), "custom_mm")
    alone = torch.cat([encoder.embed(encoder.batch([text]), "custom_mm") for text in TEXTS])
    assert (together - alone).abs().max() < 1e-5


def test_padding_would_leak_without_the_mask(encoder):
    """The test above can fail: with the mask function gone, it does."""
    batch = encoder.batch(TEXTS)
    right = encoder.embed(batch, "custom_mm")
    interface = transformers.AttentionMaskInterface
    interface.register("custom_mm", lambda *args, **kwargs: None)
    try:
        assert (encoder.embed(batch, "custom_mm") - right).abs().max() > 1e-3
    finally:
        register()


def test_attentions_are_returned(encoder):
    batch = encoder.batch(TEXTS[:2])
    with torch.no_grad():
        encoder.model.set_attn_implementation("custom_mm")
        ours = encoder.model(**batch, output_attentions=True).attentions
        encoder.model.set_attn_implementation("eager")
        theirs = encoder.model(**batch, output_attentions=True).attentions
    assert len(ours) == len(theirs) == 6
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).abs().max() < 1e-5


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "bert decoder": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, is_decoder=True)),
    "grouped heads": lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "position bias": lambda: transformers.T5EncoderModel(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60)
    ),
    "sliding window": lambda: transformers.MistralModel(
        transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3)
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_models_agree_with_eager(name, padded):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(1, 60, (3, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 5:] = 0
        mask[1, 8:] = 0
    outputs, gradients = [], []
    for attention in ("custom_mm", "eager"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        hidden.square().sum().backward()
        outputs.append(hidden.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_what_is_not_computed_is_refused():
    config = transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=5.0)
    model = transformers.Gemma2Model(config)
    model.set_attn_implementation("custom_mm")
    with pytest.raises(NotImplementedError, match="expected a model without softcap"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_the_padding_mask_is_not_expanded():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ours = attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=mask)
    assert ours.shape == (2, 1, 1, 3)
    assert torch.equal(ours[:, 0, 0], mask.bool())
    assert attention_mask(batch_size=2, q_length=3, kv_length=3) is None
