"""Compiles the kernels whose code differs between GPU architectures for several of them, to machine code.

Usage: python tools/check_archs.py [ARCH...], such as 8.0 12.0; without any, those of ARCHS. No GPU is needed, but a
torch for CUDA and its toolkit. A build for 7.5 and 9.0a covers the rest: code is guarded by __CUDA_ARCH__ >= 800 and
>= 900 and by the instructions of 9.0a alone.
"""

import os
import runpy
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("8.0", "8.6", "8.9", "10.0", "12.0")  # CUDA 13's nvcc knows all of them
FILES = ("tests/data/guarded_kernels.cu", "src/rows/kernels/norm_backward_stream.cu")


def compiler() -> list[str]:
    """nvcc and its arguments, without architecture and files."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="find")
    home = setup["find_cuda_home"]()
    build = home and setup["cuda_build"](home)
    if not isinstance(build, dict):
        sys.exit(f"check_archs: expected a CUDA toolkit for this Python's torch, got {build or 'none'}")
    os.environ["CUDA_HOME"] = str(home)
    from torch.utils.cpp_extension import include_paths

    folders = (str(ROOT / "src"), *include_paths(), *build["includes"], sysconfig.get_path("include"))
    # --Ofast-compile=max: less work for the optimizer, but every instruction is still assembled
    flags = ["-std=c++20", "--expt-relaxed-constexpr", "--Ofast-compile=max", "-DMATMULS_CUDA", "-DMATMULS_SM90A"]
    return [str(home / "bin/nvcc"), *flags, "-DAT_PER_OPERATOR_HEADERS", *(f"-I{folder}" for folder in folders)]


def main() -> None:
    begin, nvcc = time.monotonic(), compiler()
    jobs = [(f"sm_{arch.replace('.', '')}", file) for arch in sys.argv[1:] or ARCHS for file in FILES]

    def compiled(job: tuple[str, str]) -> "subprocess.CompletedProcess[str]":
        arch, file = job
        made = ["-cubin", f"-arch={arch}", f'-DMATMULS_ARCHS="{arch}"', file, "-o", os.devnull]
        return subprocess.run([*nvcc, *made], cwd=ROOT, capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(compiled, jobs))
    for (arch, file), done in zip(jobs, runs, strict=True):
        print(f"{arch:7} {file}: {'compiled' if done.returncode == 0 else done.stderr}")
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(any(done.returncode for done in runs))


if __name__ == "__main__":
    main()
