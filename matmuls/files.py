"""Writes files atomically."""

import secrets
import shutil
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: readers see the old or the new file; a failed write leaves the old one."""
    path = path.resolve()  # replaces a symbolic link's target, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{secrets.token_hex(8)}.new")  # tempfile's would be readable by the owner only
    try:
        new.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
