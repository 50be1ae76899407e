"""What the tests of attention share."""

import torch

from matmuls import attention

B, H, Q, K, D, E = 3, 4, 6, 7, 5, 3
MASKS = {
    "none": lambda draw: None,
    "padding": lambda draw: draw(B, 1, 1, K) > 0.5,
    "queries": lambda draw: draw(B, 1, Q, K) > 0.5,
    "keys alone": lambda draw: draw(K) > 0.5,
    "heads": lambda draw: draw(H, 1, K),
}


def operands(dtype=torch.float64, device="cpu", strided=True):
    """q, k, v as models pass them: [B, H, S, D] views of [B, S, H, D]."""
    torch.manual_seed(0)
    shapes = ((B, Q, H, D), (B, K, H, D), (B, K, H, E))
    drawn = [torch.randn(s, dtype=dtype, device=device).transpose(1, 2) for s in shapes]
    return [x if strided else x.contiguous() for x in drawn]


def plain(q, k, v, mask, scale, causal=False):
    scores = q @ k.mT * scale
    dropped = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        dropped = dropped.logical_not().triu(1)
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    elif mask is not None:
        dropped = dropped | mask
    y = scores.masked_fill(dropped, -torch.inf).softmax(-1).nan_to_num(0)
    return (y @ v).transpose(1, 2), y


def drawer(device):
    return lambda *shape: torch.randn(shape, dtype=torch.float64, device=device)


def kept(**options):
    """The tensors saved for backward, one per storage."""
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.shape
        return t

    inputs = [x.requires_grad_() for x in operands()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = attention.attend(*inputs, None, 0.3, **options)  # noqa: F841 keeps its memory from being reused
    return sorted(tuple(shape) for shape in memory.values())
