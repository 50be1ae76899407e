"""Old name of matmuls.sparse.layouts, which pickled plans of earlier versions hold."""

from .sparse.layouts import CachedLayout as Full  # noqa: F401
