"""`matmuls bench`: times every operation of the table against the alternatives a user would pick, in one run.

- Inputs are random. All rivals get the same inputs, layouts and precision; their rounds alternate.
- As called, on a GPU: wall time per call of a plain loop of calls, the host included.
- GPU time: a CUDA graph of the same call. Both go over several sets of inputs, enough to exceed the L2 cache but at
  most 128 (the inputs of the smallest cases stay in L2, for all rivals). On a CPU a time is the wall time of a call.
- In place: the overwritten tensor is restored before every round, untimed.
- Errors: each result is compared with the float64 reference in the same run.
- Roof: the measured copy bandwidth and the fastest measured matrix product in the case's dtype.
"""

from .jobs import COMPILED, DENSE, REPLAYED, Job, plan, precompile
from .rows import Row, load, save
from .timing import measure_job

__all__ = [
    "COMPILED",
    "DENSE",
    "REPLAYED",
    "Job",
    "Row",
    "load",
    "measure_job",
    "plan",
    "precompile",
    "save",
]
