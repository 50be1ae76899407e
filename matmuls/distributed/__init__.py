"""Sparse products over several processes: each holds a block of rows of A and the rows of x that go with it.

`plan` finds once which rows of x each process needs from which other; every product sends those rows alone, while the
block that needs none of them is multiplied.
"""

from .plans import DistributedPlan, plan
from .splits import Split, local_rows, split

__all__ = ["DistributedPlan", "Split", "local_rows", "plan", "split"]
