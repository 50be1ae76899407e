"""The GPU kernel of a sparse product without a plan, and how it splits the work, as chosen from sizes alone.

`tests/data/spmm_choices.json.gz` has the choices that the launcher made before they were one function.
"""

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from custom_mm import _C, explain
from matmuls.sparse import costs
from matmuls.sparse.names import BY_ROWS, DENSE, FP16X2, SHARES, SPLIT_ROWS

DATA = Path(__file__).resolve().parents[1] / "data/spmm_choices.json.gz"
ROWS = (1, 100, 4096, 65_537, 2**20)
MEANS = (0, 1, 5, 40, 100, 800)  # nonzeros of a row
LONGEST = (-1, 1, 9, 40)  # times the mean
N = (1, 8, 32, 33, 64, 128, 256, 520)  # columns of B
KINDS = ((2, True), (2, False), (4, True), (4, False), (8, True))  # bytes of an element, aligned to 16 bytes
PARTS = ((1, 132), (3, 132), (1, 68))  # entries of the batch, multiprocessors
FIELDS = ("lanes", "parts", "vectors", "shares", "lean", "blocks", "piece_blocks", "slices", "rows_each")
FIELDS += ("slices_first", "slot", "slots", "densify", "densify_copies")


def cases():
    """(rows, columns, nonzeros, longest, n, batches, element_bytes, vectors, multiprocessors) of every case."""
    for rows, mean, times, n, (size, vectors), (batches, sms) in itertools.product(
        ROWS, MEANS, LONGEST, N, KINDS, PARTS
    ):
        longest = -1 if times < 0 else min(mean * times, rows * mean)
        yield rows, max(rows // 2, 64), rows * mean, longest, n, batches, size, vectors, sms


def choice_of(case):
    names = "rows", "columns", "nonzeros", "longest", "n", "batches", "element_bytes", "vectors", "multiprocessors"
    return _C.choose_spmm(**dict(zip(names, case, strict=True)))


def test_the_choice_is_that_of_the_table():
    table = json.loads(gzip.decompress(DATA.read_bytes()))
    drawn = list(cases())
    assert len(drawn) == len(table) > 5000
    for case, expected in zip(drawn, table, strict=True):
        choice = choice_of(case)
        assert [int(choice[name]) for name in FIELDS] == expected, case


def test_every_choice_is_compiled():
    """choose_spmm raises if the chosen instance is not in the lists that launches expand."""
    generator, chosen = random.Random(0), set()
    near = [n * 2**p + d for n in (1, 3, 5) for p in range(12) for d in (-1, 0, 1)]
    for _ in range(100_000):
        rows, mean = (
            generator.choice((1, 60, 700, 9000, 10**5, 10**6)),
            generator.choice((0, 1, 3, 4, 7, 8, 31, 32, 64)),
        )
        longest = generator.choice((-1, mean, 9 * mean, 10**4))
        n, size = max(generator.choice(near), 1), generator.choice((2, 4, 8))
        vectors = n * size % 16 == 0 and generator.random() < 0.9
        case = rows, 4096, rows * mean, longest, n, generator.choice((1, 3)), size, vectors, generator.choice((40, 132))
        choice = choice_of(case)
        chosen.add((size * vectors, *(choice[name] for name in FIELDS[:5])))
    assert len(chosen) >= 3 + 4 + 16 + 18


def test_the_name_says_whether_rows_are_cut():
    even = {"rows": 4096, "columns": 4096, "nonzeros": 2**17, "n": 64}
    assert _C.choose_spmm(longest=40, **even)["kernel"] == BY_ROWS
    cut = _C.choose_spmm(longest=4096, **even)
    assert (cut["kernel"], cut["shares"]) == (SPLIT_ROWS, False)
    many = {"rows": 2**20, "columns": 4096, "nonzeros": 2**23, "n": 64}
    shared = _C.choose_spmm(longest=4096, **many)
    assert (shared["kernel"], shared["shares"]) == (SHARES, True)
    few = {"rows": 64, "columns": 2**20, "nonzeros": 2**17, "n": 1, "vectors": False}
    assert _C.choose_spmm(longest=2**16, **few)["kernel"] == SPLIT_ROWS


def test_a_grid_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match=r"spmm: expected at most 2\^31 - 1 blocks of rows, got \d+"):
        _C.choose_spmm(rows=2**31, columns=8, nonzeros=2**33, longest=4, n=2**20, element_bytes=8)


def test_python_reads_the_limits_of_the_kernels():
    limits = _C.kernel_limits
    assert limits["fewest_in_fp16x2"] == costs.MIN_MEAN_FP16X2
    assert limits["hopper_block_bytes"] == costs.SHARED_BYTES


def explained(rows, columns, mean, n, dtype=torch.float32, gpu="H100", **options):
    crow = torch.arange(0, rows * mean + 1, mean, dtype=torch.int32)
    col, values = torch.zeros(rows * mean, dtype=torch.int32), torch.zeros(rows * mean, dtype=dtype)
    dense = torch.empty(columns, n, dtype=dtype)
    return explain("csr_spmm", crow, col, values, dense, columns, gpu=gpu, **options)


def test_explain_says_the_kernel_of_a_product():
    assert explained(4096, 4096, 4, 64, longest=5).kernel == BY_ROWS
    assert explained(4096, 4096, 4, 64, longest=2000).kernel == SPLIT_ROWS
    assert explained(4096, 4096, 4, 64, longest=5).launch["lanes"] == 16
    assert explained(4096, 4096, 4, 64, reduce="max").kernel == BY_ROWS
    assert explained(2048, 2048, 1024, 512, longest=1024).kernel == FP16X2
    assert explained(2048, 2048, 1024, 512, longest=1024, gpu="A100").kernel == BY_ROWS  # fp16x2 is for Hopper
    assert explained(2048, 2048, 1024, 512, torch.float16, longest=1024).kernel == DENSE
    assert explained(64, 64, 4, 8, gpu=None).kernel == "cpu: run_cpu"


def test_explain_says_the_library_of_a_dense_product():
    a = torch.zeros(4, 4)
    assert explain("matmul", a, a).kernel == "cpu: at::matmul"
    assert explain("matmul", a, a, gpu="A100").kernel == "cublas"
