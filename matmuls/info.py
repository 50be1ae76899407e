"""`matmuls info`: collects the facts that a bug report needs."""

import platform
import sys
from typing import Any

import torch

import custom_mm
import matmuls
from matmuls.device import takes_tf32

VERSION = matmuls.__version__


def collect() -> dict[str, Any]:
    """Versions, GPUs, libraries, live handles and build options, as JSON-serializable values."""
    build = custom_mm.build_info()
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
    return {
        "matmuls": VERSION,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": _cuda_state(build, gpus),
        "gpus": gpus,
        "packages": {name: _version(name) for name in ("numpy", "scipy", "transformers", "triton")},
        "tf32": takes_tf32(),
        "workspace_nbytes": custom_mm.workspace_size() or "default",
        "handles": custom_mm.handle_info(),
        "build": build,
    }


def _cuda_state(build: dict[str, Any], gpus: list[dict[str, Any]]) -> str:
    if build["cuda"] is None:
        reason = "torch has no CUDA" if torch.version.cuda is None else "no nvcc was found when it was built"
        return f"off: this build has no CUDA ({reason})"
    if not torch.cuda.is_available():
        return "off: built with CUDA, but no GPU or driver is visible"
    state = f"on: CUDA {build['cuda']}, built for {build['archs']}"
    others = [
        f"{gpu['name']} ({gpu['capability']})"
        for i, gpu in enumerate(gpus)
        if not serves(build["archs"], torch.cuda.get_device_capability(i))
    ]
    if others:
        state = f"{state} and not for {', '.join(others)}: build again here"
    if not build.get("hopper_kernels") and any(gpu["capability"] == "9.0" for gpu in gpus):
        state = f"{state}; without Hopper's own kernels, for which a build needs TORCH_CUDA_ARCH_LIST=9.0a"
    return state


def serves(archs: str, capability: tuple[int, int]) -> bool:
    """True if kernels built for `archs` (in the syntax of TORCH_CUDA_ARCH_LIST) run on a GPU of this capability.

    Binary code runs on the same major version and the same or a later minor one ("9.0a": on 9.0 only). PTX ("+PTX")
    runs on any later version.
    """
    for arch in archs.replace(";", " ").split():
        number, _, ptx = arch.partition("+")
        try:
            major, minor = map(int, number.rstrip("af").split("."))
        except ValueError:  # a name such as "Hopper"
            return True
        if (major, minor) == capability:
            return True
        if not number.endswith("a") and (major, minor) <= capability and (ptx or major == capability[0]):
            return True
    return False


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
