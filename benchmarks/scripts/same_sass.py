"""Compare the SASS of every kernel in two builds, as cuobjdump prints it.

    python benchmarks/scripts/same_sass.py BEFORE AFTER [--cuobjdump PATH]

BEFORE and AFTER: each a built extension (.so), an object file, or a folder of object files. Exit status 0 if both hold
the same kernels with the same instructions, 1 if they differ. Kernels are compared by architecture, name and
instructions. Names are demangled, and the hash of the source path in the names of unnamed namespaces is left out, so
that a kernel may move to another file.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# nvcc names an unnamed namespace after the file: _GLOBAL__N__<hash>_<length>_<file>_<hash>[_<number>].
UNNAMED = re.compile(r"\(anonymous namespace\)|_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}(_\d+)?")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?;)")

Kernel = tuple[str, str]  # architecture, name


def kernels_of(sass: str) -> Iterator[tuple[Kernel, str]]:
    """((architecture, mangled name), hash of the instructions) of every function in cuobjdump's output."""
    arch, arch_of_name, name, text = "", "", "", hashlib.sha256()
    for line in sass.splitlines():
        if line.startswith("code for "):
            arch = line.removeprefix("code for ").strip()
        elif line.strip().startswith("Function : "):
            if name:
                yield (arch_of_name, name), text.hexdigest()
            name, arch_of_name, text = line.partition(" : ")[2].strip(), arch, hashlib.sha256()
        elif found := INSTRUCTION.match(line.replace("\t", " ")):
            text.update(UNNAMED.sub("", found["text"]).encode() + b"\n")
    if name:
        yield (arch_of_name, name), text.hexdigest()


def plain(names: list[str]) -> list[str]:
    """Demangled names without what depends on the source path."""
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [UNNAMED.sub("", line) for line in run.stdout.splitlines()]


def read(path: Path, cuobjdump: str) -> Counter[tuple[Kernel, str]]:
    """How often each (kernel, hash of its instructions) occurs in a build."""
    found: list[tuple[Kernel, str]] = []
    for file in sorted(path.rglob("*.o")) if path.is_dir() else [path]:
        run = subprocess.run([cuobjdump, "--dump-sass", file], capture_output=True, text=True)
        if run.returncode and "does not contain device code" not in run.stderr:
            sys.exit(f"same_sass: {cuobjdump} --dump-sass {file}: {run.stderr.strip() or run.returncode}")
        found += kernels_of(run.stdout)
    names = plain([name for (_, name), _ in found])
    return Counter(((arch, name), code) for ((arch, _), code), name in zip(found, names, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump")
    arguments = parser.parse_args()
    before, after = (read(path, arguments.cuobjdump) for path in (arguments.before, arguments.after))
    if not before or not after:
        sys.exit(f"same_sass: expected kernels in both builds, found {before.total()} and {after.total()}")
    gone, new = before - after, after - before
    changed = {kernel for kernel, _ in gone} & {kernel for kernel, _ in new}
    for (arch, name), word in sorted(
        {(k, "changed" if k in changed else "only before") for k, _ in gone}
        | {(k, "changed" if k in changed else "only after") for k, _ in new}
    ):
        print(f"{word}: {arch} {name[:300]}")
    same = (before & after).total()
    print(f"{same} kernels are the same, {len(changed)} changed, of {before.total()} and {after.total()}")
    sys.exit(1 if gone or new else 0)


if __name__ == "__main__":
    main()
