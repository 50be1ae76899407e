"""Switches by which kernels are chosen: each as a function that sets it to another value, and returns one that sets it
back."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import custom_mm
import matmuls


def _attribute(holder, name, value):
    def change():
        before = getattr(holder, name)
        setattr(holder, name, value)
        return lambda: setattr(holder, name, before)

    return change


def _called(get, put, value):
    def change():
        before = get()
        put(value)
        return lambda: put(before)

    return change


def _entered(make):
    def change():
        scope = make()
        scope.__enter__()
        return lambda: scope.__exit__(None, None, None)

    return change


_cuda, _dense = torch.backends.cuda, torch.backends.cuda.matmul
ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
SWITCHES = {
    "TF32": _attribute(_dense, "fp32_precision", "tf32"),
    "TF32 of all": _called(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "bfloat16 in oneDNN": _attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "sums in float16": _attribute(_dense, "allow_fp16_reduced_precision_reduction", False),
    "sums in bfloat16": _attribute(_dense, "allow_bf16_reduced_precision_reduction", False),
    "accumulation in float16": _attribute(_dense, "allow_fp16_accumulation", True),
    "deterministic": _called(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "flash attention": _called(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, False),
    "memory-efficient attention": _called(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, False),
    "attention by products": _called(_cuda.math_sdp_enabled, _cuda.enable_math_sdp, False),
    "cuDNN's attention": _called(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, False),
    "order of attention": _entered(lambda: sdpa_kernel(ORDER, set_priority=True)),
    "cuDNN": _attribute(torch.backends.cudnn, "enabled", False),
    "oneDNN": _called(lambda: torch.backends.mkldnn.enabled, lambda on: torch.backends.mkldnn.set_flags(on), False),
    "batch invariance": _entered(lambda: matmuls.handles(batch_invariant=True)),
    "a kernel": _entered(lambda: custom_mm.without_kernels("nearly_even")),
    "another kernel": _entered(lambda: custom_mm.without_kernels("chunks")),
}
