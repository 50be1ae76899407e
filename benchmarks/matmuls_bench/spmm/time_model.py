"""A model of the seconds of a distributed product, fitted to measurements: it predicts, it does not measure.

    seconds = max(peers * latency + bytes / link, own work / rate) + halo work / rate

for the busiest rank: the rows of x are on their way while the block of own columns is multiplied. Work is nonzeros
times columns of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize  # type: ignore[import-untyped]
import torch

from matmuls.distributed.group import even, starts_of
from matmuls.distributed.splits import balanced


@dataclass(frozen=True)
class Load:
    """The largest counts of any rank in one product, of which the model computes its time.

    peers: ranks that one of them receives rows from. rows: rows of x, sent or received, whichever are more. own, halo:
    nonzeros in the columns that a rank has the rows of x for, and in others.
    """

    peers: int
    rows: int
    own: int
    halo: int


@dataclass(frozen=True)
class Measured:
    """Seconds of one product and its parts: the exchange alone, and the products of own block and halo alone."""

    n: int
    itemsize: int
    load: Load
    exchange: float
    products: float
    whole: float


@dataclass(frozen=True)
class Model:
    """The parameters: seconds for each peer of an exchange, bytes per second of a rank (inf: too few to tell), and
    nonzeros times columns per second. error: of the predicted seconds, the largest relative one over the measurements.
    """

    latency: float
    link: float
    rate: float
    error: float = 0.0

    def seconds(self, load: Load, n: int, itemsize: int) -> float:
        """Predicted seconds of a product with n columns."""
        exchange = load.peers * self.latency + load.rows * n * itemsize / self.link
        return max(exchange, load.own * n / self.rate) + load.halo * n / self.rate


def fit(measured: Sequence[Measured]) -> Model:
    """Fit by least squares of relative errors, with parameters that are not negative.

    ValueError without a measurement that sent something.
    """
    sent = [m for m in measured if m.load.rows]
    if not sent:
        raise ValueError("model: expected measurements with bytes sent, got none")
    columns = [[m.load.peers / m.exchange, m.load.rows * m.n * m.itemsize / m.exchange] for m in sent]
    (latency, per_byte), _ = scipy.optimize.nnls(np.array(columns), np.ones(len(sent)))
    work = np.array([(m.load.own + m.load.halo) * m.n / m.products for m in measured])
    rate = float((work @ work) / work.sum())
    model = Model(float(latency), float(1 / per_byte) if per_byte else float("inf"), rate)
    errors = [abs(model.seconds(m.load, m.n, m.itemsize) / m.whole - 1) for m in measured]
    return Model(model.latency, model.link, model.rate, max(errors))


def load_of(crow: torch.Tensor, col: torch.Tensor, sizes: Sequence[int]) -> Load:
    """The busiest ranks' loads of a square matrix whose rows are cut into these sizes. crow, col: its CSR indices."""
    parts, columns = len(sizes), sum(sizes)
    starts = torch.tensor(starts_of(sizes), device=col.device)
    counts = crow[starts].diff().long()
    owner = torch.searchsorted(starts, col.long(), right=True) - 1  # the last of empty ranges that begin there
    rank = torch.repeat_interleave(torch.arange(parts, device=col.device), counts)
    away = owner != rank
    halo = torch.bincount(rank[away], minlength=parts)
    pairs = torch.unique(rank[away] * columns + col[away])
    to, of = pairs // columns, torch.searchsorted(starts, pairs % columns, right=True) - 1
    moved = torch.cat([torch.bincount(side, minlength=parts) for side in (to, of)])
    peers = torch.bincount(torch.unique(to * parts + of) // parts, minlength=parts)
    return Load(*(int(t.max()) for t in (peers, moved, counts - halo, halo)))


def predictions(
    model: Model, crow: torch.Tensor, col: torch.Tensor, n: int, itemsize: int, by: str = "nonzeros"
) -> list[tuple[int, Load, float, float]]:
    """For 4 to 1024 GPUs: how many, their load, predicted seconds, and the speedup over one by the same model.

    The loads are counted for the matrix with these CSR indices, cut anew for each number. Every GPU has the links that
    the model was fitted on.
    """
    alone = col.shape[0] * n / model.rate
    rows = crow.shape[0] - 1
    found = []
    for gpus in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if gpus > rows:
            break
        load = load_of(crow, col, balanced(crow, gpus) if by == "nonzeros" else even(rows, gpus))
        seconds = model.seconds(load, n, itemsize)
        found.append((gpus, load, seconds, alone / seconds))
    return found
