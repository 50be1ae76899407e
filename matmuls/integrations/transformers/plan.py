"""Facts about a layer and a model that `optimize` relies on, and the check at each call that they still hold."""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_all
from transformers import activations

from custom_mm.literals import Activation

from .families import FAMILIES, Family, _kind
from .graphs import Graphs
from .quantized import Int8

# Bytes of q, k and v, or of a feed-forward's intermediate rows, at a time. Less adds launches and saves no memory.
CHUNK_BYTES = 24 << 20
CHUNK_STATES = 3  # or this multiple of the hidden states: q, k and v in one piece, BERT's intermediate rows in two

PLAIN = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ModuleList)  # allowed in a layer, plus transformers' own
ALREADY = "already optimized"
TENSORS = (nn.Parameter, Tensor)  # types whose data kernels can read directly
EPILOGUES: dict[type, Activation] = {  # activations in `matmul`'s epilogue; any other is called
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
    nn.ReLU: "relu",
}


class _Norm(Protocol):
    """The attributes of a norm that layers read, by nn.LayerNorm's names. transformers' RMS norms rename eps."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, /) -> Tensor: ...


class _Scale(Protocol):
    """A layer scale of DINOv2."""

    lambda1: Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """The parts of a layer, and for each module inside it the place where it must still be."""

    attention: Any
    qkv: tuple[nn.Linear, ...]
    projection: nn.Linear
    norms: tuple[_Norm, ...]
    after: tuple[_Norm, ...]
    of_heads: tuple[_Norm, ...]
    up: tuple[nn.Linear, ...]
    activation: nn.Module
    epilogue: Activation | None
    down: nn.Linear
    scales: tuple[_Scale, ...]
    family: Family
    head_size: int
    forward: Callable[..., Any]  # the layer's own
    chunk_bytes: int | None
    inside: tuple[tuple[dict[str, Any], str, nn.Module, type, Callable[..., Any]], ...]
    weighted: tuple[tuple[Mapping[str, Tensor | None], str], ...]  # where the weights of its parts are
    methods: tuple[tuple[type, str, FunctionType], ...]  # of transformers' classes
    int8: Int8 | None = None

    @classmethod
    def of(cls, layer: nn.Module, family: Family, chunk_bytes: int | None) -> "_Plan | str":
        """The plan, or the reason why there is none."""
        part: Callable[[str], Any] = layer.get_submodule  # what it is, is checked below
        try:
            attention, activation = part(family.attention), part(family.activation)
            qkv = tuple(attention.get_submodule(name) for name in family.qkv)
            up = tuple(part(name) for name in family.up)
            projection, down = part(family.projection), part(family.down)
            norms = tuple(part(name) for name in family.norms)
            scales = tuple(part(name) for name in family.scales)
            after = tuple(part(name) for name in family.after)
            of_heads = tuple(attention.get_submodule(name) for name in family.of_heads)
        except AttributeError as error:
            return cls.of(layer, family.other, chunk_bytes) if family.other else str(error)
        linears = [*qkv, projection, *up, down]
        if _is_ours(layer):
            return ALREADY
        places = [(parent._modules, name, m) for parent in layer.modules() for name, m in parent._modules.items()]
        inside = tuple((parent, name, m, type(m), type(m).forward) for parent, name, m in places if m is not None)
        if len(inside) < len(places):
            return f"its {next(name for _, name, m in places if m is None)} is None"
        if any("forward" in m.__dict__ for m in layer.modules()):
            return "its forward has been replaced"
        normed = norms[1:] if family.norm_first and type(norms[0]) is nn.Identity else norms
        normed = *normed, *after, *of_heads
        if any(type(m) is not nn.Linear for m in linears) or not all(_is_norm(m, family, layer) for m in normed):
            return f"not all of its parts are nn.Linear and {'RMS norms' if family.rms else 'nn.LayerNorm'}"
        for m in layer.modules():
            known = type(m).__module__.startswith("transformers.") or type(m) in PLAIN or m is activation
            if not known or not type(m).forward.__module__.startswith(("transformers.", "torch.")):
                return f"its {type(m).__name__} is not known"
        classes = dict.fromkeys(type(m) for m in layer.modules() if type(m) not in PLAIN)
        methods = tuple((c, name, f) for c in classes for name, f in vars(c).items() if isinstance(f, FunctionType))
        if any(not f.__module__.startswith(("transformers.", "torch.")) for _, _, f in methods):
            return "methods of its classes have been replaced"
        if any(m.weight is None for m in normed):
            return "its norms have no weights"
        parts = *linears, *normed, *scales
        parameters = [p for m in parts for p in m.parameters()]
        if any(type(p.data) is not Tensor or p.layout != torch.strided for p in parameters):
            return "its weights are not plain tensors"
        size = getattr(attention, "attention_head_size", None) or getattr(attention, "head_dim", None)
        size = size or qkv[0].out_features // attention.config.num_attention_heads
        rows = [m.out_features for m in qkv]
        shared = family.causal or family.rms is not None
        equal = rows[0] % rows[-1] == 0 if shared else rows[0] == rows[-1]
        if any(n % (3 // len(qkv) * size) for n in rows) or len({*rows[1:]}) > 1 or not equal:
            return f"its q, k and v are not equally many heads of {size}"
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            return "its weights differ in dtype or device"
        return cls(
            attention,
            qkv,
            projection,
            norms,
            after,
            of_heads,
            up,
            activation,
            EPILOGUES.get(type(activation)) if _is_stock_gelu(activation) else None,
            down,
            scales,
            family,
            size,
            type(layer).forward,
            chunk_bytes,
            inside,
            tuple((m._parameters, "weight" if hasattr(m, "weight") else "lambda1") for m in parts),
            methods,
        )

    @property
    def joined(self) -> tuple[nn.Linear, ...]:
        """The linears whose parameters `optimize` moves next to each other."""
        return self.qkv if len(self.qkv) == 3 else ()

    @property
    def width(self) -> int:
        """That of q."""
        return self.qkv[0].out_features * len(self.qkv) // 3

    @property
    def shared(self) -> int:
        """How many heads of q share one of k and of v."""
        return self.qkv[0].out_features // self.qkv[-1].out_features

    @property
    def inner(self) -> int:
        """The width of the feed-forward network's intermediate rows, with those of the gate."""
        return sum(m.out_features for m in self.up)

    def scaling(self) -> float:
        """The factor of the attention scores."""
        factor: float = getattr(self.attention, self.family.scaling, self.head_size**-0.5)
        return factor

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
            or torch._C._is_tracing()
            or (not x.is_meta and torch.is_autocast_enabled(x.device.type))
            or module.training
            or type(module).forward is not self.forward
        ):
            return False
        for parameters, name in self.weighted:  # checked for every layer of every forward pass: 8 us in all
            weight = parameters.get(name)
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

    unpad: bool
    plans: frozenset["_Plan"]
    links: tuple[tuple[dict[str, Any], str, nn.Module, Any, Callable[..., Any]], ...]
    layers: tuple[tuple[nn.Module, "_Plan"], ...]
    sizes: tuple[tuple[dict[str, nn.Module | None], int], ...]  # how many modules each of those around the layers has
    graphs: Graphs | None

    @classmethod
    def of(cls, model: nn.Module, unpad: bool, cuda_graphs: bool) -> "_Chain | None":
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
        pairs = tuple((layer, plan) for layer in layers for plan in (_plan_of(layer),) if plan)
        sizes = tuple((m._modules, len(m._modules)) for m in model.modules() if id(m) not in inside)
        return cls(unpad, plans, links, pairs, sizes, Graphs() if cuda_graphs else None)

    def is_training(self, model: nn.Module) -> bool:
        """True if the model, or a module around its layers, is in training mode."""
        return model.training or any(m.training for _, _, m, _, _ in self.links)

    def is_private(self) -> bool:
        """True if nothing else sees what one module passes to the next."""
        if modules_of_all._has_any_global_hook() or any(len(children) != n for children, n in self.sizes):
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


def _is_norm(module: nn.Module, family: Family, layer: nn.Module) -> bool:
    if family.rms is None:
        return type(module) is nn.LayerNorm
    return type(module).__module__ == type(layer).__module__ and type(module).__name__.endswith("RMSNorm")


def _watched(module: nn.Module) -> bool:
    """True if it has hooks other than transformers' own, which capture attention probabilities."""
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in module._forward_hooks.values())


def _is_ours(module: nn.Module) -> bool:
    """True if `optimize` replaced its forward, by a function of layers.py with the module and its plan or chain."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and len(forward.args) > 1 and isinstance(forward.args[1], (_Plan, _Chain))


def _plan_of(module: nn.Module) -> _Plan | None:
    return module.__dict__["forward"].args[1] if _is_ours(module) else None


def _is_stock_gelu(activation: nn.Module) -> bool:
    """False for the variants written in Python, which round at other steps."""
    return not inspect.ismethod(getattr(activation, "act", None))
