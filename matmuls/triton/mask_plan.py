"""mask_plan: stable partition of the rows into the first expert's and the second's, in one launch."""

import torch
import triton
import triton.language as tl

from .launch import launch, wait_for_earlier

BLOCK, SCAN, WARPS = 1024, 16384, 8
# Every program counts the whole mask itself, from the L2: no second launch and no waiting between programs. Above this
# size it costs more than torch's prefix sums.
LARGEST = 1 << 20


@triton.jit(do_not_specialize=["M"])
def plan_kernel(mask, rows, counts, M, BLOCK: tl.constexpr, SCAN: tl.constexpr, EARLY: tl.constexpr):
    """A row's place in the plan: the number of earlier rows of its expert; the second expert's rows follow all of the
    first's."""
    wait_for_earlier(EARLY)
    mine = tl.program_id(0) * BLOCK
    before = tl.zeros((SCAN,), tl.int32)
    total = tl.zeros((SCAN,), tl.int32)
    for at in range(0, M, SCAN):
        r = at + tl.arange(0, SCAN)
        set_ = (tl.load(mask + r, mask=r < M, other=0) != 0).to(tl.int32)
        total += set_
        before += tl.where(r < mine, set_, 0)
    n1, earlier = tl.sum(total, 0), tl.sum(before, 0)
    r = mine + tl.arange(0, BLOCK)
    set_ = (tl.load(mask + r, mask=r < M, other=0) != 0).to(tl.int32)
    ones = earlier + tl.cumsum(set_, 0) - set_  # rows of the first expert before r
    tl.store(rows + tl.where(set_ != 0, ones, n1 + r - ones), r, mask=r < M)
    if mine == 0:
        tl.store(counts, n1)
        tl.store(counts + 1, M - n1)


def plan(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows, int32 [M], and counts, int32 [2]; mask: bool [M], contiguous, 1 to LARGEST rows."""
    M = mask.shape[0]
    rows = torch.empty(M, dtype=torch.int32, device=mask.device)
    counts = torch.empty(2, dtype=torch.int32, device=mask.device)
    launch(plan_kernel, -(-M // BLOCK), (mask.view(torch.uint8), rows, counts), (M,), (BLOCK, SCAN), WARPS, 2)
    return rows, counts
