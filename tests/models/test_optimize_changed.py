"""`optimize` of models that are not as transformers made them, and what it says of models that it does not know."""

import contextlib
import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertSelfOutput  # noqa: E402

from common.model_cases import SMALL, batch_of, model_of  # noqa: E402
from common.optimize_cases import KNOWN, hidden  # noqa: E402
from matmuls import timing  # noqa: E402
from matmuls.bert import Encoder, ModelMissing, model_folder  # noqa: E402
from matmuls.integrations.transformers import VerificationError, optimize, verify  # noqa: E402
from matmuls.integrations.transformers import layers as module_under_test  # noqa: E402
from matmuls.integrations.transformers.families import FAMILIES, NAMES, _kind  # noqa: E402


def test_a_replaced_module_is_used():
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model)
    layer = model.encoder.layer[0]
    layer.intermediate.dense = torch.nn.Sequential(layer.intermediate.dense, torch.nn.ReLU())  # as adapters do
    assert verify(model, batch).hidden_states < 1e-5


def test_an_unknown_module_is_not_optimized():
    model = model_of("bert")
    first, second = model.encoder.layer
    first.attention.self.query = torch.nn.Sequential(first.attention.self.query)
    second.forward = second.forward
    with pytest.warns(UserWarning, match="no layer of BertModel was changed"):
        handle = optimize(model)
    assert handle.left["encoder.layer.0"] == "BertLayer (not all of its parts are nn.Linear and nn.LayerNorm)"
    assert handle.left["encoder.layer.1"] == "BertLayer (its forward has been replaced)"
    second.__dict__.pop("forward")


class Cut(BertOutput):
    def forward(self, *args):
        return super().forward(*args).relu()


class Halved(BertIntermediate):
    def forward(self, x):
        return super().forward(x) / 2


def replaced(layer, monkeypatch):
    layer.output.dropout = torch.nn.Tanh()


def of_a_class_of_yours(layer, monkeypatch):
    layer.output.__class__ = Cut  # as adapter libraries do


def of_another(layer, monkeypatch):
    layer.intermediate.__class__ = Halved


def of_all(layer, monkeypatch):
    right = BertSelfOutput.forward
    monkeypatch.setattr(BertSelfOutput, "forward", lambda *args: right(*args).relu())


@pytest.mark.parametrize("change", [replaced, of_a_class_of_yours, of_another, of_all], ids=lambda f: f.__name__)
def test_replaced_parts_of_a_layer_run(change, monkeypatch):
    """Replaced before `optimize`, and after it."""

    def large():
        model = model_of("bert")
        for m in model.encoder.modules():
            if isinstance(m, torch.nn.Linear):
                m.weight.data.mul_(10)
        return model

    model = large()
    batch = batch_of(model)
    stock = hidden(model, batch)
    change(model.encoder.layer[0], monkeypatch)
    expected = hidden(model, batch)
    assert (expected - stock).abs().max() > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = optimize(model)
    assert "encoder.layer.0" in handle.left
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)
    monkeypatch.undo()
    model = large()
    optimize(model)
    change(model.encoder.layer[0], monkeypatch)
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)


def test_a_copied_class_is_not_optimized(monkeypatch):
    model = model_of("bert")
    for kind in (type(model), type(model.encoder.layer[0])):
        monkeypatch.setattr(kind, "__module__", "bert")
    with pytest.warns(UserWarning, match=f"optimize: expected a model of one of {', '.join(NAMES)}, got BertModel"):
        optimize(model)


def test_norms_that_differ_from_the_known_ones():
    model = model_of("bert")
    model.encoder.layer[0].output.LayerNorm = torch.nn.LayerNorm(32, elementwise_affine=False)
    handle = optimize(model)
    assert handle.left["encoder.layer.0"] == "BertLayer (its norms have no weights)"
    assert verify(model, batch_of(model)).hidden_states < 1e-5
    model = model_of("bert", dtype=torch.bfloat16)
    handle = optimize(model)
    for layer in handle.layers.values():
        layer.output.LayerNorm.float()
    ours = hidden(model, batch_of(model))
    handle.undo()
    assert torch.equal(ours, hidden(model, batch_of(model)))


def test_a_model_optimized_in_inference_mode_can_be_trained():
    model = model_of("bert")
    with torch.inference_mode():
        handle = optimize(model)
    assert not any(p.is_inference() for p in model.parameters())
    with torch.inference_mode():
        handle.undo()
    assert not any(p.is_inference() for p in model.parameters())
    model.train()(**batch_of(model)).last_hidden_state.sum().backward()


def test_verify_restores_the_attention_of_each_submodel():
    bert = transformers.BertConfig(**SMALL)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    model = transformers.EncoderDecoderModel(config).eval()
    model.encoder.set_attn_implementation("eager")
    model.decoder.set_attn_implementation("sdpa")
    optimize(model)
    before = [m.config._attn_implementation for m in (model, model.encoder, model.decoder)]
    with contextlib.suppress(VerificationError, IndexError):
        verify(model, {"input_ids": torch.ones(1, 4, dtype=torch.long), "decoder_input_ids": torch.ones(1, 3).long()})
    assert [m.config._attn_implementation for m in (model, model.encoder, model.decoder)] == before


def test_an_unknown_model_is_unchanged_and_reported():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, bos_token_id=1, eos_token_id=1)
    model = transformers.GPT2Model(config).eval()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.warns(
        UserWarning, match="^optimize: expected a model of one of BERT, RoBERTa, .*, ViT, .*, got GPT2Model$"
    ):
        handle = optimize(model)
    assert handle.left["h.0.attn.c_attn"] == "GPT2Attention's Conv1D"
    assert not handle.layers
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before


def test_layers_left_under_a_head_are_named():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    handle = optimize(model)
    assert set(handle.layers) == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    assert handle.left["classifier"] == "BertForSequenceClassification's Linear"
    assert "2 layers optimized; left as they are: 3 x BertEmbeddings's Embedding, 1 x BertPooler's Linear" in str(
        handle
    )
    verify(model, batch_of(model))


def test_optimizing_twice_changes_nothing_more():
    model = model_of("bert")
    first = optimize(model)
    with pytest.warns(UserWarning, match="^optimize: BertModel is already optimized$"):
        second = optimize(model)
    assert not second.layers
    left = {name: why for name, why in second.left.items() if "Layer" in why}
    assert left == {f"encoder.layer.{i}": "BertLayer (already optimized)" for i in (0, 1)}
    assert "Attention" not in str(second)
    first.undo()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_verify_raises_with_figures(monkeypatch):
    model = model_of("bert")
    batch = batch_of(model)
    right = module_under_test.feed_forward_
    monkeypatch.setattr(module_under_test, "feed_forward_", lambda *a, **k: right(*a, **k).mul_(1.01))
    model.set_attn_implementation("sdpa")
    optimize(model)
    model.encoder.layer[0].output.train()
    with pytest.raises(VerificationError, match=r"a difference from stock of at most 0.0001, got .*hidden_states=0.0"):
        verify(model, batch)
    assert model.config._attn_implementation == "sdpa"
    assert model.encoder.layer[0].output.training
    assert "forward" in model.encoder.layer[0].__dict__
    monkeypatch.setattr(module_under_test, "feed_forward_", lambda *a, **k: right(*a, **k).mul_(float("nan")))
    with pytest.raises(VerificationError, match="nan"):
        verify(model, batch)


@pytest.mark.parametrize("probabilities", [False, True], ids=["", "probabilities"])
def test_peak_memory_is_half(probabilities, device):
    """Above the returned tensors, for a model whose largest tensor is that of the feed-forward network, as in BERT."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=60), add_pooling_layer=False)
    model = model.to(device).eval()
    ids = torch.randint(3, 60, (16, 64), device=device)
    peaks = []
    for attention in ("eager", "custom_mm"):
        model.set_attn_implementation(attention)
        if attention == "custom_mm":
            optimize(model, chunk_bytes=1 << 16)
        kept = []

        def run(kept=kept):
            kept[:] = [model(input_ids=ids, output_attentions=probabilities)]

        with torch.inference_mode():
            run()
            kept.clear()
            peaks.append(timing.peak_memory(run, device) - sum(x.nbytes for x in kept[0].attentions or ()))
    assert peaks[1] <= 0.5 * peaks[0]


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_peak_is_five_hidden_states(name, device):
    """For BERT: hidden states, q, k and v, and the context; sdpa's peak is eleven. The embeddings are the hidden
    states.
    """
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1, "intermediate_size": 256}
        model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=60), add_pooling_layer=False)
    else:
        config = transformers.DistilBertConfig(dim=64, n_layers=3, n_heads=1, hidden_dim=256, vocab_size=60)
        model = transformers.DistilBertModel(config)
    model = model.to(device).eval()
    model.set_attn_implementation("custom_mm")
    ids = torch.randint(3, 60, (16, 64), device=device)
    states = 16 * 64 * 64 * 4
    optimize(model, chunk_bytes=3 * states)

    def run():
        kept[:] = [model(input_ids=ids)]

    kept: list = []
    with torch.inference_mode():
        run()
        kept.clear()
        assert timing.peak_memory(run, device) <= 5.3 * states


def test_compiled_models_use_stock_code():
    model = model_of("bert")
    batch = batch_of(model, padded=True)
    model.set_attn_implementation("custom_mm")
    optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden(compiled, batch)[kept], hidden(model, batch)[kept], atol=1e-5, rtol=1e-5)


def test_real_weights():
    try:
        encoder = Encoder.load(model_folder(), "cpu", torch.float32)
    except ModelMissing as error:
        pytest.skip(str(error))
    batch = encoder.batch(["A cat sat on the mat.", "word " * 30, "x"])
    stock = encoder.embed(batch, "eager")
    optimize(encoder.model)
    for probabilities in (False, True):
        assert (encoder.embed(batch, "custom_mm", probabilities) - stock).abs().max() < 1e-4
    assert verify(encoder.model, batch).attentions < 1e-5


def test_the_classes_of_families_exist():
    """The layer class and the attention function of each family exist in the installed transformers."""
    for name in FAMILIES:
        folder, layer = name.split(".")
        module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[layer])
        assert hasattr(module, layer)
        assert name == "mpnet.MPNetLayer" or callable(module.eager_attention_forward)
    tested = {_kind(m) for name in KNOWN for m in model_of(name).modules()}
    assert set(FAMILIES) <= tested | {"camembert.CamembertLayer", "xlm_roberta.XLMRobertaLayer"}


# ----------------------------------------------------------------------------- what is not as transformers made it


def drop_half_the_heads(model, name):
    """Keep two of four heads of size 8 in every layer, by narrower linears, as transformers' head pruning did."""
    for layer in model.modules():
        if _kind(layer) not in FAMILIES:
            continue
        family = FAMILIES[_kind(layer)]
        attention = layer.get_submodule(family.attention)
        for part in family.qkv:
            old = attention.get_submodule(part)
            attention.set_submodule(part, torch.nn.Linear(old.in_features, old.out_features // 2))
        old = layer.get_submodule(family.projection)
        layer.set_submodule(family.projection, torch.nn.Linear(old.in_features // 2, old.out_features))
    return model.eval()


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit"])
def test_layers_with_fewer_heads_than_in_the_configuration(name):
    model = drop_half_the_heads(model_of(name), name)
    handle = optimize(model)
    assert len(handle.layers) == 2
    assert verify(model, batch_of(model)).hidden_states < 1e-5


def test_replicas_have_their_own_weights():
    """Replicas as torch.nn.parallel.replicate makes them."""
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model)
    modules = list(model.modules())
    copies = {m: m._replicate_for_data_parallel() for m in modules}
    for m, replica in copies.items():
        for name, child in m._modules.items():
            setattr(replica, name, None if child is None else copies[child])
        for name, p in m._parameters.items():
            setattr(replica, name, None if p is None else 2 * p.detach())
    twice = copy.deepcopy(model_of("bert"))
    with torch.no_grad():
        for p in twice.parameters():
            p.mul_(2)
    torch.testing.assert_close(hidden(copies[model], batch), hidden(twice, batch))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["feed_forward_chunk", "eager_attention_forward"])
def test_replaced_functions_of_transformers_run(what, when, monkeypatch):
    from transformers.models.bert import modeling_bert

    model = model_of("bert")
    model.set_attn_implementation("eager")
    batch = batch_of(model)
    stock, seen = hidden(model, batch), []
    owner = modeling_bert.BertLayer if what == "feed_forward_chunk" else modeling_bert
    real = getattr(owner, what)

    def attention(*args, **kwargs):
        context, weights = real(*args, **kwargs)
        seen.append((context, context.clone()))
        return context, weights

    def chunk(self, attention_output):
        y = real(self, attention_output)
        seen.append((y, y.clone()))
        return y

    theirs = chunk if what == "feed_forward_chunk" else attention

    if when == "after":
        optimize(model)
    monkeypatch.setattr(owner, what, theirs)
    if when == "before":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimize(model)
    torch.testing.assert_close(hidden(model, batch), stock)
    assert len(seen) == 2
    assert all(torch.equal(x, kept) for x, kept in seen)


def test_weights_replaced_by_tensor_subclasses():
    """As torchao's quantized weights, which have their own products."""

    class Scaled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            if f is torch.nn.functional.linear:
                return f(args[0], args[1].as_subclass(torch.Tensor) * 0.01, args[2])
            return super().__torch_function__(f, types, args, kwargs or {})

    found = []
    for optimized in (False, True):
        model = model_of("bert")
        if optimized:
            optimize(model)
        for m in model.encoder.modules():
            if isinstance(m, torch.nn.Linear):
                scaled = (m.weight.detach() / 0.01).as_subclass(Scaled)
                m.weight = torch.nn.Parameter(scaled, requires_grad=False)
        found.append(hidden(model, batch_of(model)))
    torch.testing.assert_close(found[1], found[0])


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = model_of("bert")
        stock = hidden(model, batch_of(model))
        optimize(model)
        torch.testing.assert_close(hidden(model, batch_of(model)), stock)
    torch.testing.assert_close(hidden(model, batch_of(model)), stock)


@pytest.mark.parametrize("shared", ["storage", "with processes"])
def test_weights_that_share_memory_stay_shared(shared):
    model = model_of("bert")
    attention = model.encoder.layer[0].attention.self
    if shared == "storage":
        attention.key.weight.data = attention.query.weight.data
    else:
        model.share_memory()
    stock = hidden(model, batch_of(model))
    before = [p.data_ptr() for p in attention.parameters()]
    handle = optimize(model)
    torch.testing.assert_close(hidden(model, batch_of(model)), stock)
    assert [p.data_ptr() for n, p in attention.named_parameters() if "bias" not in n] == before[::2]
    handle.undo()


def test_a_hook_in_a_separately_compiled_layer_may_keep_its_output():
    model = model_of("bert")
    optimize(model)
    batch, kept = batch_of(model), []
    stock = model(**batch, output_hidden_states=True).hidden_states[1].detach()
    model.encoder.layer[0].output.register_forward_hook(lambda *args: kept.append(args[-1]))
    model.encoder.layer[0].compile(backend="eager")
    hidden(model, batch)
    torch.testing.assert_close(kept[0], stock)


def test_verify_of_a_module_that_contains_a_model():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = model_of("bert")

        def forward(self, **batch):
            return self.bert(**batch)

    model = Around().eval()
    handle = optimize(model)
    assert verify(model, batch_of(model.bert)).hidden_states < 1e-5
    assert all("forward" in vars(layer) for layer in handle.layers.values())
    handle.undo()
    assert not handle.layers


@pytest.mark.parametrize("owner", ["BertLayer", "BertEncoder"])
def test_a_forward_replaced_on_a_class(owner, monkeypatch):
    from transformers.models.bert import modeling_bert

    model = model_of("bert")
    batch = batch_of(model)
    stock, seen = hidden(model, batch), []
    optimize(model)
    kind = getattr(modeling_bert, owner)
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **k: (seen.append(a), real(self, *a, **k))[1])
    torch.testing.assert_close(hidden(model, batch), stock)
    assert len(seen) == {"BertLayer": 2, "BertEncoder": 1}[owner]


def test_tensors_that_a_custom_attention_keeps_are_not_overwritten(monkeypatch):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kept = []

    def keeping(*args, **kwargs):
        result = sdpa_attention_forward(*args, **kwargs)
        kept.append((result[0], result[0].clone()))
        return result

    AttentionInterface.register("keeping", keeping)
    model = model_of("bert")
    model.set_attn_implementation("keeping")
    optimize(model)
    hidden(model, batch_of(model))
    assert len(kept) == 2
    assert all(torch.equal(x, y) for x, y in kept)


def test_layers_without_plain_weights_are_not_optimized():
    model = model_of("bert")
    layer = model.encoder.layer[1]
    del layer.intermediate.intermediate_act_fn
    layer.intermediate.intermediate_act_fn = torch.nn.functional.silu
    first = model.encoder.layer[0].attention.self.query
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first.weight = torch.nn.Parameter(first.weight.detach().to_sparse_csr(), requires_grad=False)
        handle = optimize(model)
    assert not handle.layers
    assert "not plain tensors" in str(handle)
    assert all("forward" not in m.__dict__ for m in model.modules())
