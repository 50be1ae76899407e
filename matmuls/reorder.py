"""Old name of matmuls.sparse.reordered, which pickled plans of earlier versions hold."""

from .sparse.reordered import Reordered  # noqa: F401
