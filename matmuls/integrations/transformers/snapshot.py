"""Checks that an optimized model is as it was, in a few microseconds: what a captured pass depends on."""

from typing import Any

from torch import nn
from torch.nn.modules import module as modules_of_all
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from custom_mm import _C

# attributes of modules that their forward reads, or that say how it is called
READ = "training", "forward", "_compiled_call_impl", "config"
# where a module has them
SCALARS = "is_causal", "scaling", "attention_scaling", "eps", "padding_idx", "num_embeddings", "max_norm", "rope_type"


class Snapshot:
    """The modules of a model, their places, settings and hooks, as they were when it was made.

    `holds` compares them in C++, by flat lists (see `_C.unchanged`). The lists are Python's, so that the garbage
    collector sees what they refer to.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self._items: list[Any] = []  # holder, key and value of each fact
        self._sizes: list[Any] = []
        self._types: list[Any] = []
        self._places: list[Any] = []  # holder and key of each tensor
        for m in self.modules:
            self._add_module(m)
        places = iter(self._places)
        self._states = _C.TensorStates([holder[name] for holder, name in zip(places, places, strict=True)])
        for kind in {type(m) for m in self.modules}:
            methods = [(kind, name) for name, x in vars(kind).items() if callable(x)]
            self._add([*methods, (next(c for c in kind.__mro__ if "forward" in vars(c)), "forward")])
        for config in {id(c): c for m in self.modules for c in (vars(m).get("config"),) if c is not None}.values():
            self._add((vars(config), name) for name in vars(config))
            self._sizes += [vars(config), len(vars(config))]
            functions, name = ALL_ATTENTION_FUNCTIONS, config._attn_implementation
            self._add([(functions._local_mapping, name), (functions._global_mapping, name)])

    def _add(self, places: Any) -> None:
        """Adds what holders, dictionaries or classes, have under a name now."""
        for holder, name in places:
            self._items += [holder, name, vars(holder).get(name) if isinstance(holder, type) else holder.get(name)]

    def _add_module(self, m: nn.Module) -> None:
        attributes = vars(m)
        hooks: list[dict[Any, Any]] = [m._forward_hooks, m._forward_pre_hooks]
        self._types += [m, type(m)]
        self._add((attributes, name) for name in (*READ, *(name for name in SCALARS if name in attributes)))
        self._add((m._modules, name) for name in m._modules)
        self._add((of_kind, number) for of_kind in hooks for number in of_kind)
        for some in (m._modules, *hooks):
            self._sizes += [some, len(some)]
        for tensors in (m._parameters, m._buffers):
            for name, x in tensors.items():
                if x is None:
                    self._items += [tensors, name, None]
                else:
                    self._places += [tensors, name]

    def is_in_place(self) -> bool:
        """True if parameters and buffers are where they were, with the same dtype, sizes and strides: a captured pass
        may read them."""
        return _C.unchanged([], [], [], self._places, self._states)

    def holds(self) -> bool:
        """True if nothing has changed but the values of parameters and buffers."""
        unchanged = _C.unchanged(self._items, self._sizes, self._types, self._places, self._states)
        return unchanged and not modules_of_all._has_any_global_hook()
