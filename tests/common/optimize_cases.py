"""What the tests of optimize share."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


ROTARY = ("modernbert", "modernbert biases", "nomic", "gte", "jina")
DECODERS = ("qwen3", "qwen3 window", "gemma3", "gemma3 causal")
TEXTS = (
    "bert",
    "roberta",
    "electra",
    "distilbert",
    "albert",
    "mpnet",
    *ROTARY,
    "eurobert",
    *DECODERS,
)  # those that leave out padding
CAUSAL = ("bert decoder", "clip text")
IMAGES = ("vit", "deit", "dinov2", "dinov2 swiglu", "dinov2 registers", "clip vision", "siglip vision")
KNOWN = (*TEXTS, *CAUSAL, *IMAGES, "siglip text", "whisper")


def hidden(model, batch, **wanted):
    with torch.no_grad():
        return model(**batch, **wanted).last_hidden_state
