"""What a plan chooses and when it measures."""

import threading
import time

import pytest
import torch

from common.choice_cases import assert_as_exact_as_float32, assert_densified, draw
from matmuls import plan, spmm
from matmuls.device import has_hopper_kernels
from matmuls.sparse import layouts, select, selector


def test_the_dense_product_is_chosen_if_faster(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    before = made.nbytes
    first = made @ b
    torch.testing.assert_close(first, dense @ b)
    assert all(torch.equal(made @ b, first) for _ in range(20))
    assert len(dense_wins) == 1
    # Two float16 take as many bytes as a float32; each of 96 rows has an exponent, and the matrix has four flags.
    assert made.nbytes == before + dense.nbytes + (96 * 4 + 16 if select.FP16X2 in made.explain() else 0)
    assert_densified(made)
    assert "*" in made.explain()
    made @ b[:, :100].contiguous()  # between 64 and 128: no new measurement
    assert len(dense_wins) == 2
    made @ b[:, :90].contiguous()
    assert len(dense_wins) == 2


@pytest.mark.parametrize("matrix", ["half full", "mostly empty", "mostly empty and constant"])
def test_a_plan_without_another_candidate_does_not_measure(dense_wins, matrix, device):
    """An ordinary plan of any matrix, and a constant one of a mostly empty matrix: no product waits for the GPU."""
    dense, b = draw(device)
    a = dense.to_sparse_csr()
    if matrix != "half full":
        index = torch.arange(2**17, device=device)
        row, column = index // 16, index * 977 % 8192
        a = torch.sparse_coo_tensor(torch.stack([row, column]), torch.randn(2**17, device=device).half(), (8192, 8192))
        a = a.coalesce()  # else spmm adds up the entries of a row in their own order
        b = torch.randn(8192, 32, device=device).half()
    expected, made = spmm(a, b), plan(a, constant=matrix.endswith("constant"))
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        y = made @ b
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)
    assert made.explain().endswith(f" {b.shape[1]} columns: by_rows, without another candidate")
    assert dense_wins == []
    assert not made._selector.tensors


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
def test_other_values_are_written_in_place_for_graphs_alone(name, read_by, device, layouts_on_cpu):
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
