"""torch's scaled_dot_product_attention as attention modules call it, by the backend that takes the least time."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from matmuls.device import has_hopper_kernels

# Queries and keys up to which torch's memory-efficient kernel is called. BERT-base's attention for 8 x 64 tokens in
# bfloat16 with dropout, forward + backward on an H200: 273 us as called and 25 us of the GPU, with a mask 402 and 30;
# by the cuDNN kernel that torch selects 324 and 29, with a mask 451 and 36. For 64 x 64 tokens the GPU takes 65 us
# instead of 88, for 32 x 128 it would take 102 instead of 72 (benchmarks/results/cuda/attention-backends.json).
SHORT = 64
MOST_WIDE = 128  # head size of the measured kernel's tiles
_of_torch = functional.scaled_dot_product_attention  # others, as for context parallelism, are called in its place

_efficient: Callable[..., tuple[torch.Tensor, ...]] = torch._scaled_dot_product_efficient_attention


def attend_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """The context [B, Q, H, D] of query [B, H, Q, D], key and value [B, H, K, D], as scaled_dot_product_attention; of a
    query that sees no key, zeros or that function's. Not for torch.compile and tracing: it depends on sizes."""
    if query.size(2) <= SHORT and key.size(2) <= SHORT and _takes_efficient(query, key, value, mask):
        bias = None if mask is None else _bias(mask, query, key.size(2))
        gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        y = _efficient(query, key, value, bias, gradient, dropout, causal, scale=scale)[0]
    else:
        y = functional.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale)
    return y.transpose(1, 2).contiguous()


def _bias(mask: torch.Tensor, query: torch.Tensor, keys: int) -> torch.Tensor:
    """What is added to the scores [B, H, Q, K]: 0 where a bool mask is True, else -inf. Its rows begin at multiples of
    32 bytes, as the kernel requires."""
    wide = -(-keys // 16) * 16
    bias = query.new_full((*mask.shape[:-1], wide), -math.inf)[..., :keys].masked_fill_(mask, 0.0)
    return bias.expand(*query.shape[:3], keys)


def _takes_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """True where the memory-efficient kernel was measured as the faster one, takes the call and may be selected."""
    width = query.size(3)
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and type(query) is type(key) is type(value) is torch.Tensor
        and torch._C._functorch.peek_interpreter_stack() is None
        and (mask is None or (type(mask) is torch.Tensor and mask.dtype == torch.bool and mask.dim() == 4))
        and (mask is None or mask.size(3) == key.size(2))
        and 0 < width == key.size(3) == value.size(3) <= MOST_WIDE
        and width % 8 == 0
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and min(query.size(0), query.size(2), key.size(2)) > 0
        and all(map(_is_aligned, (query, key, value)))
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.is_autocast_enabled("cuda")
        and functional.scaled_dot_product_attention is _of_torch
        and has_hopper_kernels(query.device)
    )


def _is_aligned(x: torch.Tensor) -> bool:
    """True if all rows start at multiples of 16 bytes, as the kernel requires."""
    strides = x.stride()
    return strides[3] == 1 and not any(n % 8 for n in strides[:3]) and x.data_ptr() % 16 == 0
