"""Finds the attention modules of a model that call the attention function set for it."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import registered
from .families import of_class

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # where transformers' modules look up the function by name
_COUNTING = "custom_mm_counting"


@dataclass(frozen=True)
class Taken:
    """The attention modules of a model, divided into those that call the attention function of the setting
    (`set_attn_implementation`) and those that ignore the setting.

    As a bool it is True if at least one module calls the function.

    Attributes:
        modules: the modules that call the function: a dictionary from names to classes.
        ignoring: the modules that compute attention themselves: a dictionary from names to classes.

    Examples:
        >>> from matmuls.integrations.transformers import Taken
        >>> print(Taken(modules={"layer.0.attention": "BertSelfAttention"}, ignoring={}))
        call the attention function that is set: 1 x BertSelfAttention; compute attention themselves: none
    """

    modules: dict[str, str]
    ignoring: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.modules)

    def __str__(self) -> str:
        called, ignored = (
            ", ".join(f"{n} x {name}" for name, n in Counter(classes.values()).items()) or "none"
            for classes in (self.modules, self.ignoring)
        )
        return f"call the attention function that is set: {called}; compute attention themselves: {ignored}"

    __repr__ = __str__


def takes(model: nn.Module, batch: dict[str, Tensor] | None = None) -> Taken:
    """Lists the modules of a model that call the attention function named by `model.set_attn_implementation`.

    Without a batch, no forward pass is run: the code of each module's class is searched for ALL_ATTENTION_FUNCTIONS.
    Modules that do not use it (MPNet, DeBERTa) ignore the setting, at most with a warning.

    Args:
        model: a model of transformers.
        batch: arguments of a forward pass. If given, the pass is run and the modules that really call the function are
            listed. The model's own setting is restored afterwards.

    Returns:
        A `Taken`, which is False if no module calls the function.

    Examples:
        >>> from matmuls.integrations.transformers import takes
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> list(takes(model).modules)
        ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
    """
    called = set(_looking(model)) if batch is None else _calling(model, batch)
    names = {m: name for name, m in model.named_modules()}
    ignoring = [m for m in names if "Attention" in type(m).__name__ and next(m.parameters(), None) is not None]
    # a module that contains, or lies in, one that calls or computes attention is no attention module of its own
    holds = {m: set(m.modules()) for m in (*ignoring, *called)}
    inside = {x for m in called for x in holds[m]}
    ignoring = [m for m in ignoring if m not in inside and not holds[m] & called]
    ignoring = [m for m in ignoring if not any(x in holds[m] for x in ignoring if x is not m)]
    return Taken(*({names[m]: type(m).__name__ for m in names if m in kind} for kind in (called, set(ignoring))))


def in_use(model: nn.Module, name: str | None = None) -> dict[str, str]:
    """Lists the attention modules that call an attention function of `register` as the model is set now.

    The result is empty if another implementation is set, if the model's classes ignore the setting (MPNet, DeBERTa), or
    if they need a feature that the function does not support (`unsupported`).

    Args:
        model: a model of transformers.
        name: consider only the function that was registered under this name.

    Returns:
        A dictionary from the name of each such module to its class.

    Examples:
        >>> from matmuls.integrations.transformers import in_use
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> in_use(model)
        {}
    """
    refused = unsupported(model)
    return {
        module: kind
        for module, kind in takes(model).modules.items()
        if module not in refused and _is_set(_setting(model, module), name)
    }


def unsupported(model: nn.Module) -> dict[str, str]:
    """Lists the attention modules of a model that need a feature which `attention` does not support.

    Such features are capped scores (Gemma 2) and attention sinks (GPT-OSS).

    Args:
        model: a model of transformers.

    Returns:
        A dictionary from the name of each such module to a sentence that names the feature.

    Examples:
        >>> from matmuls.integrations.transformers import unsupported
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> unsupported(model)
        {}
    """
    return {
        name: f"{type(module).__name__} needs {what}, which matmuls attention does not support"
        for name, module in model.named_modules()
        if _looks_it_up(type(module))
        for attribute, what in registered.NEEDED.items()
        if getattr(module, attribute, None) is not None
    }


def _setting(model: nn.Module, module: str) -> str | None:
    """The attention implementation that is set for a module: in its own configuration, or that of what holds it."""
    parts = module.split(".") if module else []
    for length in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:length])), "config", None)
        found: str | None = getattr(config, "_attn_implementation", None)
        if found is not None:
            return found
    return None


def _is_set(setting: str | None, name: str | None) -> bool:
    ours = registered.is_ours(ALL_ATTENTION_FUNCTIONS.get(setting))
    return ours and name in (None, setting)


@contextmanager
def attending(model: nn.Module, name: str) -> Iterator[None]:
    """Sets one attention implementation for all parts of a model; restores each part's own afterwards."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]  # parents first
    configs = {id(m.config): m.config for m in models}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for part in models:
            part.set_attn_implementation(name)
        yield
    finally:
        for key, config in configs.items():  # a parent's setting also applies to its parts, which may have their own
            config._attn_implementation = before[key]


def _looking(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.modules():
        if _looks_it_up(type(part)):
            yield part


@of_class
def _looks_it_up(kind: type) -> bool:
    """True if a method of a module's class looks up the attention function in transformers by name."""
    own = [c for c in kind.__mro__ if not c.__module__.startswith("torch.") and c is not PreTrainedModel]
    return any(_INTERFACE in _names(function) for c in own for function in vars(c).values() if callable(function))


def _names(function: Callable[..., Any]) -> Iterator[str]:
    """The names that a function's code refers to, including nested functions."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes.extend(c for c in code.co_consts if isinstance(c, CodeType))


@torch.no_grad()
def _calling(model: nn.Module, batch: dict[str, Tensor]) -> set[nn.Module]:
    called = set()

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.add(module)
        return registered.attention(module, *args, **kwargs)

    AttentionInterface.register(_COUNTING, counting)
    AttentionMaskInterface.register(_COUNTING, registered.attention_mask)
    try:
        with attending(model, _COUNTING):
            model(**batch)
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_COUNTING, None)
    return called
