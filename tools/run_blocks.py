"""Runs the Python blocks of a Markdown file in order, in one namespace, as a reader pastes them.

A block that imports transformers, and those after it, are left out where it is not installed.
"""

import importlib.util
import re
import sys
from pathlib import Path


def main(file: str) -> None:
    """Run the blocks of `file`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", Path(file).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        if "transformers" in block and importlib.util.find_spec("transformers") is None:
            blocks = blocks[:number]
            break
        exec(compile(block, f"{file}, block {number + 1}", "exec"), names)
    if not blocks:
        sys.exit(f"{file}: expected Python blocks to run, found none")
    print(f"{file}: {len(blocks)} blocks ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
