"""Attention inside Hugging Face models: real weights, padding, causal masks, grouped heads, optional outputs."""

import random
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounter  # noqa: E402

from matmuls.bert import Encoder, ModelMissing, model_folder  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    VerificationError,
    attention,
    attention_mask,
    optimize,
    register,
    takes,
    verify,
)

# implementations: sdpa unless probabilities are requested; always ours; ours without saved scores (recompute)
WAYS = {"custom_mm": {}, "always": {"sdpa": False}, "again": {"sdpa": False, "recompute": True}}
for way, options in WAYS.items():
    register(way, **options)

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


def sentences(count):
    draw = random.Random(0)
    words = ["the", "a", "cat", "dog", "house", "of", "old", "runs", "over", "blue", "nobody", "Berlin", "1987"]
    return [" ".join(draw.choices(words, k=draw.choice((1, 3, 8, 20, 40)))) for _ in range(count)]


def test_real_weights_on_200_sentences(encoder):
    texts = sentences(200)
    for first in range(0, len(texts), 50):
        batch = encoder.batch(texts[first : first + 50])
        kept = batch["attention_mask"].bool()
        assert not kept.all()
        stock, ours = (encoder.run(batch, name, probabilities=True) for name in ("eager", "custom_mm"))
        for x, y in zip(ours.attentions, stock.attentions, strict=True):
            assert (x - y).transpose(1, 2)[kept].abs().max() < 1e-5
        stock = encoder.embed(batch, "eager")
        for probabilities in (False, True):
            assert (encoder.embed(batch, "custom_mm", probabilities) - stock).abs().max() < 1e-5
        handle = optimize(encoder.model)
        assert (encoder.embed(batch, "custom_mm", probabilities=True) - stock).abs().max() < 1e-4
        handle.undo()
        assert torch.equal(encoder.embed(batch, "eager"), stock)


def test_a_text_gives_the_same_in_a_batch_and_alone(encoder):
    together = encoder.embed(encoder.batch(TEXTS), "always")
    alone = torch.cat([encoder.embed(encoder.batch([text]), "always") for text in TEXTS])
    assert (together - alone).abs().max() < 1e-5


def test_padding_would_leak_without_the_mask(encoder):
    """Shows that the test above can fail: it does without the mask function."""
    batch = encoder.batch(TEXTS)
    right = encoder.embed(batch, "custom_mm")
    interface = transformers.AttentionMaskInterface
    interface.register("custom_mm", lambda *args, **kwargs: None)
    try:
        assert (encoder.embed(batch, "custom_mm") - right).abs().max() > 1e-3
    finally:
        register()


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
IMAGES = SMALL | {"image_size": 24, "patch_size": 8}
t = transformers
MODELS = {
    "bert": lambda: t.BertModel(t.BertConfig(**SMALL)),
    "bert decoder": lambda: t.BertModel(t.BertConfig(**SMALL, is_decoder=True)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SMALL)),
    "electra": lambda: t.ElectraModel(t.ElectraConfig(**SMALL, embedding_size=16)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**DISTIL)),
    "vit": lambda: t.ViTModel(t.ViTConfig(**IMAGES)),
    "grouped heads": lambda: t.LlamaModel(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "position bias": lambda: t.T5EncoderModel(t.T5Config(**T5)),
    "sliding window": lambda: t.MistralModel(t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3)),
    "says nothing of causality": lambda: t.LayoutLMModel(t.LayoutLMConfig(**SMALL)),
}


def model_of(name, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return MODELS[name]().to(device, dtype).eval()


def batch_of(model, padded=False):
    torch.manual_seed(1)
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(3, 3, 24, 24, device=model.device, dtype=model.dtype)}
    mask = torch.ones(3, 9, dtype=torch.long, device=model.device)
    if padded:
        mask[0, 5:] = 0
        mask[1, 8:] = 0
    return {"input_ids": torch.randint(3, 60, (3, 9), device=model.device), "attention_mask": mask}


def results(model, batch, attention, probabilities):
    """Hidden states and attentions at the non-padding tokens, and the parameters' gradients."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    output = model(**batch, output_attentions=probabilities)
    kept = batch["attention_mask"].bool() if "attention_mask" in batch else ...
    hidden = output.last_hidden_state[kept]
    attentions = [x.transpose(1, 2)[kept] for x in output.attentions or ()]
    (hidden.square().sum() + sum(x.square().sum() for x in attentions)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), attentions, gradients


@pytest.mark.parametrize("probabilities", [False, True], ids=["", "probabilities"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_eager(name, way, padded, probabilities, device):
    model = model_of(name, device)
    batch = batch_of(model, padded)
    ours, eager = (results(model, batch, attention, probabilities) for attention in (way, "eager"))
    assert len(ours[1]) == len(eager[1]) == 2 * probabilities
    torch.testing.assert_close(ours[:2], eager[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[2], eager[2], atol=1e-4, rtol=1e-4)


class Watched:
    """Counts calls of torch's sdpa."""

    def __init__(self, monkeypatch):
        self.calls, right = 0, torch.nn.functional.scaled_dot_product_attention

        def watched(*args, **kwargs):
            self.calls += 1
            return right(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)


def test_sdpa_is_used_unless_probabilities_are_requested(monkeypatch):
    model, sdpa = model_of("bert"), Watched(monkeypatch)
    batch = batch_of(model)
    model.set_attn_implementation("custom_mm")
    assert model(**batch).attentions is None
    assert sdpa.calls == 2
    assert len(model(**batch, output_attentions=True).attentions) == 2
    model.set_attn_implementation("always")
    model(**batch)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    model.set_attn_implementation("custom_mm")
    assert len(model(**batch).attentions) == 2
    assert sdpa.calls == 2


def test_always_gives_every_module_its_probabilities():
    model = model_of("bert")
    model.set_attn_implementation("always")
    seen = []
    model.encoder.layer[0].attention.self.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    model(**batch_of(model))
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(3, 4, 9))


def test_dropout_in_training_matches_torch():
    model = model_of("bert").train()
    batch, hidden = batch_of(model), []
    for implementation in ("always", "eager"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        hidden.append(model(**batch).last_hidden_state)
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_custom_mask_is_respected(way):
    model = model_of("bert")
    ids = batch_of(model)["input_ids"]
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    added = torch.zeros(9, 9).masked_fill(~near, -torch.inf)[None, None]
    model.set_attn_implementation("eager")
    right = model(input_ids=ids, attention_mask=added.expand(3, 1, 9, 9)).last_hidden_state
    model.set_attn_implementation(way)
    for mask in (added, added.expand(3, 1, 9, 9), added.expand(3, 4, 9, 9), near[None, None], added.double()):
        found = model(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.ones(3, 1, 9, 8), RuntimeError, r"broadcasts to the scores' \[3, 4, 9, 9\], got \[3, 1, 9, 8\]"),
        (torch.ones(2, 1, 9, 9), RuntimeError, r"got \[2, 1, 9, 9\]"),
        (torch.ones(3, 1, 9, 9, dtype=torch.long), TypeError, "in bool or a floating-point dtype, got torch.int64"),
    ],
    ids=["keys", "batch", "dtype"],
)
def test_a_mismatched_mask_raises(way, mask, error, words):
    model = model_of("bert")
    model.set_attn_implementation(way)
    with pytest.raises(error, match=words):
        model(input_ids=batch_of(model)["input_ids"], attention_mask=mask)


def test_a_fully_masked_query_gives_zeros():
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2] = False
    context, probabilities = attention(torch.nn.Module(), q, k, v, mask, sdpa=False)
    assert (probabilities.sum(-1) == 0).nonzero().tolist() == [[0, head, 2] for head in range(4)]
    assert torch.equal(context[0, 2], torch.zeros(4, 8))


@pytest.mark.parametrize("way", WAYS)
def test_float16_scores_that_overflow(way, device):
    """q @ k reaches 100 * 100 * 64 = 640000, and 80000 after scaling: in float16 infinities, and then NaN."""
    q, k = (torch.randn(2, 4, 5, 64, device=device).sign().mul(100).half().requires_grad_() for _ in range(2))
    v = torch.randn(2, 4, 5, 64, device=device, dtype=torch.float16, requires_grad=True)
    k.data[:, :, 0] = q.data[:, :, 0]
    module = torch.nn.Module().eval()
    asked = {"output_attentions": True, **WAYS[way]}
    context, probabilities = attention(module, q, k, v, None, **asked)
    scores = q.double() @ k.double().mT / 8
    assert scores.abs().max() == 80000
    torch.testing.assert_close(probabilities.double(), scores.softmax(-1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        context.double(), (scores.softmax(-1) @ v.double()).transpose(1, 2), atol=1e-2, rtol=1e-2
    )
    context.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_results_are_as_accurate_as_eager(dtype, device):
    model = model_of("bert", device)
    batch = batch_of(model, padded=True)
    kept = batch["attention_mask"].bool()

    def error(attention):
        model.set_attn_implementation(attention)
        return (model(**batch, output_attentions=True).last_hidden_state[kept].double() - truth).abs().max()

    with torch.no_grad():
        model.set_attn_implementation("eager")
        truth = model.double()(**batch).last_hidden_state[kept]
        model.to(dtype)
        assert error("custom_mm") <= 2 * error("eager")


@pytest.mark.parametrize("way", ["custom_mm", "again"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["", "probabilities"])
def test_compiles_without_graph_breaks(way, probabilities, device):
    model = model_of("bert", device)
    model(
        **batch_of(model), output_attentions=True
    )  # transformers installs its hooks under a lock, which cannot be traced
    batch = batch_of(model, padded=True)
    model.set_attn_implementation(way)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (model, compiled):
        output = run(**batch, output_attentions=probabilities)
        assert len(output.attentions or ()) == 2 * probabilities
        loss = output.last_hidden_state.square().sum() + sum(x.square().sum() for x in output.attentions or ())
        gradients.append(torch.autograd.grad(loss, [p for n, p in model.named_parameters() if "pooler" not in n]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("name", ["bert", "grouped heads"])
def test_compiles_once_and_as_the_first_call(name, stock, monkeypatch):
    """The traced code does not read or guard state of transformers that other models change."""
    models = transformers.MODEL_MAPPING
    monkeypatch.setattr(models, "_modules", {})  # as in a new process
    model = model_of(name)
    model.set_attn_implementation("sdpa" if stock else "custom_mm")
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        first = compiled(**batch_of(model, padded=True)).last_hidden_state
        assert models[t.GPT2Config] is t.GPT2Model
        register("another")
        assert torch.equal(compiled(**batch_of(model, padded=True)).last_hidden_state, first)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.parametrize("way", WAYS)
def test_unsupported_arguments_raise(way):
    config = t.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=5.0)
    model = t.Gemma2Model(config)
    model.set_attn_implementation(way)
    with pytest.raises(NotImplementedError, match="expected a model without softcap"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize(("name", "longest"), [("bert", 64), ("roberta", 62), ("distilbert", 64)])
def test_texts_are_truncated_to_the_models_longest_input(name, longest):
    torch.manual_seed(0)
    config = {"bert": t.BertConfig, "roberta": t.RobertaConfig, "distilbert": t.DistilBertConfig}[name]
    sizes = DISTIL if name == "distilbert" else SMALL
    model = t.AutoModel.from_config(config(**sizes, max_position_embeddings=64, pad_token_id=1)).eval()
    encoder = Encoder(model, SimpleNamespace(model_max_length=10**30))
    assert encoder.longest == longest
    ids = torch.randint(3, 60, (1, longest + 1))
    batch = {"input_ids": ids[:, :-1], "attention_mask": torch.ones(1, longest, dtype=torch.long)}
    assert encoder.embed(batch, "custom_mm").isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)
    assert Encoder(model, SimpleNamespace(model_max_length=20)).longest == 20


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


IGNORING = {
    "mpnet": (lambda: t.MPNetModel(t.MPNetConfig(**SMALL)), "MPNetSelfAttention"),
    "deberta": (lambda: t.DebertaModel(t.DebertaConfig(**SMALL)), "DisentangledSelfAttention"),
    "deberta v2": (lambda: t.DebertaV2Model(t.DebertaV2Config(**SMALL)), "DisentangledSelfAttention"),
    "xlnet": (
        lambda: t.XLNetModel(t.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=60)),
        "XLNetRelativeAttention",
    ),
}


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
