"""A client under mypy --strict and pyright: the stubs and annotations say what users rely on."""

# pyright: strict

from typing import Any, assert_type

import torch

import custom_mm
import matmuls
from custom_mm.literals import Activation, Reduce
from matmuls.nn import SparseLinear


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    devices: int = custom_mm.init_cublas()
    assert devices >= 0
    c: torch.Tensor = matmuls.matmul(a, b, transb=True, bias=b[0], activation="relu")
    c = custom_mm.cublas_mmul(a, b, c, transa=False, transb=True)
    c = custom_mm.cublas_bmm(a, b, None, 3)
    c = custom_mm.cublaslt_matmul(a, b, bias=None, activation="gelu")
    c = custom_mm.bias_act_(c, None, "gelu_tanh")
    with matmuls.handles() as ready:
        assert ready >= devices
    custom_mm.destroy_cublas()
    return c


def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = matmuls.softmax_(x, dim=-1)
    y = matmuls.softmax_backward_(y, matmuls.softmax(x, out=torch.empty_like(x)))
    y = matmuls.rms_norm_(matmuls.layer_norm_(y, weight, bias=None, residual=x), weight, eps=1e-6)
    y = matmuls.scaled_masked_softmax(y, mask=None, scale=0.125, causal=True, inplace=True)
    return matmuls.inplace_softmax(y, 3, 4)


def experts(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    plan: matmuls.MaskPlan = matmuls.mask_plan(mask)
    y: torch.Tensor = matmuls.masked_linear(x, w, w, plan, w[0], w[1])
    y = matmuls.masked_ffn(y, w, w, w, w, w, w, mask, recompute=True)
    return matmuls.MaskedLinear.apply(y, w, w, plan)


def sparse(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: matmuls.SparsePlan = matmuls.plan(a, tune=[128], products=1000).update(a.values())
    y: torch.Tensor = made @ x + matmuls.spmm(a, x, reduce="mean", alpha=0.5) + matmuls.cusparseMM.apply(a, x)
    y = matmuls.spmm(made.with_values(matmuls.sddmm(y, x.mT, made)), x, beta=1, out=y)
    probabilities: torch.Tensor = matmuls.sparse_softmax(made.values, made, scale=0.5)
    y += probabilities.sum() + made.nbytes
    return matmuls.sparse_attention(y, x, x, made, scale=None)


def cusparse(offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    custom_mm.init_cusparse()
    prepared: torch.Tensor = custom_mm.cusparse_prepare(offsets, columns, values, x, 3, 4, algorithm="csr_alg3")
    y: torch.Tensor = custom_mm.cusparse_spmm(offsets, columns, values, x, 3, 4, transb=True, prepared=prepared)
    y = custom_mm.cusparse_mmul(values, columns, offsets, 5, 3, 4, x, y)
    layer = SparseLinear.from_linear(torch.nn.Linear(4, 3), sparsity=0.5)
    product: torch.Tensor = layer(x.mT)
    return product.mT + custom_mm.cusparse_sddmm(offsets, columns, y, x, alpha=0.5).sum()


def facts() -> tuple[list[int], dict[str, Any]]:
    custom_mm.set_workspace_size(custom_mm.workspace_size())
    return [w["nbytes"] for h in custom_mm.handle_info() for w in h["workspaces"]], custom_mm.build_info()


def of_the_seeds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert_type(matmuls.cublasMM.apply(a, b), torch.Tensor)
    assert_type(matmuls.cublasTransaMM.apply(a, b), torch.Tensor)
    assert_type(matmuls.cublasTransbMM.apply(a, b), torch.Tensor)
    assert_type(matmuls.cublasTransabMM.apply(a, b), torch.Tensor)
    assert_type(matmuls.cusparseMM.apply(matmuls.plan(a), b), torch.Tensor)
    assert_type(matmuls.FusedSoftmax.apply(a, None, 0.5), torch.Tensor)
    assert_type(matmuls.MaskedLinear.apply(a, b, b, a > 0), torch.Tensor)
    return matmuls.MaskedFFN.apply(a, b, b, b, b, b, b, a > 0)


def plans(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = matmuls.plan(a, constant=True)
    assert_type(made.T, matmuls.SparsePlan)
    assert_type(made.to("cuda", torch.float16), matmuls.SparsePlan)
    assert_type(made.to(torch.float16).mT.to(device=0), matmuls.SparsePlan)
    assert_type(x @ made, torch.Tensor)
    assert_type(made @ x, torch.Tensor)
    shape: torch.Size = made.shape
    return x[0] @ made.T + shape[0]


def modules(x: torch.Tensor, activation: Activation, reduce: Reduce) -> torch.Tensor:
    """Modules that are imported at first access are known under plain `import matmuls`."""
    layer = matmuls.nn.SparseLinear.from_linear(torch.nn.Linear(4, 3), sparsity=0.5)
    assert_type(layer.weight, torch.Tensor)
    assert_type(layer.freeze().plan(), matmuls.SparsePlan)
    inplace: torch.nn.Linear = matmuls.nn.InplaceLinear(4, 3)
    context, probabilities = matmuls.attention.attend(x, x, x, None, 0.125)
    if probabilities is not None:
        context = context + matmuls.blocks.bsr_spmm(x, x, x, x, 4) + probabilities
    context = matmuls.spmm(x, context, reduce=reduce)
    return matmuls.matmul(inplace.weight, context, activation=activation)
