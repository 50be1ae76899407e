"""nn.Modules around the operations: parameters and one call."""

import threading
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from custom_mm.arguments import clearer
from custom_mm.indices import place_of, version_of

from . import inplace
from .masked import MaskPlan, masked_ffn, masked_linear
from .sparse import SparsePlan, plan_of
from .sparse.csr_pattern import untransformed
from .stacked import Stacked, unwrapped

__all__ = ["InplaceLinear", "MaskedFFN", "MaskedLinear", "SparseLinear"]

_planning = threading.Lock()  # of plans of SparseLinear: a plan is made of what `freeze` sets step by step


class InplaceLinear(nn.Linear):
    """nn.Linear that writes its output over its input: [..., in_features] -> [..., out_features] in the same memory.

    It calls `matmuls.linear_`. The weight's gradient needs the overwritten input, so a call that would record it raises
    an error, unless keep_input saves a copy of the input. Under autocast the input's dtype stays, and the weight is
    cast to it.

    Args:
        in_features: size of an input row.
        out_features: size of an output row, at most in_features, which is the default.
        bias: add a bias.
        keep_input: save a copy of the input if the weight's gradient is recorded.
        workspace: maximum bytes of extra memory; at least one row is allocated.
        device: device of the parameters.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Raises:
        ValueError: if there are more output than input features.

    Examples:
        >>> import torch, matmuls
        >>> layer, x = matmuls.nn.InplaceLinear(4, 2), torch.ones(3, 4)
        >>> with torch.no_grad():
        ...     y = layer(x)
        >>> y.shape, y.data_ptr() == x.data_ptr()
        (torch.Size([3, 2]), True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        keep_input: bool = False,
        workspace: int = inplace.WORKSPACE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        out_features = in_features if out_features is None else out_features
        if out_features > in_features:
            raise ValueError(
                f"InplaceLinear: expected no more output than input features, got {out_features} and {in_features}"
            )
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.keep_input, self.workspace = keep_input, workspace

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, keep_input: bool = False, workspace: int = inplace.WORKSPACE
    ) -> "InplaceLinear":
        """Makes a module that shares the parameters of a linear layer.

        Args:
            linear: the layer, with at most as many output as input features.
            keep_input: as in the constructor.
            workspace: as in the constructor.

        Returns:
            The module, in the layer's training mode.

        Raises:
            ValueError: if there are more output than input features.
        """
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            keep_input=keep_input,
            workspace=workspace,
            device="meta",
        )
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if isinstance(x, Tensor) and x.dtype != weight.dtype and torch.is_autocast_enabled(x.device.type):
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return inplace.linear_(x, weight, bias, keep_input=self.keep_input, workspace=self.workspace)


def _expect_linear(name: str, *layers: nn.Module) -> None:
    """Raises TypeError for layers that are not plain nn.Linear: their weights are used, the layers are not called."""
    for layer in layers:
        plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if not plain or layer._forward_pre_hooks or layer._forward_hooks:
            raise TypeError(f"{name}: expected layers that are nn.Linear without hooks, got {layer}")


class MaskedLinear(nn.Module):
    """Two nn.Linear of one shape, `first` and `second`; a row uses the first if the mask is True, else the second.

    Call it as `layer(x, mask)`: x is [..., in_features], and mask is a bool tensor with one element for each row, or a
    mask plan, as in `matmuls.masked_linear`. The weights have nn.Linear's layout, [out, in], unlike those of
    `matmuls.MaskedLinear`.

    Args:
        in_features: size of an input row.
        out_features: size of an output row.
        bias: add biases.
        device: device of the parameters.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Raises:
        TypeError: in a call, if a layer is not a plain nn.Linear or has hooks, which would not be called.
        RuntimeError: in a call, as `matmuls.masked_linear`.

    Examples:
        >>> import torch, matmuls
        >>> layer, x, mask = matmuls.nn.MaskedLinear(4, 2), torch.ones(3, 4), torch.tensor([True, False, True])
        >>> y = layer(x, mask)
        >>> torch.allclose(y[mask], layer.first(x)[mask], atol=1e-6)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, out_features, bias, device, dtype)
        self.second = nn.Linear(in_features, out_features, bias, device, dtype)

    @classmethod
    def from_linear(cls, first: nn.Linear, second: nn.Linear) -> "MaskedLinear":
        """Makes a module that shares the parameters of two existing layers.

        Args:
            first: the layer for rows where the mask is True.
            second: the layer for the others, of the same shape.

        Returns:
            The module.

        Raises:
            ValueError: if the shapes differ, or one has a bias and the other has none.
        """
        if first.weight.shape != second.weight.shape or (first.bias is None) != (second.bias is None):
            raise ValueError(f"MaskedLinear: expected two layers of one shape, got {first} and {second}")
        module = cls(1, 1, False, "meta")
        module.first, module.second = first, second
        return module

    def forward(self, x: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        first, second = self.first, self.second
        _expect_linear("MaskedLinear", first, second)
        return masked_linear(x, first.weight, second.weight, mask, first.bias, second.bias)


class MaskedFFN(nn.Module):
    """Two SwiGLU networks, w2(silu(w1 x) * w3 x) and the same with u; a row uses w if the mask is True, else u.

    Call it as `layer(x, mask)`: x is [..., hidden_size], and mask is a bool tensor with one element for each row, or a
    mask plan, as in `matmuls.masked_ffn`. The weights have nn.Linear's layout, [out, in], unlike those of
    `matmuls.MaskedFFN`.

    Args:
        hidden_size: size of an input and of an output row.
        intermediate_size: size of a row between the projections.
        recompute: compute the products of size intermediate_size again in backward, instead of saving them.
        device: device of the parameters.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Raises:
        TypeError: in a call, if a layer is not a plain nn.Linear or has hooks, which would not be called.
        RuntimeError: in a call, as `matmuls.masked_ffn`.

    Examples:
        >>> import torch, matmuls
        >>> layer = matmuls.nn.MaskedFFN(4, 8)
        >>> layer(torch.ones(3, 4), torch.tensor([True, False, True])).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        up, down = (hidden_size, intermediate_size, False, device, dtype), (intermediate_size, hidden_size, False)
        self.w1, self.w2, self.w3 = nn.Linear(*up), nn.Linear(*down, device, dtype), nn.Linear(*up)
        self.u1, self.u2, self.u3 = nn.Linear(*up), nn.Linear(*down, device, dtype), nn.Linear(*up)

    def forward(self, x: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        w, u = (self.w1, self.w2, self.w3), (self.u1, self.u2, self.u3)
        _expect_linear("MaskedFFN", *w, *u)
        (w1, w2, w3), (u1, u2, u3) = ([layer.weight for layer in expert] for expert in (w, u))
        return masked_ffn(x, w1, w2, w3, u1, u2, u3, mask, self.recompute)


class SparseLinear(nn.Module):
    """nn.Linear with a sparse weight: x [..., in_features] -> x @ weight^T + bias, [..., out_features].

    The parameters are `values` [nonzeros] and `bias`. The buffers are the weight's CSR pattern: `offsets`
    [out_features + 1] and `columns` [nonzeros]. All of them are in the state dict. A loaded state may have another
    number of nonzeros than the module. A new module has no nonzeros; use `from_linear` to make one from a trained
    layer. torch's parametrizations do not accept a parameter named `values`. Layers that
    `torch.func.stack_module_state` stacks for vmap must have equal patterns.

    Every product uses the sparse plan of the weight and reads the current values. `freeze()` promises that the values
    will not change. Products may then keep a copy of the weight in a layout for tensor cores, and in 16 bits, on Hopper
    and without a gradient, add the bias before the sum is rounded.

    Args:
        in_features: size of an input row.
        out_features: size of an output row.
        bias: add a bias.
        device: device of the parameters and buffers.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Raises:
        ValueError: if a number of features is negative.
        RuntimeError: in a call, if x does not match.

    Examples:
        >>> import torch, matmuls
        >>> dense = torch.nn.Linear(8, 4)
        >>> layer = matmuls.nn.SparseLinear.from_linear(dense, sparsity=0.75)
        >>> layer
        SparseLinear(in_features=8, out_features=4, bias=True, sparsity=0.7500)
        >>> layer(torch.ones(3, 8)).shape
        torch.Size([3, 4])
    """

    _is_frozen = False  # class attributes: older pickles lack this and _captured, the plans that graphs read
    _captured: tuple[SparsePlan, ...] = ()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, out_features) < 0:
            raise ValueError(
                f"SparseLinear: expected numbers of features of 0 or more, got {in_features} and {out_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.values = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.offsets: Tensor
        self.columns: Tensor
        self.register_buffer("offsets", torch.zeros(out_features + 1, device=device, dtype=torch.int32))
        self.register_buffer("columns", torch.empty(0, device=device, dtype=torch.int32))
        # The buffers, their addresses and versions when the plan was made, and the plan.
        self._plan: tuple[Tensor, Tensor, Any, SparsePlan] | None = None

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, sparsity: float | None = None, threshold: float | None = None
    ) -> "SparseLinear":
        """Makes a sparse copy of a linear layer without its smallest weights.

        Args:
            linear: the layer.
            sparsity: the fraction of weights to drop, from 0 to 1; those of smallest magnitude are dropped.
            threshold: drop all weights whose magnitude is at most this. If neither argument is given, only zeros are
                dropped.

        Returns:
            The module, in the layer's training mode.

        Raises:
            ValueError: if both are given, if the fraction is not between 0 and 1, or if the threshold is negative.
        """
        if sparsity is not None and threshold is not None:
            raise ValueError(f"SparseLinear: expected sparsity or threshold, got both, {sparsity} and {threshold}")
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"SparseLinear: expected a threshold of 0 or more, got {threshold}")
        if sparsity is not None and not 0 <= sparsity <= 1:
            raise ValueError(f"SparseLinear: expected sparsity from 0 to 1, got {sparsity}")
        weight = linear.weight.detach()
        if sparsity is None:
            keep = ~(weight.abs() <= (threshold or 0.0))  # keeps NaN, which is not zero
        else:
            kept = weight.numel() - round(sparsity * weight.numel())
            largest = weight.abs().flatten().topk(kept, sorted=False).indices
            keep = weight.new_zeros(weight.numel(), dtype=torch.bool)
            keep[largest] = True
            keep = keep.view(weight.shape)
        module = cls(linear.in_features, linear.out_features, linear.bias is not None, weight.device, weight.dtype)
        module.values = nn.Parameter(weight[keep], requires_grad=linear.weight.requires_grad)
        module.columns = keep.nonzero()[:, 1].int()
        module.offsets[1:] = keep.sum(1).cumsum(0)
        if module.bias is not None:
            module.bias.copy_(linear.bias).requires_grad_(linear.bias.requires_grad)
        return module.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The weight as a sparse CSR tensor [out_features, in_features], without a gradient.

        Raises ValueError if a loaded state is inconsistent.
        """
        self.plan()
        return self._as_csr()

    def _as_csr(self, *parts: Tensor) -> Tensor:
        """The weight, or other offsets, columns and values, as a CSR tensor without a check of its indices."""
        offsets, columns, values = parts or (self.offsets, self.columns, self.values.detach())
        shape = self.out_features, self.in_features
        with warnings.catch_warnings():  # torch warns once per process that the layout is in beta
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(
                offsets, columns, values, shape, device=values.device, check_invariants=False
            )

    def _drop_plan(self) -> None:
        """Drop the plan; the next product makes a new one. A plan that a captured graph reads is kept as long as the
        module."""
        known = self._plan
        if known is not None and known[3]._is_captured:
            self._captured = (*self._captured, known[3])
        self._plan = None

    def freeze(self) -> "SparseLinear":
        """Promises that the values will not change, for inference: products may then keep copies of them. Returns the
        module.

        values and bias no longer require a gradient. Writes that raise the version counter of values are noticed, and
        so are loaded states. After other writes (through `.data`, by a replayed CUDA graph) call `freeze` again. The
        promise ends with `unfreeze()`, or when values require a gradient again.
        """
        return self._freeze(True)

    def unfreeze(self) -> "SparseLinear":
        """Ends `freeze`: values and bias require a gradient, and every product reads the values. Returns the module."""
        return self._freeze(False)

    def _freeze(self, frozen: bool) -> "SparseLinear":
        with _planning:
            for parameter in (self.values, self.bias):
                if parameter is not None:
                    parameter.requires_grad_(not frozen)
            self._is_frozen = frozen
            self._drop_plan()
        return self

    def plan(self) -> SparsePlan:
        """The weight's `SparsePlan`. A new one is made if the pattern was written to or moved."""
        with _planning:
            return self._current_plan()

    def _current_plan(self) -> SparsePlan:
        values = self.values
        if self._is_frozen and values.requires_grad:
            # About to be trained, perhaps by an optimizer that does not increment versions.
            self._is_frozen = False
            self._drop_plan()
        known, transformed = self._plan, not is_compiling() and peek_interpreter_stack() is not None
        stacks = [unwrapped(t) if transformed else Stacked(t, ()) for t in (self.offsets, self.columns)]
        offsets, columns = (stack.base for stack in stacks)
        state = [(version_of(t), place_of(t), dims) for t, dims in stacks]
        if known is None or known[0] is not offsets or known[1] is not columns or known[2] != state:
            shared = not columns.is_inference()  # writes to inference tensors cannot be detected
            with untransformed() if transformed else nullcontext():
                one_offsets, one_columns = (stack.one("SparseLinear") for stack in stacks)
                # Values of a transform must not outlive it.
                own = torch.zeros_like(one_columns, dtype=values.dtype) if transformed else values
                csr = self._as_csr(one_offsets, one_columns, own.detach())
                made = plan_of("plan", csr, shared=shared, constant=self._is_frozen).update(own)
            self._drop_plan()
            self._plan = known = offsets, columns, state, made  # one assignment: other threads see all or nothing
        made = known[3]
        if transformed:
            return made.with_values(values)
        return made if made._prepared.values is values else made.update(values)

    def forward(self, x: Tensor) -> Tensor:
        compiling, known = is_compiling(), self._plan
        calls = None if known is None or compiling else known[3]._prepared.linear
        if calls is not None:
            own, buffers = self._parameters, self._buffers
            y = calls(x, own.get("values"), own.get("bias"), buffers["offsets"], buffers["columns"])
            if y is not None:  # a call prepared before: `plan` would have changed nothing
                return y
        if not isinstance(x, Tensor):
            raise clearer(TypeError(), "SparseLinear", x=x)
        if x.shape[-1:] != (self.in_features,):
            raise RuntimeError(f"SparseLinear: expected x of shape [..., {self.in_features}], got {list(x.shape)}")
        multiply = self.plan()._linear
        # The plan breaks a compiled graph anyway; compiled, only the default SpMM could be selected.
        multiply = torch.compiler.disable(multiply) if compiling else multiply
        return multiply(x, self.bias, self.offsets, self.columns)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _, _, missing, _, errors = args
        failures = len(errors)
        names = "values", "offsets", "columns"
        before = [(name, t := getattr(self, name), t.detach().clone()) for name in names]
        for name in ("values", "columns"):
            loaded, own = state_dict.get(prefix + name), getattr(self, name)
            if loaded is not None and loaded.shape != own.shape and loaded.dim() == 1:
                own.grad, own.data = None, own.new_empty(loaded.shape)
        self._drop_plan()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if len(errors) > failures or any(prefix + name in missing for name in names):
            # A partial state is inconsistent with the rest.
            for name, own, numbers in before:
                own.data = numbers
                setattr(self, name, own)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None, "_captured": ()}  # the plan is cheap to make again

    def extra_repr(self) -> str:
        sparsity = 1 - self.values.numel() / max(self.in_features * self.out_features, 1)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"sparsity={sparsity:.4f}" + (", frozen" if self._is_frozen else "")
        )
