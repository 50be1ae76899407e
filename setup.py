"""Builds custom_mm._C, with CUDA if the installed torch has CUDA and an nvcc is found.

MATMULS_CUDA=0 builds without CUDA; MATMULS_CUDA=1 fails if CUDA cannot be built. TORCH_CUDA_ARCH_LIST selects the GPU
architectures; the default is those of the visible GPUs. The build needs no GPU.

The extension runs with the minor version of torch that it was built with. The package's version names it
(0.2.0+torch2.13.cpu), its requirements pin it, and custom_mm/_build.py records it for the import.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "matmuls/__init__.py").read_text(), re.MULTILINE)[0]
LEAST_TORCH = (2, 11)
REQUIREMENTS = ["numpy", "platformdirs>=4", "rich>=13", "scipy>=1.12", "typer>=0.12"]
# Architectures if no GPU is visible. Later GPUs compile the PTX; 9.0a has the Hopper-specific instructions.
DEFAULT_ARCHS = "7.5 8.0 8.6+PTX 9.0a"

try:
    import torch
except ImportError:
    torch = None


def say(*words: object) -> None:
    print("matmuls:", *words, file=sys.stderr, flush=True)


def need_torch() -> None:
    """Exits unless a torch is importable that the extension can be built with."""
    least = ".".join(map(str, LEAST_TORCH))
    if torch is None:
        isolated = any("build-env-" in folder for folder in sys.path)  # pip's, build's
        why = (
            "pip and build make an empty environment for a build, which hides an installed torch"
            if isolated
            else f"{sys.executable} cannot import torch"
        )
        sys.exit(
            f"matmuls is compiled against the torch that it will run with, and this build sees none: {why}. Run\n"
            f"    pip install 'torch>={least}' numpy 'setuptools>=77' wheel ninja\n"
            "    pip install --no-build-isolation .      (or: python -m build --no-isolation)"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
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


def build_folder(cuda: dict[str, list[str]] | None) -> Path:
    """Where objects of this Python, torch and kind are kept, so that a later build compiles only what has changed."""
    return ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}-{'cuda' if cuda else 'cpu'}"


def write_if_other(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# Folders of src/ whose files are compiled as one: most of a small file's time is that of torch's headers. Files with
# loops, whose name has "cpu" in it, are apart: what is inlined in them must not depend on the others. Those of them
# that include torch's headers have names that end in "_cpu".
TOGETHER = (
    ("attention", "distributed", "gpu", "masked", "rows", "texts"),
    ("dense", "sparse"),
    ("glue",),
    ("_cpu",),
)


def units(folder: Path) -> list[str]:
    """The .cpp files to compile: they include those of src/, and .cu files, which without nvcc have plain C++ alone.
    Their objects lie apart from those of the .cu files, some of which have the same names.

    A file that was edited since its folder was compiled as one, or is new, is compiled alone from then on. A unit names
    the contents of its files by their hashes: a copied checkout has other times of modification.
    """
    groups: dict[str, list[str]] = {}  # unit -> its lines, one for each file that it includes
    for path in sorted(p for pattern in ("*.cpp", "*.cu") for p in ROOT.glob(f"src/**/{pattern}")):
        inside = path.relative_to(ROOT / "src")
        # pybind11 takes longer than any other header, and what binds functions to Python is neither hot nor large
        text = path.read_text()
        line = f"#include <{inside}>  // sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}\n"
        place = "glue" if "<pybind11/" in text else inside.parts[0]
        if "cpu" in inside.name:
            place = "_cpu" if inside.stem.endswith("_cpu") else ""
        name = next(("_".join(folders) for folders in TOGETHER if place in folders), "")
        unit = folder / "units" / f"{name}.cpp"
        edited = unit.is_file() and line not in unit.read_text()
        if edited or not name:
            name = str(inside.with_suffix(""))
        groups.setdefault(f"{name}.cpp", []).append(line)
    made = []
    for unit, lines in groups.items():
        write_if_other(folder / "units" / unit, "".join(lines))
        made.append(str((folder / "units" / unit).relative_to(ROOT)))
    return made


def extension(cuda: dict[str, list[str]] | None) -> Extension:
    from torch.utils.cpp_extension import CppExtension  # imported after decide() has set CUDA_HOME

    includes = [str(ROOT / "src")]
    sources = units(build_folder(cuda))
    # -std=c++20: torch 2.14 and later need it; older versions do not set it.
    # -g0: Python's flags enable debug symbols, a third of the build time and nine tenths of the size.
    # AT_PER_OPERATOR_HEADERS: torch's headers include only the operators that they use.
    narrow = "-DAT_PER_OPERATOR_HEADERS"
    # -fopenmp: without it at::parallel_for uses one thread. Only for the compiler: the OpenMP runtime must be torch's.
    cxx = ["-O3", "-g0", "-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden", "-fopenmp", narrow]
    # Without cost: small calls took 0.98 to 1.08 times as long with these, the median of 8 pairs of processes was 1.00.
    # -U: a compiler that defines it itself warns of a second definition. 3 needs g++ 12.
    cxx += ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
    link = ["-Wl,-z,relro,-z,now"]  # addresses of functions are read-only after the import, which binds all in any case
    depends = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("src/**/*.*h"))]
    if cuda is None:
        return CppExtension(
            "custom_mm._C",
            sources,
            include_dirs=includes,
            depends=depends,
            extra_link_args=link,
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
        sources + [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("src/**/*.cu"))],
        include_dirs=[*includes, *cuda["includes"]],
        depends=depends,
        libraries=["c10_cuda", "torch_cuda"],
        extra_link_args=cuda["link"] + link,
        extra_compile_args={"cxx": cxx + define, "nvcc": nvcc + define},
    )


def build_command(cuda: dict[str, list[str]] | None) -> type:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(build_folder(cuda))
            self.force = True  # ninja knows what has changed, beside another torch too

        def run(self) -> None:
            super().run()
            record = f'TORCH = "{torch.__version__}"\nCUDA = {torch.version.cuda if cuda else None!r}\n'
            text = f'"""Written by setup.py: what the extension in this folder was built with."""\n\n{record}'
            write_if_other(Path(self.build_lib) / "custom_mm" / "_build.py", text)
            if self.inplace:
                write_if_other(ROOT / "custom_mm" / "_build.py", text)

    return Build


def main() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja of an environment not activated
    if not list(ROOT.glob("src/**/*.cu")):
        sys.exit(f"matmuls: expected the kernels of the source tree, src/**/*.cu, and found none in {ROOT / 'src'}")
    if "sdist" in sys.argv or (torch is None and "egg_info" in sys.argv):  # of no torch in particular
        setup(version=VERSION, install_requires=[f"torch>={'.'.join(map(str, LEAST_TORCH))}", *REQUIREMENTS])
        return
    need_torch()
    cuda = decide()
    major, minor = map(int, torch.__version__.split(".")[:2])
    kind = f"cu{torch.version.cuda.replace('.', '')}" if cuda else "cpu"
    public = torch.__version__.split("+")[0]
    least = public if re.search("a|b|rc|dev", public) else f"{major}.{minor}"  # a pre-release is before its release
    setup(
        version=f"{VERSION}+torch{major}.{minor}.{kind}",
        install_requires=[f"torch>={least},<{major}.{minor + 1}", *REQUIREMENTS],
        ext_modules=[extension(cuda)],
        cmdclass={"build_ext": build_command(cuda)},
    )


if __name__ == "__main__":  # install_deps.sh only uses find_cuda_home
    main()
