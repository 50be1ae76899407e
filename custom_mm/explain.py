"""Which kernel a call takes and why, without running it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _C

Launch = dict[str, int | bool | str]
# Multiprocessors, shared memory of a block and of a multiprocessor, capability.
Gpu = tuple[int, int, int, tuple[int, int]]

# From NVIDIA's data sheets and the table of technical specifications in the CUDA programming guide.
GPUS: dict[str, Gpu] = {
    "T4": (40, 64 << 10, 64 << 10, (7, 5)),
    "A100": (108, 163 << 10, 164 << 10, (8, 0)),
    "H100": (132, 227 << 10, 228 << 10, (9, 0)),
}


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call runs.

    Attributes:
        operation: the operator.
        kernel: the kernel's name. On a GPU it is one of those listed under "Names of kernels" in the reference, or that
            of a library; on a CPU it is "cpu: " and the name of a C++ function.
        why: the reason for the choice.
        launch: on a GPU the parameters of the launch, such as the number of threads of a block.
    """

    operation: str
    kernel: str
    why: str
    launch: Launch = field(default_factory=dict)  # threads of a block, vectors per thread and so on, of a GPU's kernel

    def __str__(self) -> str:
        launch = ", ".join(f"{name} {value}" for name, value in self.launch.items())
        return f"{self.operation}: {self.kernel} ({self.why})" + (f"; {launch}" if launch else "")


Answer = tuple[str, str, Launch]
INVARIANT = "handles(batch_invariant=True): one order of sums for any number of rows"
Arguments = Mapping[str, Any]


def _softmax(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    out = a["x"] if name.endswith("_") else a["out"]
    return _C.explain_softmax(name, a["x"], a["dim"], out, gpu)


def _masked_softmax(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    out = a["x"] if name.endswith("_") else None
    return _C.explain_scaled_masked_softmax(a["x"], a["mask"], a["scale"], a["causal"], out, gpu)


def _softmax_backward(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    out = a["y"] if name.endswith("_") else a["out"]
    return _C.explain_softmax_backward(a["y"], a["grad"], a["dim"], a["scale"], a["causal"], out, gpu)


def _norm(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    keep = name == "norm_keep_"  # rms_norm_ has no bias
    rms = a["rms"] if keep else name == "rms_norm_"
    tensors = a["x"], a["weight"], a.get("bias"), a["eps"], a["residual"]
    return _C.explain_norm("rms_norm_" if rms else "layer_norm_", *tensors, rms, keep, gpu)


def _norm_backward(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    tensors = a["grad"], a["xhat"], a["rstd"], a["weight"]
    return _C.explain_norm_backward(*tensors, a["rms"], a["need_dx"], a["need_columns"], gpu)


def _matmul(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    if gpu is None and not a["a"].is_cuda:
        if _C.is_batch_invariant():
            return "cpu: batch_invariant_product_cpu", INVARIANT, {}
        return "cpu: at::matmul", "torch's BLAS", {}
    if _C.is_batch_invariant():
        return "cublaslt", INVARIANT, {}
    return "cublas", "cublasGemmEx, or cublasGemmStridedBatchedEx for a batch that is not one matrix", {}


def _matmul_in_place(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    if gpu is not None:
        raise ValueError(
            f"explain: expected no other gpu for {name}, whose kernels ask the GPU for its room, got {gpu}"
        )
    kernel, why, launch = _C.explain_in_place(a["a"], a["b"], a["transb"], a["bias"], a["workspace"])
    if _C.is_batch_invariant():
        return kernel if a["a"].is_cuda else "cpu: batch_invariant_product_cpu", INVARIANT, launch
    return kernel if a["a"].is_cuda else "cpu: at::mm", why, launch


def _spmm(name: str, a: Arguments, gpu: Gpu | None) -> Answer:
    meta = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in a.items() if key != "out"}
    torch.ops.custom_mm.csr_spmm.default(**meta)  # raises the operator's errors
    b, rows, nonzeros = a["dense"], a["crow"].shape[0] - 1, a["col"].shape[0]
    if gpu is None and not b.is_cuda:
        return "cpu: run_cpu", f"{nonzeros} nonzeros in {rows} rows, shared out among the threads", {}
    if a["reduce"] in ("max", "min") or a["selected"] is not None:
        return "by_rows", "a warp for a row of A, a lane for a column of B", {}
    if gpu is None:
        limits = torch.cuda.get_device_properties(b.device)
        sms, capability = limits.multi_processor_count, (limits.major, limits.minor)
    else:
        sms, _, _, capability = gpu
    read = b.stride(-1) == 1 or b.shape[-1] == 1  # as it lies; the operator copies other layouts
    starts = (b.stride(-2), b.storage_offset()) if read else ()
    vectors = all(n * b.element_size() % 16 == 0 for n in (b.shape[-1], *starts))
    choice = _C.choose_spmm(
        rows=rows,
        columns=b.shape[-2],
        nonzeros=nonzeros,
        longest=a["longest"],
        n=b.shape[-1],
        batches=b.shape[:-2].numel(),
        element_bytes=b.element_size(),
        vectors=vectors,
        multiprocessors=sms,
        plain=a["reduce"] == "sum",
        alpha=a["alpha"],
        fp16x2=capability == (9, 0),
        cublas=not torch.are_deterministic_algorithms_enabled(),
    )
    kernel: str = choice.pop("kernel")
    return kernel, _SPMM_KERNELS[kernel], {k: v for k, v in choice.items() if not k.startswith("densify")}


_SPMM_KERNELS = {  # why csr_spmm takes each of its kernels
    "by_rows": "rows of about equal length",
    "split_rows": "long rows of A, or few rows, are cut",
    "shares": "rows of uneven length, in shares of equal rows and nonzeros",
    "fp16x2": "estimated faster with A densified for this product",
    "dense": "estimated faster with A densified for this product, by cuBLAS",
}


# Operator of torch.ops.custom_mm -> who explains a call of it. Another operator needs a line here.
_EXPLAINERS: dict[str, Callable[[str, Arguments, Gpu | None], Answer]] = {
    "softmax": _softmax,
    "softmax_": _softmax,
    "scaled_masked_softmax": _masked_softmax,
    "scaled_masked_softmax_": _masked_softmax,
    "softmax_backward": _softmax_backward,
    "softmax_backward_": _softmax_backward,
    "layer_norm_": _norm,
    "rms_norm_": _norm,
    "norm_keep_": _norm,
    "norm_backward": _norm_backward,
    "matmul": _matmul,
    "matmul_": _matmul_in_place,
    "csr_spmm": _spmm,
}


@functools.cache
def _parameters(name: str) -> dict[str, Any]:
    """The operator's parameters, in order, with their defaults (`...` if required); `out` last, if it takes one."""
    operator = getattr(torch.ops.custom_mm, name)
    arguments = operator.default._schema.arguments
    found = {a.name: a.default_value if a.has_default_value() else ... for a in arguments}
    return found | ({"out": None} if "out" in operator.overloads() else {})


def _bind(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    parameters = _parameters(name)
    positional = [p for p in parameters if p != "out"]
    if len(tensors) > len(positional):
        raise ValueError(f"explain: expected at most {len(positional)} arguments of {name}, got {len(tensors)}")
    given = dict(zip(positional, tensors, strict=False))
    for option in options:
        if option not in parameters:
            raise ValueError(f"explain: expected options of {name}, {', '.join(parameters)}, got {option}")
        if option in given:
            raise ValueError(f"explain: expected {option} of {name} once, got it by position and by name")
    bound = parameters | given | options
    if missing := [p for p, value in bound.items() if value is ...]:
        raise ValueError(f"explain: expected {', '.join(missing)} of {name}, got none")
    return bound


def _limits(gpu: str | Gpu | None) -> Gpu | None:
    if not isinstance(gpu, str):
        if gpu is not None and len(gpu) != 4:
            raise ValueError(f"explain: expected gpu of 4 entries, from multiprocessors to capability, got {gpu!r}")
        return gpu
    if gpu not in GPUS:
        raise ValueError(f"explain: expected gpu to be one of {', '.join(GPUS)}, got {gpu!r}")
    return GPUS[gpu]


def explain(name: str, *tensors: Any, gpu: str | Gpu | None = None, **options: Any) -> Explanation:
    """Says which kernel a call would run, and why, without computing or writing anything.

    For tensors on a GPU it names the kernel that runs on this GPU; for tensors on a CPU, the C++ function. It assumes
    that an output which the operator allocates is aligned to 16 bytes, and that as many blocks fit on a multiprocessor
    as the limits of the GPU allow; a real launch asks CUDA instead.

    Args:
        name: an operator of torch.ops.custom_mm: softmax, softmax_, scaled_masked_softmax, scaled_masked_softmax_,
            softmax_backward, softmax_backward_, layer_norm_, rms_norm_, norm_keep_, norm_backward, matmul, matmul_ or
            csr_spmm.
        *tensors: the operator's arguments by position.
        gpu: choose for another GPU than that of the tensors: "T4", "A100", "H100", or a tuple (multiprocessors, bytes
            of shared memory per block, bytes of shared memory per multiprocessor, (major, minor) compute capability).
            Not possible for matmul_.
        **options: the operator's arguments by name.

    Returns:
        An `Explanation` with `kernel`, `why` and `launch`.

    Raises:
        ValueError: if name, an option or gpu is unknown.
        RuntimeError: the errors that the operator itself raises for its arguments.

    Examples:
        >>> import torch, custom_mm
        >>> print(custom_mm.explain("softmax_", torch.zeros(64, 8192, dtype=torch.bfloat16), gpu="H100").kernel)
        nearly_even
    """
    if name not in _EXPLAINERS:
        raise ValueError(f"explain: expected one of {', '.join(_EXPLAINERS)}, got {name!r}")
    kernel, why, launch = _EXPLAINERS[name](name, _bind(name, tensors, options), _limits(gpu))
    return Explanation(name, kernel, why, launch)
