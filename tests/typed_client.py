"""A client under mypy --strict: the stubs and annotations say what users rely on."""

from typing import Any

import torch

import custom_mm
import matmuls
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
    return layer(x.mT).mT + custom_mm.cusparse_sddmm(offsets, columns, y, x, alpha=0.5).sum()  # type: ignore[no-any-return]


def facts() -> tuple[list[int], dict[str, Any]]:
    custom_mm.set_workspace_size(custom_mm.workspace_size())
    return [w["nbytes"] for h in custom_mm.handle_info() for w in h["workspaces"]], custom_mm.build_info()
