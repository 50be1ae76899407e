"""Tells whether a SentenceTransformer computes what it did in an earlier run."""

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


def fingerprints(model: Any) -> dict[str, str]:
    """SHA-256 of the weights, of the tokenizer's files and of the settings of a SentenceTransformer, by their names in
    messages."""
    return {
        "weights of the model": _weights(model.state_dict()),
        "tokenizer": _tokenizers([getattr(module, "tokenizer", None) for module in model]),
        "settings of the model": _settings(model),
    }


def _weights(state: dict[str, Any]) -> str:
    """Every byte is hashed, on all cores: 91 MB took 0.35 s on two busy cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return _text(
            [f"{name} {digest}" for name, digest in zip(state, pool.map(_weight, state.values()), strict=True)]
        )


def _weight(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    data = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    data = data.contiguous().cpu().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data.numpy().data).hexdigest()}"


def _tokenizers(found: list[Any]) -> str:
    parts: list[str] = []
    for tokenizer in found:
        if hasattr(tokenizer, "save_pretrained"):
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                for file in sorted(Path(folder).iterdir()):
                    parts.append(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}")
    return _text(parts)


def _settings(model: Any) -> str:
    parts = [json.dumps([model.prompts, model.default_prompt_name, model.max_seq_length])]
    for module in model:
        own = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
        inner: Any = getattr(getattr(module, "model", None), "config", None)
        whole = inner.to_dict() if hasattr(inner, "to_dict") else {}
        parts.append(json.dumps([type(module).__qualname__, own, whole], sort_keys=True, default=str))
    return _text(parts)


def _text(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
