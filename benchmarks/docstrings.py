"""Draws texts from the docstrings of installed packages: the corpus that encode_texts.py encodes."""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy", "sentence_transformers")


def drawn(count: int, seed: int = 0) -> list[str]:
    """`count` different docstrings of functions, classes and modules of PACKAGES and of Python's library, in random
    order; ValueError if there are fewer."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [*library.glob("*.py"), *(p for name in PACKAGES for p in (packages / name).rglob("*.py"))]
    texts = sorted({text for file in sorted(files) for text in _docstrings(file)})
    if len(texts) < count:
        raise ValueError(f"expected {count} docstrings in {', '.join(PACKAGES)}, found {len(texts)}")
    return random.Random(seed).sample(texts, count)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 20:
                yield text
