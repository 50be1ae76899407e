"""Checks of distributed products that every rank of a group runs."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from common.distributed_processes import close, dense, drawn, mine, raises, sparse
from matmuls import distributed
from matmuls.distributed import part
from matmuls_bench.matrices import load

SIZES = {1: [13], 2: [21, 8], 3: [14, 0, 17], 4: [9, 0, 23, 5]}  # rows of each rank


def product_and_gradients(a, rows, columns, rank, n, device, **options):
    """Compare one product and its gradients with dense ones in one process."""
    own = sparse(mine(a, rank, rows), device)
    constant = options.get("constant", False)
    own.requires_grad_(not constant)
    plan = distributed.plan(own, columns=None if rows == columns else columns, **options)
    x, grad = dense(a.shape[1], n, device), dense(a.shape[0], n, device)
    x_own = mine(x, rank, columns).clone().requires_grad_()
    y = plan @ x_own
    whole = a.to(device)
    close(y, mine(whole @ x, rank, rows))
    y.backward(mine(grad, rank, rows))
    close(x_own.grad, mine(whole.mT @ grad, rank, columns))
    if not constant:
        pattern = mine(whole, rank, rows) != 0
        close(own.grad.to_dense(), mine(grad, rank, rows) @ x.mT * pattern)
        assert own.grad.layout == torch.sparse_csr
    return plan


def check_products_and_gradients(rank, world, device):
    sizes = SIZES[world]
    total = sum(sizes)
    for constant in (False, True):
        for gather in (None, False, True):
            for n in (1, 7):
                a = drawn(total, total)
                plan = product_and_gradients(a, sizes, sizes, rank, n, device, constant=constant, gather=gather)
                assert plan.gathers == (gather is True) or gather is None


def check_few_rows_with_a_halo(rank, world, device):
    """A band: the halo is kept without its empty rows."""
    sizes = SIZES[world]
    total = sum(sizes)
    band = drawn(total, total, share=1.0).tril(1).triu(-1)
    for gather in (None, True):
        plan = product_and_gradients(band, sizes, sizes, rank, 5, device, gather=gather)
        assert sizes[rank] == 0 or plan._halo.rows.index.numel() <= 2
    assert not distributed.plan(sparse(mine(band, rank, sizes), device)).gathers


def check_rectangular(rank, world, device):
    rows, columns = SIZES[world], list(reversed(SIZES[world]))
    columns[0] += 6
    product_and_gradients(drawn(sum(rows), sum(columns)), rows, columns, rank, 3, device)
    with raises(ValueError, "distributed.plan", f"rank {rank} of {world}", "add up to", "columns= is not given"):
        distributed.plan(sparse(mine(drawn(sum(rows), sum(columns)), rank, rows), device))


class Counted:
    """Counts the bytes that torch.distributed is asked to send to other ranks."""

    def __init__(self, rank):
        self.rank, self.sent = rank, 0

    def __enter__(self):
        from matmuls.distributed import group, peers

        self.before = group._all_to_all, group._all_gather, peers.Channel.send

        def all_to_all(pg, target, sent, received_counts, counts):
            others = sum(counts) - counts[self.rank]
            self.sent += others * sent.shape[1] * sent.element_size()
            return self.before[0](pg, target, sent, received_counts, counts)

        def all_gather(pg, target, sent):
            self.sent += (target.numel() - sent.numel()) * sent.element_size()
            return self.before[1](pg, target, sent)

        def send(channel, x):
            self.sent += channel.sent * x.shape[1] * x.element_size()
            return self.before[2](channel, x)

        group._all_to_all, group._all_gather, peers.Channel.send = all_to_all, all_gather, send
        return self

    def __exit__(self, *error):
        from matmuls.distributed import group, peers

        group._all_to_all, group._all_gather, peers.Channel.send = self.before


def check_bytes(rank, world, device):
    """What explain() says is what is sent, and the halo counted one by one."""
    sizes = SIZES[world]
    total = sum(sizes)
    for share in (0.02, 0.05, 0.9):
        a = drawn(total, total, share)
        needs = [mine(a, r, sizes).count_nonzero(0) > 0 for r in range(world)]
        halo = [sum(int(mine(needs[r], o, sizes).sum()) for o in range(world) if o != r) for r in range(world)]
        for gather in (None, False, True):
            plan = distributed.plan(sparse(mine(a, rank, sizes), device), gather=gather)
            x = mine(dense(total, 3, device), rank, sizes)
            plan @ x  # compares sizes across ranks
            with Counted(rank) as counted:
                plan @ x
            assert counted.sent == plan.bytes_sent(3)[rank]
            told = plan.explain(3)
            assert f"sent by each rank {plan.bytes_sent(3)}" in told
            assert f"received by each rank: {[rows * 24 for rows in halo]}" in told
            assert f"would send {(world - 1) * max(sizes) * 24} from" in told
            if not plan.gathers:
                assert sum(plan.bytes_sent(3)) == 24 * sum(halo)
        assert plan.bytes_sent(3, torch.float32)[rank] * 2 == plan.bytes_sent(3)[rank]
    full = mine(drawn(8 * world, 8 * world, 0.9), rank, [8] * world)
    assert distributed.plan(sparse(full, device)).gathers, "nearly all rows are needed"


def check_empty_halo(rank, world, device):
    sizes = SIZES[world]
    blocks = torch.block_diag(*(drawn(size, size, 0.5) for size in sizes))
    for gather in (None, True):
        plan = product_and_gradients(blocks, sizes, sizes, rank, 4, device, gather=gather)
        assert plan.bytes_sent(4) == [0] * world
        assert "nothing is sent" in plan.explain()
    one_way = blocks.clone()
    one_way[0, -1] = 1.0  # rank 0 alone needs a row, of the last rank
    plan = product_and_gradients(one_way, sizes, sizes, rank, 4, device)
    assert plan.bytes_sent(1) == [0] * (world - 1) + [8]


def check_repeated_bits(rank, world, device):
    sizes = [40] * world
    a = drawn(40 * world, 40 * world, 0.3, torch.float32)
    for gather in (False, True):
        plan = distributed.plan(sparse(mine(a, rank, sizes), device), gather=gather)
        found = []
        for _ in range(3):
            x = mine(dense(40 * world, 33, device, torch.float32), rank, sizes).clone().requires_grad_()
            y = plan @ x
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        assert all(torch.equal(one, other) for pair in found[1:] for one, other in zip(found[0], pair, strict=True))


def check_what_is_repeated(rank, world, device):
    """Products of a constant plan from the second on, which C++ runs: with few and with many nonzeros in the halo, of
    gradients in other strides, in turns with other shapes, and after an update."""
    sizes = [30] * world
    a = drawn(30 * world, 30 * world, 0.3, torch.float32)
    whole = a.to(device)
    before, short = dict(part.MOST_SUMMED), part.SHORT_ROW
    for gather in (False, True):
        for summed in (True, False):
            part.MOST_SUMMED.update(before if summed else dict.fromkeys(before, 0))
            part.SHORT_ROW = short if summed else 0
            plan = distributed.plan(sparse(mine(a, rank, sizes), device), constant=True, gather=gather)
            for turn in range(3):
                for n in (5, 32):
                    x, grad = (dense(a.shape[0], n + i, device, torch.float32)[:, :n].contiguous() for i in range(2))
                    x_own = mine(x, rank, sizes).clone().requires_grad_()
                    y = plan @ x_own
                    assert type(y.grad_fn).__name__ == ("RecordedBackward" if turn == 0 else "CppFunction")
                    close(y, mine(whole @ x, rank, sizes), torch.float32)
                    close(plan @ x_own.detach(), y, torch.float32)
                    for given in (grad, grad[:, :1].expand(-1, n), grad.t().contiguous().t()):
                        (found,) = torch.autograd.grad(y, x_own, mine(given, rank, sizes), retain_graph=True)
                        close(found, mine(whole.mT @ given, rank, sizes), torch.float32)
                    with raises(RuntimeError, "distributed.plan", "create_graph=True"):
                        torch.autograd.grad(y.sum(), x_own, create_graph=True)
            plan.update(-plan.values)
            for _ in range(2):
                close(plan @ x_own, mine(-(whole @ x), rank, sizes), torch.float32)
            own, last = weakref.ref(plan._own), plan @ x_own
            del plan, y
            gc.collect()
            (found,) = torch.autograd.grad(last, x_own, mine(grad, rank, sizes))  # the graph keeps what it needs
            close(found, mine(-(whole.mT @ grad), rank, sizes), torch.float32)
            del last
            gc.collect()
            assert own() is None, "something keeps the plan"
    part.MOST_SUMMED.update(before)
    part.SHORT_ROW = short


def check_values(rank, world, device):
    """Writes, update and with_values reach the next product, and a backward pass after them is refused or right."""
    sizes = SIZES[world]
    a = drawn(sum(sizes), sum(sizes)).to(device)
    x = dense(sum(sizes), 3, device)
    x_own, truth = mine(x, rank, sizes), mine(a @ x, rank, sizes)
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
        own = mine(a, rank, sizes).to_sparse(layout=layout)
        plan, constant = distributed.plan(own), distributed.plan(own, constant=True)
        close(plan @ x_own, truth)
        close(constant @ x_own, truth)
        if layout != torch.sparse_coo:
            own.values().mul_(2)
            close(plan @ x_own, 2 * truth)
        for each in (plan, constant):
            values = own.values() if layout != torch.sparse_coo else own.coalesce().values()
            each.update(-values.detach().clone())
            close(each @ x_own, -truth if layout == torch.sparse_coo else -2 * truth)
            each.update(values)
        weights = values.detach().clone().requires_grad_()
        for each in (plan, constant):
            weights.grad = None
            made = each.with_values(weights)
            y = made @ x_own
            plan @ x_own  # other values in between
            y.sum().backward()
            entries = mine(a, rank, sizes).to_sparse(layout=layout)
            pattern = entries.to_dense() != 0
            wanted = (torch.ones_like(y) @ x.mT * pattern).to_sparse(layout=layout)
            close(weights.grad, wanted.values() if layout != torch.sparse_coo else wanted.coalesce().values())
    trained = sparse(mine(a, rank, sizes), device).requires_grad_()
    with raises(ValueError, "constant=True"):
        distributed.plan(trained, constant=True)
    y = distributed.plan(trained) @ x_own
    with torch.no_grad():
        trained.values().add_(1)
    if trained.values().numel():
        with raises(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()


def check_dtypes(rank, world, device):
    sizes = SIZES[world]
    total = sum(sizes)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a, x = drawn(total, total, dtype=dtype).to(device), dense(total, 8, device, dtype)
        plan = distributed.plan(sparse(mine(a, rank, sizes), device))
        x_own = mine(x, rank, sizes).clone().requires_grad_()
        y = plan @ x_own
        assert y.dtype == dtype
        close(y, mine(a.double() @ x.double(), rank, sizes), dtype)
        y.sum().backward()
        close(x_own.grad, mine(a.double().sum(0)[:, None].expand(-1, 8), rank, sizes), dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert (plan @ x_own.float()).dtype == dtype
        vector = plan @ x_own[:, 0]
        close(vector, mine(a.double() @ x[:, 0].double(), rank, sizes), dtype)


def check_dtensors(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    total = 6 * world + 1  # the last rank has fewer rows, or none
    a = drawn(total, total)
    split = distributed.split(sparse(a), world, by="rows")
    plan = distributed.plan(distributed.local_rows(sparse(a, device), rank, split), mesh)
    x = distribute_tensor(dense(total, 3, device), mesh, [Shard(0)]).requires_grad_()
    y = plan @ x
    assert isinstance(y, DTensor)
    assert tuple(y.placements) == (Shard(0),)
    close(y.full_tensor(), a.to(device) @ x.full_tensor().detach())
    y.square().sum().backward()
    close(x.grad.full_tensor(), 2 * a.to(device).mT @ (a.to(device) @ dense(total, 3, device)))
    vector = plan @ distribute_tensor(dense(total, 1, device)[:, 0], mesh, [Shard(0)])
    close(vector.full_tensor(), a.to(device) @ dense(total, 1, device)[:, 0])
    uneven = distributed.plan(
        sparse(mine(drawn(sum(SIZES[world]), sum(SIZES[world])), rank, SIZES[world]), device), mesh
    )
    with raises(ValueError, "Shard(0)", "to_local"):
        uneven @ x


def check_groups(rank, world, device):
    """A plan of a subgroup: ranks 0 and 1."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        a, x = drawn(12, 12), dense(12, 2, device)
        plan = distributed.plan(sparse(mine(a, rank, [5, 7]), device), pair)
        close(plan @ mine(x, rank, [5, 7]), mine(a.to(device) @ x, rank, [5, 7]))
    with raises(TypeError, "mesh", "DeviceMesh"):
        distributed.plan(sparse(drawn(3, 3)), mesh="cuda")


def check_a_destroyed_group(rank, world, device):
    """A plan does not keep its process group: gloo's threads end with it, without the garbage collector, and a
    product says why it fails."""
    pair = dist.new_group(list(range(world)))
    a, rows = drawn(sum(SIZES[world]), sum(SIZES[world])), SIZES[world]
    plan = distributed.plan(sparse(mine(a, rank, rows), device), pair)
    x = mine(dense(sum(rows), 3, device), rank, rows)
    y = plan @ x.clone().requires_grad_()
    y.sum().backward()
    kept = weakref.ref(pair)
    gc.disable()
    try:
        dist.destroy_process_group(pair)
        del pair
        assert kept() is None
    finally:
        gc.enable()
    if world > 1:
        with raises(RuntimeError, "distributed.plan", "destroy_process_group"):
            plan @ x


def check_reordered(rank, world, device):
    """rcm finds the band of a shuffled matrix; products in its order are those of the matrix."""
    total = 24 * world
    band = drawn(total, total, share=1.0).tril(2).triu(-2)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    a = band[shuffled][:, shuffled]
    sent = {}
    for reorder in (None, "rcm"):
        split = distributed.split(sparse(a), world, reorder=reorder)
        order = torch.arange(total) if split.permutation is None else split.permutation
        plan = distributed.plan(distributed.local_rows(sparse(a, device), rank, split))
        x = dense(total, 3, device)
        y = plan @ mine(x[order], rank, split.sizes)
        close(y, mine((a.to(device) @ x)[order], rank, split.sizes))
        sent[reorder] = sum(plan.bytes_sent(1))
    assert sent["rcm"] <= 8 * 4 * 2 * world < sent[None]


def trained(product, edges, features, labels, total, group):
    """Losses of a GCN of two layers in five steps of SGD; then its weights, the same on all ranks, and the edges.

    product: by the matrix `edges`, sparse, or dense with zeros that stay. group: sums over ranks.
    """
    device, dtype = features.device, features.dtype
    weights = [dense(6, 8, device, dtype).requires_grad_(), dense(8, 4, device, dtype).requires_grad_()]
    found = []
    for _ in range(5):
        hidden = torch.relu(product(features @ weights[0]))
        out = product(hidden @ weights[1])
        loss = torch.nn.functional.cross_entropy(out, labels, reduction="sum") / total
        to_edges, *gradients = torch.autograd.grad(loss, (edges, *weights))
        shown = loss.detach().clone()
        if group:
            for t in (*gradients, shown):
                dist.all_reduce(t)
        found.append(shown.item())
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient
            if edges.layout == torch.strided:
                edges -= to_edges * (edges != 0)
            else:
                edges.detach().values().sub_(to_edges.values())
    return torch.tensor(found, dtype=dtype), *weights, edges.detach().to_dense()


def check_a_graph_network(rank, world, device):
    """Losses, weights and edges are those of one process with a dense matrix, wherever the rows are."""
    sizes = SIZES[world]
    total = sum(sizes)
    whole = drawn(total, total).abs()
    whole = whole / whole.sum(1, keepdim=True).clamp(min=1e-9)
    labels = torch.arange(total, device=device) % 4
    for dtype, within in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        features = dense(total, 6, device, dtype)
        edges = whole.to(device, dtype, copy=True).requires_grad_()
        alone = trained(lambda x, edges=edges: edges @ x, edges, features, labels, total, False)
        assert alone[0][-1] < alone[0][0]
        for rows in (sizes, [0] * (world - 1) + [total]):  # all on the last rank, too
            for gather in (False, True):
                own = sparse(mine(whole.to(dtype), rank, rows), device).requires_grad_()
                plan = distributed.plan(own, gather=gather)
                parts, right = (mine(features, rank, rows), mine(labels, rank, rows)), mine(alone[-1], rank, rows)
                if device == "cuda" and 0 in rows:  # torch cannot add two CSR gradients that have no rows on a GPU
                    leaf, right = own.detach().values().clone().requires_grad_(), right[own.detach().to_dense() != 0]
                    found = trained(lambda x, v=leaf, p=plan: p.with_values(v) @ x, leaf, *parts, total, True)
                else:
                    found = trained(plan.__matmul__, own, *parts, total, True)
                for ours, truth in zip(found, (*alone[:-1], right), strict=True):
                    torch.testing.assert_close(ours, truth, rtol=within, atol=within)


def check_errors(rank, world, device):
    """Errors name the operator, the rank, what was expected and what came."""
    sizes = SIZES[world]
    total = sum(sizes)
    own = sparse(mine(drawn(total, total), rank, sizes), device)
    here = f"distributed.plan on rank {rank} of {world}"
    x = mine(dense(total, 3, device), rank, sizes)
    short = x if rank != 1 else torch.zeros(sizes[1] + 2, 3, device=device, dtype=torch.float64)
    other = f"got [{sizes[1] + 2}, 3]" if rank == 1 else f"[{sizes[1] + 2}, 3]"
    with raises(RuntimeError, here, other, f"[{sizes[1]}, n]" if rank == 1 else "on rank 1"):
        distributed.plan(own) @ short
    plan = distributed.plan(own)
    with raises(RuntimeError, here, "on rank"):
        plan @ (x if rank else x[:, :2])
    with raises(RuntimeError, here, "torch.float32" if rank == 0 else "rank 0"):
        plan @ (x if rank else x.float())
    with raises(RuntimeError, here, "a gradient", "on rank"):
        plan @ x.clone().requires_grad_(rank == 0)
    plan @ x
    if rank == 0 or device == "cpu":  # after the first product on GPUs there alone
        fits, got = f"[{sizes[0]}, n]" if rank == 0 else "on rank 0", f"[{sizes[0] - 1}, 3]"
        with raises(RuntimeError, here, fits, got):
            plan @ (x[:-1] if rank == 0 else x)
    with raises(ValueError, here, "constant", "on ranks 0 and 1"):
        distributed.plan(own, constant=rank != 0)
    with raises(ValueError, here, "dtype", "torch.float32 and torch.float64"):
        distributed.plan(own.float() if rank == 0 else own)
    wrong = torch.sparse_csr_tensor([0, 1], [7], [1.0], (1, 3), device=device, check_invariants=False)
    with raises(ValueError if rank == 0 else RuntimeError, "distributed.plan", "" if rank == 0 else "on rank 0"):
        distributed.plan(wrong if rank == 0 else own)
    with raises(TypeError, "products", "0"):
        distributed.plan(own, products=0)
    with raises(TypeError, "gather", "'yes'"):
        distributed.plan(own, gather="yes")
    with raises(ValueError, here, "list of columns"):
        distributed.plan(own, columns=sizes if rank else sizes[::-1])
    with raises(TypeError, "distributed.plan", "x", "dense"):
        plan @ [1.0]
    y = plan @ x.clone().requires_grad_()
    with raises(RuntimeError, "distributed.plan", "create_graph=True"):
        torch.autograd.grad(y.sum(), y.grad_fn.next_functions[1][0].variable, create_graph=True)


def check_a_large_graph_on_gpus(rank, world, device):
    """Sizes at which plans select among their kernels."""
    m = load("rmat:16:16")
    values = torch.rand(m.nnz, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = torch.sparse_csr_tensor(m.crow, m.col, values, m.shape).to(device)
    split = distributed.split(whole, world)
    x, grad = dense(m.shape[0], 128, device), dense(m.shape[0], 128, device)
    truth, to_x = whole @ x, whole.t().to_sparse_csr() @ grad
    rows = distributed.local_rows(whole, rank, split)
    for dtype in (torch.float32, torch.bfloat16):
        for constant in (False, True):
            for gather in (False, True):
                plan = distributed.plan(rows.to(dtype), constant=constant, gather=gather)
                x_own = mine(x.to(dtype), rank, split.sizes).clone().requires_grad_()
                for _ in range(2):
                    y = plan @ x_own
                    (found,) = torch.autograd.grad(y, x_own, mine(grad.to(dtype), rank, split.sizes))
                    for got, wanted in ((y, truth), (found, to_x)):
                        wanted = mine(wanted, rank, split.sizes)
                        error = (got.double() - wanted).norm() / wanted.norm()
                        assert error < (5e-6 if dtype == torch.float32 else 2e-2), (dtype, constant, gather, error)


def check_captured_on_gpus(rank, world, device):
    """A CUDA graph on each rank of a product, and of one with its gradient; it reads what is written later."""
    sizes = [300] * world
    a = drawn(300 * world, 300 * world, dtype=torch.float32)
    for constant in (True, False):
        for gather in (False, True):
            own = sparse(mine(a, rank, sizes), device)
            plan = distributed.plan(own, constant=constant, gather=gather)
            x = mine(dense(300 * world, 32, device, torch.float32), rank, sizes).clone().requires_grad_()
            grad = torch.ones(300, 32, device=device)

            def step(plan=plan, x=x, grad=grad):
                y = plan @ x
                return y.detach(), *torch.autograd.grad(y, x, grad)

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y, to_x = step()
            with torch.no_grad():
                x.mul_(-2)
                if not constant:
                    own.values().mul_(3)
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            for got, wanted in zip((y, to_x), step(), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


GPU_CHECKS = [check for name, check in list(globals().items()) if name.endswith("_on_gpus")]
CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_") and check not in GPU_CHECKS]
