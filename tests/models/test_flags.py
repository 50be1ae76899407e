"""What an optimized model returns: the same outputs as stock for every flag, given or configured, and every mask."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import SMALL, model_of  # noqa: E402
from common.optimize_cases import TEXTS  # noqa: E402
from matmuls.integrations.transformers import optimize, register  # noqa: E402

register()
NAMES = "output_attentions", "output_hidden_states"
GIVEN = {  # of the call, and of the configuration
    "hidden states": ({"output_hidden_states": True}, {}),
    "attentions": ({"output_attentions": True}, {}),
    "configured": ({}, dict.fromkeys(NAMES, True)),
    "configured, and None given": (dict.fromkeys(NAMES), dict.fromkeys(NAMES, True)),
    "configured, and False given": (dict.fromkeys(NAMES, False), dict.fromkeys(NAMES, True)),
    "a tuple": ({"return_dict": False}, {}),
    "a tuple configured": ({}, {"return_dict": False}),
    "a tuple configured, and None given": ({"return_dict": None}, {"return_dict": False}),
    "no tuple": ({"return_dict": True}, {"return_dict": False}),
    "a tuple with all": ({"return_dict": False} | dict.fromkeys(NAMES, True), {}),
}
HEADS = {
    "MPNet": ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    "Bert": ("MaskedLM", "SequenceClassification", "QuestionAnswering"),
    "DistilBert": ("MaskedLM", "SequenceClassification"),
}


def batch():
    torch.manual_seed(1)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, 5:] = 0
    mask[1, 8:] = 0
    return {"input_ids": torch.randint(3, 60, (3, 9)), "attention_mask": mask}


def assert_same(ours, stock, seen, where=""):
    """The same names, tuples and shapes, and the same numbers where tokens are not hidden."""
    assert type(ours) is type(stock), where
    if isinstance(stock, tuple) or hasattr(stock, "to_tuple"):
        if hasattr(stock, "keys"):
            assert list(ours.keys()) == list(stock.keys()), where
            ours, stock = (tuple(x.values()) for x in (ours, stock))
        assert len(ours) == len(stock), where
        for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert_same(a, b, seen, f"{where}[{i}]")
    elif stock is not None:
        assert ours.shape == stock.shape, where
        if ours.dim() == 4:  # probabilities [B, H, Q, K]
            ours, stock = (x.transpose(1, 2) for x in (ours, stock))
        if ours.shape[:2] == seen.shape:
            ours, stock = ours[seen], stock[seen]
        torch.testing.assert_close(ours, stock, atol=2e-5, rtol=2e-5, msg=lambda text: f"{where}: {text}")


def compare(model, given, configured, inputs, rows=...):
    """rows: the texts of the inputs, as the model sees them."""
    model.set_attn_implementation("eager")  # the configuration takes output_attentions with no other
    for name, flag in configured.items():
        setattr(model.config, name, flag)
    model.set_attn_implementation("custom_mm")  # gives probabilities where they are asked for
    other = copy.deepcopy(model)
    optimize(other)
    with torch.no_grad():
        stock, ours = (m(**inputs, **given) for m in (model, other))
    assert_same(ours, stock, inputs["attention_mask"][rows].bool())


@pytest.mark.parametrize("flags", GIVEN)
@pytest.mark.parametrize("name", TEXTS)
def test_models_return_what_stock_returns(name, flags):
    compare(model_of(name), *GIVEN[flags], batch())


@pytest.mark.parametrize("flags", GIVEN)
@pytest.mark.parametrize("kind", [f"{family}For{head}" for family, heads in HEADS.items() for head in heads])
def test_heads_return_what_stock_returns(kind, flags):
    torch.manual_seed(0)
    family = kind.partition("For")[0]
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**SMALL, pad_token_id=1)).eval()
    choices = kind.endswith("MultipleChoice")
    inputs = {name: x[:, None] if choices else x for name, x in batch().items()}
    compare(model, *GIVEN[flags], inputs, (slice(None), 0) if choices else ...)


@pytest.mark.parametrize("flags", ["a tuple", "a tuple configured"])
@pytest.mark.parametrize("family", ["MPNet", "Bert"])
def test_tuples_without_a_pooler(family, flags):
    config = getattr(transformers, f"{family}Config")(**SMALL, pad_token_id=1)
    model = getattr(transformers, f"{family}Model")(config, add_pooling_layer=False).eval()
    compare(model, *GIVEN[flags], batch())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "custom_mm"])
@pytest.mark.parametrize("name", [name for name in TEXTS if not name.startswith(("qwen3", "gemma3"))])
def test_masks_of_four_dimensions_are_read_as_stock_reads_them(name, attention, dtype):
    torch.manual_seed(2)
    model = model_of(name)
    for m in model.modules():
        if isinstance(m, torch.nn.Linear):
            m.weight.data.mul_(5)  # so that attention is not nearly equal for all keys
    mask = torch.rand(3, 1, 9, 9) < 0.6
    mask[..., 0] = True
    mask = torch.zeros(mask.shape).masked_fill(~mask, -100.0) if dtype.is_floating_point else mask.to(dtype)
    if name != "mpnet" or attention != "eager":
        model.set_attn_implementation(attention)
    given = {"input_ids": batch()["input_ids"], "attention_mask": mask}
    other = copy.deepcopy(model)
    optimize(other)
    with torch.no_grad():
        try:
            stock = model(**given).last_hidden_state
        except (RuntimeError, TypeError) as error:  # sdpa takes no integers, nor does eager of some families
            with pytest.raises(type(error)):
                other(**given)
            return
        torch.testing.assert_close(other(**given).last_hidden_state, stock, atol=1e-4, rtol=1e-4)
