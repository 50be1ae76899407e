"""Checks of divided models that every rank of a group runs: a training gives the losses of one process."""

import copy
import inspect

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import matmuls.nn
from common.distributed_processes import raises
from matmuls.distributed import Sharded
from matmuls_bench.table import Draw

ROWS, WIDTH, STEPS = 16, 8, 3
# torch 2.13 renamed it
_options = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BROADCAST = {name: False for name in ["forward_sync_buffers", "broadcast_buffers"] if name in _options}
NO_BROADCAST = dict([next(iter(NO_BROADCAST.items()))])


class Model(nn.Module):
    """One of each module of matmuls.nn, and functions between them."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.expert = matmuls.nn.MaskedLinear(WIDTH, WIDTH, bias, dtype=torch.float64)
        self.network = matmuls.nn.MaskedFFN(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.sparse = matmuls.nn.SparseLinear.from_linear(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), sparsity=0.5)
        self.inplace = matmuls.nn.InplaceLinear(WIDTH, keep_input=True, dtype=torch.float64)
        self.leave = nn.Linear(WIDTH, 4, dtype=torch.float64)

    def forward(self, x, mask):
        x = matmuls.softmax_(2 * self.entry(x))  # a view of a DTensor cannot be written
        x = x + self.expert(x, mask)
        x = matmuls.rms_norm_(x + self.network(x, mask))
        x = matmuls.layer_norm_(2 * self.sparse(x), residual=x)
        return self.leave(self.inplace(x * 2))


def drawn():
    draw = Draw(torch.float64)
    return draw(ROWS, WIDTH), draw(ROWS) > 0, torch.arange(ROWS) % 4


def losses(model, x, mask, labels, shown=float, divided=1):
    """Losses of steps of SGD. shown: the whole loss as a number, of this process's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x, mask), labels, reduction="sum") / (ROWS // divided)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(shown(loss.detach()))
    return torch.tensor(found)


def mean_of_all(world):
    def shown(loss):
        torch.distributed.all_reduce(loss)
        return float(loss / world)

    return shown


def compilations(world):
    """Whether to compile a model: takes seconds on each process, so only two of them do."""
    return (False, True)[: 1 + (world == 2)]


def own(t, rank, world):
    return t.chunk(world)[rank]


def check_fully_shard(rank, world, device):
    alone = losses(Model(), *drawn())
    mesh = init_device_mesh(device, (world,))
    for compiled in compilations(world):
        model = Model()
        for layer in (model.expert, model.network, model.sparse):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)  # and model.inplace with it: torch passes a module of its own a view of x
        assert isinstance(model.sparse.values, DTensor)
        model = torch.compile(model, backend="aot_eager") if compiled else model
        found = losses(model, *(own(t, rank, world) for t in drawn()), mean_of_all(world), world)
        torch.testing.assert_close(found, alone)
    assert alone[-1] < alone[0]


def check_distributed_data_parallel(rank, world, device):
    alone = losses(Model(), *drawn())
    for compiled in compilations(world):
        torch._dynamo.reset()
        model = DistributedDataParallel(Model(), **NO_BROADCAST)
        plan = model.module.sparse.plan()
        model = torch.compile(model, backend="aot_eager") if compiled else model
        found = losses(model, *(own(t, rank, world) for t in drawn()), mean_of_all(world), world)
        torch.testing.assert_close(found, alone)
        assert getattr(model, "_orig_mod", model).module.sparse.plan() is plan, "the pattern was checked again"


def check_tensor_parallel(rank, world, device):
    """Every process has all rows, and a part of the features of each layer."""
    ways = [(True, "columns", False), (False, "inner", False), (True, "columns", True)][: 2 + (world == 2)]
    for bias, by, compiled in ways:
        alone = losses(Model(bias), *drawn())
        mesh = init_device_mesh(device, (world,))
        layers = {
            "entry": ColwiseParallel(output_layouts=Replicate()),
            "expert": Sharded(by, output=Replicate()),
            "network": Sharded("inner"),
            "sparse": Sharded("columns", output=Replicate()),
            "leave": RowwiseParallel(input_layouts=Replicate()),
        }
        model = parallelize_module(Model(bias), mesh, layers)
        if by == "inner":
            enter = lambda _, args, mesh=mesh: (own_features(args[0], mesh), *args[1:])  # noqa: E731
            model.expert.register_forward_pre_hook(enter, prepend=True)
        weight = model.expert.first.weight
        assert tuple(weight.placements) == (Shard(0 if by == "columns" else 1),)
        assert weight.to_local().numel() == WIDTH * WIDTH // world
        model = torch.compile(model, backend="aot_eager") if compiled else model
        torch.testing.assert_close(losses(model, *drawn()), alone)


def own_features(x, mesh):
    """This process's features of an x that all have, differentiable."""
    return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(-1)])


def check_rows_on_every_module(rank, world, device):
    """Every process has all parameters and some of the rows, which are DTensors from the first layer to the loss."""
    alone = losses(Model(), *drawn())
    mesh = init_device_mesh(device, (world,))
    model = Model()
    for layer in (model.entry, model.leave):
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    rows = {name: Sharded("rows", use_local_output=False) for name in ("expert", "network", "sparse", "inplace")}
    model = parallelize_module(model, mesh, rows)
    x, mask, labels = (distribute_tensor(t, mesh, [Shard(0)]) for t in drawn())
    found = losses(model, x, mask, labels, lambda loss: float(loss.full_tensor()))
    torch.testing.assert_close(found, alone)


def check_plans_of_a_matrix_that_all_have(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    draw = Draw(torch.float64)
    a = (draw(9, 7) * (draw(9, 7) > 0)).to_sparse_csr()
    for constant in (False, True):
        for b, place in (
            (draw(7, 6), Shard(1)),
            (draw(7, 6), Shard(0)),
            (draw(7), Shard(0)),
            (draw(7, 6), Replicate()),
        ):
            values = a.values().clone().requires_grad_(not constant)
            plan = matmuls.plan(a, constant=constant).update(values)
            alone = b.clone().requires_grad_()
            wanted = torch.autograd.grad((plan @ alone).square().sum(), [alone, *([] if constant else [values])])
            spread = distribute_tensor(b, mesh, [place]).requires_grad_()
            with CommDebugMode() as communicated:
                y = plan @ spread
            assert tuple(y.placements) == (place if place == Shard(1) else Replicate(),)
            assert place == Shard(0) or communicated.get_total_counts() == 0
            torch.testing.assert_close(y.full_tensor(), plan @ b)
            found = torch.autograd.grad(y.square().sum(), [spread, *([] if constant else [values])])
            torch.testing.assert_close(found[0].full_tensor(), wanted[0])
            torch.testing.assert_close(found[1:], wanted[1:])


def check_plans_and_keywords(rank, world, device):
    """A mask plan, of all rows or of this process's, and arguments by name."""
    mesh = init_device_mesh(device, (world,))
    x, mask, _ = drawn()
    wanted = Model().expert(x, mask)
    columns = parallelize_module(Model().expert, mesh, Sharded("columns", output=Replicate()))
    torch.testing.assert_close(columns(x, matmuls.mask_plan(mask)), wanted)
    torch.testing.assert_close(columns(x, mask=mask), wanted)
    rows = parallelize_module(Model().expert, mesh, Sharded("rows"))
    mine, plan = own(x, rank, world), matmuls.mask_plan(own(mask, rank, world), known=int(own(mask, rank, world).sum()))
    torch.testing.assert_close(rows(mine, plan), own(wanted, rank, world))
    torch.testing.assert_close(rows(x=mine, mask=plan), own(wanted, rank, world))


def check_errors_of_styles(rank, world, device):
    mesh = init_device_mesh(device, (world,))
    with raises(ValueError, "distributed.Sharded", "'sideways'"):
        Sharded("sideways")
    with raises(TypeError, "SparseLinear by rows or columns", "got Linear by rows"):
        parallelize_module(nn.Linear(2, 2), mesh, Sharded("rows"))
    with raises(TypeError, "got InplaceLinear by columns"):
        parallelize_module(matmuls.nn.InplaceLinear(2), mesh, Sharded("columns"))
    with raises(TypeError, "without a bias"):
        parallelize_module(matmuls.nn.MaskedLinear(4, 4), mesh, Sharded("inner"))
    x, state = drawn()[0], copy.deepcopy(Model().sparse)
    uneven = matmuls.nn.SparseLinear.from_linear(nn.Linear(WIDTH, world + 1, dtype=torch.float64), sparsity=0.2)
    wanted = uneven(x)
    found = parallelize_module(uneven, mesh, Sharded("columns", output=Replicate()))(x)
    torch.testing.assert_close(found, wanted)
    assert state(x).shape == (ROWS, WIDTH)


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
