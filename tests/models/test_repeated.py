"""Calls of an encoder that repeat an earlier one: when they are replayed at once, and what they cost on the host."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from models.test_cuda_graph_passes import REPLAYED, attend_by_starts, batch_of, read_of  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPooling  # noqa: E402

from common import layout_references  # noqa: E402
from common.model_cases import model_of  # noqa: E402
from custom_mm import _C  # noqa: E402
from matmuls.integrations.transformers import cuda_graph_passes, graphs, optimize, segments  # noqa: E402


class Stream:
    def wait_event(self, event):
        pass


class Event:
    def record(self, stream=None):
        pass

    synchronize = record


class Computed:
    """What a CUDA graph would do: computes the outputs again, into the same memory."""

    count = 0

    def __init__(self, inputs, outputs, body):
        self.inputs, self.outputs, self.body = inputs, outputs, body

    def replay(self):
        Computed.count += 1
        new = self.body(self.inputs)
        for name, x in self.outputs.items():
            x.copy_(new[name])


def captured(self, make, fill, body):
    inputs = make()
    fill(inputs)
    outputs = body(inputs)
    return graphs._Pass(Computed(inputs, outputs, body), inputs, outputs)


def can_replay(model, chain, device):
    if not chain.graphs.holds():
        chain.graphs.renew(model)
    return not chain.is_training(model)


@pytest.fixture
def replaying(monkeypatch):
    """A CPU in the place of a GPU."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(cuda_graph_passes, "can_replay", can_replay)
    monkeypatch.setattr(graphs.Graphs, "_captured", captured)
    monkeypatch.setattr(segments.Segments, "attend", attend_by_starts)
    for name in ("pack_padded", "unpack_padded"):
        monkeypatch.setattr(_C, name, getattr(layout_references, name))
    monkeypatch.setattr(Computed, "count", 0)


def is_replayed(model, *args, **kwargs):
    """Whether a call was replayed by `repeated`, and its output."""
    found = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        stock = cuda_graph_passes.repeated
        patch.setattr(cuda_graph_passes, "repeated", lambda *given: found.append(stock(*given)) or found[-1])
        output = model(*args, **kwargs)
    return found[0] is not None, output


def warm(model, batch, **kwargs):
    with torch.inference_mode():
        for _ in range(2):
            model(**batch, **kwargs)


@pytest.mark.parametrize("kind", ["whole", "no mask", "right", "left", "holes"])
@pytest.mark.parametrize("name", REPLAYED)
def test_repeated_calls(name, kind, replaying):
    exact, model = model_of(name), model_of(name)
    optimize(model)
    for seed in range(4):
        batch = batch_of(model, 3, 9, kind, seed)
        repeats, ours = is_replayed(model, **batch)
        assert repeats == (seed > 1)
        right = exact(**batch)
        seen = read_of(batch)
        assert type(ours) is type(right)
        assert list(ours) == list(right)
        assert vars(ours).keys() == vars(right).keys()
        torch.testing.assert_close(ours[0][seen], right[0][seen], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours[1:], right[1:], atol=1e-5, rtol=0)
    assert Computed.count == 3


def test_arguments_in_order_and_tuples(replaying):
    model = model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "right")
    ids, mask = batch.values()
    warm(model, batch, return_dict=False)
    repeats, output = is_replayed(model, **batch, return_dict=False)
    assert repeats
    assert type(output) is tuple
    assert not is_replayed(model, ids, mask)[0]
    repeats, other = is_replayed(model, ids, mask)
    assert repeats
    assert torch.equal(output[0], other[0])
    assert torch.equal(output[1], other.pooler_output)


def collecting(call):
    from transformers.utils import output_capturing

    before = output_capturing._active_collector.set({"hidden_states": []})
    try:
        return call()
    finally:
        output_capturing._active_collector.reset(before)


def with_autocast(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        return call()


STATES = {"collected outputs": collecting, "autocast": with_autocast}


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_states_that_are_not_replayed(state, replaying):
    model = model_of("bert")
    handle = optimize(model)
    batch = batch_of(model, 3, 9, "right")
    warm(model, batch)
    chain = model.__dict__["forward"].args[1]
    assert cuda_graph_passes.repeated(model, chain, (), batch) is not None
    assert STATES[state](lambda: cuda_graph_passes.repeated(model, chain, (), batch)) is None
    assert cuda_graph_passes.repeated(model, chain, (), batch) is not None
    handle.undo()
    assert cuda_graph_passes.repeated(model, chain, (), batch) is None


def test_transforms_are_not_replayed(replaying):
    model = model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "right")
    warm(model, batch)
    chain, found = model.__dict__["forward"].args[1], []

    def inside(x):
        found.append(cuda_graph_passes.repeated(model, chain, (), batch))
        return x

    torch.func.vmap(inside)(torch.zeros(2))
    assert found == [None]


@pytest.mark.parametrize(
    "other",
    [
        {"input_ids": torch.ones(3, 10, dtype=torch.long)},
        {"attention_mask": torch.ones(3, 9)},
        {"token_type_ids": torch.zeros(3, 9, dtype=torch.long)},
        {"output_hidden_states": True},
        {"position_ids": torch.zeros(1, 9, dtype=torch.long)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_arguments_are_another_call(other, replaying):
    model = model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "whole")
    warm(model, batch)
    if "input_ids" in other:
        batch = {}
    assert not is_replayed(model, **batch | other)[0]


def test_a_changed_model_is_not_repeated(replaying):
    model, exact = model_of("bert"), model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "whole")
    warm(model, batch)
    for m in (model, exact):
        m.encoder.layer[0].attention.self.scaling = 3.0
    repeats, ours = is_replayed(model, **batch)
    assert not repeats
    torch.testing.assert_close(ours[0], exact(**batch)[0], atol=1e-5, rtol=0)


def test_a_model_with_a_hook_runs_a_pass_in_vain_once(replaying, monkeypatch):
    model, exact = model_of("bert"), model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "whole")
    warm(model, batch)
    monkeypatch.setattr(cuda_graph_passes, "can_replay", lambda model, chain, device: chain.graphs.holds())
    before = Computed.count
    hook = model.encoder.layer[0].register_forward_hook(lambda *args: None)
    for _ in range(3):
        repeats, ours = is_replayed(model, **batch)
        assert not repeats
        torch.testing.assert_close(ours[0], exact(**batch)[0], atol=1e-5, rtol=0)
    assert Computed.count == before + 1
    hook.remove()
    assert [is_replayed(model, **batch)[0] for _ in range(2)] == [False, True]


def test_moved_weights_are_not_read(replaying):
    model = model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "whole")
    warm(model, batch)
    before = Computed.count
    weight = model.embeddings.word_embeddings.weight
    weight.data = weight.data.clone()
    assert not is_replayed(model, **batch)[0]
    assert Computed.count == before


def test_the_graphs_used_last_are_kept(replaying, monkeypatch):
    monkeypatch.setattr(graphs, "GRAPHS", 3)
    made, device = graphs.Graphs(), torch.device("cpu")

    def run(key):
        def body(inputs):
            return BaseModelOutputWithPooling(last_hidden_state=2 * inputs["x"])

        def fill(inputs):
            inputs["x"].fill_(key)

        return made.run(key, device, lambda: {"x": torch.zeros(2)}, fill, body, lambda x, inputs: x.clone())

    assert [run(key) for key in range(10)] == [None] * 10
    for key in range(10):  # every key has come once, and is captured now
        assert run(key).last_hidden_state.tolist() == [2.0 * key] * 2
        assert len(made) == min(key + 1, 3)
    again = [made.again(key, device, lambda inputs: None, lambda x, inputs: x) is not None for key in range(10)]
    assert again == [False] * 7 + [True] * 3


def test_an_output_is_as_its_constructor_makes_it():
    states, pooled, other = torch.zeros(1, 2, 3), torch.zeros(1, 3), torch.ones(1, 3)
    right = BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=other)
    captured = BaseModelOutputWithPooling(last_hidden_state=torch.ones(1), pooler_output=pooled)
    made = graphs._like(captured, {"last_hidden_state": states, "pooler_output": other})
    assert type(made) is type(right)
    assert list(made) == list(right)
    assert vars(made) == vars(right)
    assert made.to_tuple()[1] is other
    assert made["last_hidden_state"] is made[0] is states
    assert captured.pooler_output is pooled


@pytest.mark.parametrize("name", REPLAYED)
def test_a_pass_makes_no_mask_and_pools_once(name, replaying, monkeypatch):
    model, calls = model_of(name), []
    optimize(model)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: calls.append("mask"))
    pooler = getattr(model, "pooler", None)
    ours = pooler is not None and not isinstance(pooler, torch.nn.Linear)  # a class that nothing else has
    if ours:
        forward = type(pooler).forward
        monkeypatch.setattr(type(pooler), "forward", lambda *given: calls.append("pooler") or forward(*given))
    batch = batch_of(model, 3, 9, "right")
    chain = model.__dict__["forward"].args[1]
    with torch.no_grad():
        passes = cuda_graph_passes._Padded(model, chain, batch["input_ids"].device, 3, 9, True, False, False)
        inputs = passes.make()
        passes.fill(batch, batch["attention_mask"], inputs)
        passes.body(inputs)
    assert calls == ["pooler"] * ours


def test_a_repeated_call_takes_few_function_calls(replaying):
    model = model_of("bert")
    optimize(model)
    batch = batch_of(model, 3, 9, "right")
    warm(model, batch)
    calls = [0]

    def count(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Computed, "replay", lambda self: None)
        patch.setattr(_C, "pack_padded", lambda *given: None)
        patch.setattr(_C, "unpack_padded", lambda x, *given: x)
        sys.setprofile(count)
        try:
            model(**batch)
        finally:
            sys.setprofile(None)
    assert calls[0] < 80  # 400 without `repeated`
