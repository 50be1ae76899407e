"""PyTorch Geometric on the products of matmuls. Importing this imports torch_geometric (2.8)."""

from .counted import Stats, explain, stats
from .enabled import disable, enable, enabled, is_enabled

__all__ = ["Stats", "disable", "enable", "enabled", "explain", "is_enabled", "stats"]
