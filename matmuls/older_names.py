"""Modules under the names of earlier versions, which pickled plans hold: matmuls.structure and four others."""

import sys
from types import ModuleType

from .sparse.chunks import Chunks
from .sparse.csr_pattern import Blocks, CsrPattern
from .sparse.layouts import CachedLayout
from .sparse.reordered import Reordered
from .sparse.selector import Measurement, Selector

MODULES: dict[str, dict[str, type]] = {
    "chunks": {"Chunks": Chunks},
    "choice": {"Choice": Selector, "Measurement": Measurement},
    "forms": {"Full": CachedLayout},
    "reorder": {"Reordered": Reordered},
    "structure": {"Blocks": Blocks, "Structure": CsrPattern},
}
for name, members in MODULES.items():
    module = ModuleType(f"{__package__}.{name}", f"The name of earlier versions for {', '.join(members)}.")
    vars(module).update(members)
    sys.modules[module.__name__] = module
