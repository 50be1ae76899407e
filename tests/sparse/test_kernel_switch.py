"""Kernels of sparse products that are switched off: what is taken instead, and each of them alone."""

from types import SimpleNamespace

import pytest
import torch

from common.choice_cases import draw
from custom_mm import _C, explain, kernel_switch, only_kernel, without_kernels
from matmuls import device as limits
from matmuls import plan, spmm
from matmuls.sparse import default_spmm, layouts, names, select, selector

KERNELS = kernel_switch.FAMILIES["sparse products"].kernels
ROWS = names.BY_ROWS, names.SPLIT_ROWS, names.SHARES
EVEN = {"rows": 4096, "columns": 4096, "nonzeros": 2**17, "n": 64, "longest": 40}
SKEWED = EVEN | {"longest": 4096}
LARGE = {"rows": 2**20, "columns": 4096, "nonzeros": 2**23, "n": 64, "longest": 4096}


@pytest.fixture
def h100(monkeypatch):
    """Facts of a GPU for choices that nothing runs."""
    for module in (select, selector, default_spmm):
        for name, value in (
            ("has_hopper_kernels", lambda device: device.type == "cuda"),
            ("memory", lambda device: limits.H200),
            ("multiprocessors", lambda device: 132),
        ):
            monkeypatch.setattr(module, name, value, raising=False)
    return torch.device("cuda")


def pattern_of(rows=4096, columns=4096, nonzeros=2**20, longest=300, **facts):
    crow = SimpleNamespace(dtype=torch.int32)
    known = {"distinct": True, "beyond_two": nonzeros // 4, "far": 0, "blocks": None, "crow": crow}
    known["reordered"] = lambda size, piece: None
    return SimpleNamespace(rows=rows, columns=columns, nonzeros=nonzeros, longest=longest, **(known | facts))


def test_the_family_has_every_name_of_a_kernel_once():
    named = {value for name, value in vars(names).items() if name.isupper()} - {names.DEFAULT}
    assert set(KERNELS) == named
    assert len(KERNELS) == len(named)
    assert not named & set(kernel_switch.FAMILIES["rows"].kernels)


@pytest.mark.parametrize(
    ("sizes", "off", "kernel"),
    [
        (EVEN, (), "by_rows"),
        (EVEN, ("split_rows", "shares"), "by_rows"),
        (EVEN, ("by_rows",), "split_rows"),
        (EVEN, ("by_rows", "split_rows"), "shares"),
        (SKEWED, (), "split_rows"),
        (SKEWED, ("split_rows",), "by_rows"),
        (SKEWED, ("split_rows", "by_rows"), "shares"),
        (LARGE, (), "shares"),
        (LARGE, ("shares",), "split_rows"),
        (LARGE, ("shares", "split_rows"), "by_rows"),
    ],
)
def test_the_next_row_kernel_is_taken(sizes, off, kernel):
    with without_kernels(*off):
        choice = _C.choose_spmm(**sizes)
    assert choice["kernel"] == kernel
    assert choice["shares"] == (kernel == "shares")
    assert (choice["slots"] > 0) == (kernel != "by_rows")
    assert (choice["piece_blocks"] > 0) == (kernel == "split_rows")


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        (EVEN | {"element_bytes": 8}, "shares"),
        (EVEN | {"vectors": False}, "shares"),
        (EVEN | {"nonzeros": 0, "longest": 0}, "split_rows"),
        (EVEN | {"nonzeros": 2**32}, "by_rows"),
        (EVEN, "fp16x2"),
        (EVEN, "packed_mma"),
    ],
)
def test_a_product_that_no_kernel_takes_is_refused(sizes, kernel):
    with only_kernel(kernel), pytest.raises(ValueError, match=r"every kernel that takes this product .* is switched"):
        _C.choose_spmm(**sizes)


def test_the_densified_product_is_switched():
    sizes = {"rows": 2048, "columns": 2048, "nonzeros": 2**21, "n": 512, "longest": 1024}
    wide = {"plain": True, "fp16x2": True, "cublas": True}
    narrow = wide | {"element_bytes": 2}
    assert _C.choose_spmm(**sizes, **wide)["kernel"] == "fp16x2"
    assert _C.choose_spmm(**sizes, **narrow)["kernel"] == "dense"
    for off in ("plain", "fp16x2"):
        assert _C.choose_spmm(**sizes, **(wide | {off: False}))["kernel"] == "by_rows"
    for other in ({"plain": False}, {"cublas": False}, {"alpha": 2.0}, {"batches": 2}):
        assert _C.choose_spmm(**sizes, **(narrow | other))["kernel"] == "by_rows"
    few = sizes | {"nonzeros": 2**14, "longest": 8}  # 8 a row: fp16x2 would be less exact than float32
    with without_kernels(*ROWS), pytest.raises(ValueError, match="switched off"):
        _C.choose_spmm(**few, **wide)
    with without_kernels("fp16x2", "dense"):
        assert _C.choose_spmm(**sizes, **wide)["kernel"] == "by_rows"
        assert _C.choose_spmm(**sizes, **narrow)["kernel"] == "by_rows"
    small = sizes | {"rows": 64, "nonzeros": 2**13, "n": 8}
    assert _C.choose_spmm(**small, **narrow)["kernel"] != "dense"
    with only_kernel("dense"):
        assert _C.choose_spmm(**small, **narrow)["kernel"] == "dense"


def test_explain_says_what_is_taken_instead():
    crow, col = torch.arange(0, 4097 * 32, 32, dtype=torch.int32), torch.zeros(2**17, dtype=torch.int32)
    given = crow, col, torch.zeros(2**17), torch.empty(4096, 64), 4096
    for kernel in ROWS:
        with only_kernel(kernel):
            assert explain("csr_spmm", *given, longest=40, gpu="H100").kernel == kernel


@pytest.mark.parametrize("kernel", [*ROWS, names.CHUNKS])
def test_each_kernel_of_the_default_product_alone(h100, kernel):
    facts = select.Facts(pattern_of(), 64, torch.float32, h100)
    with only_kernel(kernel):
        assert select.default_kernel(facts) == kernel
    wide = select.Facts(pattern_of(), 64, torch.float64, h100)
    with only_kernel(kernel):
        assert (select.default_kernel(wide) == names.DEFAULT) == (kernel in (names.SHARES, names.CHUNKS))


FORCED = [
    (names.SMEM_TILES, torch.float32, {"columns": 1024, "longest": 1024}),  # too uneven for the cost models
    (names.FP16X2, torch.float32, {}),
    (names.SPARSE24, torch.float32, {}),
    (names.SPARSE24, torch.bfloat16, {}),
    (names.PACKED_MMA, torch.float16, {"longest": 4096}),
    (names.DENSE, torch.float32, {"nonzeros": 2**14}),  # too empty
    (names.DENSE, torch.float64, {}),
]


@pytest.mark.parametrize(("kernel", "dtype", "sizes"), FORCED, ids=str)
def test_each_other_kernel_alone_is_taken_whatever_its_cost(h100, kernel, dtype, sizes):
    facts = select.Facts(pattern_of(**sizes), 128, dtype, h100)
    with only_kernel(kernel):
        assert select.default_kernel(facts) == names.DEFAULT
        assert select.rivals(facts, constant=True) == [kernel]
        assert select.rivals(facts, constant=False) == []
    with without_kernels(kernel):
        assert kernel not in select.rivals(facts, constant=True)
        assert not select.BY_NAME[kernel].may_run(facts)


@pytest.mark.parametrize(
    ("kernel", "dtype", "n", "sizes"),
    [
        (names.SMEM_TILES, torch.float16, 128, {}),
        (names.SMEM_TILES, torch.float32, 128, {"columns": 9000}),
        (names.SMEM_TILES, torch.float32, 128, {"distinct": False}),
        (names.FP16X2, torch.float32, 128, {"nonzeros": 2**15}),  # 8 nonzeros a row: less exact than float32
        (names.FP16X2, torch.float32, 100, {}),  # n % 8
        (names.SPARSE24, torch.bfloat16, 128, {"columns": 40000}),
        (names.PACKED_MMA, torch.float32, 128, {}),
        (names.PACKED_MMA, torch.float16, 128, {"columns": 4100}),
        (names.PACKED_MMA, torch.float16, 129, {}),
        (names.DENSE, torch.bfloat16, 128, {"distinct": False}),
        (names.REORDERED, torch.float64, 128, {}),
        (names.BLOCKS, torch.float16, 128, {}),
        (names.PACKED_MMA_LINEAR, torch.float16, 128, {}),
    ],
    ids=str,
)
def test_no_kernel_is_forced_on_what_it_does_not_take(h100, kernel, dtype, n, sizes):
    facts = select.Facts(pattern_of(**sizes), n, dtype, h100)
    with only_kernel(kernel):
        assert select.rivals(facts, constant=True) == []


@pytest.mark.parametrize("kernel", [names.DENSE, names.PACKED_MMA_LINEAR, names.PACKED_MMA])
def test_a_linear_layer_takes_the_kernel_that_is_on(h100, kernel):
    for longest in (300, 4096):
        facts = select.Facts(pattern_of(longest=longest), 64, torch.float16, h100)
        with only_kernel(kernel):
            assert select.linear_kernel(facts) == kernel
    with only_kernel(names.SMEM_TILES):
        assert select.linear_kernel(facts) == names.DEFAULT


def test_the_faster_of_both_halves_is_of_those_that_are_on(h100):
    facts = [select.Facts(pattern_of(beyond_two=0), 128, torch.float32, h100) for _ in range(2)]
    assert facts[0].fp16x2_kernel == names.SPARSE24
    with without_kernels(names.SPARSE24):
        assert facts[1].fp16x2_kernel == names.FP16X2
        assert select.BY_NAME[names.FP16X2].may_run(facts[1])


def test_a_plan_takes_the_only_kernel_however_small_the_product():
    dense, b = draw("cpu", 16, 16)
    with only_kernel(names.DENSE):
        made = plan(dense.to_sparse_csr(), constant=True)
        torch.testing.assert_close(made @ b, dense @ b)
        assert "128 columns: dense" in made.explain()
    assert "by_rows" not in made.explain()
    with only_kernel(names.BY_ROWS):
        made = plan(dense.to_sparse_csr(), constant=True, tune=[128])
        assert "by_rows" in made.explain()


def test_a_plan_names_the_kernel_that_does_not_take_its_product():
    dense, b = draw("cpu", 16, 16)
    for kernel in set(KERNELS) - {names.BY_ROWS, names.DENSE}:
        with only_kernel(kernel):
            made = plan(dense.to_sparse_csr(), constant=True)
            with pytest.raises(ValueError, match=rf"^spmm: expected a product that {kernel} takes"):
                made @ b
    with only_kernel(names.DENSE), pytest.raises(ValueError, match="spmm: expected a product that dense takes"):
        plan(dense.to_sparse_csr()) @ b  # values that may change


def test_a_kernel_that_is_off_is_not_measured(dense_wins):
    dense, b = draw("cpu")
    with without_kernels(names.DENSE):
        made = plan(dense.to_sparse_csr(), constant=True)
        torch.testing.assert_close(made @ b, dense @ b)
    assert dense_wins == []
    assert "by_rows, without another candidate" in made.explain()


def assert_close_to_float64(y, a, b):
    """y = a @ b, a in CSR: within 4 eps of the sum of the magnitudes of an element's terms."""
    wide = a.values().double()
    truth, size = (
        torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), values, a.shape) @ side
        for values, side in ((wide, b.double()), (wide.abs(), b.double().abs()))
    )
    assert ((y.double() - truth).abs() <= 4 * torch.finfo(y.dtype).eps * size).all()


def matrix(dtype, kernel, device="cuda"):
    """[768, 1024] with a tenth of its elements and, where the kernel takes it, a full row; for `reordered` a 9-point
    stencil on a torus whose points have random numbers."""
    torch.manual_seed(0)
    if kernel != names.REORDERED:
        dense = torch.randn(768, 1024) * (torch.rand(768, 1024) < 0.1)
        if not kernel.startswith(names.PACKED_MMA):
            dense[7] = torch.randn(1024)
        return dense.to(dtype).to(device).to_sparse_csr()
    side = 256
    at = torch.arange(side * side).view(side, side)
    near = [at.roll((down, right), (0, 1)).flatten() for down in (-1, 0, 1) for right in (-1, 0, 1)]
    edges = torch.randperm(side * side)[torch.stack([at.flatten().repeat(9), torch.cat(near)])]
    a = torch.sparse_coo_tensor(edges, torch.randn(edges.shape[1]), (side * side, side * side)).to_sparse_csr()
    return torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), a.values().to(dtype), a.shape).to(device)


def test_the_torus_has_an_order_that_is_kept(device, layouts_on_cpu):
    """It halves the reads."""
    before, after = layouts.reordered_of(plan(matrix(torch.float32, names.REORDERED, device))._pattern).reads
    assert after < 0.6 * before


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {names.PACKED_MMA_LINEAR, names.BLOCKS}))
def test_each_kernel_alone_multiplies(kernel, dtype):
    taken = {names.PACKED_MMA: 2, names.FP16X2: 4, names.SMEM_TILES: 4}
    if taken.get(kernel, dtype.itemsize) != dtype.itemsize:
        pytest.skip("takes another dtype")
    if kernel in {*taken, names.SPARSE24} and not limits.has_hopper_kernels(torch.device("cuda:0")):
        pytest.skip("Hopper's own")
    a = matrix(dtype, kernel)
    b = torch.randn(a.shape[1], 64 if kernel == names.REORDERED else 128, device="cuda").to(dtype)
    with only_kernel(kernel):
        made = plan(a, constant=True)
        y = made @ b
        assert torch.equal(made @ b, y)
    if kernel not in (*ROWS, names.CHUNKS):
        assert kernel in made.explain().splitlines()[-1]
    assert_close_to_float64(y, a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [*ROWS, names.CHUNKS, names.FP16X2, names.DENSE])
def test_each_kernel_alone_multiplies_without_a_plan(kernel):
    if kernel == names.FP16X2 and not limits.has_hopper_kernels(torch.device("cuda:0")):
        pytest.skip("Hopper's own")
    dtype = torch.bfloat16 if kernel == names.DENSE else torch.float32
    a = matrix(dtype, kernel)
    for n in (64, 100) if kernel != names.CHUNKS else (64,):
        b = torch.randn(a.shape[1], n, device="cuda").to(dtype)
        with only_kernel(kernel):
            y = spmm(a, b)
        assert_close_to_float64(y, a, b)


@pytest.mark.cuda
def test_blocks_alone_multiply():
    torch.manual_seed(0)
    dense = torch.randn(512, 256) * torch.kron((torch.rand(16, 8) < 0.3).float(), torch.ones(32, 32))
    dense, b = dense.bfloat16().cuda(), torch.randn(256, 128, device="cuda").bfloat16()
    with only_kernel(names.BLOCKS):
        made = plan(dense.to_sparse_bsr((32, 32)))
        y = made @ b
    assert names.BLOCKS in made.explain().splitlines()[-1]
    assert_close_to_float64(y, dense.to_sparse_csr(), b)


@pytest.mark.cuda
def test_a_product_of_a_kernel_that_is_off_is_refused():
    a = matrix(torch.float64, names.BY_ROWS)
    b = torch.randn(1024, 64, device="cuda", dtype=torch.float64)
    for kernel in (names.SHARES, names.CHUNKS, names.DENSE):
        with only_kernel(kernel), pytest.raises(ValueError, match="switched off"):
            spmm(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [names.PACKED_MMA_LINEAR, names.DENSE])
def test_a_linear_layer_by_one_kernel_alone(kernel):
    if not limits.has_hopper_kernels(torch.device("cuda:0")):
        pytest.skip("Hopper's own")
    a = matrix(torch.bfloat16, names.PACKED_MMA)
    x = torch.randn(64, 1024, device="cuda").bfloat16()
    with only_kernel(kernel):
        made = plan(a, constant=True)
        y = made._linear(x, None)
    assert kernel in made.explain()
    assert_close_to_float64(y.mT, a, x.mT)
