"""The embeddings of packed tokens in one kernel, for models of BERT's form: torch takes three gathers, two sums and a
norm."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from custom_mm import _C

from .families import _kind

FORM = {  # word + type + position embeddings, and a norm
    *(f"{name.lower()}.{name}Embeddings" for name in ("Albert", "Bert", "Camembert", "Electra", "Roberta")),
    "xlm_roberta.XLMRobertaEmbeddings",
}
WIDEST = 8192  # bytes of a row
DTYPES = torch.float32, torch.float16, torch.bfloat16


def in_one_kernel(embeddings: Any) -> Any:
    """Returns a function that computes the embeddings of packed tokens in one kernel, for an embeddings module in eval
    mode on a GPU; None if the kernel does not support the module."""
    if _kind(embeddings) not in FORM or getattr(embeddings, "position_embedding_type", "absolute") != "absolute":
        return None
    norm = embeddings.LayerNorm
    tables = [embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings]
    if type(norm) is not nn.LayerNorm or any(type(t) is not nn.Embedding or t.max_norm is not None for t in tables):
        return None
    parameters = [*(table.weight for table in tables), norm.weight, norm.bias]
    return partial(_embedded, embeddings) if all(_fits(p, tables[0].weight) for p in parameters) else None


def _fits(p: Any, words: Tensor) -> bool:
    """True if the kernel takes a parameter [..., width] of a model with such word embeddings."""
    if type(p) not in (nn.Parameter, Tensor) or not p.is_cuda or p.device != words.device or not p.is_contiguous():
        return False
    row = p.size(-1) * p.dtype.itemsize
    known = p.dtype == words.dtype and p.dtype in DTYPES and p.size(-1) == words.size(1)
    return bool(known and p.data_ptr() % 16 == row % 16 == 0 and row <= WIDEST)


def _embedded(
    embeddings: Any, input_ids: Tensor, *, position_ids: Tensor, token_type_ids: Tensor | None = None, **others: Any
) -> Tensor:
    ids, positions = (x.long().contiguous() for x in (input_ids, position_ids))
    types = None if token_type_ids is None else token_type_ids.long().contiguous()
    tables = embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings
    words, of_positions, of_types = (table.weight for table in tables)
    norm = embeddings.LayerNorm
    return _C.embed(ids, words, positions, of_positions, types, of_types, norm.weight, norm.bias, norm.eps)
