"""Products in place on a GPU, eager and in CUDA graphs, in turns with torch.mm: they end, and the numbers stay right.

The blocks of a product in place wait for each other. One that waited for a block that is not running would never end.
"""

import random

import pytest
import torch

import matmuls

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120, method="thread")]  # a signal cannot end a wait for the GPU
SHAPES = [(6000, 768), (9000, 640), (6000, 1024), (20000, 256), (8192, 1024), (12000, 2048), (1000, 768), (300, 768)]


def off(y, exact):
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_products_in_turns(seed, dtype, transposed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for rows, width in draw.sample(SHAPES, len(SHAPES)):
        b = torch.linalg.qr(torch.randn(width, width, device="cuda"))[0].to(dtype)  # lengths of rows stay as they are
        b = b.t() if transposed else b
        a = torch.randn(rows, width, device="cuda", dtype=dtype)
        exact, theirs, length = a.double() @ b.double(), a @ b, a.double().norm().item()
        assert off(matmuls.matmul_(a.clone(), b), exact) <= 2 * off(theirs, exact)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        matmuls.matmul_(a, b), torch.mm(a, b, out=theirs)
        with torch.cuda.graph(graphs[0]):
            for _ in range(10):
                matmuls.matmul_(a, b)
        with torch.cuda.graph(graphs[1]):
            for _ in range(10):
                torch.mm(a, b, out=theirs)
        for _ in range(20):
            for graph in graphs:
                graph.replay()
            for _ in range(draw.choice([1, 5])):
                matmuls.matmul_(a, b), torch.mm(a, b, out=theirs)
        torch.cuda.synchronize()
        assert a.double().norm().item() == pytest.approx(length, rel=0.1)
