"""Calls that type checkers must refuse: each line that is marked is an error of mypy and of pyright, and no other."""

import torch

import custom_mm
import matmuls


def strings(a: torch.Tensor, b: torch.Tensor) -> None:
    matmuls.matmul(a, b, activation="gelu_tahn")  # error
    matmuls.matmul(a, b, activation="gelu_tanh")
    matmuls.feed_forward_(a, b, None, b, None, activation="silu")  # error
    matmuls.spmm(a, b, reduce="avg")  # error
    matmuls.spmm(a, b, reduce="mean")
    custom_mm.bias_act_(a, b, "Gelu")  # error
    custom_mm.cublaslt_matmul(a, b, b, "swish")  # error
    custom_mm.cusparse_spmm(a, a, a, b, 3, 4, layout="ell")  # error
    custom_mm.cusparse_spmm(a, a, a, b, 3, 4, algorithm="csr_alg4")  # error
    custom_mm.cusparse_prepare(a, a, a, b, 3, 4, layout="csr", algorithm="CSR_ALG2")  # error


def results(a: torch.Tensor, b: torch.Tensor) -> None:
    product: str = matmuls.cublasMM.apply(a, b)  # error
    product = matmuls.cublasTransabMM.apply(a)  # error
    probabilities: int = matmuls.FusedSoftmax.apply(a, None, 1.0)  # error
    shape: int = matmuls.plan(a).T  # error
    vector: float = a @ matmuls.plan(a)  # error
    print(product, probabilities, shape, vector)


def arguments(a: torch.Tensor) -> None:
    matmuls.softmax_(3.0)  # error
    matmuls.masked_linear(a, a, a, True)  # error
    matmuls.plan(a).to("cpu", "float16")  # error
    matmuls.plan(a, constant="yes")  # error
    matmuls.spmm("matrix.mtx", a)  # error
    matmuls.nn.SparseLinear("4", 3)  # error
    matmuls.softmax_over(a)  # error
    matmuls.nn.DenseLinear(4, 3)  # error
    custom_mm.init_cufft()  # error
