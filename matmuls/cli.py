"""`python -m matmuls`, and the name of the command line's module in earlier versions; it lives in matmuls_cli."""

from matmuls_cli import main
from matmuls_cli.app import app

__all__ = ["app", "main"]
