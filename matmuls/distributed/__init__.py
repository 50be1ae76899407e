"""Products over several processes: sparse ones whose rows are divided, and all operators on DTensors.

`plan` finds once which rows of x each process needs from which other; every product sends those rows alone, while the
block that needs none of them is multiplied. Importing this package registers the DTensor rules of the operators.
"""

from .plans import DistributedPlan, plan
from .sharding import enable_dtensor
from .splits import Split, local_rows, split
from .styles import Sharded

__all__ = ["DistributedPlan", "Sharded", "Split", "enable_dtensor", "local_rows", "plan", "split"]

enable_dtensor()
