"""Optimized encoder layers for inference: fewer kernels, most of them in place."""

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_all
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from matmuls.attention import reads_strided, shares
from matmuls.dense import matmul
from matmuls.inplace import feed_forward_, linear_
from matmuls.rowwise import layer_norm_

from . import registered
from .taken import attending, takes

# Bytes of q, k and v, or of a feed-forward's intermediate rows, at a time. Less adds launches and saves no memory.
CHUNK_BYTES = 24 << 20
CHUNK_STATES = 3  # or this multiple of the hidden states: q, k and v in one piece, BERT's intermediate rows in two


@dataclass(frozen=True)
class Family:
    """The attribute paths of a layer's parts: q, k and v start at its attention, the others at the layer."""

    attention: str
    qkv: tuple[str, str, str]
    projection: str
    norms: tuple[str, str]
    up: str
    activation: str
    down: str
    norm_first: bool = False


BERT = Family(
    attention="attention.self",
    qkv=("query", "key", "value"),
    projection="attention.output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
)
FAMILIES = {  # by the model's folder in transformers and the layer's class
    **{f"{name.lower()}.{name}Layer": BERT for name in ("Bert", "Camembert", "Electra", "Roberta")},
    "xlm_roberta.XLMRobertaLayer": BERT,
    "distilbert.TransformerBlock": Family(
        attention="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        projection="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
    ),
    "vit.ViTLayer": Family(
        attention="attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        projection="attention.o_proj",
        norms=("layernorm_before", "layernorm_after"),
        up="mlp.fc1",
        activation="mlp.activation_fn",
        down="mlp.fc2",
        norm_first=True,
    ),
}
MODELS = {  # models that pass the embeddings, and each layer's output, only to the next layer
    *(f"{name.lower()}.{name}Model" for name in ("Bert", "Camembert", "Electra", "Roberta")),
    "xlm_roberta.XLMRobertaModel",
    "distilbert.DistilBertModel",
    "vit.ViTModel",
}
PLAIN = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ModuleList)  # allowed in a layer, plus transformers' own
TENSORS = (nn.Parameter, Tensor)  # types whose data kernels can read directly
EPILOGUES = {  # activations in `matmul`'s epilogue; any other is called
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
    nn.ReLU: "relu",
}
# transformers 5.24 renamed past_key_values
OTHER_INPUTS = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "cache")


class VerificationError(RuntimeError):
    """The outputs of the optimized model differ from those of stock by more than the tolerance.

    Examples:
        >>> from matmuls.integrations.transformers import VerificationError
        >>> issubclass(VerificationError, RuntimeError)
        True
    """


@dataclass(frozen=True)
class Difference:
    """The largest difference from stock, relative to the largest magnitude of stock if that is above 1.

    Attributes:
        hidden_states: of the hidden states.
        attentions: of the attentions, or None if the model returns none.
        tolerance: what was allowed.

    Examples:
        >>> from matmuls.integrations.transformers import Difference
        >>> Difference(hidden_states=1e-7, attentions=None, tolerance=1e-4)
        Difference(hidden_states=1e-07, attentions=None, tolerance=0.0001)
    """

    hidden_states: float
    attentions: float | None  # None: the model returns none
    tolerance: float


@dataclass
class Optimized:
    """What `optimize` changed, and a way back.

    Attributes:
        layers: the changed layers by name.
        left: modules with weights that were not changed, each with the reason.

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
    _models: list[nn.Module] = field(default_factory=list, repr=False)

    @torch.inference_mode(False)  # parameters created in inference mode can never train
    def undo(self) -> None:
        """Restores every layer: its forward methods, and separate memory for each parameter, which stays the same
        object. A layer whose forward has since been wrapped stays in `layers`, for another undo() once the wrapper
        is gone."""
        for model in self._models:
            if _is_ours(model):  # not one that replaced ours since
                _remove(model)
        self._models.clear()
        for name, layer in list(self.layers.items()):
            plan = _plan_of(layer)
            if plan is None:
                continue
            for module in (layer, plan.attention):
                if _is_ours(module):
                    _remove(module)
            for linear in plan.qkv:
                for parameter in linear.parameters():
                    parameter.data = parameter.data.clone()
            del self.layers[name]

    def __str__(self) -> str:
        left = ", ".join(f"{n} x {reason}" for reason, n in Counter(self.left.values()).items())
        return f"{len(self.layers)} layers optimized; left as they are: {left or 'none'}"


def optimize(model: nn.Module, *, chunk_bytes: int | None = None) -> Optimized:
    """Makes the encoder layers of a Hugging Face model ready for inference.

    Supported: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, ViT, bare or under any head. With grad
    disabled and the model in eval mode, a layer then computes q, k and v in one product, residual and layer norm in
    place, and bias and activation in the product's epilogue. The output projection is written over its input or, with
    several pieces, into its place. Inside a whole model a layer writes over the hidden states that it receives, unless
    they are to be returned or you have hooks around the layers. In any other call (gradients, training, autocast,
    torch.compile, caches, your hooks inside a layer) the stock code runs, with unchanged results.

    The weights of q, k and v are moved next to each other, which takes the memory of one layer's for a moment. Optimize
    after moving the model: `.to()` separates them again, and they become three products. Call `undo()` before saving
    with a tool that checks for shared memory (safetensors.torch.save_model, Accelerator.save_model): it would leave out
    k and v.

    Args:
        model: a model of transformers. Unsupported modules stay as they are.
        chunk_bytes: bytes of q, k and v (if the model's attention, which stays as it is, is sdpa or "custom_mm") and of
            the feed-forward network's intermediate rows at a time. None is the largest of 24 MiB, three times the
            hidden states, and half of the layer's probabilities.

    Returns:
        An `Optimized`, which lists what was changed and left, and whose `undo()` reverts it. Warns if nothing was
        changed.

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
    for name, layer, plan in plans:
        if isinstance(plan, str):
            handle.left[name] = f"{type(layer).__name__} ({plan})"
            continue
        for parameters in ([m.weight for m in plan.qkv], [m.bias for m in plan.qkv]):
            _lay_together(parameters)
        _install(layer, partial(_layer, layer, plan))
        _install(plan.attention, partial(_attention, plan.attention, plan))
        handle.layers[name] = layer
    for whole in [m for m in model.modules() if _kind(m) in MODELS]:
        chain = _Chain.of(whole)
        if chain:
            signature = inspect.signature(whole.forward)
            _install(whole, partial(_model, whole, chain))
            whole.forward.__signature__ = signature  # read by code that forwards arguments
            handle._models.append(whole)
    inside = {id(m) for layer in handle.layers.values() for m in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            owner = model.get_submodule(name.rpartition(".")[0])
            handle.left.setdefault(name, f"{type(owner).__name__}'s {type(module).__name__}")
    if not handle.layers:
        warnings.warn(f"optimize: no layer of {type(model).__name__} was changed: {handle}", stacklevel=2)
    return handle


@torch.no_grad()
def verify(model: nn.Module, batch: dict[str, Tensor], tolerance: float | None = None) -> Difference:
    """Runs a batch through the model as it is and as stock with eager attention, and compares the outputs.

    It compares hidden states of all layers, the first output of a call that returns none of them and, if the model
    returns them, attentions, each at the tokens that batch["attention_mask"] keeps.

    Args:
        model: a model that `optimize` changed, or whose attention is of `register`.
        batch: arguments of a forward pass.
        tolerance: the largest difference allowed; by default 1e-10 for float64, 1e-4 for float32, 2e-2 for float16 and
            1e-1 for bfloat16.

    Returns:
        A `Difference`.

    Raises:
        VerificationError: with the figures, if the difference is larger or NaN, and if the model has no layer changed
            by `optimize` and no module that calls an attention function of `register`: it would be compared with
            itself.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import register, verify
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> register()
        >>> model.set_attn_implementation("custom_mm")
        >>> verify(model, {"input_ids": torch.tensor([[1, 2, 3]])}).attentions < 1e-4
        True
    """
    if not any(_is_ours(m) for m in model.modules()) and not _attends(model):
        raise VerificationError(
            "verify: expected layers that optimize changed or modules whose attention function is of register, got "
            f"{type(model).__name__} without any ({takes(model)})"
        )
    if tolerance is None:
        dtype = next(model.parameters()).dtype
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2}.get(dtype, 1e-1)
    training = {m: m.training for m in model.modules()}
    wanted = {"output_hidden_states": True, "output_attentions": True}
    model.eval()
    try:
        ours = _results(model(**batch, **wanted))
        ours["hidden_states"] += (model(**batch)[0],)  # in such a call layers write over their input
        forwards = {m: m.__dict__.pop("forward") for m in model.modules() if _is_ours(m)}
        try:
            with attending(model, "eager"):
                output = model(**batch, **wanted)
            stock = _results(output)
            stock["hidden_states"] += (output[0],)
        finally:
            for module, forward in forwards.items():
                module.forward = forward
    finally:
        for module, mode in training.items():
            module.training = mode
    kept = batch.get("attention_mask")
    found = {name: _difference(ours[name], stock[name], kept) for name in stock if ours[name]}
    result = Difference(found["hidden_states"], found.get("attentions"), tolerance)
    if not all(x <= tolerance for x in found.values()):
        raise VerificationError(f"verify: expected a difference from stock of at most {tolerance:g}, got {result}")
    return result


def _attends(model: nn.Module) -> bool:
    """True if a module calls an attention function made by `register`."""
    for name in takes(model).modules:
        config = getattr(model.get_submodule(name), "config", getattr(model, "config", None))
        if registered.is_ours(ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None))):
            return True
    return False


def _results(output: Any) -> dict[str, tuple[Tensor, ...]]:
    return {name: tuple(getattr(output, name, None) or ()) for name in ("hidden_states", "attentions")}


def _difference(ours: tuple[Tensor, ...], stock: tuple[Tensor, ...], kept: Tensor | None) -> float:
    worst = 0.0
    for x, y in zip(ours, stock, strict=True):
        # mask [B, S] for x [B, S, hidden] or [B, H, S, S]; x may belong to a decoder, with other sizes
        if kept is not None and x.dim() > 2 and kept.shape == (x.size(0), x.size(-2)):
            x, y = (t.movedim(-2, 1)[kept.bool()] for t in (x, y))
        x, y = x.double(), y.double()
        difference = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
        worst = difference if difference > worst or difference != difference else worst
    return worst


@dataclass(frozen=True, eq=False)
class _Plan:
    """The parts of a layer, and for each module inside it the place where it must still be."""

    attention: nn.Module
    qkv: tuple[nn.Linear, ...]
    projection: nn.Linear
    norms: tuple[nn.LayerNorm, ...]
    up: nn.Linear
    activation: nn.Module
    epilogue: str | None
    down: nn.Linear
    norm_first: bool
    head_size: int
    forward: Callable[..., Any]  # the layer's own
    chunk_bytes: int | None
    inside: tuple[tuple[dict[str, Any], str, nn.Module, type, Callable[..., Any]], ...]
    weighted: tuple[dict[str, Tensor | None], ...]  # parameters of its linears and norms
    methods: tuple[tuple[type, str, FunctionType], ...]  # of transformers' classes

    @classmethod
    def of(cls, layer: nn.Module, family: Family, chunk_bytes: int | None) -> "_Plan | str":
        """The plan, or the reason why there is none."""
        try:
            attention = layer.get_submodule(family.attention)
            activation = layer.get_submodule(family.activation)
        except AttributeError as error:
            return str(error)
        linears = [attention.get_submodule(name) for name in family.qkv]
        linears += [layer.get_submodule(name) for name in (family.projection, family.up, family.down)]
        norms = tuple(layer.get_submodule(name) for name in family.norms)
        inside = tuple(
            (parent._modules, name, m, type(m), type(m).forward)
            for parent in layer.modules()
            for name, m in parent._modules.items()
        )
        if any("forward" in m.__dict__ for m in layer.modules()):
            return "its forward has been replaced"
        if any(type(m) is not nn.Linear for m in linears) or any(type(m) is not nn.LayerNorm for m in norms):
            return "not all of its parts are nn.Linear and nn.LayerNorm"
        for m in layer.modules():
            known = type(m).__module__.startswith("transformers.") or type(m) in PLAIN or m is activation
            if not known or not type(m).forward.__module__.startswith(("transformers.", "torch.")):
                return f"its {type(m).__name__} is not known"
        classes = dict.fromkeys(type(m) for m in layer.modules() if type(m) not in PLAIN)
        methods = tuple((c, name, f) for c in classes for name, f in vars(c).items() if isinstance(f, FunctionType))
        if any(not f.__module__.startswith(("transformers.", "torch.")) for _, _, f in methods):
            return "methods of its classes have been replaced"
        if any(m.weight is None for m in norms):
            return "its norms have no weights"
        parameters = [p for m in (*linears, *norms) for p in m.parameters()]
        if any(type(p.data) is not Tensor or p.layout != torch.strided for p in parameters):
            return "its weights are not plain tensors"
        size = getattr(attention, "attention_head_size", None) or getattr(attention, "head_dim", None)
        size = size or linears[0].out_features // attention.config.num_attention_heads
        if any(m.out_features % size for m in linears[:3]):
            return f"its q, k and v are no heads of {size}"
        if len({(m.weight.dtype, m.weight.device) for m in (*linears, *norms)}) > 1:
            return "its weights differ in dtype or device"
        return cls(
            attention,
            tuple(linears[:3]),
            linears[3],
            norms,
            linears[4],
            activation,
            EPILOGUES.get(type(activation)) if _is_stock_gelu(activation) else None,
            linears[5],
            family.norm_first,
            size,
            type(layer).forward,
            chunk_bytes,
            inside,
            tuple(m._parameters for m in (*linears, *norms)),
            methods,
        )

    def room(self, hidden_states: Tensor, probabilities: Tensor | None = None) -> int:
        """Bytes of one step's intermediate tensor. Two chunks cost 5 % of a feed-forward network's time (H200,
        bfloat16)."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        beside = 0 if probabilities is None else probabilities.nbytes // 2
        return max(CHUNK_BYTES, CHUNK_STATES * hidden_states.nbytes, beside)

    def applies(self, module: nn.Module, x: Tensor) -> bool:
        """True if the planned inference path is valid: no training, no hooks inside, and no module replaced."""
        if (
            torch.is_grad_enabled()
            or modules_of_all._has_any_global_hook()
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or (not x.is_meta and torch.is_autocast_enabled(x.device.type))
            or module.training
            or type(module).forward is not self.forward
        ):
            return False
        for parameters in self.weighted:  # checked for every layer of every forward pass: 8 us in all
            weight = parameters.get("weight")
            if weight is None or weight.dtype != x.dtype or type(weight) not in TENSORS:
                return False
        for of_class, name, method in self.methods:
            if of_class.__dict__.get(name) is not method:
                return False
        for parent, name, m, kind, forward in self.inside:
            if parent.get(name) is not m or m.training or m._forward_pre_hooks:
                return False
            if type(m) is not kind or kind.forward is not forward:
                return False
            replaced = _plan_of(m) is not self if m is self.attention else "forward" in m.__dict__
            if replaced or (m._forward_hooks and _watched(m)):
                return False
        return True


@dataclass(frozen=True, eq=False)
class _Chain:
    """A model's layers and the modules around them, each with its place and its own forward, or None."""

    plans: frozenset["_Plan"]
    links: tuple[tuple[dict[str, Any], str, nn.Module, Any, Callable[..., Any]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> "_Chain | None":
        """None if a module may keep its input: a layer that is not optimized, or a module of unknown origin."""
        layers = [m for m in model.modules() if _kind(m) in FAMILIES]
        inside = {id(m) for layer in layers for m in layer.modules()}
        links = tuple(
            (parent._modules, name, m, vars(m).get("forward"), type(m).forward)
            for parent in model.modules()
            if id(parent) not in inside
            for name, m in parent._modules.items()
            if m is not None
        )
        theirs = "torch.", "transformers."
        known = all(
            type(m).__module__.startswith(theirs) and of_class.__module__.startswith(theirs)
            for _, _, m, _, of_class in links
        )
        stock = all(forward is None or _is_ours(m) for _, _, m, forward, _ in links)
        plans = frozenset(plan for plan in map(_plan_of, layers) if plan)
        if "forward" in vars(model) or not (plans and known and stock and len(plans) == len(layers)):
            return None
        return cls(plans, links)

    def is_private(self) -> bool:
        """True if nothing else sees what one module passes to the next."""
        if modules_of_all._has_any_global_hook():
            return False
        for parent, name, m, forward, of_class in self.links:
            if type(m).forward is not of_class or m._compiled_call_impl is not None:  # may keep its output
                return False
            if parent.get(name) is not m or m.__dict__.get("forward") is not forward or m._forward_pre_hooks:
                return False
            if m._forward_hooks and _watched(m):
                return False
        return True


_running: ContextVar[_Chain | None] = ContextVar("running", default=None)  # its layers may write over their input


def _kind(module: nn.Module) -> str:
    """A transformers module as "folder.Class"; "" for other modules."""
    where = type(module).__module__
    return f"{where.split('.')[2]}.{type(module).__name__}" if where.startswith("transformers.models.") else ""


def _watched(module: nn.Module) -> bool:
    """True if it has hooks other than transformers' own, which capture attention probabilities."""
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in module._forward_hooks.values())


def _is_ours(module: nn.Module) -> bool:
    """True if `optimize` replaced its forward."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func in (_model, _layer, _attention)


def _install(module: nn.Module, forward: Any) -> None:
    """Sets a forward on this module. torch's data-parallel replicas copy its attributes; they get their class's
    forward."""
    module.forward = forward
    module._replicate_for_data_parallel = partial(_replica, module)  # type: ignore[assignment]


def _remove(module: nn.Module) -> None:
    del module.forward
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    _remove(replica)
    return replica


def _plan_of(module: nn.Module) -> _Plan | None:
    return module.__dict__["forward"].args[1] if _is_ours(module) else None


@torch.inference_mode(False)  # parameters created in inference mode can never train
def _lay_together(parameters: list[Tensor | None]) -> None:
    """Moves parameters of one shape next to each other in one storage; they stay the same objects. Skips parameters
    that share memory with others or must not be written to."""
    given = [p for p in parameters if p is not None]
    if len({p.data_ptr() for p in given}) < len(parameters) or len({p.shape for p in given}) > 1:
        return
    if any(p.is_inference() or (p.device.type == "cpu" and p.is_shared()) for p in given):
        return
    whole = torch.cat([p.data for p in given])
    for p, part in zip(given, whole.chunk(len(given)), strict=True):
        p.data = part


def _together(parameters: list[Tensor]) -> Tensor | None:
    """The combined tensor of parameters that `_lay_together` has moved, or None if they have been separated again."""
    first, second, third = parameters
    start, step = first.data_ptr(), first.nbytes
    if second.data_ptr() != start + step or third.data_ptr() != start + 2 * step:
        return None
    if not (first.is_contiguous() and second.is_contiguous() and third.is_contiguous()):
        return None
    storage = first.untyped_storage()
    if storage.data_ptr() + storage.nbytes() < start + 3 * step:  # adjacent by chance, in different storages
        return None
    return first.as_strided((3 * first.size(0), *first.shape[1:]), first.stride())


def _linear(x: Tensor, linear: nn.Linear, activation: str | None = None) -> Tensor:
    return matmul(x, linear.weight, transb=True, bias=linear.bias, activation=activation)


def _project_(x: Tensor, linear: nn.Linear) -> Tensor:
    """Linear, written over x if the result has x's size."""
    square = linear.in_features == linear.out_features
    return linear_(x, linear.weight, linear.bias) if square else _linear(x, linear)


def _feed_forward(x: Tensor, plan: _Plan) -> Tensor:
    inner = _linear(x, plan.up, plan.epilogue)
    return _linear(inner if plan.epilogue else plan.activation(inner), plan.down)


def _is_stock_gelu(activation: nn.Module) -> bool:
    """False for the variants written in Python, which round at other steps."""
    return not inspect.ismethod(getattr(activation, "act", None))


def _model(model: nn.Module, chain: _Chain, *args: Any, **kwargs: Any) -> Any:
    """A whole model's forward. Its layers may write over their input if that cannot be observed."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not chain.is_private():
        return type(model).forward(model, *args, **kwargs)
    before = _running.set(chain)
    try:
        return type(model).forward(model, *args, **kwargs)
    finally:
        _running.reset(before)


def _layer(
    layer: nn.Module,
    plan: _Plan,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A layer's forward. Writes over hidden_states if `_model` allows it and they are not captured."""
    others = [*args, *(kwargs.get(name) for name in OTHER_INPUTS)]
    if any(x is not None for x in others) or not plan.applies(layer, hidden_states):
        if not torch.compiler.is_compiling():
            _running.set(None)  # modules called from here may keep what they return
        return type(layer).forward(layer, hidden_states, attention_mask, *args, **kwargs)
    for name in OTHER_INPUTS:
        kwargs.pop(name, None)
    chain = _running.get()
    over = chain is not None and plan in chain.plans and not registered.captures_hidden_states()
    first, second = plan.norms
    x = first(hidden_states) if plan.norm_first else hidden_states
    x, probabilities = plan.attention(x, attention_mask, planned=True, **kwargs)
    x, other = (hidden_states, x) if over else (x, hidden_states)
    if plan.norm_first:
        x += other
    else:
        layer_norm_(x, first.weight, first.bias, first.eps, residual=other)
    del other
    room, up, down = plan.room(x, probabilities), plan.up, plan.down
    del probabilities  # eager attention returns them even if not requested
    if plan.epilogue and not plan.norm_first:
        return feed_forward_(
            x,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            second.weight,
            second.bias,
            second.eps,
            activation=plan.epilogue,
            chunk_bytes=room,
        )
    rows = x.view(-1, x.size(-1))
    for part in shares(len(rows), room // (up.out_features * x.element_size())):
        some = rows[part]
        if plan.norm_first:
            some += _feed_forward(second(some), plan)
        else:
            layer_norm_(some, second.weight, second.bias, second.eps, residual=_feed_forward(some, plan))
    return x


def _attention(
    attention: nn.Module,
    plan: _Plan,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    planned: bool = False,
    **kwargs: Any,
) -> Any:
    """A self-attention's forward when called by `_layer`: the projected context, and the probabilities or None."""
    if not planned:
        return type(attention).forward(attention, hidden_states, attention_mask, **kwargs)
    batch, length, _ = hidden_states.shape
    heads, projection = plan.qkv[0].out_features // plan.head_size, plan.projection
    name = attention.config._attn_implementation
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    ours, sdpa = registered.is_ours(function), function is sdpa_attention_forward
    probabilities, strided, most = None, True, batch
    if ours or sdpa:
        nbytes = 3 * length * plan.qkv[0].out_features * hidden_states.element_size()
        if ours and registered.gives_probabilities(function, attention, kwargs):
            probabilities = hidden_states.new_empty(batch, heads, length, length)
            strided = reads_strided(hidden_states, plan.qkv[0].out_features // heads)
        most = plan.room(hidden_states) // (nbytes if strided else 2 * nbytes)
    kwargs |= {"dropout": 0.0, "scaling": attention.scaling}
    parts = [slice(0, batch)] if most >= batch else list(shares(batch, most))
    x = None if len(parts) == 1 else hidden_states.new_empty(batch, length, projection.out_features)
    for part in parts:
        some, mask, into = hidden_states, attention_mask, probabilities
        if x is not None:
            some, into = some[part], into if into is None else into[part]
            mask = mask[part] if mask is not None and mask.dim() == 4 and mask.size(0) > 1 else mask
        qkv = _qkv(some, plan, heads)
        if not strided:
            qkv = qkv.contiguous()  # a temporary second copy
        given = {} if into is None else {"into": into}
        context, weights = function(attention, *qkv.unbind(0), mask, **kwargs, **given)
        del qkv  # free before the next part
        context = context.flatten(2)
        if x is None:
            # write over the context, unless the function is not ours and may keep it
            stock = function is eager and eager.__module__.startswith("transformers.")
            project = _project_ if ours or sdpa or stock else _linear
            return project(context, projection), weights
        matmul(context, projection.weight, transb=True, bias=projection.bias, out=x[part])
        del context
    return x, probabilities


def _qkv(x: Tensor, plan: _Plan, heads: int) -> Tensor:
    """q, k and v of [B, S, hidden] as one tensor [3, B, H, S, D], in one product if the weights are adjacent."""
    weight = _together([m.weight for m in plan.qkv])
    biases = [m.bias for m in plan.qkv if m.bias is not None]
    bias = _together(biases) if len(biases) == 3 else None
    if weight is None or (bias is None and biases):
        return torch.stack([_linear(x, m) for m in plan.qkv]).unflatten(-1, (heads, -1)).transpose(2, 3)
    whole = matmul(x, weight, transb=True, bias=bias)
    return whole.view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
