"""Which models our attention is in use in, which refuse it, and what the errors say."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import IGNORING, SMALL, batch_of, model_of  # noqa: E402
from matmuls.integrations.transformers import (  # noqa: E402
    VerificationError,
    in_use,
    optimize,
    register,
    unsupported,
    verify,
)

t = transformers
ours = register()
other = register("other", sdpa=False)
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
REFUSING = {
    "gemma2": (
        lambda: t.Gemma2Model(t.Gemma2Config(**SMALL, **GROUPED)),
        "Gemma2Attention needs capped scores (softcap)",
    ),
    "gpt-oss": (
        lambda: t.GptOssModel(t.GptOssConfig(**SMALL, **GROUPED, num_local_experts=2, num_experts_per_tok=1)),
        "GptOssAttention needs attention sinks (s_aux)",
    ),
}


def test_bert_uses_it_where_it_is_set():
    model = model_of("bert")
    modules = {f"encoder.layer.{i}.attention.self": "BertSelfAttention" for i in (0, 1)}
    for stock in ("eager", "sdpa"):
        model.set_attn_implementation(stock)
        assert in_use(model) == ours.in_use(model) == {}
    model.set_attn_implementation("custom_mm")
    assert in_use(model) == ours.in_use(model) == modules
    assert other.in_use(model) == {}
    model.set_attn_implementation("other")
    assert in_use(model) == other.in_use(model) == modules
    assert ours.in_use(model) == {}


def test_what_holds_a_model_is_asked_for_its_parts():
    model = torch.nn.Sequential(model_of("bert"))
    assert in_use(model) == {}
    model[0].set_attn_implementation("custom_mm")
    assert list(in_use(model)) == [f"0.encoder.layer.{i}.attention.self" for i in (0, 1)]


@pytest.mark.parametrize("name", IGNORING)
def test_models_that_ignore_the_setting_do_not_use_it(name):
    make, _ = IGNORING[name]
    model = make().eval()
    model.set_attn_implementation("custom_mm")
    assert in_use(model) == ours.in_use(model) == {}
    assert unsupported(model) == {}


@pytest.mark.parametrize("name", REFUSING)
def test_models_that_need_more_are_named_before_they_run(name):
    make, why = REFUSING[name]
    model = make().eval()
    model.set_attn_implementation("custom_mm")
    assert in_use(model) == {}
    assert set(unsupported(model)) == {f"layers.{i}.self_attn" for i in (0, 1)}
    assert set(unsupported(model).values()) == {f"{why}, which matmuls attention does not support"}
    with pytest.raises(NotImplementedError) as told:
        verify(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)})
    assert str(told.value) == f"verify: {why}, which matmuls attention does not support"


def test_gemma2_without_a_cap_uses_it():
    model = t.Gemma2Model(t.Gemma2Config(**SMALL, **GROUPED, attn_logit_softcapping=None)).eval()
    model.set_attn_implementation("custom_mm")
    assert len(in_use(model)) == 2
    assert unsupported(model) == {}
    assert verify(model, {"input_ids": torch.randint(3, 60, (2, 7))}).hidden_states < 1e-5


class SentenceModel(torch.nn.Module):
    """Called as a SentenceTransformer is: with the tensors in one dict."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def tokenize(self, texts):
        ids = torch.tensor([[3 + len(text), 4, 5] for text in texts])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "modality": "text"}

    def forward(self, features):
        raise AssertionError("it takes no keywords")


SentenceModel.__module__ = "sentence_transformers.model"


def test_verify_runs_the_transformer_of_a_sentence_transformer():
    model = SentenceModel(model_of("bert"))
    texts = ["a", "abc"]
    with pytest.raises(VerificationError, match="got BertModel without any"):
        verify(model, texts)
    model.model.set_attn_implementation("custom_mm")
    found = verify(model, texts)
    assert 0 <= found.hidden_states < 1e-5
    assert found == verify(model, model.tokenize(texts))
    assert len(optimize(model).layers) == 2
    assert verify(model, texts).hidden_states < 1e-5
    model.model = torch.nn.Identity()
    with pytest.raises(TypeError, match="verify: expected a model of transformers inside SentenceModel, got none"):
        verify(model, texts)


def test_verify_of_another_model_takes_tensors():
    model = model_of("bert")
    model.set_attn_implementation("custom_mm")
    with pytest.raises(TypeError, match="verify: expected the tensors of a batch by name, got list"):
        verify(model, ["a text"])
    assert verify(model, batch_of(model)).hidden_states < 1e-5


def test_a_sentence_transformer_as_its_users_load_it(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from matmuls.bert import ModelMissing, model_folder

    try:
        folder = str(model_folder())
    except ModelMissing as error:
        pytest.skip(str(error))
    stock = sentence_transformers.SentenceTransformer(folder, device="cpu")
    model = sentence_transformers.SentenceTransformer(
        folder, device="cpu", model_kwargs={"attn_implementation": "custom_mm"}
    )
    texts = ["How old are you?", "A cat sat on the mat."]
    assert (len(ours.in_use(stock)), len(ours.in_use(model))) == (0, 6)
    assert abs(stock.encode(texts) - model.encode(texts)).max() < 1e-5
    assert verify(model, texts).hidden_states < 1e-5
    assert len(optimize(model).layers) == 6
    assert verify(model, texts).hidden_states < 1e-4
