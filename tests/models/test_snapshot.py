"""What a captured pass depends on: a snapshot of the model, and the switches by which kernels are chosen."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from common.model_cases import model_of  # noqa: E402
from common.switch_cases import SWITCHES  # noqa: E402
from custom_mm import _C  # noqa: E402
from matmuls.integrations.transformers import graphs, optimize  # noqa: E402
from matmuls.integrations.transformers.snapshot import Snapshot  # noqa: E402

CHANGES = {
    "a layer appended": lambda m: m.encoder.layer.append(copy.deepcopy(m.encoder.layer[0])),
    "another layer": lambda m: m.encoder.layer.__setitem__(1, copy.deepcopy(m.encoder.layer[0])),
    "a setting of the model": lambda m: setattr(m.config, "num_hidden_layers", 1),
    "causal": lambda m: setattr(m.encoder.layer[0].attention.self, "is_causal", True),
    "a scale": lambda m: setattr(m.encoder.layer[0].attention.self, "scaling", 3.0),
    "a norm's eps": lambda m: setattr(m.encoder.layer[0].output.LayerNorm, "eps", 1.0),
    "training": lambda m: m.encoder.layer[1].train(),
    "a hook": lambda m: m.pooler.register_forward_hook(lambda *args: None),
    "a weight elsewhere": lambda m: setattr(m.pooler.dense.weight, "data", m.pooler.dense.weight.data.clone()),
    "a transposed weight": lambda m: setattr(m.pooler.dense.weight, "data", m.pooler.dense.weight.data.t()),
    "a weight of another shape": lambda m: setattr(
        m.pooler.dense.weight, "data", m.pooler.dense.weight.data.view(16, 64)
    ),
    "a part of a bias": lambda m: setattr(m.pooler.dense.bias, "data", m.pooler.dense.bias.data[:5]),
    "another config": lambda m: setattr(
        m, "config", type(m.config)(**m.config.to_dict() | {"output_hidden_states": True})
    ),
    "no bias": lambda m: setattr(m.pooler.dense, "bias", None),
    "a forward of one module": lambda m: setattr(m.pooler, "forward", lambda states: states[:, 1]),
    "compiled": lambda m: m.pooler.compile(backend="eager"),
    "fewer positions": lambda m: setattr(m.embeddings.position_embeddings, "num_embeddings", 7),
    "an attention of that name": lambda m: ALL_ATTENTION_FUNCTIONS.__setitem__("sdpa", lambda *args: None),
    "another attention": lambda m: m.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_snapshot_notices(change, monkeypatch):
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", ALL_ATTENTION_FUNCTIONS._local_mapping.copy())
    model = model_of("bert")
    optimize(model)
    snapshot = Snapshot(model)
    for p in model.parameters():
        p.data.mul_(2)
    assert snapshot.holds()
    change(model)
    assert not snapshot.holds()


@pytest.mark.parametrize("change", ["a transposed weight", "a weight of another shape"])
def test_a_weight_of_another_form_is_not_in_place(change):
    model = model_of("bert")
    snapshot = Snapshot(model)
    assert snapshot.is_in_place()
    CHANGES[change](model)
    assert not snapshot.is_in_place()


def test_a_snapshot_notices_a_scale_of_rotated_positions():
    model = model_of("nomic")
    snapshot = Snapshot(model)
    model.rotary_emb.attention_scaling *= 2
    assert not snapshot.holds()


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_captured_pass_is_for_its_switches(switch):
    before = graphs._with_switches("size")
    back = SWITCHES[switch]()
    try:
        assert graphs._with_switches("size") != before
    finally:
        back()
    assert graphs._with_switches("size") == before


def test_a_snapshot_notices_another_hook_and_another_method(monkeypatch):
    model = model_of("bert")
    hook = model.pooler.register_forward_hook(lambda *args: None)
    snapshot = Snapshot(model)
    assert snapshot.holds()
    hook.remove()
    model.pooler.register_forward_hook(lambda *args: None)
    assert not snapshot.holds()
    snapshot = Snapshot(model)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    assert not snapshot.holds()


def test_a_snapshot_notices_another_dtype_at_the_same_address():
    model = model_of("bert").half()
    snapshot = Snapshot(model)
    assert snapshot.is_in_place()
    model.pooler.dense.weight.data = model.pooler.dense.weight.data.view(torch.bfloat16)
    assert not snapshot.is_in_place()


def test_unchanged_refuses_lists_of_other_things():
    none, one = _C.TensorStates([]), _C.TensorStates([torch.ones(1)])
    for wrong in ([1, "a", 2], [{}, "a"]):
        with pytest.raises(RuntimeError, match="unchanged: expected a"):
            _C.unchanged(wrong, [], [], [], none)
    with pytest.raises(RuntimeError, match="unchanged: expected a state for each place, got 1 states and a list of 0"):
        _C.unchanged([], [], [], [], one)
    with pytest.raises(TypeError):
        _C.unchanged([], [{}, "a"], [], [], none)
    assert not _C.unchanged([], [], [], [{"x": None}, "x"], one)
    assert _C.unchanged([{"x": 1.0}, "x", 1.0, {}, "y", None], [{}, 0], [1, int], [], none)


def test_unchanged_compares_all_of_a_tensor_but_its_numbers():
    x = torch.zeros(4, 4)
    place, states = [{"x": x}, "x"], _C.TensorStates([x])
    x += 1
    assert _C.unchanged([], [], [], place, states)
    others = [x.t(), x.view(2, 8), x.view(16), x.view(torch.int32), x.clone(), x[:3], torch._neg_view(x), None]
    for other in others:
        place[0]["x"] = other
        assert not _C.unchanged([], [], [], place, states)
    place[0]["x"] = x.view(4, 4)
    assert _C.unchanged([], [], [], place, states)
