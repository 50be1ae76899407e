"""Draws texts from the docstrings of installed packages: the corpus that encode_texts.py encodes."""

import ast
import random
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy", "sentence_transformers")


def drawn(count: int, seed: int = 0) -> list[str]:
    """`count` different docstrings of functions, classes and modules of PACKAGES and of Python's library, in random
    order; ValueError if there are fewer."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [*library.glob("*.py"), *(p for name in PACKAGES for p in (packages / name).rglob("*.py"))]
    with ProcessPoolExecutor() as processes:
        texts = sorted(set().union(*processes.map(_docstrings, sorted(files), chunksize=64)))
    if len(texts) < count:
        raise ValueError(f"expected {count} docstrings in {', '.join(PACKAGES)}, found {len(texts)}")
    return random.Random(seed).sample(texts, count)


def _docstrings(file: Path) -> set[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 20:
                found.add(text)
    return found
