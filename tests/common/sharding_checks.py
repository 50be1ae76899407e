"""Checks of the DTensor rules that every rank of a group runs: each way of each rule, with values and gradients."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.torch_version import TorchVersion

from common.distributed_processes import raises
from matmuls.distributed.sharding import PARTIAL, RULES, placement, ways
from matmuls_bench.table import Draw

_ops = torch.ops.custom_mm
BEFORE_213 = TorchVersion(torch.__version__) < (2, 13)
MASK = [True, False, True, True, False, False, True, True]


def _sparse_operands():
    """crow, col, values of a matrix of 5 x 8, and the same of its transpose with the order of the values."""
    draw = Draw(torch.float64, seed=3)
    a = (draw(5, 8) * (draw(5, 8) > 0.3)).to_sparse_csr()
    crow, col = a.crow_indices().int(), a.col_indices().int()
    return (crow, col, a.values()), _ops.csr_transpose.default(crow, col, 8)


def calls(m, n):
    """Calls of every operator that has a rule, with matrices of m rows and of n rows of more dimensions."""
    draw = Draw(torch.float64)
    x, b, w = draw(m, 8), draw(8), [draw(8, 8) for _ in range(6)]
    deep, mask = draw(2, n, 5, 8), draw(2, n, 1, 8) > 0
    y = torch.softmax(deep, -1)
    plan = _ops.mask_plan.default(torch.tensor(MASK[:m]))
    (crow, col, values), transposed = _sparse_operands()
    xhat, rstd = draw(m, 8), draw(m).exp()
    yield from ((_ops.matmul.default, (p, q, *t)) for p, q, t in _products(draw, m, n))
    yield _ops.matmul.out, (x, w[0], False, False), {"out": torch.empty(m, 8, dtype=torch.float64)}
    yield _ops.cublaslt_matmul.default, (x, w[0], b, "gelu", False, True)
    yield _ops.cublaslt_matmul.default, (deep, w[0], b, None, False, False)
    yield _ops.cublaslt_matmul.default, (x, w[0], None, None, False, True)
    out = {"out": torch.empty(m, 8, dtype=torch.float64)}
    yield _ops.cublaslt_matmul.out, (x, w[0], b, "relu", False, True), out
    yield _ops.kept.default, (x,)
    yield _ops.gelu.default, (x, True)
    yield _ops.gelu_backward.default, (x, xhat, False)
    yield _ops.bias_act_.default, (deep, b, "relu")
    yield _ops.bias_act_.default, (x, None, "gelu")
    yield _ops.matmul_.default, (deep, w[0], True, b, True)
    yield _ops.feed_forward_.default, (x, w[0], b, w[1], b, b, b, 1e-5, "gelu")
    for dim in (-1, 1):
        yield _ops.softmax.default, (deep, dim)
        yield _ops.softmax_.default, (deep, dim)
        yield _ops.softmax_backward.default, (y, deep, dim, 0.5)
    yield _ops.softmax.out, (x, 0), out
    yield _ops.softmax_backward.default, (y, deep, -1, 1.0, True)
    yield _ops.softmax_backward.out, (x, xhat, -1), out
    yield _ops.softmax_backward_.default, (y, deep)
    for operator in (_ops.scaled_masked_softmax.default, _ops.scaled_masked_softmax_.default):
        yield operator, (deep, mask, 0.5)
        yield operator, (deep, None, 1.0, True)
    yield _ops.layer_norm_.default, (deep, b, b + 1, 1e-5, draw(2, n, 5, 8))
    yield _ops.layer_norm_.default, (x, None, None)
    yield _ops.rms_norm_.default, (deep, b, 1e-5, draw(2, n, 5, 8))
    yield _ops.norm_keep_.default, (x, b, None, 1e-5, None, False)
    yield _ops.norm_keep_.default, (deep, None, None, 1e-5, None, True)
    yield _ops.norm_backward.default, (x, xhat, rstd, b, False)
    yield _ops.norm_backward.default, (x, xhat, rstd, b, False, False, True)
    yield _ops.norm_backward.default, (x, xhat, rstd, None, True, True, False)
    yield _ops.mask_plan.default, (torch.tensor(MASK[:m]),)
    yield _ops.masked_linear.default, (x, w[0], w[1], *plan, b, 2 * b)
    yield _ops.masked_linear.default, (x.view(m, 1, 8), w[0], w[1], *plan)
    yield _ops.masked_linear.default, (x, w[0], w[1], *plan, None, None, sum(MASK[:m]))
    yield _ops.masked_linear_backward.default, (xhat, x, w[0], w[1], *plan)
    yield _ops.masked_weights.default, (xhat, x, *plan)
    yield _ops.masked_weights.default, (xhat, x, *plan, False, True)
    yield _ops.masked_sums.default, (x, *plan)
    yield _ops.masked_ffn.default, (x, *w, *plan)
    yield _ops.masked_ffn_forward.default, (x, *w, *plan, False)
    yield _ops.masked_ffn_forward.default, (x, *w, *plan, True)
    yield _ops.masked_ffn_backward.default, (xhat, x, *w, *plan, None, [True] * 7)
    yield _ops.masked_ffn_backward.default, (xhat, x, *w, *plan, None, [False, True, *[False] * 5])
    yield _ops.csr_linear.default, (crow, col, values, deep, draw(5), None, *transposed)
    yield _ops.csr_spmm.default, (crow, col, values, draw(8, 6), 8, "sum", 0.5, None, *transposed)
    yield _ops.csr_sddmm.default, (crow, col, draw(5, 6), draw(8, 6), 8, 2.0, None, *transposed)


def _products(draw, m, n):
    for transa in (False, True):
        for transb in (False, True):
            yield draw(8, 8), draw(8, 8), (transa, transb)  # of the same shapes: DTensor must not take one for another
            yield draw(*(8, m)[:: 1 if transa else -1]), draw(*(5, 8)[:: 1 if transb else -1]), (transa, transb)
    yield draw(2, n, 5, 8), draw(2, n, 8, 5), (False, False)
    yield draw(n, 5, 8), draw(8, 5), (False, False)
    yield draw(1, 5, 8), draw(n, 8, 5), (False, False)
    yield draw(8), draw(8, 5), (False, False)
    yield draw(5, 8), draw(8), (False, False)
    yield draw(8), draw(8), (False, False)
    yield draw(n, 5, 8), draw(8), (False, False)
    yield draw(8), draw(n, 8, 5), (False, False)


def _named(operator, args, kwargs):
    return dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | kwargs


def _placed(mesh, way, named):
    """The arguments as DTensors with the placements of a way; a mask plan is made by every process of its mask."""
    made = {}
    for name, given in named.items():
        if isinstance(given, torch.Tensor):
            place = placement(way.arguments.get(name))
            whole = given.clone()
            made[name] = (
                DTensor.from_local(whole, mesh, [place])  # to be written, or a plan's counts
                if place.is_partial()
                else distribute_tensor(whole, mesh, [place])
            )
        else:
            made[name] = given
    if way.arguments.get("counts") == PARTIAL:
        mask = distribute_tensor(torch.tensor(MASK[: named["rows"].shape[0]]), mesh, [Shard(0)])
        made["rows"], made["counts"] = _ops.mask_plan.default(mask)
    return made


def _shardable(way, named, world):
    """Whether DTensor takes the way: it keeps no dimension shorter than the mesh sharded."""
    sharded = ((named[name], d) for name, d in way.arguments.items() if isinstance(named.get(name), torch.Tensor))
    return all(t.shape[d] >= world for t, d in sharded if isinstance(d, int))


def _results(found, named, operator):
    """All that a call wrote or returned."""
    found = [found] if isinstance(found, torch.Tensor) else list(found or ())
    written = [named[a.name] for a in operator._schema.arguments if a.alias_info is not None]
    return found, written


def check_every_way_of_every_rule(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    seen = set()
    for operator, args, *more in calls(7, 6):  # which four processes cannot divide
        named = _named(operator, args, more[0] if more else {})
        options = [n for n in named if n == "out"]
        for way in ways(operator, *args, **{n: named[n] for n in options}):
            if not _shardable(way, named, world):
                continue
            seen.add((operator, way.what))
            where = f"{operator} {way}"
            alone = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in named.items()}
            wanted, wrote = _results(operator(**alone), alone, operator)
            placed = _placed(mesh, way, named)
            with CommDebugMode() as communicated:
                found, written = _results(operator(**placed), placed, operator)
            assert communicated.get_total_counts() == 0, f"{where}: {communicated.get_comm_counts()}"
            if operator._overloadname != "out":
                places = [t.placements[0] for t in found]
                assert places == [placement(p) for p in way.results], f"{where}: {places}"
            if operator == _ops.mask_plan.default and way.arguments:
                own = distribute_tensor(named["mask"], mesh, [Shard(0)]).to_local()
                wanted[0], found[0] = _ops.mask_plan.default(own)[0], found[0].to_local()
            if operator == _ops.masked_ffn_forward.default:
                wanted, found = wanted[:1], found[:1]  # what is kept is in an order of the process
            for got, t in zip(found + written, wanted + wrote, strict=True):
                got = got.full_tensor() if isinstance(got, DTensor) else got
                torch.testing.assert_close(got, t, msg=lambda m, where=where: f"{where}: {m}")
    assert {operator for operator, _ in seen} == set(RULES)
    assert {op for op, what in seen if what != "replicated"} == set(RULES)


DIFFERENTIABLE = {
    _ops.matmul.default: "a b",
    _ops.cublaslt_matmul.default: "a b bias",
    _ops.kept.default: "a",
    _ops.gelu.default: "x",
    _ops.matmul_.default: "a b bias",
    _ops.softmax.default: "x",
    _ops.softmax_.default: "x",
    _ops.softmax_backward.default: "y grad",
    _ops.scaled_masked_softmax.default: "x",
    _ops.scaled_masked_softmax_.default: "x",
    _ops.layer_norm_.default: "x weight bias residual",
    _ops.rms_norm_.default: "x weight residual",
    _ops.masked_linear.default: "x w1 w2 b1 b2",
    _ops.masked_ffn.default: "x w1 w2 w3 u1 u2 u3",
    _ops.masked_weights.default: "grad x",
    _ops.masked_sums.default: "x",
    _ops.csr_linear.default: "values x bias",
    _ops.csr_spmm.default: "values dense",
    _ops.csr_sddmm.default: "a b",
}


def _gradients(operator, named, spread=None):
    """Gradients of a weighted sum of the results to the arguments that have one."""
    given = dict(named)
    leaves = {
        n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE[operator].split() if given.get(n) is not None
    }
    given |= leaves
    first = operator._schema.arguments[0]
    if first.alias_info is not None:  # a leaf cannot be written
        given[first.name] = given[first.name] * 1.0
    found, written = _results(operator(**given), given, operator)
    total = 0
    for y in found + written:
        weights = Draw(torch.float64, seed=9)(*y.shape)
        total = total + (y * (spread(weights) if spread else weights)).sum()
    total.backward()
    return {n: t.grad for n, t in leaves.items()}


def check_gradients_of_every_way(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    for operator, args, *_ in calls(8, 4):  # torch flattens leading dimensions only if they are divided evenly
        if operator not in DIFFERENTIABLE:
            continue
        named = _named(operator, args, {})
        wanted = _gradients(operator, named)
        for way in ways(operator, *args):
            if not _shardable(way, named, world):
                continue
            spread = lambda t: distribute_tensor(t, mesh, [Replicate()])  # noqa: E731
            try:
                found = _gradients(operator, _placed(mesh, way, named), spread)
            except RuntimeError as error:
                if BEFORE_213 and "Attempted to flatten multiple dimensions" in str(error):
                    continue  # torch's own view refuses what it takes from 2.13 on
                error.add_note(f"in {operator} {way}")
                raise
            for name, grad in found.items():
                torch.testing.assert_close(
                    grad.full_tensor(), wanted[name], msg=lambda m, w=way, o=operator, n=name: f"{o} {w} {n}: {m}"
                )


def check_other_placements_are_redistributed(rank, world, device):
    """With every argument sharded in dimension 0 results are right, or an error says what may not be moved."""
    mesh = init_device_mesh(device, (world,))
    refused = set()
    for operator, args, *more in calls(7, 6):
        named = _named(operator, args, more[0] if more else {})
        alone = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in named.items()}
        wanted, wrote = _results(operator(**alone), alone, operator)
        placed = {
            n: distribute_tensor(t.clone(), mesh, [Replicate() if n in ("rows", "counts") else Shard(0)])
            if isinstance(t, torch.Tensor)
            else t
            for n, t in named.items()
        }
        try:
            found, written = _results(operator(**placed), placed, operator)
        except RuntimeError as error:
            if "expected placements with which these arguments need not be moved" not in str(error):
                raise
            refused.add(operator)
            continue
        if operator in (_ops.mask_plan.default, _ops.masked_ffn_forward.default):
            continue
        for got, t in zip(found + written, wanted + wrote, strict=True):
            torch.testing.assert_close(got.full_tensor(), t, msg=lambda m, o=operator: f"{o}: {m}")
    assert all(operator._schema.name.endswith("_") or operator._overloadname == "out" for operator in refused), refused


def check_what_is_written_stays_where_it_is(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)])
    for operator, others in ((_ops.softmax_.default, ()), (_ops.layer_norm_.default, ())):
        with raises(RuntimeError, operator._schema.name.partition("::")[2], "in place", "x [Shard(dim=1)]"):
            operator(x, *others)
    rows, counts = _ops.mask_plan.default(distribute_tensor(torch.ones(8, dtype=torch.bool), mesh, [Shard(0)]))
    w = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    replicated = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    y = _ops.masked_linear.default(replicated, w, w, rows, counts)  # x goes where the plan is
    assert tuple(y.placements) == (Shard(0),)


def check_two_dimensions(rank, world, device):
    if world != 4:
        return
    mesh = init_device_mesh(device, (2, 2))
    draw = Draw(torch.float64)
    x, w = draw(8, 6), draw(4, 6)
    a = distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_()
    b = distribute_tensor(w, mesh, [Replicate(), Shard(0)]).requires_grad_()
    with CommDebugMode() as communicated:
        y = _ops.matmul.default(a, b, False, True)
    assert communicated.get_total_counts() == 0
    assert tuple(y.placements) == (Shard(0), Shard(1))
    torch.testing.assert_close(y.full_tensor(), x @ w.T)
    y.sum().backward()
    torch.testing.assert_close(a.grad.full_tensor(), w.sum(0).expand(8, 6))
    torch.testing.assert_close(b.grad.full_tensor(), x.sum(0).expand(4, 6))


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
