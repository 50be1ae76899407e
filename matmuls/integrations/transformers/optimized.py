"""Optimized encoder layers for inference: what `optimize` changes in a model, and `undo` changes back."""

import inspect
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import quantized
from .families import BIASED, FAMILIES, MODELS, NAMES, _kind
from .graphs import Graphs
from .layers import _attention, _layer, _model
from .plan import ALREADY, _Chain, _is_ours, _Plan, _plan_of
from .relative import _encoder


@dataclass
class Optimized:
    """The list of modules that `optimize` changed; `undo()` restores them.

    Attributes:
        layers: a dictionary from names to the layers that were changed.
        left: a dictionary from the names of modules that have weights and were not changed to the reason.

    Examples:
        >>> from matmuls.integrations.transformers import optimize
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> handle = optimize(model)
        >>> len(handle.layers)
        2
        >>> handle.undo()
        >>> len(handle.layers)
        0
    """

    layers: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _models: list[nn.Module] = field(default_factory=list)

    @property
    def graphs(self) -> int:
        """How many passes are captured as CUDA graphs now (see `cuda_graphs`).

        Examples:
            >>> from matmuls.integrations.transformers import Optimized
            >>> Optimized().graphs
            0
        """
        return sum(len(graphs) for graphs in map(_graphs_of, self._models) if graphs is not None)

    @torch.inference_mode(False)  # parameters created in inference mode can never train
    def undo(self) -> None:
        """Restores every layer: its forward methods, and separate memory for each parameter. The parameters stay the
        same objects. If other code has wrapped a layer's forward in the meantime, the layer stays in `layers`; call
        undo() again after the wrapper is removed."""
        for model in self._models:
            graphs = _graphs_of(model)
            if _is_ours(model):  # not one that replaced ours since
                _remove(model)
            if graphs is not None:
                graphs.clear()
        self._models.clear()
        for name, layer in list(self.layers.items()):
            plan = _plan_of(layer)
            if plan is None:
                continue
            for module in (layer, plan.attention):
                if _is_ours(module):
                    _remove(module)
            for linear in plan.joined:
                for parameter in linear.parameters():
                    parameter.data = parameter.data.clone()
            del self.layers[name]

    def __str__(self) -> str:
        left = ", ".join(f"{n} x {reason}" for reason, n in Counter(self.left.values()).items())
        return f"{len(self.layers)} layers optimized; left as they are: {left or 'none'}"

    __repr__ = __str__  # not the layers'


def optimize(
    model: nn.Module,
    *,
    chunk_bytes: int | None = None,
    unpad: bool = True,
    cuda_graphs: bool = True,
    int8: bool = False,
) -> Optimized:
    """Makes the encoder layers of a Hugging Face model need less memory and time in inference.

    The supported models are BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, ALBERT, MPNet, ModernBERT,
    NomicBERT, GTE, Jina embeddings v3, EuroBERT, Qwen3, the text model of Gemma3, ViT, DeiT, DINOv2, CLIP, SigLIP and
    the encoder of Whisper, bare or with any head. When gradients are disabled and the model is in eval mode, a layer
    computes q, k and v in one product, residual and norm in place, and bias and activation in the product's epilogue.
    The output projection overwrites its input; if attention is computed in several parts of the batch, each part is
    written into the result. Inside a whole model, a layer overwrites the hidden states that it receives, unless they
    are to be returned or you have hooks on the layers.

    If a 2-D attention_mask masks tokens and the model's attention is "sdpa" or "custom_mm", a whole model of texts
    (not of CLIP or SigLIP) leaves them out, see `unpad`: its layers run on the other tokens of all texts, packed one
    after the other. The last hidden state of a masked token is then zero, except for the first token of a text, which
    heads read: it is as in the stock model (not in Qwen3 and Gemma3, whose heads do not read it).

    In any other call (gradients, training, autocast, torch.compile, caches, your hooks inside a layer) the stock code
    runs, with unchanged results. Qwen3 and Gemma3 use a cache unless use_cache=False is given or configured, as
    sentence-transformers does. The attention function is not changed: use `register` for that. (MPNet, which takes no
    setting, gets that of `register`.)

    The weights of q, k and v are joined in one tensor. Each layer in turn needs memory for a second copy of them.
    `.to()` splits them again, and q, k and v are then computed by three products, so move the model first.
    `save_pretrained` works on an optimized model. Call `undo()` before you save with a tool that checks for shared
    memory (safetensors.torch.save_model, Accelerator.save_model), because such a tool would leave out k and v.

    Args:
        model: a model of transformers. Unsupported modules stay as they are.
        chunk_bytes: maximum bytes of the feed-forward network's intermediate activations at a time, and of q, k and v
            if the model's attention is "sdpa" or "custom_mm". None means the largest of 24 MiB, three times the size of
            the hidden states, and half the size of a layer's attention probabilities.
        unpad: leave out masked tokens. On a GPU, a batch of more than 4,096 tokens waits for the mask, and your own
            captured CUDA graph computes the padded batch.
        cuda_graphs: on a GPU, capture passes of at most 16,384 tokens of texts in float16 or bfloat16, and replay them,
            wherever masked tokens are left out. The second call of a size, rounded up, is captured. At most 64 graphs
            share their memory, which `undo()` frees. MPNet, ModernBERT, EuroBERT, Qwen3 and Gemma3 run without.
        int8: compute the products of the layers in int8, on a CPU with VNNI instructions; results differ (see the
            guide). The quantized weights follow changes of the parameters, but not those of `parameter.data`.

    Returns:
        An `Optimized`, which lists the modules that were changed and those that were not. Its `undo()` restores them.
        There is a warning if nothing was changed.

    Raises:
        ValueError: if int8 is given for a model that is not in float32 on a CPU with VNNI instructions; nothing is
            changed then.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import optimize, verify
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> handle = optimize(model)
        >>> verify(model, {"input_ids": torch.tensor([[1, 2, 3]])}).hidden_states < 1e-4
        True
    """
    handle = Optimized()
    plans = [
        (name, layer, _Plan.of(layer, FAMILIES[_kind(layer)], chunk_bytes))
        for name, layer in model.named_modules()
        if _kind(layer) in FAMILIES
    ]  # all plans before anything is changed
    if int8:
        plans = [(name, layer, _in_int8(plan)) for name, layer, plan in plans]
    _install_layers(plans, handle)
    _install_models(model, handle, unpad, cuda_graphs)
    _name_the_rest(model, handle, [layer for _, layer, plan in plans if plan == ALREADY or _is_ours(layer)])
    _warn_of_emulation(handle)
    if not handle.layers:
        warnings.warn(_why_nothing(model, handle, [plan for _, _, plan in plans]), stacklevel=2)
    return handle


def _is_emulated(p: Tensor) -> bool:
    """True if torch multiplies by a weight on this CPU in loops, and not by oneDNN: about 8 times the time of
    float32, in float16 and bfloat16 (AMD EPYC with AVX2)."""
    known = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}
    if p.device.type != "cpu" or p.dtype not in known:
        return False
    return not (torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, known[p.dtype])())


def _warn_of_emulation(handle: Optimized) -> None:
    slow = {str(p.dtype) for layer in handle.layers.values() for p in layer.parameters() if _is_emulated(p)}
    if slow:
        why = f"which has no instructions for {' and '.join(sorted(slow))}: products are several times slower"
        warnings.warn(f"optimize: expected float32 on this CPU, {why}", stacklevel=3)


def _in_int8(plan: _Plan | str) -> _Plan | str:
    """The plan with products in int8; raises ValueError for other weights and CPUs."""
    if isinstance(plan, str):
        return plan
    why = quantized.why_not([*plan.qkv, plan.projection, *plan.up, plan.down])
    if why is not None:
        raise ValueError(f"optimize: expected {why} for int8")
    return replace(plan, int8=quantized.Int8())


def _install_layers(plans: list[tuple[str, nn.Module, _Plan | str]], handle: Optimized) -> None:
    for name, layer, plan in plans:
        if isinstance(plan, str):
            handle.left[name] = f"{type(layer).__name__} ({plan})"
            continue
        for parameters in ([m.weight for m in plan.joined], [m.bias for m in plan.joined]):
            _lay_together(parameters)
        _install(layer, partial(_layer, layer, plan))
        _install(plan.attention, partial(_attention, plan.attention, plan))
        handle.layers[name] = layer


def _install_models(model: nn.Module, handle: Optimized, unpad: bool, cuda_graphs: bool) -> None:
    """Sets the forwards of whole models, and of encoders that make a position bias, around optimized layers."""
    handle._models += _install_encoders(model)
    for whole in [m for m in model.modules() if _kind(m) in MODELS]:
        chain = _Chain.of(whole, unpad, cuda_graphs)
        if chain:
            forward: Any = partial(_model, whole, chain)
            forward.__signature__ = inspect.signature(whole.forward)  # read by code that forwards arguments
            _install(whole, forward)
            handle._models.append(whole)


def _name_the_rest(model: nn.Module, handle: Optimized, layers: list[nn.Module]) -> None:
    """Adds the modules with weights outside the optimized layers to `left`."""
    inside = {id(m) for layer in layers for m in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            owner = model.get_submodule(name.rpartition(".")[0])
            handle.left.setdefault(name, f"{type(owner).__name__}'s {type(module).__name__}")


def _install_encoders(model: nn.Module) -> list[nn.Module]:
    """Sets the forwards of encoders that make a position bias for their optimized layers."""
    changed = []
    for encoder in [m for m in model.modules() if _kind(m) in BIASED and "forward" not in vars(m)]:
        plan = next(filter(None, map(_plan_of, encoder.modules())), None)
        if plan:
            _install(encoder, partial(_encoder, encoder, plan))
            changed.append(encoder)
    return changed


def _why_nothing(model: nn.Module, handle: Optimized, plans: list[_Plan | str]) -> str:
    """One sentence for a model none of whose layers was changed."""
    name = type(next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)).__name__
    if not plans:
        return f"optimize: expected a model of one of {', '.join(NAMES)}, got {name}"
    if all(plan == ALREADY for plan in plans):
        return f"optimize: {name} is already optimized"
    return f"optimize: no layer of {name} was changed: {handle}"


def _graphs_of(model: nn.Module) -> Graphs | None:
    return getattr(model.__dict__["forward"].args[1], "graphs", None) if _is_ours(model) else None


def _install(module: nn.Module, forward: Any) -> None:
    """Sets a forward on this module. torch's data-parallel replicas copy its attributes; they get their class's
    forward."""
    module.forward = forward
    module.__dict__["_replicate_for_data_parallel"] = partial(_replica, module)


def _remove(module: nn.Module) -> None:
    del module.forward
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    _remove(replica)
    return replica


@torch.inference_mode(False)  # parameters created in inference mode can never train
def _lay_together(parameters: Sequence[Tensor | None]) -> None:
    """Moves parameters of one width next to each other in one storage; they stay the same objects. Skips parameters
    that share memory with others or must not be written to."""
    given = [p for p in parameters if p is not None]
    if not given or len({p.data_ptr() for p in given}) < len(parameters) or len({p.shape[1:] for p in given}) > 1:
        return
    if any(p.is_inference() or (p.device.type == "cpu" and p.is_shared()) for p in given):
        return
    whole = torch.cat([p.data for p in given])
    for p, part in zip(given, whole.split([*map(len, given)]), strict=True):
        p.data = part
