"""Files that are there whole or not at all."""

import secrets
import shutil
from pathlib import Path


def write(path: Path, text: str) -> None:
    """All of it at once: who reads meanwhile sees the old file or the new one; a write that fails leaves the old."""
    path = path.resolve()  # of a link, what it points to
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{secrets.token_hex(8)}.new")  # not tempfile's, which only its owner may read
    try:
        new.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
