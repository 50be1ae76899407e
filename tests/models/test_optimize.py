"""`optimize` of encoders for inference: equal results, less memory, and an undo that restores every bit."""

import copy
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import IMAGES, SMALL, WHISPER, batch_of, model_of  # noqa: E402
from common.optimize_cases import KNOWN, hidden  # noqa: E402
from matmuls.integrations.transformers import layers as module_under_test  # noqa: E402
from matmuls.integrations.transformers import optimize, register, verify  # noqa: E402

register()
ATTENTIONS = ("custom_mm", "sdpa", "eager")
ALL = {"output_hidden_states": True, "output_attentions": True}


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 48 * 4, 1 << 20])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", KNOWN)
def test_agrees_with_stock(name, padded, attention, chunk_bytes, device):
    model = model_of(name, device)
    batch = batch_of(model, padded)
    model.set_attn_implementation(attention)
    handle = optimize(model, chunk_bytes=chunk_bytes)
    assert len(handle.layers) == (1 if name == "albert" else 2)  # ALBERT runs one layer twice
    found = verify(model, batch)
    assert found.hidden_states < 1e-5
    if attention == "sdpa" and name != "mpnet":  # which ignores the setting
        assert found.attentions is None  # optimized layers return none
    else:
        assert found.attentions < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_dtypes(name, dtype, device):
    model = model_of(name, device, dtype)
    model.set_attn_implementation("custom_mm")
    optimize(model)
    rough = dtype == torch.float64 and name != "bert"  # eager attention of some takes the softmax in float32
    # stock eager attention in float64 makes NaN of a query whose window is all padding
    padded = dtype != torch.float64 or name != "gemma3"
    verify(model, batch_of(model, padded), tolerance=1e-6 if rough else None)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": act} for act in ("relu", "gelu_new", "gelu_python", "silu")], ids=str
)
def test_activations(changes):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL, **changes)).eval()
    optimize(model)
    assert verify(model, batch_of(model)).hidden_states < 1e-5


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_both_towers(family):
    torch.manual_seed(0)
    of = {"text_config": SMALL, "vision_config": IMAGES}
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**of)).eval()
    batch = batch_of(model.text_model, padded=True) | batch_of(model.vision_model)
    with torch.no_grad():
        stock = model(**batch)
        assert len(optimize(model).layers) == 4
        ours = model(**batch)
    for name in ("logits_per_text", "text_embeds", "image_embeds"):
        torch.testing.assert_close(ours[name], stock[name], atol=1e-5, rtol=1e-5)


def test_transcriptions_are_equal():
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER, pad_token_id=0)).eval()
    wanted = {
        "max_new_tokens": 8,
        "do_sample": False,
        "decoder_input_ids": torch.ones(3, 1).long(),
        "eos_token_id": None,
    }
    batch = batch_of(model)
    stock = model.generate(**batch, **wanted)
    assert len(optimize(model).layers) == 2  # of the encoder
    assert torch.equal(model.generate(**batch, **wanted), stock)


def test_layers_run_as_planned(monkeypatch):
    """Otherwise the tests above would compare stock with stock."""
    calls = []
    for name in ("linear_", "layer_norm_", "feed_forward_"):
        right = getattr(module_under_test, name)
        monkeypatch.setattr(module_under_test, name, lambda *a, r=right, n=name, **k: (calls.append(n), r(*a, **k))[1])
    right = module_under_test._product
    monkeypatch.setattr(module_under_test, "_product", lambda *a: (calls.append("_product"), right(*a))[1])
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model)
    hidden(model, batch)
    assert calls == ["_product", "linear_", "layer_norm_", "feed_forward_"] * 2
    calls.clear()
    batch["attention_mask"][0, 5:] = 0
    hidden(model, batch)  # packed tokens, too few for oneDNN: see test_products_of_packed_texts_by_onednn
    assert calls == ["_product", "linear_", "layer_norm_", "feed_forward_"] * 2


@pytest.mark.parametrize("name", KNOWN)
def test_undo_restores_bit_for_bit(name):
    model = model_of(name)
    batch = batch_of(model)
    before, objects = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    stock, modules = hidden(model, batch), dict(model.named_modules())
    forwards = {name: m.forward for name, m in modules.items()}
    handle = optimize(model)
    assert all(p is objects[name] for name, p in model.named_parameters())
    handle.undo()
    assert dict(model.named_modules()) == modules
    assert {name: m.forward for name, m in modules.items()} == forwards
    assert all(p is objects[name] for name, p in model.named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert len({p.untyped_storage().data_ptr() for p in objects.values()}) == len(objects)
    assert torch.equal(hidden(model, batch), stock)
    assert handle.layers == {}
    handle.undo()  # a second undo does nothing


def test_weights_take_no_more_memory():
    model = model_of("bert")

    def nbytes():
        return sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}.values())

    before = nbytes()
    handle = optimize(model)
    assert nbytes() == before
    handle.undo()
    assert nbytes() == before


def test_weights_may_change_and_move_and_be_saved(tmp_path):
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert verify(model, batch).hidden_states < 1e-5
    model.double().float()  # q, k and v no longer share memory
    assert verify(model, batch).hidden_states < 1e-5
    model.encoder.layer[0].attention.self.key.weight.data.mul_(2)
    assert verify(model, batch).hidden_states < 1e-5
    model.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    other = copy.deepcopy(model)
    other.encoder.layer[0].output.dense.weight.data.zero_()
    assert verify(other, batch).hidden_states < 1e-5
    assert (hidden(other, batch) - hidden(model, batch)).abs().max() > 1e-3


def test_gradients_and_training_use_stock_code():
    model = model_of("bert")
    batch, found, dropped = batch_of(model), [], []
    for optimized in (False, True):
        if optimized:
            optimize(model)
        model.zero_grad()
        model(**batch).last_hidden_state.square().sum().backward()
        model.train()
        torch.manual_seed(3)
        found.append([*(p.grad.clone() for p in model.parameters() if p.grad is not None), hidden(model, batch)])
        model.eval()
        model.encoder.layer[1].output.dropout.train()  # Monte Carlo dropout, in this layer only
        torch.manual_seed(3)
        dropped.append(hidden(model, batch))
        model.eval()
    assert all(map(torch.equal, *found))
    torch.testing.assert_close(*dropped, atol=1e-5, rtol=1e-5)
    assert (dropped[0] - hidden(model, batch)).abs().max() > 1e-2


def test_autocast_uses_stock_code():
    model = model_of("bert")
    batch = batch_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        before = hidden(model, batch)
        optimize(model)
        assert torch.equal(hidden(model, batch), before)


def test_cross_attention_and_caches_use_stock_code():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    model = transformers.BertLMHeadModel(config).eval()
    batch = batch_of(model)
    others = {"encoder_hidden_states": torch.randn(3, 5, 32), "encoder_attention_mask": torch.ones(3, 5)}
    runs = [lambda: model(**batch, **others).logits, lambda: model(**batch).logits]
    runs.append(lambda: model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0).float())
    with torch.no_grad():
        before = [run() for run in runs]
        assert len(optimize(model).layers) == 2
        torch.testing.assert_close([run() for run in runs], before, atol=1e-5, rtol=1e-5)


def test_global_hooks_and_replaced_forwards_run():
    model = model_of("bert")
    batch, seen = batch_of(model), []
    dense = model.encoder.layer[0].intermediate.dense
    expected = hidden(model, batch)
    optimize(model)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(module) if module is dense else None
    )
    hidden(model, batch)
    hook.remove()
    assert seen == [dense]
    dense.forward = lambda x: 0 * torch.nn.functional.linear(x, dense.weight)
    assert not torch.allclose(hidden(model, batch), expected)
    del dense.forward
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)


def test_a_replaced_attention_forward_runs():
    model = model_of("bert")
    batch = batch_of(model)
    expected = hidden(model, batch)
    optimize(model)
    own, seen = model.encoder.layer[0].attention, []
    stock = type(own).forward

    def forward(*args, **kwargs):
        seen.append(own)
        return stock(own, *args, **kwargs)

    own.forward = forward
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)
    assert seen == [own]


def test_undo_keeps_a_replaced_forward():
    model = model_of("bert")
    handle, stock = optimize(model), type(model).forward
    model.forward = mine = lambda *args, **kwargs: stock(model, *args, **kwargs)
    handle.undo()
    assert model.forward is mine


def test_undo_of_a_layer_whose_forward_was_wrapped():
    model = model_of("bert")
    handle, layer = optimize(model), model.encoder.layer[1]
    ours = layer.forward
    layer.forward = lambda *args, **kwargs: ours(*args, **kwargs)  # as a profiler does
    handle.undo()
    assert list(handle.layers) == ["encoder.layer.1"]
    layer.forward = ours
    handle.undo()
    assert not handle.layers
    assert not any("forward" in vars(m) for m in model.modules())


def test_meta_tensors_have_shapes():
    model = model_of("bert")
    optimize(model)
    ids = batch_of(model)["input_ids"].to("meta")
    assert hidden(model.to("meta"), {"input_ids": ids}).shape == (*ids.shape, model.config.hidden_size)


@pytest.mark.parametrize("where", ["attention.self", "attention", "attention.output", "output", "intermediate.dense"])
def test_hooks_inside_a_layer_get_their_usual_inputs(where):
    model = model_of("bert")
    batch, seen = batch_of(model), []
    hook = (
        model.encoder.layer[0]
        .get_submodule(where)
        .register_forward_hook(
            lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
    )
    hidden(model, batch)
    optimize(model)
    hidden(model, batch)
    torch.testing.assert_close(seen[0], seen[1])
    hook.remove()
    hidden(model, batch)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet", "modernbert", "vit", "dinov2", "whisper"])
def test_the_input_of_a_layer_is_not_overwritten(name):
    """It may be one of the hidden states that are returned."""
    model, inputs = model_of(name), []
    batch = batch_of(model)
    handle = optimize(model)
    for layer in handle.layers.values():
        layer.register_forward_pre_hook(lambda module, args: inputs.append((args[0], args[0].clone())))
    hidden(model, batch)
    assert len(inputs) == 2
    assert all(torch.equal(x, y) for x, y in inputs)


WAYS_TO_SEE = {  # kinds of hooks, and how each gets a layer's input or output
    "embeddings": (lambda model: model.embeddings, lambda args, output: output),
    "their norm": (lambda model: model.embeddings.LayerNorm, lambda args, output: output),
    "the encoder's input": (lambda model: getattr(model, "encoder", None) or model.transformer, None),
    "a layer": (lambda model: next(iter(layers_of(model))), lambda args, output: output),
    "inside a layer": (lambda model: list(next(iter(layers_of(model))).modules())[-1], lambda args, output: output),
}


def layers_of(model):
    return [m for m in model.modules() if type(m).__name__ in ("BertLayer", "TransformerBlock", "ElectraLayer")]


@pytest.mark.parametrize("name", ["bert", "distilbert", "electra"])
@pytest.mark.parametrize("way", WAYS_TO_SEE)
def test_tensors_that_hooks_get_are_not_overwritten(name, way):
    model, seen = model_of(name), []
    optimize(model)
    where, of = WAYS_TO_SEE[way]

    def keep(x):
        x = x[0] if isinstance(x, tuple) else x
        seen.append((x, x.clone()))

    if of is None:
        hook = where(model).register_forward_pre_hook(
            lambda module, args, kwargs: keep(args or kwargs["hidden_states"]), with_kwargs=True
        )
    else:
        hook = where(model).register_forward_hook(lambda module, args, output: keep(of(args, output)))
    hidden(model, batch_of(model))
    assert seen
    assert all(torch.equal(x, y) for x, y in seen)
    hook.remove()


def test_tensors_that_global_hooks_get_are_not_overwritten():
    model, seen = model_of("bert"), []
    optimize(model)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append((output, output.clone())) if torch.is_tensor(output) else None
    )
    hidden(model, batch_of(model))
    hook.remove()
    assert len(seen) > 2
    assert all(torch.equal(x, y) for x, y in seen)


def test_tensors_that_a_replaced_module_keeps_are_not_overwritten():
    class Keeping(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.kept = inner, None

        def forward(self, **kwargs):
            if self.kept is None:
                self.kept = self.inner(**kwargs)
            return self.kept

    for before in (True, False):
        model = model_of("bert")
        batch = batch_of(model)
        if not before:
            optimize(model)
        model.embeddings = Keeping(model.embeddings)
        if before:
            optimize(model)
        first = hidden(model, batch)
        kept = model.embeddings.kept.clone()
        assert torch.equal(hidden(model, batch), first)
        assert torch.equal(model.embeddings.kept, kept)


def test_the_input_of_a_submodule_is_not_overwritten():
    model = model_of("bert")
    optimize(model)
    x = torch.randn(2, 5, 32)
    before = x.clone()
    with torch.no_grad():
        model.encoder(x)
        model.encoder.layer[0](x)
        model(inputs_embeds=x)
    assert torch.equal(x, before)


def test_a_copy_and_a_signature():
    model = model_of("bert")
    batch = batch_of(model)
    stock, signature = hidden(model, batch), inspect.signature(model.forward)
    handle = optimize(model)
    assert inspect.signature(model.forward) == signature
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.zero_()
    torch.testing.assert_close(hidden(other, batch), stock, atol=1e-5, rtol=1e-5)
    assert inspect.signature(other.forward) == signature
    handle.undo()
    assert "forward" not in vars(model)


def test_a_layer_with_a_module_that_is_none_is_left():
    model = model_of("bert")
    model.encoder.layer[0].attention.register_module("adapter", None)
    handle = optimize(model)
    assert handle.left["encoder.layer.0"] == "BertLayer (its adapter is None)"
    assert list(handle.layers) == ["encoder.layer.1"]
    assert verify(model, batch_of(model)).hidden_states < 1e-5
