"""pack_padded on a GPU: what it gives on a CPU, for more tokens than a block has threads."""

import pytest
import torch

from custom_mm import _C


def packed(ids, mask, types, padding, extra):
    """The outputs: packed ids, positions, types, places, starts. extra: room for more tokens and texts."""
    batch, length = ids.shape
    size, room = batch * length + extra, batch + extra
    longs = [ids.new_full((1, size), 77) for _ in range(3)]
    per_text = 1 if mask is None else 2
    ints = [torch.full(n, 77, dtype=torch.int32, device=ids.device) for n in ((size,), (2, per_text * room + 1))]
    _C.pack_padded(ids, mask, types, padding, *longs[:2], longs[2], *ints)
    place = ints[0][: batch * length]
    return *longs, place, ints[1]


@pytest.mark.cuda
@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.int64])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 11), (1, 1024), (7, 301), (3, 1025), (32, 512), (700, 33)])
def test_as_on_a_cpu(batch, length, masked, padding):
    generator = torch.Generator().manual_seed(batch * length)
    ids = torch.randint(0, 9, (batch, length), generator=generator)
    types = torch.randint(0, 2, (batch, length), generator=generator)
    mask = None if masked is None else (torch.rand(batch, length, generator=generator) < 0.7).to(masked)
    for extra in (0, 5):
        right = packed(ids, mask, types, padding, extra)
        found = packed(ids.cuda(), None if mask is None else mask.cuda(), types.cuda(), padding, extra)
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one.cpu(), other)
