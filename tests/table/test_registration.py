"""Every operator of the table has kernels, meta function, gradient and autocast rule. Needs no GPU, also in a CUDA
build.
"""

import re

import pytest
import torch

import custom_mm
from matmuls_bench.table import TABLE, operators

CUDA_BUILD = custom_mm.build_info()["cuda"] is not None


@pytest.mark.parametrize("operator", operators(), ids=str)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta", "Autograd"])
def test_every_operator_has_a_kernel_for(operator, key):
    has = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    in_triton = re.search("::(mask_plan|masked_(linear|weights|sums|ffn)|bsr_)", operator.name())
    assert has == (CUDA_BUILD or key != "CUDA" or bool(in_triton))  # Triton kernels need no nvcc


@pytest.mark.parametrize("spec", [s for s in TABLE if s.autocast], ids=lambda s: s.name)
@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA"])
def test_every_differentiable_operator_has_an_autocast_rule(spec, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(spec.operators[0].name(), key)


def test_the_table_names_every_operator():
    """An operator without a row would have no tests. Composite operators are tested through their callers."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("custom_mm::")}
    composite = {
        n for n in registered if torch._C._dispatch_has_kernel_for_dispatch_key(n, "CompositeImplicitAutograd")
    }
    assert registered - composite == {op.name() for op in operators()}
    assert composite == {"custom_mm::attention", "custom_mm::attention_at_once", "custom_mm::matmul_backward"}


def test_a_cuda_build_knows_its_libraries():
    info = custom_mm.build_info()
    assert {"torch", "compiler", "cuda"} <= info.keys()
    if CUDA_BUILD:
        assert {"archs", "cublas", "cublaslt", "cusparse"} <= info.keys()
