"""What a plan chooses and when it measures; its results stay correct and reproducible."""

import copy
import math
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from custom_mm.indices import Check
from matmuls import measure, plan, spmm
from matmuls.device import has_hopper_kernels
from matmuls.sparse import costs, default_spmm, layouts, race, select, selector


@pytest.fixture
def dense_wins(monkeypatch):
    """The last candidate measures as the fastest; yields the numbers of candidates of each measurement."""
    measured = []

    def time(runs, device, rounds):
        measured.append(len(runs))
        return [measure.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))]

    monkeypatch.setattr(race, "time_warm", time)
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *args: {})
    return measured


def draw(device, rows=96, columns=80, dtype=torch.float32):
    dense = torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < 0.5)
    return dense.to(dtype).to(device), torch.randn(columns, 128, dtype=dtype, device=device)


def assert_as_exact_as_float32(result, dense, b):
    """Each element within 8 roundings of the sum of the magnitudes of its terms; torch has 4.5."""
    truth, size = dense.double() @ b.double(), dense.double().abs() @ b.double().abs()
    assert ((result.double() - truth).abs() <= 2**-21 * size).all()


def test_the_dense_product_is_chosen_if_faster(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    before = made.nbytes
    first = made @ b
    torch.testing.assert_close(first, dense @ b)
    assert all(torch.equal(made @ b, first) for _ in range(20))
    assert len(dense_wins) == 1
    # As halves a number takes as many bytes; beside them lie a row's exponent and four facts.
    assert made.nbytes == before + dense.nbytes + (96 * 4 + 16 if select.FP16X2 in made.explain() else 0)
    assert "dense" in made.explain()
    assert "*" in made.explain()
    made @ b[:, :100].contiguous()  # between 64 and 128: no new measurement
    assert len(dense_wins) == 2
    made @ b[:, :90].contiguous()
    assert len(dense_wins) == 2


def test_large_products_of_mostly_empty_matrices_have_no_rival(device):
    index = torch.arange(2**17, device=device)
    row, column = index // 16, index * 977 % 8192
    a = torch.sparse_coo_tensor(torch.stack([row, column]), torch.randn(2**17, device=device).half(), (8192, 8192))
    made = plan(a)
    assert made.explain().endswith("from 32 columns on: by_rows, without another candidate")
    b = torch.randn(8192, 32, device=device).half()
    assert torch.equal(made @ b, spmm(a, b))
    assert not made._selector.measured
    made @ b[:, :31].contiguous()
    assert len(made._selector.measured) == 1


@pytest.mark.parametrize("fastest", [select.DEFAULT, select.DENSE])
def test_nothing_is_measured_where_sizes_say_it(dense_wins, monkeypatch, fastest):
    dense, b = draw("cpu")
    monkeypatch.setattr(
        selector.Selector, "_estimates", lambda *args: {select.DEFAULT: 2.0, select.DENSE: 2.0, fastest: 1.0}
    )
    made = plan(dense.to_sparse_csr(), constant=True)
    torch.testing.assert_close(made @ b, dense @ b)
    assert not dense_wins
    assert f"{'by_rows' if fastest == select.DEFAULT else fastest}, by its size alone" in made.explain()
    assert len(made._selector.tensors) == (fastest == select.DENSE)


def test_changed_values_are_seen(dense_wins, device):
    dense, b = draw(device)
    a = dense.to_sparse_csr()
    made = plan(a, constant=True)
    made @ b
    a.detach().values().mul_(3)

    def assert_times(factor, result):
        assert_as_exact_as_float32(result, factor * dense, b)

    assert_times(3, made @ b)
    made.update(a.values() * 2)
    assert_times(6, made @ b)
    assert_times(3, made.with_values(a.values()) @ b)
    assert_times(6, made @ b)
    with torch.inference_mode():  # where torch does not update version counters
        inferred = plan(dense.to_sparse_csr())
        values = inferred.values.clone()
        inferred.update(values)
        inferred @ b
        values.mul_(2)
        assert_times(2, inferred @ b)


@pytest.mark.parametrize("read_by", ["a call", "a graph"])
@pytest.mark.parametrize("name", [select.DENSE, select.FP16X2, select.SPARSE24, select.SMEM_TILES])
def test_other_values_are_written_in_place_for_graphs_alone(name, read_by, device):
    """What a thread has yet to multiply by stays as it was."""
    if device == "cuda" and name != select.DENSE and not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("halves are Hopper's")
    if device == "cpu" and name == select.SPARSE24:
        pytest.skip("tensor cores' own layout")
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    values = made.values.detach().clone()
    product = made._selector._made(name)
    before = product.call(values.clone(), b, torch.float32)
    first, places = before.run(), [t.data_ptr() for t in product.tensors]
    if read_by == "a graph":
        product._captured.add(product._key(b, torch.float32))
    values.mul_(2)
    assert torch.equal(product.call(values, b, torch.float32).run(), 2 * first)
    product.refresh(4 * values)
    assert torch.equal(product.call(values, b, torch.float32).run(), 2 * first)
    if read_by == "a graph":
        assert [t.data_ptr() for t in product.tensors] == places
    else:
        assert torch.equal(before.run(), first)


def test_threads_that_see_changed_values_rebuild_the_copy_once(dense_wins, monkeypatch):
    """A second rebuild in place would zero the copy during the first thread's product."""
    dense, b = draw("cpu")
    made = plan(dense.to_sparse_csr(), constant=True)
    made @ b
    real, count = layouts.Dense._made, []

    def slow(self, *args):
        count.append(args)
        found = real(self, *args)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(layouts.Dense, "_made", slow)
    with torch.no_grad():
        made.values.mul_(2)
    results = []
    threads = [threading.Thread(target=lambda: results.append(made @ b)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    for result in results:
        torch.testing.assert_close(result, 2 * dense @ b)
    assert len(results) == 4


def test_threads_that_choose_while_others_look_up_choices(dense_wins, monkeypatch):
    """The first products of another width and dtype run while another thread iterates over the known choices."""
    monkeypatch.setattr(
        selector.Selector, "_copies", lambda self, facts: [select.FP16X2 if facts.n == 100 else select.DENSE]
    )
    dense, b = draw("cpu")

    def others(made):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made @ b
        made @ b[:, :100].contiguous()

    def meanwhile(place, name, look):
        made, real, met = plan(dense.to_sparse_csr(), constant=True), getattr(place, name), []
        made @ b

        def and_others(*args):
            if not met:
                met.append(threading.Thread(target=others, args=(made,)))
                met[0].start()
                met[0].join()
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, and_others)
            look(made)
        assert met
        torch.testing.assert_close(made @ b, dense @ b)

    meanwhile(layouts.CachedLayout, "_keep", lambda made: made.update(made.values.clone()))
    meanwhile(selector.Measurement, "fastest", lambda made: made.explain())
    meanwhile(selector.Measurement, "fastest", lambda made: plan(made, tune=[7]))


def test_duplicates_are_added(dense_wins):
    crow, col = torch.arange(0, 4 * 1000 + 1, 4), torch.randint(20, (4000,))
    made = plan(torch.sparse_csr_tensor(crow, col, torch.randn(4000), (1000, 20)), constant=True)
    b = torch.randn(20, 128)
    torch.testing.assert_close(made @ b, plan(made, tune=False) @ b)
    expected = torch.zeros(1000, 20).index_put_((torch.arange(1000).repeat_interleave(4), col), made.values, True) @ b
    torch.testing.assert_close(made @ b, expected)
    assert made._selector.tensors


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 300), (torch.float16, 3000)], ids=str)
def test_duplicates_are_not_added_in_16_bits(dense_wins, dtype, count, device):
    crow, col = torch.arange(0, 64 * count + 1, count), torch.zeros(64 * count, dtype=torch.long)
    a = torch.sparse_csr_tensor(crow, col, torch.ones(64 * count), (64, count)).to(device)
    b, expected = torch.ones(count, 128, device=device), torch.full((64, 128), count, dtype=dtype, device=device)
    assert torch.equal(plan(a.to(dtype), constant=True) @ b.to(dtype), expected)
    with torch.autocast(device, dtype):
        assert torch.equal(plan(a, constant=True) @ b, expected)


def test_the_chosen_layout_stays_for_graphs_that_read_it(dense_wins, monkeypatch, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    made @ b
    kept = made._selector.tensors
    monkeypatch.setattr(
        race, "time_warm", lambda runs, *_: [measure.Timing(1.0 + i, 0.0, 1.0 + i) for i in range(len(runs))]
    )
    plan(made, tune=[b.shape[1]])  # ours wins now
    assert "by_rows" in made.explain().splitlines()[-1].partition("*")[0]
    assert [t.data_ptr() for t in made._selector.tensors] == [t.data_ptr() for t in kept]


def test_products_with_other_values_do_not_change_the_copy(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    made @ b
    before = [t.clone() for t in made._selector.tensors]
    other = torch.randn(b.shape[0], 100, device=device)
    passing = made.with_values(2 * made.values)
    result = passing @ other
    plan(passing.update(3 * made.values), tune=[b.shape[1]])
    assert all(isinstance(form, layouts.Cusparse) for form in passing._selector._products.values()), "no copies"
    assert all(torch.equal(x, y) for x, y in zip(before, made._selector.tensors, strict=True))
    assert_as_exact_as_float32(result, 2 * dense, other)
    assert_as_exact_as_float32(passing @ other, 3 * dense, other)


def test_changed_values_between_a_product_and_its_gradient(dense_wins, device):
    """With each candidate as the fastest."""
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    b.requires_grad_()
    for _ in range(2):
        y = made @ b
        made.update(2 * made.values)
        b.grad = None
        y.sum().backward()
        torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand(b.shape))
        dense = 2 * dense
    assert_as_exact_as_float32((made @ b).detach(), dense, b.detach())


def test_many_duplicates_are_summed_in_a_fixed_order(dense_wins):
    nonzeros = 300_000
    crow, col = torch.tensor([0, nonzeros // 3, 2 * nonzeros // 3, nonzeros]), torch.randint(50, (nonzeros,))
    made = plan(torch.sparse_csr_tensor(crow, col, torch.randn(nonzeros), (3, 50)), constant=True)
    b = torch.randn(50, 8)
    first = made @ b
    assert "dense" in made.explain()
    assert all(torch.equal(made.update(made.values.clone()) @ b, first) for _ in range(10))


def test_every_tf32_setting_of_torch_is_respected(dense_wins, device):
    products = torch.backends.cuda.matmul
    dense, b = draw(device)
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        torch.testing.assert_close(plan(dense.to_sparse_csr(), constant=True) @ b, dense @ b, atol=1e-1, rtol=1e-2)
    finally:
        products.fp32_precision = before


def test_autocast_leaves_float64_alone(dense_wins, device):
    dense, b = draw(device, dtype=torch.float64)
    made = plan(dense.to_sparse_csr(), constant=True)
    with torch.autocast(device, torch.bfloat16):
        y = made @ b
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, dense @ b)


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_gradients(dense_wins, layout, device):
    dense, b = draw(device, dtype=torch.float64)
    made = plan(getattr(dense, f"to_sparse_{layout}")())
    weight = torch.randn(dense.shape[0], b.shape[1], dtype=b.dtype, device=device)
    b.requires_grad_()
    (made @ b * weight).sum().backward()
    torch.testing.assert_close(b.grad, dense.mT @ weight)
    values = made.values.clone().requires_grad_()
    b.grad = None
    made.update(values)
    (made @ b * weight).sum().backward()
    torch.testing.assert_close(b.grad, dense.mT @ weight)
    row, column = made._pattern.row.long(), made._pattern.col.long()
    ours = made._pattern.by_rows(values.grad)
    torch.testing.assert_close(ours, (weight @ b.detach().mT)[row, column])


@pytest.mark.parametrize("train", ["matmul", "mean", "few columns", "compiled"])
def test_values_that_a_fused_optimizer_wrote(dense_wins, train, device):
    """A fused optimizer does not change their version counter."""
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr())
    values = torch.nn.Parameter(made.values.clone())
    made.update(values)
    optimizer = torch.optim.SGD([values], lr=1.0, fused=True)
    steps = {
        "matmul": lambda: made @ b,
        "mean": lambda: spmm(made, b, reduce="mean"),
        "few columns": lambda: made @ b[:, :2],
        "compiled": torch.compile(lambda: spmm(made, b), fullgraph=True, backend="aot_eager"),
    }
    for _ in range(3):
        with torch.no_grad():
            dense[made._pattern.row.long(), made._pattern.col.long()] = values
            for _ in range(2):
                assert_as_exact_as_float32(made @ b, dense, b)
                assert_as_exact_as_float32(made @ b[:, :100], dense, b[:, :100])
            assert select.CUSPARSE in made.explain() or made._again(b) is not None
        optimizer.zero_grad()
        steps[train]().square().mean().backward()
        optimizer.step()


def test_values_that_a_fused_optimizer_wrote_through_another_plan(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr())
    values = torch.nn.Parameter(made.values.clone())
    made.update(values)
    optimizer = torch.optim.SGD([values], lr=1.0, fused=True)
    for _ in range(2):
        with torch.no_grad():
            made @ b
            made @ b
        (made.with_values(values) @ b).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            dense[made._pattern.row.long(), made._pattern.col.long()] = values
            assert_as_exact_as_float32(made @ b, dense, b)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_an_overwritten_sparse_leaf(dense_wins, layout, device):
    dense, b = draw(device)
    a = (dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()).requires_grad_()
    made = plan(a)
    with torch.no_grad():
        for _ in range(3):
            assert_as_exact_as_float32(made @ b, a.detach().to_dense(), b)
            a.values().mul_(2)
    assert "dense" in made.explain()


def test_new_values_at_the_same_address(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    both = torch.randn(2 * made.nnz, device=device)
    values = both[: made.nnz]
    made.update(values)
    for _ in range(2):
        made @ b
    values.data = both[::2]
    torch.testing.assert_close(made @ b, plan(made, tune=False).with_values(both[::2].clone()) @ b)


def test_fake_and_functional_tensors_are_not_cached(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    leaf = b.clone().requires_grad_()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        product = made @ mode.from_tensor(b)
        assert product.shape == (dense.shape[0], b.shape[1])
        (made @ mode.from_tensor(leaf)).sum().backward()
    torch.testing.assert_close(torch.func.vmap(lambda x: made @ x)(b[None]), (dense @ b)[None])
    slope = torch.func.grad(lambda x: (made @ x).sum())(b)
    torch.testing.assert_close(slope, dense.T @ torch.ones_like(dense @ b))
    assert dense_wins == []
    for _ in range(2):
        assert type(made @ b) is torch.Tensor
        assert_as_exact_as_float32(made @ b, dense, b)
    (made @ leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.mT.sum(1, keepdim=True).expand_as(b))
    with forward_ad.dual_level():
        made.update(forward_ad.make_dual(made.values.clone(), torch.ones_like(made.values)))
        with pytest.raises(RuntimeError, match="forward-mode"):
            made @ b


def test_a_width_beside_the_one_that_was_measured(dense_wins, monkeypatch):
    """Tiles of more than 1024 columns are for dense sides of at most 32."""
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.SMEM_TILES])
    dense, _ = draw("cpu", 64, 2048)
    made = plan(dense.to_sparse_csr(), constant=True)
    for n in (32, 40, 63):
        b = torch.randn(2048, n)
        assert_as_exact_as_float32(made @ b, dense, b)
    assert select.SMEM_TILES in made.explain()


@pytest.mark.parametrize("passing_first", [False, True])
def test_what_cannot_be_made_is_not_taken(passing_first, monkeypatch):
    """Nonzeros that lie too unevenly to be packed, or no memory: whoever's product came first."""
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.PACKED_MMA])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {select.DEFAULT: 9e-6, select.PACKED_MMA: 6e-6})
    dense, b = draw("cpu", 512, 512)
    dense *= torch.rand(512, 512) < 0.1
    dense[:64, :64] = 1
    dense, b = dense.bfloat16(), b.bfloat16()
    made = plan(dense.to_sparse_csr(), constant=True)
    if passing_first:
        made.with_values(made.values.clone()) @ b
    torch.testing.assert_close(made @ b, dense @ b)
    assert "by_rows" in made.explain().splitlines()[-1]


@pytest.mark.parametrize("shape", [(2048, 2048), (0, 2048), (2048, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_products_are_not_measured(shape, dtype, device):
    a = draw("cpu", *shape)[0].to(dtype).to(device).to_sparse_csr()
    for n in (0, 8):
        made = plan(a, tune=[n], constant=True)
        b = torch.randn(shape[1], n, device=device).to(dtype)
        truth, theirs = a.to_dense().double() @ b.double(), a.to_dense() @ b
        error, its = ((y - truth).norm() for y in (made @ b, theirs))
        assert error <= 2 * its + torch.finfo(dtype).eps * truth.norm()


def test_cases_in_which_nothing_is_measured(dense_wins, device):
    dense, b = draw(device)
    a = dense.to_sparse_csr()
    expected = spmm(a, b)
    assert torch.equal(plan(a, tune=False) @ b, expected)
    plan(a, constant=True) @ b[:, :2].contiguous()  # small
    made = plan(a, constant=True)
    compiled = torch.compile(lambda x: spmm(made, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(b), expected)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(plan(a, constant=True) @ b, expected)
    finally:
        torch.use_deterministic_algorithms(False)
    leaf = dense.to_sparse_csr().requires_grad_()
    plan(leaf) @ b
    assert dense_wins == []


def test_tune_measures_in_advance(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True, tune=[128, 4])
    assert len(dense_wins) == 2
    made @ b
    assert plan(made) is made
    assert len(dense_wins) == 2


def test_what_few_products_could_not_pay_for(dense_wins, device, monkeypatch):
    """Sizes say 10 us of ours and 10.5 of the dense product: 50 of them would not pay for a measurement."""
    known = {select.DEFAULT: 10.0e-6, select.DENSE: 10.5e-6, select.FP16X2: 10.5e-6, select.SMEM_TILES: math.inf}
    monkeypatch.setattr(
        selector.Selector, "_estimates", lambda self, facts, large: {k: known[k] for k in (select.DEFAULT, *large)}
    )
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    few = made @ b
    torch.testing.assert_close(few, dense @ b)
    assert "float32, 128 columns: by_rows, by its size alone" in made.explain()
    assert dense_wins == []
    many = plan(dense.to_sparse_csr(), constant=True, products=10**6)
    for kept in (many, copy.deepcopy(many), pickle.loads(pickle.dumps(many)), plan(made, products=10**6, tune=[128])):
        torch.testing.assert_close(kept @ b, dense @ b)
        assert "dense" in kept.explain()
    assert dense_wins == [2, 2, 2, 2]


def test_autocast_and_copies(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = made @ b
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), dense @ b, atol=0.3, rtol=0.05)
    torch.testing.assert_close(copy.deepcopy(made) @ b, dense @ b)


def test_a_refused_candidate_is_reported(dense_wins, monkeypatch):
    dense, b = draw("cpu")

    def refuse(self, *args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(layouts.Dense, "call", refuse)
    made = plan(dense.to_sparse_csr(), constant=True)
    torch.testing.assert_close(made @ b, dense @ b)
    assert "dense refused" in made.explain()


def test_mismatched_operands_raise_before_a_measurement(dense_wins):
    dense, b = draw("cpu")
    made = plan(dense.to_sparse_csr(), constant=True)
    with pytest.raises(RuntimeError, match=r"spmm: expected dense of shape \[..., 80, n\]"):
        made @ b[1:]
    with pytest.raises(RuntimeError, match="spmm: expected values to be a strided tensor in Double"):
        made @ b.double()
    assert dense_wins == []


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_an_empty_matrix_is_checked_in_advance_too(shape):
    made = plan(torch.zeros(shape).to_sparse_csr(), tune=[8], constant=True)
    assert torch.equal(made @ torch.randn(shape[1], 8), torch.zeros(shape[0], 8))
    assert min(costs.us_fp16x2(made._pattern, 8).values()) > 0


@pytest.mark.cuda
def test_a_plan_works_on_every_stream(monkeypatch):
    """Including its int32 indices, which are created after the index check has synchronized."""

    def check_then_keep_the_gpu_busy(check):
        found = facts(check)
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        return found

    facts = Check.facts
    monkeypatch.setattr(Check, "facts", check_then_keep_the_gpu_busy)
    dense, b = draw("cuda", 512, 512)
    a = dense.to_sparse_csr()
    torch.cuda.synchronize()
    made = plan(a, tune=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        y = made @ b
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, dense, b)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [layouts.Fp16x2, layouts.Dense])
def test_what_a_stream_makes_of_other_values_others_wait_for(kind):
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), tune=False)
    values, product = made.values, kind(made._pattern)
    product.call(values, b, b.dtype).run()
    values *= 2
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    product.call(values, b, b.dtype).run()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = product.call(values, b, b.dtype).run()
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, 2 * dense, b)


@pytest.mark.cuda
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("kind", [layouts.Fp16x2, layouts.Dense])
def test_other_values_wait_for_those_who_still_read(kind, bound):
    """On whatever stream: a product goes by the values that it was called with."""
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), tune=False)
    values, product, side = made.values, kind(made._pattern), torch.cuda.Stream()
    calls = [product.call(values, b, b.dtype)]
    calls[0].run()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        calls.append(product.call(values, b, b.dtype))
        calls[1].run()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        y = (calls[1] if bound else product.call(values, b, b.dtype)).run()
    product.refresh(2 * values)
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, dense, b)
    assert_as_exact_as_float32(product.call(2 * values, b, b.dtype).run(), 2 * dense, b)


@pytest.mark.cuda
def test_capture_uses_measured_choices_and_measures_nothing():
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), constant=True)
    for n in range(2):  # before and after it was measured
        if n:
            made @ b
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            spmm(made, b, alpha=1.0, out=torch.empty(512, 128, device="cuda"))
            if n:
                made @ b
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made @ b
        assert len(made._selector.measured) == n
        graph.replay()
        torch.testing.assert_close(y.double(), dense.double() @ b.double(), atol=1e-3, rtol=1e-4)
        first = y.clone()
        for _ in range(100):
            graph.replay()
            assert torch.equal(y, first)


@pytest.mark.parametrize(
    "name", [select.CUSPARSE, select.FP16X2, select.SPARSE24, select.SMEM_TILES, select.PACKED_MMA, "dense"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_candidate_is_correct_and_reproducible(name, dtype, device):
    dense, b = draw(device, 300, 400, dtype)
    made = plan(dense.to_sparse_csc(), tune=[128])
    values, truth = made.values, dense.double() @ b.double()
    if name in (select.FP16X2, select.SPARSE24, select.SMEM_TILES) and dtype != torch.float32:
        pytest.skip("float32's alone")
    if name == select.PACKED_MMA and dtype == torch.float32:
        pytest.skip("16 bits' alone")
    if device == "cpu" and name == select.SPARSE24:
        pytest.skip("tensor cores' own layout")
    product = made._selector._made(name)
    try:
        if name.startswith("cusparse"):
            product.learn(values, b, dtype)
        first = product.call(values, b, dtype).run()
    except RuntimeError as error:
        if "NOT_SUPPORTED" not in str(error):
            raise
        pytest.skip(str(error))
    error = torch.linalg.vector_norm(first.double() - truth) / torch.linalg.vector_norm(truth)
    assert error < 8 * torch.finfo(dtype).eps
    assert all(torch.equal(product.call(values, b, dtype).run(), first) for _ in range(100))


KERNELS = Path(__file__).resolve().parents[1] / "src/sparse/spmm"


def test_the_name_of_a_kernel_is_that_of_its_file():
    folders = {select.BY_ROWS, select.CHUNKS, select.PACKED_MMA, select.SMEM_TILES, select.REORDERED}
    assert all((KERNELS / name).is_dir() for name in folders)
    assert all((KERNELS / f"densified/{name}_sm90.cu").is_file() for name in (select.FP16X2, select.SPARSE24))
    others = {select.SPLIT_ROWS, select.DENSE, select.CUSPARSE, select.BLOCKS, select.PACKED_MMA_LINEAR}
    assert set(select.BY_NAME) == folders | {select.FP16X2, select.SPARSE24} | others
    assert len(select.BY_NAME) == len(select.CANDIDATES)


@pytest.mark.parametrize("name", sorted(set(select.BY_NAME) - {select.SPARSE24, select.REORDERED}))
def test_the_table_names_the_operator_that_is_called(name):
    dtype = torch.float16 if name.startswith(select.PACKED_MMA) else torch.float32
    dense, b = draw("cpu", 64, 64, dtype)
    made = plan(dense.to_sparse_bsr((16, 16)), tune=False)
    candidate = select.BY_NAME[name]
    if name == select.CHUNKS:
        chunks = made._pattern.chunks(32, 64)
        op = default_spmm.chunks_op(made._pattern, chunks, made.values, b)
    elif candidate.layout is None:
        op = default_spmm.default_op(made._pattern, made.values, b)
    else:
        op = candidate.layout(made._pattern).call(made.values, b, dtype)
    assert op.operator == candidate.operator.default
    assert op.arguments[op.b_index].shape == (b.mT if name == select.PACKED_MMA_LINEAR else b).shape
    assert op.reusable == (name != select.CUSPARSE)


@pytest.mark.parametrize(
    ("sizes", "n", "dtype", "where", "kernel"),
    [
        ((2**14, 2**18, 20), 128, torch.float32, "cuda", select.CHUNKS),  # short rows, much of B
        ((2**14, 2**18, 20), 128, torch.float32, "cpu", select.BY_ROWS),
        ((2**14, 2**18, 20), 128, torch.float64, "cuda", select.BY_ROWS),
        ((2**14, 2**18, 20), 32, torch.float32, "cuda", select.BY_ROWS),  # rows of B below 512 bytes
        ((2**14, 2**18, 65), 64, torch.float32, "cuda", select.CHUNKS),  # skewed
        ((2**10, 2**16, 4 * 64), 64, torch.float32, "cuda", select.BY_ROWS),  # long rows
        ((2**10, 2**16, 8 * 64), 64, torch.float32, "cuda", select.BY_ROWS),
        ((2**10, 2**16, 8 * 64 + 1), 64, torch.float32, "cuda", select.SPLIT_ROWS),
        ((2**10, 2**16, 8 * 64 + 1), 64, torch.float32, "cpu", select.BY_ROWS),
        ((2**10, 0, 0), 64, torch.float32, "cuda", select.BY_ROWS),
    ],
)
def test_the_default_product_is_named_by_the_kernel_that_runs(sizes, n, dtype, where, kernel):
    rows, nonzeros, longest = sizes
    pattern = SimpleNamespace(rows=rows, columns=rows, nonzeros=nonzeros, longest=longest, blocks=None)
    facts = select.Facts(pattern, n, dtype, torch.device(where))
    assert select.default_kernel(facts) == kernel
    assert sum(c.may_run(facts) for c in select.CANDIDATES if c.layout is None) == 1
    one = selector.Measurement(n, {select.DEFAULT: None}, kernel=kernel)
    assert (one.chosen, one.describe()) == (kernel, f"{kernel}, without another candidate")
    two = selector.Measurement(n, {select.DEFAULT: 2e-6, select.DENSE: 1e-6, select.FP16X2: None}, kernel=kernel)
    assert (two.chosen, two.describe()) == (select.DENSE, f"{kernel} 2.0 us, dense 1.0 us*, fp16x2 refused")
    assert two.fastest(without_gradient=False) == select.DENSE
