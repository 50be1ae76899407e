"""Cases of transformers' common model and generation tests, with our attention compared with eager attention.

tests/test_modeling_common.py and tests/generation/test_utils.py of transformers 5.17 to 5.24 vary these flags: dtype,
padding and its side, 4-D masks, output_attentions by argument and configuration, inputs_embeds, a batch of one, caches,
training with and without gradient checkpointing, torch.compile. Tiny random models; nothing is downloaded.
"""

import copy

import pytest
import torch

t = pytest.importorskip("transformers")
from torch._dynamo.testing import CompileCounter  # noqa: E402

from matmuls.integrations.transformers import register, takes  # noqa: E402
from matmuls.integrations.transformers.families import FAMILIES  # noqa: E402

WAYS = {"custom_mm": {}, "always": {"sdpa": False}, "again": {"sdpa": False, "recompute": True}}
for way, options in WAYS.items():
    register(way, **options)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
KEYS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 60,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
IMAGES = {name: size for name, size in SMALL.items() if name != "vocab_size"} | {"image_size": 24, "patch_size": 8}
GROUPED = SMALL | {"num_key_value_heads": 2}
SINGLE = SMALL | {"num_key_value_heads": 1}
ENCODERS = {
    "albert": lambda: t.AlbertModel(t.AlbertConfig(**SMALL, **DROPOUT, **KEYS, embedding_size=16)),
    "bert": lambda: t.BertModel(t.BertConfig(**SMALL, **DROPOUT)),
    "camembert": lambda: t.CamembertModel(t.CamembertConfig(**SMALL, **DROPOUT, **KEYS)),
    "electra": lambda: t.ElectraModel(t.ElectraConfig(**SMALL, **DROPOUT, embedding_size=16)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SMALL, **DROPOUT, **KEYS)),
    "xlm_roberta": lambda: t.XLMRobertaModel(t.XLMRobertaConfig(**SMALL, **DROPOUT, **KEYS)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**DISTIL, dropout=0.0, attention_dropout=0.0)),
    "vit": lambda: t.ViTModel(t.ViTConfig(**IMAGES, **DROPOUT)),
}
DECODERS = {
    "bert decoder": lambda: t.BertLMHeadModel(t.BertConfig(**SMALL, **DROPOUT, is_decoder=True)),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, **KEYS)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, **KEYS)),
    "llama, grouped heads": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, **KEYS)),
    "llama, one key head": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SINGLE, **KEYS)),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED, **KEYS, sliding_window=4)),
}
MODELS = ENCODERS | DECODERS
TEXT = [name for name in MODELS if name != "vit"]
B, S = 3, 7


def model_of(name, implementation="eager", dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    model = MODELS[name]().to(device, dtype).eval()
    for p in model.parameters():  # makes attention matter
        if p.dim() > 1:
            p.data.normal_(0, 0.2)
    model.config.eos_token_id = None
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    model.set_attn_implementation(implementation)
    return model


def batch_of(model, side="none", rows=B):
    torch.manual_seed(1)
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(rows, 3, 24, 24, device=model.device, dtype=model.dtype)}
    ids = torch.randint(3, 60, (rows, S), device=model.device)
    if side == "none":
        return {"input_ids": ids}
    mask = torch.ones(rows, S, dtype=torch.long, device=model.device)
    mask[0, slice(0, 3) if side == "left" else slice(S - 3, S)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def hidden(output):
    return output.hidden_states[-1] if output.hidden_states else output[0]


def kept(batch):
    return batch["attention_mask"].bool() if "attention_mask" in batch else ...


def run(model, batch, **options):
    with torch.no_grad():
        return model(**batch, output_hidden_states=True, **options)


def close(found, right):
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def near(found, eager, truth):
    """In float32 within a fixed tolerance; at 16 bits at most twice eager attention's error, plus a rounding."""
    if found.dtype == torch.float32:
        close(found, eager)
        return
    error = [torch.linalg.vector_norm(x.float() - truth).item() for x in (found, eager)]
    assert error[0] <= 2 * error[1] + torch.finfo(found.dtype).eps * torch.linalg.vector_norm(truth).item()


def test_the_families_have_modules_that_call_the_function():
    assert set(ENCODERS) <= {kind.split(".")[0] for kind in FAMILIES}
    for name in MODELS:
        assert takes(model_of(name))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_eager_matches_inference(name, way, device):
    """dtype; padding on either side or none; with and without attentions; one text or several."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = model_of(name, dtype=dtype, device=device)
        exact = copy.deepcopy(model).float()
        for side in ("none", "left", "right") if name in TEXT else ("none",):
            for rows in (1, B):
                for attentions in (False, True):
                    batch, found = batch_of(model, side, rows), []
                    for implementation in ("eager", way):
                        model.set_attn_implementation(implementation)
                        found.append(run(model, batch, output_attentions=attentions))
                    wide = {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}
                    outputs = [*found[::-1], run(exact, wide, output_attentions=attentions)]
                    near(*(hidden(output)[kept(batch)] for output in outputs))
                    assert {len(output.attentions or ()) for output in outputs} == {2 * attentions}
                    for layers in zip(*(output.attentions or () for output in outputs), strict=True):
                        assert {x.shape[:2] for x in layers} == {(rows, 4)}
                        near(*(x.transpose(1, 2)[kept(batch)] for x in layers))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_batching_equivalence(name, way, device):
    model = model_of(name, way, device=device)
    batch = batch_of(model, "right")
    together = hidden(run(model, batch))
    for row in range(B):
        alone = {key: x[row : row + 1] for key, x in batch.items()}
        close(hidden(run(model, alone))[kept(alone)], together[row : row + 1][kept(alone)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TEXT)
def test_inputs_embeds_match_input_ids(name, way):
    model = model_of(name, way)
    batch = batch_of(model, "right")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    given = batch | {"inputs_embeds": embeds, "input_ids": None}
    close(hidden(run(model, given))[kept(batch)], hidden(run(model, batch))[kept(batch)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TEXT)
def test_custom_4d_masks(name, way):
    """Bool masks, True where a query may attend, and additive float masks; for all heads, and for one text."""
    model = model_of(name)
    near = (torch.arange(S)[:, None] - torch.arange(S)).abs() < 3
    seen = near.tril()[None, None].repeat(B, 1, 1, 1)
    seen[1, :, :, 0] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ids = batch_of(model)["input_ids"]
    right = hidden(run(model, {"input_ids": ids, "attention_mask": added}))
    model.set_attn_implementation(way)
    for mask in (added, seen, added.expand(B, 4, S, S), seen.expand(B, 4, S, S)):
        close(hidden(run(model, {"input_ids": ids, "attention_mask": mask})), right)
    one = {"input_ids": ids[:1], "attention_mask": seen[:1]}
    close(hidden(run(model, one)), right[:1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_by_argument_and_configuration(name, way):
    model = model_of(name, way)
    batch = batch_of(model)
    right = run(model, batch, output_attentions=True)
    assert len(right.attentions) == 2
    close(right.attentions[0].sum(-1), torch.ones(right.attentions[0].shape[:-1]))
    parts = run(model, batch, output_attentions=True, return_dict=False)
    close([x for x in parts if isinstance(x, tuple) and x and x[0].dim() == 4][-1], right.attentions)
    assert run(model, batch, output_attentions=False).attentions is None
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    model.set_attn_implementation(way)
    close(run(model, batch).attentions, right.attentions)
    close(run(model, batch).attentions, right.attentions)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_retain_grad_of_hidden_states_and_attentions(name, way):
    gradients = []
    for implementation in ("eager", way):
        model = model_of(name, implementation)
        output = model(**batch_of(model), output_attentions=True, output_hidden_states=True)
        watched = output.hidden_states[0], output.attentions[-1]
        for x in watched:
            x.retain_grad()
        output.attentions[-1].sin().sum().backward()
        gradients.append([x.grad for x in watched])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def gradients_of(model, batch, attentions=False):
    model.zero_grad()
    output = model(**batch, output_attentions=attentions)
    loss = output[0][kept(batch)].sin().sum() + sum(x.square().sum() for x in output.attentions or ())
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_training_and_gradient_checkpointing(name, way, side):
    """Without dropout; with and without checkpointing, reentrant and not."""
    model = model_of(name).train()
    batch = batch_of(model, side)
    right = gradients_of(model, batch)
    assert len(right) > 20
    model.set_attn_implementation(way)
    torch.testing.assert_close(gradients_of(model, batch), right, atol=1e-4, rtol=1e-4)
    for reentrant in (False, True) if model.supports_gradient_checkpointing else ():  # ALBERT does not
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        torch.testing.assert_close(gradients_of(model, batch), right, atol=1e-4, rtol=1e-4)
        model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
    model.set_attn_implementation("eager")
    right = gradients_of(model, batch, attentions=True)
    model.set_attn_implementation(way)
    torch.testing.assert_close(gradients_of(model, batch, attentions=True), right, atol=1e-4, rtol=1e-4)


PROMPTS = {
    "one": lambda ids: (ids[:1], torch.ones_like(ids[:1])),
    "whole": lambda ids: (ids, torch.ones_like(ids)),
    "left": lambda ids: (
        ids,
        torch.ones_like(ids).index_put((torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])), torch.tensor(0)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_matches_eager(name, way):
    """Greedy and beam search; with a dynamic, a static and no cache; from embeddings; with attentions."""
    eager, ours = model_of(name), model_of(name, way)
    greedy = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for prompt in PROMPTS.values():
        ids, mask = prompt(batch_of(eager)["input_ids"])
        given = {"attention_mask": mask, "pad_token_id": 0}
        ways = [{}, {"num_beams": 2}, {"use_cache": False}, {"output_attentions": True}]
        if "bert" not in name:
            ways.append({"cache_implementation": "static", "disable_compile": True})
        for more in ways:
            found, right = (m.generate(ids, **given, **greedy, **more) for m in (ours, eager))
            assert torch.equal(found.sequences, right.sequences)
            close(found.logits, right.logits)
            assert len(found.get("attentions") or ()) == 5 * ("output_attentions" in more)
            for step, eagers in zip(found.get("attentions") or (), right.get("attentions") or (), strict=True):
                for x, y in zip(step, eagers, strict=True):
                    sees = x.any(-1)  # a query at padding is fully masked, where eager attention averages
                    assert (~sees).sum() == (4 * (mask.cumsum(-1) == 0).sum() if x.size(2) > 1 else 0)
                    close(x[sees], y[sees])
        if "bert" not in name:
            embeds = ours.get_input_embeddings()(ids)
            found = ours.generate(inputs_embeds=embeds, **given, **greedy).sequences
            right = ours.generate(ids, **given, **greedy).sequences
            assert torch.equal(found, right[:, ids.size(1) :])


def counting(counter):
    """A compile backend that transformers does not copy; it copies other arguments."""
    return lambda graph, inputs, **options: counter(graph, inputs)


MASKS = {
    "none": lambda rows: None,
    "right": lambda rows: torch.ones(rows, S, dtype=torch.long).tril(S - rows),
    "left, of the second half": lambda rows: torch.ones(rows, S, dtype=torch.long).triu(1 - rows // 2),
}


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("implementation", ["eager", *WAYS])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, grouped heads"])
def test_generation_compiles_its_forward_once(name, implementation):
    """Two prompts of one shape with a static cache: no graph break and no recompilation."""
    for mask in (make(4) for make in MASKS.values()):
        model = model_of(name, implementation)  # the model caches the compiled forward
        ids = torch.randint(3, 60, (4, S))
        torch.compiler.reset()
        counter = CompileCounter()
        config = t.CompileConfig(fullgraph=True, dynamic=False, backend=counting(counter))
        config._compile_all_devices = True
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        options |= {"compile_config": config, "pad_token_id": 0}
        for rows in (slice(0, 2), slice(2, 4)):
            given = options if mask is None else options | {"attention_mask": mask[rows]}
            with torch.compiler.set_stance("force_eager"):
                right = model.generate(ids[rows], **given)
            # `fail_on_recompile` would also reject the first compilation
            found = model.generate(ids[rows], cache_implementation="static", **given)
            assert counter.frame_count == 1
            assert torch.equal(found.sequences, right.sequences)
            close(found.logits, right.logits)
    torch.compiler.reset()


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama, grouped heads"])
def test_compiles_with_sizes_that_change(name, way):
    """One graph for batches of several sizes, forward, and in a training step."""
    model = model_of(name, way)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for rows in (2, 3, 4):
            batch = batch_of(model, rows=rows) | ({"use_cache": False} if name in DECODERS else {})
            close(compiled(**batch)[0], model(**batch)[0])
    assert counter.frame_count == 1
    torch.compiler.reset()
    right = gradients_of(model.train(), batch_of(model))
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch_of(model))[0]
    model.zero_grad()
    found.sin().sum().backward()
    found = {key: p.grad for key, p in model.named_parameters() if key in right}
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_attention_setting_reaches_every_submodel(name, way):
    """Set at construction, by the configuration and by the method; back to stock, the results are bitwise equal."""
    model = model_of(name)
    batch = batch_of(model)
    before = hidden(run(model, batch))
    model.set_attn_implementation(way)
    parts = [m for m in model.modules() if isinstance(m, t.PreTrainedModel)]
    assert {m.config._attn_implementation for m in parts} == {way}
    ours = hidden(run(model, batch))
    built = type(model)._from_config(model.config, attn_implementation=way).eval()
    built.load_state_dict(model.state_dict())
    assert torch.equal(hidden(run(built, batch)), ours)
    model.set_attn_implementation("eager")
    assert torch.equal(hidden(run(model, batch)), before)
