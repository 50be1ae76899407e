"""Old name of matmuls.sparse.selector, which pickled plans of earlier versions hold."""

from .sparse.selector import Measurement  # noqa: F401
from .sparse.selector import Selector as Choice  # noqa: F401
