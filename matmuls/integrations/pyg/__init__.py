"""PyTorch Geometric on the products of matmuls. Importing this imports torch_geometric (2.8)."""

from .enabled import disable, enable, enabled, is_enabled
from .statistics import Stats, explain, stats

__all__ = ["Stats", "disable", "enable", "enabled", "explain", "is_enabled", "stats"]
