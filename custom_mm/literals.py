"""The strings that operators take, as types: a misspelt one is an error of a type checker."""

from typing import Literal

Activation = Literal["relu", "gelu", "gelu_tanh"]  # of `matmul`, `bias_act_` and `feed_forward_`; "gelu" by erf
Reduce = Literal["sum", "mean", "max", "min"]  # of `spmm`
Layout = Literal["csr", "csc", "coo", "bsr"]  # of `cusparse_spmm`
Algorithm = Literal[  # of `cusparse_spmm`; each names the layout that it is for
    "default",
    "csr_alg1",
    "csr_alg2",
    "csr_alg3",
    "coo_alg1",
    "coo_alg2",
    "coo_alg3",
    "coo_alg4",
    "bsr_alg1",
]
