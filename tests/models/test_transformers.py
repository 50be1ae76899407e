"""Attention inside Hugging Face models: real weights, padding, causal masks, grouped heads, optional outputs."""

import random
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounter  # noqa: E402

from common.model_cases import DISTIL, MODELS, SMALL, WAYS, batch_of, model_of, t  # noqa: E402
from matmuls.bert import Encoder, ModelMissing, model_folder  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    attention,
    optimize,
    register,
)

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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive(keep=1)
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
