"""Old name of matmuls.sparse.chunks, which pickled plans of earlier versions hold."""

from .sparse.chunks import Chunks  # noqa: F401
