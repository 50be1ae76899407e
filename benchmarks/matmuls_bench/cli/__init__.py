"""The commands that matmuls-bench adds to `matmuls`, one file a command, by entry points of its pyproject.toml."""
