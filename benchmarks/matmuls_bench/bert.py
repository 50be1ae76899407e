"""`matmuls bench-bert`: times BERT models of random weights with matmuls attention and stock attention, in one run.

A "way" is an attention implementation, with or without `optimize`. Time: whole calls by CUDA events; rounds alternate
between the ways. Memory: the peak above the weights, and also above the weights and the returned probabilities. Error:
each way's last hidden states compared with float32 eager attention in the same run.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matmuls import attention

from . import machine, timing

MIB = 2**20
SIZES = {
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
}
GPU_SHAPES = (("base", 32, 512), ("large", 16, 512), ("base", 8, 2048))
TINY_SHAPES = (("tiny", 3, 16),)


@dataclass(frozen=True)
class Way:
    """One variant of a model: the name of its attention implementation in transformers, and whether it is optimized."""

    name: str
    attention: str
    optimized: bool = False
    pieces: bool = False  # it computes scores in pieces, whose size --piece sets


# task -> its ways; the first is the rival
TASKS = {
    "probabilities": (
        Way("eager", "eager"),
        Way("custom_mm", "custom_mm", pieces=True),
        Way("custom_mm, optimized", "custom_mm", optimized=True, pieces=True),
    ),
    "hidden states": (
        Way("sdpa", "sdpa"),
        Way("custom_mm", "custom_mm"),
        Way("custom_mm, optimized", "custom_mm", optimized=True),
    ),
    "hidden states, padded": (
        Way("sdpa", "sdpa"),
        Way("custom_mm", "custom_mm"),
        Way("custom_mm, optimized", "custom_mm", optimized=True),
    ),
    # the attention computes probabilities, as eager does, and the layer drops them
    "training": (
        Way("eager", "eager"),
        Way("sdpa", "sdpa"),  # computes no probabilities
        Way("custom_mm", "custom_mm, always", pieces=True),
        Way("custom_mm, recompute", "custom_mm, recompute", pieces=True),
    ),
    # the caller keeps the probabilities until the step is done
    "training, probabilities returned": (
        Way("eager", "eager"),
        Way("custom_mm", "custom_mm, always", pieces=True),
    ),
}


@dataclass(frozen=True)
class Row:
    """One way on one model. speed: the rival's time over this one's; memory: this one's peak over the rival's."""

    task: str
    case: str
    way: str
    ms: float
    fastest_ms: float
    spread: float
    peak_mib: float  # above the weights
    above_mib: float  # above the weights and the returned probabilities
    speed: float
    memory: float  # ratio of above_mib
    error: float  # of the last hidden states, relative to float32 eager attention
    piece_mib: float | None = None
    chunk_mib: float | None = None


def run(
    device: str,
    tiny: bool,
    pieces: list[int],
    chunks: list[int],
    rounds: int,
    part: Callable[[str, float], object] = lambda now, done: None,
) -> Iterator[Row]:
    """Yield rows as they are measured. On a CPU, or with `tiny`, a tiny float32 model.

    pieces: sizes of pieces of scores to try, MiB. chunks: sizes of chunks of optimized layers to try, MiB. Empty: the
    default size. part: called with what runs next and how much of the `tasks` is done, in fractions too.
    """
    from matmuls.integrations.transformers import register

    register("custom_mm")
    register("custom_mm, always", sdpa=False)
    register("custom_mm, recompute", sdpa=False, recompute=True)
    shapes, dtype = (TINY_SHAPES, torch.float32) if tiny or device == "cpu" else (GPU_SHAPES, torch.bfloat16)
    done = 0
    for size, group in groupby(sorted(shapes), key=lambda shape: shape[0]):
        models = Models.of(size, device, dtype, chunks)
        for _, batch, length in group:
            for task in TASKS:
                case = f"{size} {batch}x{length}"

                def news(share: float, now: str = f"{case}, {task}", done: int = done) -> None:
                    part(now, done + share)

                yield from _measure(models, task, case, batch, length, pieces, rounds, news)
                done += 1
        del models
        gc.collect()


def tasks(device: str, tiny: bool) -> int:
    """How many tasks `run` measures, over all shapes."""
    return len(TASKS) * len(TINY_SHAPES if tiny or device == "cpu" else GPU_SHAPES)


def _tried(task: str, pieces: list[int], chunks: Iterable[int | None]) -> list[tuple[Way, int | None, int | None]]:
    """The ways of a task with each size of pieces and chunks that they have."""
    return [
        (way, piece, chunk)
        for way in TASKS[task]
        for chunk in (chunks if way.optimized else (None,))
        for piece in ((pieces or [None]) if way.pieces else [None])
    ]


@dataclass
class Models:
    """The models of one size: a stock one for each attention, optimized ones by chunk size in MiB (None: the default),
    and `truth` in float32.

    Each attention has its own model because switching a model's attention takes 0.14 ms of host time.
    """

    stock: dict[str, Any]
    optimized: dict[int | None, Any]
    truth: Any

    @classmethod
    def of(cls, size: str, device: str, dtype: torch.dtype, chunks: list[int]) -> "Models":
        from transformers import BertConfig, BertModel

        from matmuls.integrations.transformers import optimize

        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        torch.manual_seed(0)
        with torch.device(device):
            truth = BertModel(BertConfig(**SIZES[size], **dropout, max_position_embeddings=2048)).eval()
        stock = copy.deepcopy(truth).to(dtype)
        optimized: dict[int | None, Any] = {}
        for chunk in chunks or [None]:
            optimized[chunk] = copy.deepcopy(stock)
            optimize(optimized[chunk], **({} if chunk is None else {"chunk_bytes": chunk * MIB}))
            optimized[chunk].set_attn_implementation("custom_mm")
        stocks = {way.attention: copy.deepcopy(stock) for ways in TASKS.values() for way in ways}
        for name, model in stocks.items():
            model.set_attn_implementation(name)
        return cls(stocks, optimized, truth)


def _measure(
    models: Models,
    task: str,
    case: str,
    batch: int,
    length: int,
    pieces: list[int],
    rounds: int,
    news: Callable[[float], object],
) -> Iterator[Row]:
    device = models.truth.device.type
    ids = torch.randint(1000, 30000, (batch, length), device=device)
    inputs = {"input_ids": ids}
    if task.endswith("padded"):  # lengths from length / 2 to length
        lengths = torch.linspace(length // 2, length, batch, device=device)
        inputs["attention_mask"] = (torch.arange(length, device=device) < lengths[:, None]).long()
    training = task.startswith("training")
    returned = "probabilities" in task
    tried = [
        (way, piece, chunk, models.optimized[chunk] if way.optimized else models.stock[way.attention])
        for way, piece, chunk in _tried(task, pieces, models.optimized)
    ]
    runs = [_step(model, inputs, way.attention, training, returned, piece) for way, piece, _, model in tried]
    news(0.0)
    peaks = [_peaks(step, device) for step in runs]
    times = timing.time_of_whole(runs, device, rounds, lambda share: news(0.1 + 0.9 * share))  # most of the time
    for i, (way, piece, chunk, model) in enumerate(tried):
        yield Row(
            task=task,
            case=case,
            way=way.name,
            ms=times[i].seconds * 1e3,
            fastest_ms=times[i].fastest * 1e3,
            spread=times[i].spread,
            peak_mib=peaks[i][0] / MIB,
            above_mib=peaks[i][1] / MIB,
            speed=times[0].seconds / times[i].seconds,
            memory=peaks[i][1] / peaks[0][1],
            error=_error(models.truth, model, way.attention, inputs),
            piece_mib=piece,
            chunk_mib=chunk,
        )
    if device == "cuda":
        torch.cuda.empty_cache()


def _peaks(step: Callable[[], tuple[Tensor, ...] | None], device: str) -> tuple[int, int]:
    """Peak bytes of a step above the weights, and above the weights and the probabilities that it returns."""
    step()
    returned = []
    peak = timing.peak_memory(lambda: returned.append(step()), device)
    return peak, peak - sum(x.nbytes for x in returned[0] or ())


def _step(
    model: Any, inputs: dict[str, Tensor], implementation: str, training: bool, returned: bool, piece: int | None
) -> Callable[[], tuple[Tensor, ...] | None]:
    """A function for one forward pass, or one forward + backward pass without an optimizer step; it returns the
    probabilities."""
    parameters = list(model.parameters())  # listing those of 24 layers takes 1 ms of host time

    def step() -> tuple[Tensor, ...] | None:
        with _as(model, implementation, piece), torch.inference_mode(not training):
            output = model(**inputs, output_attentions=returned)
            if training:
                output.last_hidden_state.float().square().mean().backward()
                for parameter in parameters:
                    parameter.grad = None
            attentions: tuple[Tensor, ...] | None = output.attentions
            return attentions

    return step


@contextmanager
def _as(model: Any, implementation: str, piece: int | None) -> Iterator[None]:
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    default = attention.PIECE_BYTES
    attention.PIECE_BYTES = default if piece is None else piece * MIB
    try:
        yield
    finally:
        attention.PIECE_BYTES = default


@torch.inference_mode()
def _error(truth: Any, model: Any, implementation: str, inputs: dict[str, Tensor]) -> float:
    """Relative error of the last hidden states of two sequences, padding excluded."""
    two = {name: x[:2] for name, x in inputs.items()}
    kept = two.get("attention_mask", torch.ones_like(two["input_ids"])).bool()
    hidden = []
    for one, name in ((model, implementation), (truth, "eager")):
        with _as(one, name, None):
            hidden.append(one(**two, output_attentions=name == "custom_mm").last_hidden_state[kept].double())
    return ((hidden[0] - hidden[1]).norm() / hidden[1].norm()).item()


def save(path: Path, rows: list[Row], device: str, *, complete: bool = True) -> None:
    import transformers

    facts = {"transformers": transformers.__version__, "complete": complete}
    machine.save(path, device, facts, rows=[asdict(row) for row in rows])
