"""DistributedPlan: a sparse matrix A whose rows several processes share, made ready for many products A @ x."""

import random
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Shard

from custom_mm import _C

from ..registration import expect_dense
from ..sparse.csr_pattern import INT32_MAX, CsrPattern, for_every_stream, is_capturing
from ..sparse.plan import DTYPES, SparsePlan, plan_of
from ..sparse.plan import plan as plan_alone
from .agreement import Told, agreement_of
from .exchange import AllRows, Exchange, NeededRows
from .group import Group, Mesh, digest, starts_of
from .part import Part
from .repeat import Recorded, Repeated, backward_step, forward_step

NAME = "distributed.plan"
NEARLY = 0.9  # of the rows of an all-gather: from here on it is faster, since it packs nothing


class DistributedPlan:
    """A sparse matrix A whose rows several processes share, made ready for products `plan @ x`. Made by
    `matmuls.distributed.plan`.

    Each product sends the rows of x that other ranks need. Meanwhile each rank multiplies the part of A that needs its
    own rows of x only. Then it adds the product with the received rows. All ranks must call a product, in the same
    order. The first product for a number of columns and a dtype compares these across the ranks, selects kernels and
    waits for the GPU. Later ones do not wait. Before a CUDA-graph capture do one product, and one backward pass if the
    graph has one.

    Attributes:
        shape: [M, K] of the whole matrix.
        rows: rows of A of every rank.
        columns: rows of x of every rank.
        rank: of this process in the group.
        gathers: True if all of x is sent, by an all-gather.
        peers: ranks that this one receives rows of x from.
        values: [nonzeros] of this rank, in the order of A_rows.values().
        nnz: the number of nonzeros of this rank.
        dtype: of the values.
        device: of the values and the indices.
        nbytes: bytes that the plan keeps alive on this rank.

    Examples:
        >>> import torch, matmuls.distributed
        >>> a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]).to_sparse_csr()
        >>> plan = matmuls.distributed.plan(a)  # without torch.distributed: one process with all rows
        >>> plan
        DistributedPlan(shape=[3, 3], rank 0 of 1: rows=3, nnz=4, dtype=torch.float32, device=cpu)
        >>> plan @ torch.tensor([1.0, 1.0, 1.0])
        tensor([3., 3., 1.])
    """

    def __init__(self, group: Group, base: SparsePlan, rows: list[int], columns: list[int], constant: bool) -> None:
        self._group, self._base, self._constant = group, base, constant
        self.rank, self.rows, self.columns = group.rank, tuple(rows), tuple(columns)
        self.shape = torch.Size((sum(rows), sum(columns)))
        self._agreed: set[tuple[object, ...]] = set()  # shape, dtype, device and need of a gradient of products before
        self._device_type = base.device.type
        self._reversed: set[tuple[object, ...]] = set()  # columns and dtype of gradients before
        self._loads = 0  # how often the parts took the values
        self._repeated = Repeated()
        self._own: Part
        self._halo: Part
        self._exchange: Exchange | None = None
        self._sent: list[int] = []
        self._halos: list[int] = []
        self.gathers, self.peers = False, 0

    @property
    def values(self) -> torch.Tensor:
        """The values of this rank's rows, [nonzeros], in the order of A_rows.values()."""
        return self._base.values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._base.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values and the indices."""
        return self._base.device

    @property
    def nnz(self) -> int:
        """The number of nonzeros of this rank's rows."""
        return self._base.nnz

    @property
    def nbytes(self) -> int:
        """Bytes that the plan keeps alive on this rank."""
        parts = self._base.nbytes + self._own.nbytes + self._halo.nbytes
        return parts if self._exchange is None else parts + self._exchange.nbytes

    def update(self, values: torch.Tensor) -> "DistributedPlan":
        """Replaces the values of this rank's nonzeros; the indices stay. Nothing is sent.

        Args:
            values: [nonzeros] in the order of A_rows.values(); any floating-point dtype, the same on every rank.

        Returns:
            This plan.

        Raises:
            ValueError: on another shape or device, and on values of a constant plan that require a gradient.
            TypeError: if values is not a dense tensor.
        """
        if self._constant and isinstance(values, torch.Tensor) and values.requires_grad:
            raise ValueError(f"{NAME}: expected values without a gradient in a constant plan, got some with one")
        self._base.update(values)
        if self._constant:
            self._load(self._base.values)
        return self

    def with_values(self, values: torch.Tensor) -> "DistributedPlan":
        """Makes a plan with other values for the same nonzeros, not constant, sharing everything else with this one.

        Args:
            values: [nonzeros] in the order of A_rows.values(); gradients go to it.

        Returns:
            A plan of the same matrix.

        Raises:
            ValueError: on another shape or device.
            TypeError: if values is not a dense tensor.
        """
        made = copy(self)
        made._base, made._constant, made._agreed = self._base.with_values(values), False, set()
        made._reversed, made._repeated = set(), Repeated()
        made._own, made._halo = (part.of_other_values(values.view(-1)) for part in (self._own, self._halo))
        return made

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """A @ x: this rank's rows of it, [rows, n] or [rows], from its rows of x, [columns, n] or [columns]. A DTensor
        with Shard(0) gives one."""
        product: Callable[[torch.Tensor], torch.Tensor] = self._product
        if torch.compiler.is_compiling():  # a graph break
            product = torch.compiler.disable(product)
        return product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if (repeated := self._repeated(x)) is not None:
            return repeated
        recording = torch.is_grad_enabled()
        recorded = recording and isinstance(x, torch.Tensor) and x.requires_grad
        autocast = torch.is_autocast_enabled(self._device_type)
        if autocast or type(x) is not torch.Tensor or (x.shape, x.dtype, x.device, recorded) not in self._agreed:
            if isinstance(x, DTensor):
                return self._distributed(x)
            try:
                expect_dense(NAME, x=x)
            except TypeError:
                self._refuse()
                raise
            if x.dim() == 1:
                return (self @ x.unsqueeze(-1)).squeeze(-1)
            if autocast:  # in the dtype of the plan
                with torch.autocast(self._device_type, enabled=False):
                    return self @ x.to(self.dtype)
            self._expect_agreement(x, recorded)
        if not self._constant:
            try:
                self._base._expect_same_indices(NAME)
            except ValueError:
                self._refuse()
                raise
        values = self._base.values
        product: torch.Tensor
        if recorded or (recording and values.requires_grad):
            product = Recorded.apply(values, x, self)  # type: ignore[no-untyped-call]
        else:
            product = self._forward(values, x)[0]
        if self._constant and not self._repeated.knows(x, recorded) and not is_capturing(self.device):
            self._record(x, recorded)
        return product

    def _record(self, x: torch.Tensor, recorded: bool) -> None:
        """Let C++ repeat the product of x."""
        step = forward_step(self._own, self._halo, self._exchange, x.shape[1], x.dtype)
        if step is not None:
            rest = copy(self)  # kept by the product, which `_repeated` of this plan keeps
            rest._repeated = Repeated()
            self._repeated.record(x, recorded, step, rest._slow_gradient, rest._name_the_lost)

    def _slow_gradient(self, product: _C.RepeatedProduct, grad: torch.Tensor) -> torch.Tensor:
        """The gradient to x, which C++ repeats from then on."""
        found = self._gradient_of_x(grad)
        if not is_capturing(self.device):
            step = backward_step(self._own, self._halo, self._exchange, grad.shape[1], grad.dtype)
            if step is not None:
                product.bind_backward(step)
        return found

    def _distributed(self, x: DTensor) -> torch.Tensor:
        """The product of a DTensor of rows."""
        try:
            self._group.expect_rows(x, self.rows, self.columns)
        except ValueError:
            self._refuse()
            raise
        y, mesh = self @ x.to_local(), x.device_mesh
        shape = torch.Size((self.shape[0], *y.shape[1:]))
        stride = (y.shape[1], 1) if y.dim() == 2 else (1,)
        return DTensor.from_local(y, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _expect_agreement(self, x: torch.Tensor, recorded: bool) -> None:
        """RuntimeError unless x fits, and n, the dtype and whether x needs a gradient are the same on every rank, which
        is compared once for each. Every rank raises the error, but on GPUs after the first product that rank alone."""
        own = self.columns[self.rank]
        fits = x.dim() == 2 and x.shape[0] == own and x.dtype == self.dtype and x.device == self.device
        key = x.shape, x.dtype, x.device, recorded
        if fits and (key in self._agreed or is_capturing(self.device)):
            return
        rows, n = (*x.shape, 0, 0)[:2]
        agreement, dtype = self._group.agreement, DTYPES.index(x.dtype) if x.dtype in DTYPES else -1
        facts = Told(0, fits, rows, n, dtype, recorded, 0 if agreement is None else agreement.exchanges)
        told = []
        if self._exchange is None:  # no rank waits for another
            pass
        elif agreement is not None:
            told = agreement.settle(facts, self._exchange, self.columns[self.rank], self.dtype)
        elif fits or not self._agreed:
            told = [Told(*numbers) for numbers in self._group.all_gather(facts)]
        if not fits:
            raise RuntimeError(
                f"{self._group}: expected x of shape [{own}, n], {self.dtype} on {self.device}, "
                f"got {list(x.shape)}, {x.dtype} on {x.device}"
            )
        for rank, others in enumerate(told):
            if others.waits_for or not others.fits or others[3:6] != facts[3:6]:
                raise RuntimeError(
                    f"{self._group}: expected x that fits the plan, of the same columns, dtype and need of a gradient "
                    f"on every rank, got {facts} here and {others} on rank {rank}"
                )
        self._agreed.add(key)
        if self._exchange is not None:
            self._exchange.prepare(n, x.dtype, recorded)
            _ = self._own.plan @ x.detach()  # selects a kernel now, not while an exchange disturbs its measurement

    def _refuse(self) -> None:
        """Let the other ranks know that this one raises an error instead of making a product."""
        if (agreement := self._group.agreement) is not None and self._exchange is not None:
            own = Told(0, False, 0, 0, -1, False, agreement.exchanges)
            agreement.settle(own, self._exchange, self.columns[self.rank], self.dtype)

    def _load(self, values: torch.Tensor) -> None:
        self._loads += 1
        self._own.load(values)
        self._halo.load(values)
        self._repeated.forget()  # last: another thread may have recorded a product meanwhile

    def _forward(self, values: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A @ x, and the rows of x that were received for it; no gradient is recorded of what this calls."""
        try:
            pending = None if self._exchange is None else self._exchange.start(x)
            if not self._constant:
                self._load(values)
            y = self._own.plan @ x
            if pending is None:
                return y, None
            received = pending.wait()
            self._halo.add_to(y, received)
            return y, received
        except RuntimeError as error:
            self._name_the_lost(error)
            raise

    def _name_the_lost(self, error: RuntimeError | str) -> None:
        """Raise an error that names the ranks that did not answer, if the failure is that of one."""
        if self._exchange is not None and self._exchange.is_lost:
            self._group.name_the_dead(RuntimeError(error) if isinstance(error, str) else error)

    def _gradient_of_x(self, grad: torch.Tensor) -> torch.Tensor:
        exchange = self._exchange
        if exchange is None:
            return self._own.transposed_product(grad)
        key = grad.shape[1], grad.dtype
        if key not in self._reversed and not is_capturing(self.device):
            _ = self._own.transposed_product(grad)  # as in _expect_agreement
            self._reversed.add(key)
        try:
            pending = exchange.start_back(self._halo.transposed_product(grad))
            grad_x = self._own.transposed_product(grad)
            exchange.add_back(grad_x, pending.wait())
        except RuntimeError as error:
            self._name_the_lost(error)
            raise
        return grad_x

    def _gradient_of_values(
        self, values: torch.Tensor, x: torch.Tensor, received: torch.Tensor | None, grad: torch.Tensor
    ) -> torch.Tensor:
        grad_values = torch.empty_like(values)
        self._own.gradient_of_values(grad, x, grad_values)
        if received is not None:
            self._halo.gradient_of_values(grad, received, grad_values)
        return grad_values

    def bytes_sent(self, n: int, dtype: torch.dtype | None = None) -> list[int]:
        """Bytes that each rank sends to the others in a product.

        Args:
            n: columns of x.
            dtype: of x; that of the plan if None.

        Returns:
            A number for each rank, known without asking them.
        """
        return [rows * n * (dtype or self.dtype).itemsize for rows in self._sent]

    def explain(self, n: int = 128, dtype: torch.dtype | None = None) -> str:
        """Says how much a product sends, how much every method must send, and which kernels run.

        Args:
            n: columns of x.
            dtype: of x; that of the plan if None.

        Returns:
            Lines of text: bytes for each rank, and this rank's kernels.
        """
        size, most, exchange = self._group.size, max(self.columns), self._exchange
        each = n * (dtype or self.dtype).itemsize
        gathered = (size - 1) * most * each
        way = "" if exchange is None else exchange.way(n, dtype or self.dtype)
        lines = [
            f"{' x '.join(map(str, self.shape))} on {size} ranks; rank {self.rank}: rows {self.rows[self.rank]}, "
            f"rows of x {self.columns[self.rank]}, {self.nnz} nonzeros, {self._halo.plan.nnz} of them in the halo",
            f"x is sent {way}" if exchange is not None else "nothing is sent: no rank needs rows of another",
            f"bytes for {n} columns: sent by each rank {self.bytes_sent(n, dtype)}",
            f"the least possible (halo), received by each rank: {[rows * each for rows in self._halos]}",
            f"an all-gather would send {gathered} from each rank",
        ]
        for name, part in (("own columns", self._own), ("halo", self._halo)):
            compact = "" if part.rows is None else f", kept as {part.rows.index.shape[0]} rows that are not empty"
            if part.sums(n, dtype or self.dtype) is not None:
                compact += ", in one launch"
            lines += [f"{name}{compact}:", *(f"  {line}" for line in part.plan.explain().splitlines())]
        return "\n".join(lines)

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self._group.size}: rows={self.rows[self.rank]}, nnz={self.nnz}"
        return f"DistributedPlan(shape={list(self.shape)}, {where}, dtype={self.dtype}, device={self.device})"


def plan(
    A_rows: torch.Tensor,
    mesh: Mesh = None,
    *,
    columns: Sequence[int] | None = None,
    constant: bool = False,
    products: int | None = None,
    gather: bool | None = None,
) -> DistributedPlan:
    """Makes a sparse matrix whose rows several processes share ready for many products `plan @ x`.

    Every rank of the group calls it with its own rows and the same options. Each rank tells the others once which rows
    of x it needs. In each product only those rows are sent, by NCCL on GPUs or gloo on CPUs. Products have gradients to
    x and to the values, but no second derivatives. The same kernels give the same bits every time. If a process dies or
    stops answering, the others raise an error after the group's timeout at the latest. With gloo the error names the
    rank. With NCCL, torch's watchdog ends the process.

    Args:
        A_rows: [rows, K] this rank's rows of A, consecutive after those of the rank before, with all columns; any
            number of them, 0 too. A sparse tensor in any layout that `matmuls.plan` takes, one matrix.
        mesh: a DeviceMesh of one dimension, a ProcessGroup, or None: the default group, or this process alone where
            torch.distributed is not initialized.
        columns: how many rows of x each rank has, the same list on every rank. None: as many as rows of A, which must
            then be square.
        constant: True promises that the values will not change, as in `matmuls.plan`. Without it every product reads
            the current values, and there are gradients to them.
        products: about how many products with each number of columns you will do, as in `matmuls.plan`.
        gather: True sends all of x by an all-gather, False only the needed rows. None uses the all-gather if a rank
            sends or receives at least 90 % of it anyway.

    Returns:
        A `DistributedPlan`.

    Raises:
        ValueError: on every rank, if the rows, columns or options of the ranks do not fit together; on indices that do
            not fit, and if constant values require a gradient.
        TypeError: if A_rows is not a sparse tensor, or mesh neither a DeviceMesh nor a ProcessGroup.
        RuntimeError: if another rank raises an error or does not answer.

    Examples:
        >>> import torch, matmuls.distributed
        >>> a = torch.tensor([[1.0, 0.0], [1.0, 2.0]]).to_sparse_csr()
        >>> split = matmuls.distributed.split(a, parts=1)
        >>> plan = matmuls.distributed.plan(matmuls.distributed.local_rows(a, 0, split), constant=True)
        >>> plan @ torch.tensor([[1.0], [3.0]])
        tensor([[1.],
                [7.]])
    """
    if not isinstance(A_rows, torch.Tensor):
        raise TypeError(f"{NAME}: expected A_rows to be a sparse tensor, got {type(A_rows).__name__}")
    if gather is not None and not isinstance(gather, bool):
        raise TypeError(f"{NAME}: expected gather to be True, False or None, got {gather!r}")
    group = Group(NAME, mesh, A_rows.device)
    base = group.together(partial(_block, A_rows, constant, products))
    rows, sizes, token = _agreed_sizes(group, base, columns, constant, gather)
    made = DistributedPlan(group, base, rows, sizes, constant)
    with torch.inference_mode(False), torch.no_grad():
        _cut(made, 50 if products is None else products, gather)
    group.agreement = agreement_of(group, token)
    return made


def _block(a: torch.Tensor, constant: bool, products: int | None) -> SparsePlan:
    """This rank's rows, their indices checked."""
    base = plan_of(NAME, a, tuned=False, constant=constant)
    if len(base.shape) != 2:
        raise ValueError(f"{NAME}: expected one matrix, got a batch of shape {list(base.shape)}")
    return plan_alone(base, products=products, constant=constant)  # which checks the options


def _agreed_sizes(
    group: Group, base: SparsePlan, columns: Sequence[int] | None, constant: bool, gather: bool | None
) -> tuple[list[int], list[int], int]:
    """Rows of A and of x of every rank, and a number of this plan; ValueError on each if they do not fit together."""
    dtype = DTYPES.index(base.dtype) if base.dtype in DTYPES else -1
    given = -1 if columns is None else digest(columns)
    facts = [base.shape[1], dtype, given, constant, 2 if gather is None else gather, base.shape[0]]
    told = group.all_gather([*facts, random.getrandbits(62)])
    names = "columns of A", "dtype", "list of columns", "constant", "gather"
    for rank, facts in enumerate(told):
        for name, first, other in zip(names, told[0], facts, strict=False):
            if first != other:
                shown = f"{DTYPES[first]} and {DTYPES[other]}" if name == "dtype" else f"{first} and {other}"
                shown = "different lists" if name == "list of columns" else shown
                raise ValueError(f"{group}: expected the same {name} on every rank, got {shown} on ranks 0 and {rank}")
    rows = [facts[-2] for facts in told]
    sizes = rows if columns is None else list(columns)
    if len(sizes) != group.size or sum(sizes) != base.shape[1] or min(sizes) < 0:
        what = "rows of A, as columns= is not given," if columns is None else "columns"
        raise ValueError(
            f"{group}: expected {what} of {group.size} ranks that add up to {base.shape[1]} columns, got {sizes}, "
            f"{sum(sizes)} in all"
        )
    return rows, sizes, told[0][-1]


def _cut(made: DistributedPlan, products: int, gather: bool | None) -> None:
    """Cut this rank's rows into own columns and halo, and tell the owners which rows of x are needed."""
    group, base = made._group, made._base
    s: CsrPattern = base._pattern
    sizes, m = list(made.columns), base.shape[0]
    starts = starts_of(sizes)
    begin, end = starts[group.rank], starts[group.rank + 1]
    row, is_own = s.row, (s.col >= begin) & (s.col < end)
    ids, halo = is_own.nonzero().view(-1), (~is_own).nonzero().view(-1)
    is_needed = torch.zeros(sum(sizes), dtype=torch.bool, device=base.device)
    is_needed[s.col[halo].long()] = True
    needed = is_needed.nonzero().view(-1)
    edges = torch.tensor(starts, device=base.device)
    received_counts: list[int] = torch.searchsorted(needed, edges).diff().tolist()
    facts = group.all_gather(received_counts)
    made._halos = [sum(counts) for counts in facts]
    made._sent = [sum(counts[rank] for counts in facts) for rank in range(group.size)]
    all_rows = (group.size - 1) * max(sizes)
    busiest = max(*made._halos, *made._sent)
    made.gathers = busiest > 0 and (busiest >= NEARLY * all_rows if gather is None else gather)
    halo_col = s.col[halo].long()
    made.peers = group.size - 1 if made.gathers else sum(count > 0 for count in received_counts)
    if made.gathers:
        made._exchange = exchange = AllRows(group, sizes)
        made._sent = [all_rows] * group.size
        owner = torch.searchsorted(edges, halo_col, right=True) - 1
        halo_col += owner * exchange.most - edges[owner]
    else:
        halo_col = torch.searchsorted(needed, halo_col)
        if busiest > 0:
            owner = torch.searchsorted(edges, needed, right=True) - 1
            sent_counts = [counts[group.rank] for counts in facts]
            sent = group.start_all_to_all(needed - edges[owner], received_counts, sent_counts).wait()
            made._exchange = NeededRows(group, sizes[group.rank], sent, facts)
    width = made._exchange.columns if made._exchange is not None else 0

    def part(of: torch.Tensor, col: torch.Tensor, width: int, added: bool) -> Part:
        order = of if s.order is None else s.order[of]
        order = order.to(torch.int32 if s.nonzeros < INT32_MAX else torch.int64)
        values, constant = base.values, made._constant
        return Part(row[of], col, (m, width), order, values, constant=constant, products=products, added=added)

    made._own = part(ids, s.col[ids].long() - begin, end - begin, added=False)
    made._halo = part(halo, halo_col, width, added=True)
    for_every_stream(base.values)
