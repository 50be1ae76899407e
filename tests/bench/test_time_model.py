"""The model of the seconds of a distributed product, and the loads that it takes."""

import pytest
import torch

from matmuls.distributed.splits import balanced
from matmuls_bench.matrices import load
from matmuls_bench.spmm.distributed import grown
from matmuls_bench.spmm.time_model import Load, Measured, Model, fit, load_of, predictions


def test_the_load_is_counted_one_by_one():
    a = (torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) < 0.1).double().to_sparse_csr()
    sizes = [5, 0, 12, 7]
    blocks = [rows.split(sizes, 1) for rows in (a.to_dense() != 0).split(sizes)]
    needs = [[int(block.any(0).sum()) * (i != j) for j, block in enumerate(row)] for i, row in enumerate(blocks)]
    halo = max(sum(int(block.sum()) for j, block in enumerate(row) if i != j) for i, row in enumerate(blocks))
    own = max(int(row[i].sum()) for i, row in enumerate(blocks))
    received, sent = [sum(row) for row in needs], [sum(column) for column in zip(*needs, strict=True)]
    peers = max(sum(count > 0 for count in row) for row in needs)
    wanted = Load(peers, max(*received, *sent), own, halo)
    assert load_of(a.crow_indices(), a.col_indices(), sizes) == wanted


def test_the_model_finds_the_parameters_that_made_the_times():
    made = Model(2e-5, 4e11, 3e12)
    measured = []
    for n in (8, 32, 128):
        for one in (Load(1, 10_000, 400_000, 50_000), Load(3, 500_000, 40_000, 90_000)):
            exchange = one.peers * made.latency + one.rows * n * 4 / made.link
            products = (one.own + one.halo) * n / made.rate
            measured.append(Measured(n, 4, one, exchange, products, made.seconds(one, n, 4)))
    found = fit(measured)
    assert [found.latency, found.link, found.rate] == pytest.approx([made.latency, made.link, made.rate], rel=1e-6)
    assert found.error < 1e-6
    with pytest.raises(ValueError, match="bytes sent, got none"):
        fit([Measured(8, 4, Load(0, 0, 10, 0), 0.0, 1e-5, 1e-5)])


def test_predictions_have_the_loads_of_each_number():
    m = load("grid:40")
    rows = predictions(Model(1e-6, 1e11, 1e12), m.crow, m.col, 32, 4)
    assert [gpus for gpus, *_ in rows] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(row[1] == load_of(m.crow, m.col, balanced(m.crow, row[0])) for row in rows)
    assert rows[0][1].own > rows[1][1].own > rows[2][1].own
    assert rows[0][1].peers == 2
    assert all(seconds * speedup == pytest.approx(m.nnz * 32 / 1e12) for *_, seconds, speedup in rows)


def test_matrices_that_grow():
    assert grown("rmat:10:8", 4) == "rmat:12:8"
    assert grown("grid:100", 4) == "grid:200"
    for source, ranks in (("rmat:10:8", 3), ("file.mtx", 2)):
        with pytest.raises(ValueError, match="expected"):
            grown(source, ranks)
