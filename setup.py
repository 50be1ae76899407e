"""Builds custom_mm._C, with CUDA if the installed torch has CUDA and an nvcc is found.

MATMULS_CUDA=0 builds without CUDA; MATMULS_CUDA=1 fails if CUDA cannot be built. TORCH_CUDA_ARCH_LIST selects the GPU
architectures; the default is those of the visible GPUs. The build needs no GPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
LEAST_TORCH = (2, 11)  # as in pyproject.toml
# Architectures if no GPU is visible. Later GPUs compile the PTX; 9.0a has the Hopper-specific instructions.
DEFAULT_ARCHS = "7.5 8.0 8.6+PTX 9.0a"


def say(*words: object) -> None:
    print("matmuls:", *words, file=sys.stderr, flush=True)


try:
    import torch
except ImportError:
    sys.exit(
        "matmuls is built against the torch that it will run with, and no torch is importable here. Run\n"
        "    pip install torch numpy 'setuptools>=77' ninja\n"
        "    pip install --no-build-isolation ."
    )

if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
    least = ".".join(map(str, LEAST_TORCH))
    sys.exit(f"matmuls: expected torch {least} or later to build against, got {torch.__version__}")


def nvidia_wheels() -> list[Path]:
    """Folders of the CUDA toolkit parts that torch's wheel dependencies install, newest layout first."""
    site = Path(torch.__file__).parents[1] / "nvidia"
    return [p for p in (*sorted(site.glob("cu[0-9]*"), reverse=True), *sorted(site.glob("*"))) if p.is_dir()]


def find_cuda_home() -> Path | None:
    """The CUDA toolkit to compile with, from CUDA_HOME, PATH, the usual place, or the wheel nvidia-cuda-nvcc.

    Its major version must be that of torch's CUDA.
    """
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    for home in [Path(c) for c in candidates if c] + nvidia_wheels():
        if (home / "bin" / "nvcc").is_file() and (home / "nvvm").is_dir():  # excludes a wrapper script on PATH
            version = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
            if f"release {str(torch.version.cuda).split('.')[0]}." in version:
                return home
            say(f"passing over {home}: its nvcc is not of CUDA {torch.version.cuda}")
    return None


def find_one(pattern: str, folders: list[Path]) -> Path | None:
    return next((f for folder in folders for f in sorted(folder.glob(pattern))), None)


def cuda_build(home: Path) -> dict[str, list[str]] | str:
    """Include folders and link arguments for CUDA, or a string that names what is missing."""
    wheels = nvidia_wheels()
    includes = [home / "include", home / "targets/x86_64-linux/include", *(w / "include" for w in wheels)]
    libraries = [home / "lib64", home / "targets/x86_64-linux/lib", home / "lib", *(w / "lib" for w in wheels)]
    found_includes, found_libraries = [], []
    for header in ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "cusparse.h"):
        if (path := find_one(header, includes)) is None:
            return f"the header {header} is neither in {home} nor in torch's nvidia wheels"
        found_includes.append(str(path.parent))
    for library in ("cudart", "cublas", "cublasLt", "cusparse"):
        if (path := find_one(f"lib{library}.so*", libraries)) is None:
            return f"lib{library}.so is neither in {home} nor in torch's nvidia wheels"
        found_libraries += [f"-L{path.parent}", f"-l:{path.name}"]
    return {"includes": list(dict.fromkeys(found_includes)), "link": list(dict.fromkeys(found_libraries))}


def decide() -> dict[str, list[str]] | None:
    wish = os.environ.get("MATMULS_CUDA", "")
    if wish == "0":
        say("building without CUDA: MATMULS_CUDA=0")
        return None
    home = find_cuda_home()
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} has no CUDA"
    elif home is None:
        why = f"no nvcc of CUDA {torch.version.cuda} in CUDA_HOME, on PATH, in /usr/local/cuda or in nvidia's wheels"
    else:
        os.environ["CUDA_HOME"] = str(home)  # torch.utils.cpp_extension reads it at import
        build = cuda_build(home)
        if isinstance(build, dict):
            say(f"building with CUDA: torch {torch.__version__} for CUDA {torch.version.cuda}, nvcc from {home}")
            return build
        why = build
    if wish == "1":
        sys.exit(f"matmuls: MATMULS_CUDA=1 was asked for, but {why}")
    say("building without CUDA:", why)
    return None


def architectures() -> str:
    """Value for TORCH_CUDA_ARCH_LIST: the one that is set, or the visible GPUs' architectures.

    One architecture takes a quarter of the build time of DEFAULT_ARCHS.
    """
    if asked := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return asked
    visible = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    return " ".join("9.0a" if c == (9, 0) else f"{c[0]}.{c[1]}+PTX" for c in visible) or DEFAULT_ARCHS


def as_cpp(source: Path) -> str:
    """A one-line .cpp that includes the .cu file: without nvcc its kernels are excluded, and the rest is plain C++."""
    inside = source.relative_to(ROOT / "src")
    stub = ROOT / "build" / "cpp" / inside.with_suffix(".cpp")
    stub.parent.mkdir(parents=True, exist_ok=True)
    text = f'#include "{inside}"\n'
    if not stub.is_file() or stub.read_text() != text:
        stub.write_text(text)
    return str(stub.relative_to(ROOT))


def extension(cuda: dict[str, list[str]] | None) -> Extension:
    from torch.utils.cpp_extension import CppExtension  # imported after decide() has set CUDA_HOME

    def files(pattern: str) -> list[str]:
        return [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob(f"src/**/{pattern}"))]

    kernels = files("*.cu")
    if not kernels:  # .cu files also contain CPU code, which every build needs
        sys.exit(f"matmuls: expected the kernels of the source tree, src/**/*.cu, and found none in {ROOT / 'src'}")
    sources = files("*.cpp") + [as_cpp(ROOT / p) for p in kernels]
    # -std=c++20: torch 2.14 and later need it; older versions do not set it.
    # -g0: Python's flags enable debug symbols, a third of the build time and nine tenths of the size.
    # AT_PER_OPERATOR_HEADERS: torch's headers include only the operators that they use.
    narrow = "-DAT_PER_OPERATOR_HEADERS"
    # -fopenmp: without it at::parallel_for uses one thread. Only for the compiler: the OpenMP runtime must be torch's.
    cxx = ["-O3", "-g0", "-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden", "-fopenmp", narrow]
    depends = files("*.*h")
    if cuda is None:
        return CppExtension(
            "custom_mm._C",
            sources,
            include_dirs=[str(ROOT / "src")],
            depends=depends,
            extra_compile_args={"cxx": cxx},
        )
    archs = os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()
    say("GPU architectures:", archs)
    define = ["-DMATMULS_CUDA", f'-DMATMULS_ARCHS="{archs}"']
    if "9.0a" in archs:
        define.append("-DMATMULS_SM90A")
    nvcc = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-lineinfo", narrow]
    return CppExtension(
        "custom_mm._C",
        sources + kernels,
        include_dirs=[str(ROOT / "src"), *cuda["includes"]],
        depends=depends,
        libraries=["c10_cuda", "torch_cuda"],
        extra_link_args=cuda["link"],
        extra_compile_args={"cxx": cxx + define, "nvcc": nvcc + define},
    )


if __name__ != "find":  # install_deps.sh only uses find_cuda_home
    module = extension(decide())
    from torch.utils.cpp_extension import BuildExtension

    setup(ext_modules=[module], cmdclass={"build_ext": BuildExtension})
