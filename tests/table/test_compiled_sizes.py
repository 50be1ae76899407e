"""torch.compile compiles an operation for its first sizes, and once more with dynamic sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import custom_mm
import matmuls
from matmuls import attention
from matmuls_bench.table import Call, Draw

SIZES = [(2, 7, 11, 6), (3, 8, 12, 5), (4, 9, 300, 33), (5, 700, 1100, 7), (2, 5, 8, 4)]  # batch, rows, columns, inner

# Functions of a Draw and one of SIZES that return a call.
CALLS = {
    matmuls.softmax_: lambda draw, b, m, n, k: Call((draw(b, m, n), 1)),
    matmuls.softmax: lambda draw, b, m, n, k: Call((draw(b, m, n),)),
    matmuls.softmax_backward: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(b, m, n))),
    matmuls.softmax_backward_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(b, m, n))),
    matmuls.layer_norm_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n), draw(n))),
    matmuls.rms_norm_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n))),
    matmuls.inplace_softmax: lambda draw, b, m, n, k: Call((draw(b, m, n), b * m, n)),
    matmuls.layernorm: lambda draw, b, m, n, k: Call((draw(b, m, n), b * m, n)),
    matmuls.inplace_softmax_backward: lambda draw, b, m, n, k: Call(
        (draw(b, m, n), draw(b, m, k), draw(b, n, k), b * m, n, k)
    ),
    matmuls.scaled_masked_softmax: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n) > 1, 0.5)),
    matmuls.matmul: lambda draw, b, m, n, k: Call((draw(b, m, k), draw(b, k, n))),
    custom_mm.cublaslt_matmul: lambda draw, b, m, n, k: Call((draw(b, m, k), draw(k, n), draw(n), "gelu")),
    custom_mm.bias_act_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n), "gelu_tanh")),
    matmuls.matmul_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n, n))),
    matmuls.linear_: lambda draw, b, m, n, k: Call((draw(b, m, n), draw(n, n), draw(n))),
    matmuls.feed_forward_: lambda draw, b, m, n, k: Call(
        (draw(b, m, n), draw(k, n), draw(k), draw(n, k), draw(n)), {"activation": "gelu"}
    ),
    attention.attend: lambda draw, b, m, n, k: Call((draw(b, 2, m, 8), draw(b, 2, n, 8), draw(b, 2, n, 8), None, 0.3)),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_dynamic_sizes_are_compiled_once(function, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for sizes in SIZES:
        calls = [CALLS[function](Draw(torch.float32, device), *sizes) for _ in range(2)]
        torch.testing.assert_close(
            compiled(*calls[0].args, **calls[0].kwargs), function(*calls[1].args, **calls[1].kwargs)
        )
    assert counter.frame_count <= 2
