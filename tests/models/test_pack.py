"""pack_padded on a GPU, compared with torch, for more tokens than a block has threads; and malformed arguments."""

import pytest
import torch

from common import layout_references
from custom_mm import _C


def packed(ids, mask, types, padding, extra, pack=_C.pack_padded):
    """The outputs: packed ids, positions, types, places, starts. extra: room for more tokens and texts."""
    batch, length = ids.shape
    size, room = batch * length + extra, batch + extra
    longs = [ids.new_full((1, size), 77) for _ in range(3)]
    per_text = 1 if mask is None else 2
    ints = [torch.full(n, 77, dtype=torch.int32, device=ids.device) for n in ((size,), (2, per_text * room + 1))]
    pack(ids, mask, types, padding, *longs[:2], longs[2], *ints)
    place = ints[0][: batch * length]
    return *longs, place, ints[1]


@pytest.mark.cuda
@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.int64])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 11), (1, 1024), (7, 301), (3, 1025), (32, 512), (700, 33)])
def test_as_in_torch(batch, length, masked, padding):
    generator = torch.Generator().manual_seed(batch * length)
    ids = torch.randint(0, 9, (batch, length), generator=generator)
    types = torch.randint(0, 2, (batch, length), generator=generator)
    mask = None if masked is None else (torch.rand(batch, length, generator=generator) < 0.7).to(masked)
    for extra in (0, 5):
        right = packed(ids, mask, types, padding, extra, layout_references.pack_padded)
        found = packed(ids.cuda(), None if mask is None else mask.cuda(), types.cuda(), padding, extra)
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one.cpu(), other)


STATES, PLACE = torch.arange(8.0).view(4, 2), torch.tensor([0, -1, 3, 1], dtype=torch.int32)
WRONG = {
    "long": (STATES, PLACE.long(), 2, 2),
    "short": (STATES, PLACE, 3, 2),
    "overflow": (STATES, PLACE, 2**62, 4),
    "negative": (STATES, PLACE, -2, -2),
    "a vector": (STATES[0], PLACE, 2, 2),
    "strided": (STATES.mT.contiguous().mT, PLACE, 2, 2),
    "strided places": (STATES, PLACE.repeat_interleave(2)[::2], 2, 2),
    "sparse": (STATES.to_sparse(), PLACE, 2, 2),
    "sparse places": (STATES, PLACE.to_sparse(), 2, 2),
    "meta": (STATES.to("meta"), PLACE.to("meta"), 2, 2),
    "conjugate": (torch.complex(STATES, STATES).conj(), PLACE, 2, 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_packed_states_are_refused(name):
    with pytest.raises(RuntimeError, match=r"^unpack_padded: expected (?!states on a GPU)"):
        _C.unpack_padded(*WRONG[name])


def test_a_cpu_is_refused():
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"^pack_padded: expected input_ids on a GPU, got it on cpu"):
        packed(ids, None, ids, -1, 0)
    with pytest.raises(NotImplementedError, match=r"^unpack_padded: expected states on a GPU, got it on cpu"):
        _C.unpack_padded(STATES, PLACE, 2, 2)


def test_meta_tensors_are_not_packed():
    ids = torch.ones(2, 3, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="pack_padded: expected input_ids to be a dense tensor on a CPU or GPU"):
        packed(ids, None, ids, -1, 0)
    rows, vector = torch.ones(4, 2, device="meta"), torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="embed: expected words to be a dense tensor"):
        _C.embed(ids, rows, ids, rows, None, rows, vector, vector, 1e-5)
