"""`optimize(model, int8=True)`: products of layers in int8 on a CPU."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import batch_of, model_of  # noqa: E402
from common.optimize_cases import IMAGES, TEXTS, hidden  # noqa: E402
from matmuls.integrations.transformers import encode_tokens, optimize, quantized, verify  # noqa: E402

vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs a CPU with VNNI instructions")


@vnni
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 8), (0, 8), (2, 33, 40)])
@pytest.mark.parametrize("biases", [(True,), (False,), (True, False, True)])
def test_products_are_those_of_the_rounded_numbers(shape, biases):
    torch.manual_seed(0)
    linears = tuple(torch.nn.Linear(shape[-1], 16, bias) for bias in biases)
    x = torch.randn(shape)
    rounded = []
    for t in (x, *(m.weight.detach() for m in linears)):
        step = t.double().abs().amax(-1, keepdim=True) / 127
        rounded.append((t.double() / step).round() * step)
    added = [0 if m.bias is None else m.bias.detach().double() for m in linears]
    right = torch.cat([rounded[0] @ w.mT + b for w, b in zip(rounded[1:], added, strict=True)], -1)
    with torch.no_grad():
        found = quantized.Int8()(x, linears)
    assert found.shape == right.shape
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


@vnni
def test_zeros_and_what_is_not_finite():
    linears = (torch.nn.Linear(8, 16),)
    x = torch.randn(4, 8)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    with torch.no_grad():
        found = quantized.Int8()(x, linears)
        torch.testing.assert_close(found[0], linears[0].bias)
        assert found[1:3].isnan().all()  # not numbers that look right
        assert found[3].isfinite().all()
        linears[0].weight.zero_()
        torch.testing.assert_close(quantized.Int8()(x[3:], linears)[0], linears[0].bias)


@vnni
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", [*TEXTS, *IMAGES, "whisper"])
def test_families(name, padded, monkeypatch):
    products, right = [], quantized.Int8.__call__
    monkeypatch.setattr(quantized.Int8, "__call__", lambda *args: (products.append(args[2]), right(*args))[1])
    model = model_of(name)
    batch = batch_of(model, padded)
    seen = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    stock = hidden(model, batch)[seen]
    handle = optimize(model, int8=True)
    ours = hidden(model, batch)[seen]
    assert len(products) == 8  # of two layers: q, k and v; the projection; up; down
    assert 1e-5 < (ours - stock).norm() / stock.norm() < 2e-2
    if "input_ids" in batch:
        lengths = batch["attention_mask"].sum(1)
        packed = encode_tokens(model, batch["input_ids"][batch["attention_mask"].bool()], lengths)
        assert (packed - stock).norm() / stock.norm() < 2e-2
    products.clear()
    handle.undo()
    assert torch.equal(hidden(model, batch)[seen], stock)
    assert not products
    optimize(model)
    hidden(model, batch)
    assert not products  # never by default


@vnni
def test_parts_of_a_batch():
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model, int8=True)
    whole = hidden(model, batch)
    other = model_of("bert")
    optimize(other, int8=True, chunk_bytes=1)
    torch.testing.assert_close(hidden(other, batch), whole, atol=2e-2, rtol=2e-2)


@vnni
def test_a_parameter_at_the_address_of_one_that_is_gone():
    linear, x, product = torch.nn.Linear(256, 256, bias=False), torch.randn(4, 256), quantized.Int8()
    with torch.no_grad():
        for _ in range(20):
            product(x, (linear,))
            del linear.weight
            linear.weight = torch.nn.Parameter(torch.randn(256, 256) * 0.03)
            torch.testing.assert_close(product(x, (linear,)), quantized.Int8()(x, (linear,)), atol=0, rtol=0)


@vnni
def test_changed_weights_are_quantized_again():
    model, other = model_of("bert"), model_of("bert")
    batch = batch_of(model)
    optimize(model, int8=True)
    before = hidden(model, batch)
    with torch.no_grad():
        for changed in (model, other):
            changed.encoder.layer[0].output.dense.weight.mul_(2)
            changed.encoder.layer[1].attention.self.key.bias.add_(1)
    optimize(other, int8=True)
    assert torch.equal(hidden(model, batch), hidden(other, batch))
    assert not torch.equal(hidden(model, batch), before)


@vnni
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied):
    model = model_of("bert")
    batch = batch_of(model)
    optimize(model, int8=True)
    wanted = hidden(model, batch)
    other = copied(model)
    assert torch.equal(hidden(other, batch), wanted)
    plan = other.encoder.layer[0].forward.args[1]
    assert plan.int8 is not model.encoder.layer[0].forward.args[1].int8


@vnni
def test_training_and_other_dtypes_are_not_rounded():
    model = model_of("bert")
    batch = batch_of(model)
    stock = model(**batch).last_hidden_state
    optimize(model, int8=True)
    assert torch.equal(model(**batch).last_hidden_state, stock)  # records gradients
    assert verify(model.double(), batch).hidden_states < 1e-10


def test_what_cannot_be_rounded_is_refused(monkeypatch):
    model = model_of("bert", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^optimize: expected a model in float32 on a CPU for int8$"):
        optimize(model, int8=True)
    assert "forward" not in vars(model)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = model_of("bert")
    with pytest.raises(ValueError, match=r"^optimize: expected a CPU with VNNI instructions for int8$"):
        optimize(model, int8=True)
    assert "forward" not in vars(model.encoder.layer[0])
