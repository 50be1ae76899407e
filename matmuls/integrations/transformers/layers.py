"""The forward passes of optimized models: few kernels, most of them in place."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from custom_mm.literals import Activation
from matmuls.attention import reads_strided, shares
from matmuls.dense import matmul
from matmuls.inplace import feed_forward_, linear_
from matmuls.rowwise import layer_norm_, rms_norm_

from . import cuda_graph_passes, quantized, registered
from .families import BARE, _kind
from .packed import unpadded
from .plan import _Chain, _Norm, _Plan, _running
from .rotary import rotate_
from .segments import Unpackable, _why_not_attention, has_onednn, packed

OURS: Any = partial(registered.attention, sdpa=True, recompute=False)  # for modules that call no function by name
# transformers 5.24 renamed past_key_values
OTHER_INPUTS = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "cache")


def _model(model: nn.Module, chain: _Chain, *args: Any, **kwargs: Any) -> Any:
    """A whole model's forward. Its layers may write over their input if that cannot be observed."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return type(model).forward(model, *args, **kwargs)
    output = cuda_graph_passes.repeated(model, chain, args, kwargs)
    if output is not None:
        return output
    if not chain.is_private():
        return type(model).forward(model, *args, **kwargs)
    output = unpadded(model, chain, args, kwargs)
    if output is not None:
        return output
    # the caller's embeddings may be the first layer's input
    bare = _kind(model) in BARE and (kwargs.get("inputs_embeds") is not None or len(args) > 3)
    before = _running.set(None if bare else chain)
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
    if args and plan.family.positions and not plan.family.rms:
        kwargs[plan.family.positions], args = args[0], args[1:]
    others = [*args, *(kwargs.get(name) for name in OTHER_INPUTS)]
    others += [attention_mask] if isinstance(attention_mask, tuple) else []  # Gemma3's second argument is another
    if any(x is not None for x in others) or not plan.applies(layer, hidden_states):
        if not torch.compiler.is_compiling():
            if packed.get() is not None:
                raise Unpackable(f"{type(layer).__name__} runs its stock code")
            _running.set(None)  # modules called from here may keep what they return
        if plan.family.rms and not args and not isinstance(attention_mask, tuple):
            return type(layer).forward(layer, hidden_states, attention_mask=attention_mask, **kwargs)
        return type(layer).forward(layer, hidden_states, attention_mask, *args, **kwargs)
    for name in OTHER_INPUTS:
        kwargs.pop(name, None)
    chain = _running.get()
    over = chain is not None and plan in chain.plans and not registered.captures_hidden_states()
    over = over and hidden_states.is_contiguous()  # embeddings of a convolution are not
    first, norm_first = plan.norms[0], plan.family.norm_first
    x = _normed(first, hidden_states, plan) if norm_first else hidden_states
    x, probabilities = plan.attention(x, attention_mask=attention_mask, planned=True, **kwargs)
    if plan.scales:
        x *= plan.scales[0].lambda1
    if plan.after:
        _norm_(plan.after[0], x, plan)
    x, other = (hidden_states, x) if over else (x, hidden_states)
    if norm_first:
        x += other
    else:
        layer_norm_(x, first.weight, first.bias, first.eps, residual=other)
    del other
    room = plan.room(x, probabilities)
    wanted = (probabilities,) if plan.family.tuples and kwargs.get("output_attentions") else ()
    del probabilities  # eager attention returns them even if not requested
    _feed_forward_(x, plan, room)
    return (x, *wanted) if plan.family.tuples else x


def _feed_forward_(x: Tensor, plan: _Plan, room: int) -> None:
    """The second half of a layer, in steps of room bytes: the feed-forward network, residual and norm, written over
    x."""
    up, down, second, norm_first = plan.up[0], plan.down, plan.norms[1], plan.family.norm_first
    if plan.epilogue and not (norm_first or plan.family.gated or _by_onednn(x) or _int8(x, plan)):
        feed_forward_(
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
        return
    rows = x.view(-1, x.size(-1))
    for part in shares(len(rows), room // (plan.inner * x.element_size())):
        some = rows[part]
        if plan.scales:
            some.addcmul_(_feed_forward(second(some), plan), plan.scales[1].lambda1)
        elif norm_first:
            added = _feed_forward(_normed(second, some, plan), plan)
            some += _norm_(plan.after[1], added, plan) if plan.after else added
        else:
            layer_norm_(some, second.weight, second.bias, second.eps, residual=_feed_forward(some, plan))
    if plan.family.clamped and x.dtype == torch.float16:
        most = torch.finfo(x.dtype).max - 1000
        x.clamp_(-most, most)


def _normed(norm: _Norm, x: Tensor, plan: _Plan) -> Tensor:
    """A norm of x in new memory."""
    result: Tensor = norm(x) if plan.family.rms is None else _norm_(norm, x.clone(), plan)
    return result


def _norm_(norm: Any, x: Tensor, plan: _Plan) -> Tensor:
    """An RMS norm of transformers, written over x. In float64 it is computed in float32, as there."""
    name, added = plan.family.rms or ("", 0.0)
    # a 16-bit weight + 1 would be rounded
    if plan.family.rms is None or x.dtype == torch.float64 or (added and x.dtype != torch.float32):
        return x.copy_(norm(x))
    return rms_norm_(x, norm.weight + added if added else norm.weight, getattr(norm, name))


def _attention(
    attention: nn.Module,
    plan: _Plan,
    *args: Any,
    planned: bool = False,
    **kwargs: Any,
) -> Any:
    """A self-attention's forward. `_layer` asks for the planned one: the projected context, and the probabilities or
    None."""
    if planned:
        return _planned(attention, plan, *args, **kwargs)
    return type(attention).forward(attention, *args, **kwargs)


def _planned(
    attention: Any,
    plan: _Plan,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    batch, length, _ = hidden_states.shape
    segments, projection = packed.get(), plan.projection
    heads = plan.width // plan.head_size
    shares_of = heads, heads // plan.shared, heads // plan.shared
    kwargs |= {name: getattr(attention, attribute) for name, attribute in plan.family.passed}
    if segments is not None:
        why = _why_not_attention(attention, plan.family.causal)
        causal = kwargs.get("is_causal")
        causal = getattr(attention, "is_causal", False) if causal is None else causal
        if why is not None or (causal and not plan.family.causal):
            raise Unpackable(why or "is_causal is set")
        qkv = _positioned(_qkv(hidden_states, plan), plan, shares_of, position_embeddings)
        context = segments.attend(qkv, plan.scaling(), kwargs.get("sliding_window"), position_bias, bool(causal))
        return _projected(context, plan), None
    function = eager = OURS
    if plan.family.positions != "position_bias":
        eager = sys.modules[type(attention).__module__].eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)
    elif attention_mask is not None and not attention_mask.is_floating_point():
        attention_mask = attention_mask.to(hidden_states.dtype)  # MPNet adds any mask to the scores, a bool one too
    ours, sdpa = registered.is_ours(function), function is sdpa_attention_forward
    probabilities, strided, most = None, True, batch
    if ours or sdpa:
        nbytes = 3 * length * plan.width * hidden_states.element_size()
        if ours and registered.gives_probabilities(function, attention, kwargs):
            probabilities = hidden_states.new_empty(batch, heads, length, length)
            strided = reads_strided(hidden_states, plan.head_size)
        most = plan.room(hidden_states) // (nbytes if strided else 2 * nbytes)
    kwargs |= {"dropout": 0.0, "scaling": plan.scaling()}
    parts = [slice(0, batch)] if most >= batch else list(shares(batch, most))
    x: Any = None if len(parts) == 1 else hidden_states.new_empty(batch, length, projection.out_features)
    for part in parts:
        some, mask, into = hidden_states, attention_mask, probabilities
        if x is not None:
            some, into = some[part], into if into is None else into[part]
            mask = mask[part] if mask is not None and mask.dim() == 4 and mask.size(0) > 1 else mask
        turns = position_embeddings and tuple(t if len(t) == 1 else t[part] for t in position_embeddings)
        qkv = _positioned(_qkv(some, plan), plan, shares_of, turns)
        if not strided:
            qkv = [t.contiguous() for t in qkv]  # a temporary second copy
        given = {} if into is None else {"into": into}
        if position_bias is not None:
            given["position_bias"] = position_bias if len(position_bias) == 1 else position_bias[part]
        context, weights = function(attention, *qkv, mask, **kwargs, **given)
        del qkv  # free before the next part
        context = context.flatten(2)
        if x is None:
            # write over the context, unless the function is not ours and may keep it
            stock = function is eager and eager.__module__.startswith("transformers.")
            return _projected(context, plan, over=ours or sdpa or stock), weights
        if _int8(context, plan):
            x[part] = _projected(context, plan)
        else:
            matmul(context, projection.weight, transb=True, bias=projection.bias, out=x[part])
        del context
    return x, probabilities


def _positioned(
    heads: Tensor, plan: _Plan, shares_of: tuple[int, ...], turns: Sequence[Tensor] | None
) -> Sequence[Tensor]:
    """q, k and v of their heads [B, H + 2 h, S, D], q and k normed and rotated in place."""
    q, k, v = heads.split(shares_of, 1)
    for norm, x in zip(plan.of_heads, (q, k), strict=False):
        _norm_(norm, x, plan)
    if turns is not None:
        rotate_(heads[:, : q.size(1) + k.size(1)], *turns)
    return q, k, v


def _qkv(x: Tensor, plan: _Plan) -> Tensor:
    """The heads of q, k and v of [B, S, hidden], [B, H + 2 h, S, D], in one product if the weights are adjacent."""
    linears, biases = plan.qkv, [m.bias for m in plan.qkv if m.bias is not None]
    int8 = _int8(x, plan)
    if int8 is not None:
        return _heads(int8(x, linears), plan)
    weight = linears[0].weight if len(linears) == 1 else _together([m.weight for m in linears])
    bias = biases[0] if len(linears) == len(biases) == 1 else _together(biases) if len(biases) == 3 else None
    if weight is None or (bias is None and len(biases) == 3):
        whole = torch.cat([_linear(x, m) for m in linears], -1)
    else:
        whole = _product(x, weight, bias)
        if bias is None and biases:  # not of all three: Whisper's k has none
            for m, part in zip(linears, whole.split([m.out_features for m in linears], -1), strict=True):
                if m.bias is not None:
                    part += m.bias
    return _heads(whole, plan)


def _heads(x: Tensor, plan: _Plan) -> Tensor:
    return x.view(*x.shape[:2], -1, plan.head_size).transpose(1, 2)


def _together(parameters: Sequence[Tensor]) -> Tensor | None:
    """The combined tensor of parameters that `_lay_together` has moved, or None if they have been separated again."""
    first, start = parameters[0], parameters[0].data_ptr()
    end = start
    for p in parameters:
        if p.data_ptr() != end or not p.is_contiguous():
            return None
        end += p.nbytes
    storage = first.untyped_storage()
    if storage.data_ptr() + storage.nbytes() < end:  # adjacent by chance, in different storages
        return None
    return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())


def _linear(x: Tensor, linear: nn.Linear, activation: Activation | None = None) -> Tensor:
    return _product(x, linear.weight, linear.bias, activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """activation(x weight^T + bias). With packed tokens on a CPU oneDNN computes it, in 0.93 of MKL's time, and 0.87 if
    gelu follows (AMD EPYC of 2022)."""
    if _by_onednn(x):
        name, _, variant = (activation or "none").partition("_")
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, [], variant or "none")
        return result
    return matmul(x, weight, transb=True, bias=bias, activation=activation)


def _by_onednn(x: Tensor) -> bool:
    """True with packed tokens only: oneDNN compiles a kernel for each number of rows, in milliseconds, and `packed`
    rounds it."""
    return packed.get() is not None and has_onednn(x, x.numel() // x.size(-1))


def _int8(x: Tensor, plan: _Plan) -> quantized.Int8 | None:
    """The object that multiplies x in int8, with `optimize(model, int8=True)`; else None."""
    return plan.int8 if plan.int8 is not None and quantized.takes(x) else None


def _projected(context: Tensor, plan: _Plan, over: bool = True) -> Tensor:
    """The attention's output projection. over: it may be written over the context, where it has its size."""
    linear, int8 = plan.projection, _int8(context, plan)
    if int8 is not None:
        return int8(context, (linear,))
    square = linear.in_features == linear.out_features
    if over and square and not _by_onednn(context):
        return linear_(context, linear.weight, linear.bias)
    return _linear(context, linear)


def _feed_forward(x: Tensor, plan: _Plan) -> Tensor:
    int8 = _int8(x, plan)
    if int8 is not None:
        inner, *gate = int8(x, plan.up).chunk(2 if plan.family.gated else 1, -1)
        inner = plan.activation(inner)
        return int8(inner * gate[0] if gate else inner, (plan.down,))
    inner, *gate = (_product(x, weight, bias, name) for weight, bias, name in _ups(plan))
    inner = inner if plan.epilogue else plan.activation(inner)
    return _linear(torch.mul(inner, gate[0], out=gate[0]) if gate else inner, plan.down)


def _ups(plan: _Plan) -> list[tuple[Tensor, Tensor | None, Activation | None]]:
    """Weight, bias and epilogue of the products ahead of the activation, and of its gate."""
    parts: list[tuple[Tensor, Tensor | None]] = [(m.weight, m.bias) for m in plan.up]
    if plan.family.gated and len(parts) == 1:
        weight, bias = parts[0]
        biases = (None, None) if bias is None else bias.chunk(2)
        parts = list(zip(weight.chunk(2), biases, strict=True))
    return [(weight, bias, None if i else plan.epilogue) for i, (weight, bias) in enumerate(parts)]
