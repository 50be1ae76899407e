"""Tensors on a GPU other than the current one: results are correct, and the current GPU stays current and gets no
work.
"""

from dataclasses import replace

import pytest
import torch

import common.table_cases as table
from matmuls import masked_linear, plan
from matmuls_bench import operations
from matmuls_bench.operations.jobs import cost_of
from matmuls_bench.operations.timing import errors_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SECOND = "cuda:1"
LARGEST = 2e10  # operations of a case: large enough for all tiles and plans, seconds at most in float64


@pytest.fixture(autouse=True)
def first_gpu_is_left_alone():
    torch.cuda.set_device(0)
    torch.cuda.synchronize(0)
    held = torch.cuda.memory_allocated(0)
    yield
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) <= held


@table.every_dtype
def test_float64_is_the_truth(spec, dtype):
    table.test_float64_is_the_truth(spec, dtype, SECOND)


@table.every_dtype
def test_empty(spec, dtype):
    table.test_empty(spec, dtype, SECOND)


@table.gradient_dtypes
def test_gradcheck(spec, dtype):
    table.test_gradcheck(spec, dtype, SECOND)


@torch.no_grad()
def test_large_cases():
    jobs = operations.plan([], "cuda", [torch.bfloat16, torch.float32], quick=False)
    seen = 0
    for job in jobs:
        if job.kind != "gpu" or cost_of(job) > LARGEST:
            continue
        job = replace(job, device=SECOND)
        ours, others = errors_of(job, job.draw(), {job.rival: job.reference})
        assert ours <= 2 * others[job.rival] + torch.finfo(job.dtype).eps, job.label
        seen += 1
    assert seen > 100


@pytest.mark.parametrize("rows", [512, 4096])
def test_training_of_two_experts(rows):
    draw = torch.Generator(SECOND).manual_seed(0)
    x, *weights = (
        torch.randn(n, 2048, generator=draw, device=SECOND, dtype=torch.bfloat16, requires_grad=True)
        for n in (rows, 2048, 2048)
    )
    mask = torch.rand(rows, generator=draw, device=SECOND) < 0.3
    y = masked_linear(x, *weights, mask)
    y.square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    truth = torch.where(mask[:, None], wide[0] @ wide[1].T, wide[0] @ wide[2].T)
    truth.square().sum().backward()
    for ours, right in ((y, truth), *((t.grad, w.grad) for t, w in zip((x, *weights), wide, strict=True))):
        assert ours.device == torch.device(SECOND)
        assert table.error(ours, right) < 1e-2


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plan(share, dtype):
    draw = torch.Generator(SECOND).manual_seed(0)
    dense = torch.randn(1024, 768, generator=draw, device=SECOND)
    dense[torch.rand(dense.shape, generator=draw, device=SECOND) > share] = 0
    dense, b = dense.to(dtype), torch.randn(768, 256, generator=draw, device=SECOND).to(dtype)
    matrix = dense.to_sparse_csr()
    made = plan(matrix, constant=True)
    truth = dense.double() @ b.double()
    for _ in range(3):  # measured, chosen, repeated by the prepared call
        assert table.error(made @ b, truth) < 2e-3
    with torch.cuda.device(SECOND):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made @ b
        b.neg_()
        graph.replay()
    assert table.error(y, -truth) < 2e-3
    values = made.values.clone().requires_grad_()
    (made.with_values(values) @ b.detach()).sum().backward()
    assert table.error(values.grad, b.double().sum(1)[matrix.col_indices()]) < 2e-3
