"""Computes the vectors of SentenceTransformer.encode and the scores of CrossEncoder.predict: batches of a number of
tokens, results in one tensor."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.autonotebook import tqdm

from matmuls.integrations.transformers.cuda_graph_passes import MOST
from matmuls.integrations.transformers.packed import hidden_states, packable
from matmuls.integrations.transformers.segments import moved

from .results import Collected
from .support import why_not, why_not_call
from .tokens import Tokens, ahead, batched, tokenized, windows

TOKENS_PER_BATCH = {"cpu": 8192, "cuda": MOST}


@dataclass
class Settings:
    """tokens_per_batch: most tokens of a batch; None: TOKENS_PER_BATCH. tokens: how many were encoded so far."""

    tokens_per_batch: int | None
    tokens: int = field(default=0, compare=False)

    def most(self, device: torch.device) -> int:
        return self.tokens_per_batch or TOKENS_PER_BATCH[device.type]


class NoTokens(Exception):
    """A text without tokens: the tokenizer adds none, and the text is empty."""


@torch.inference_mode()
def _inference(
    st: Any, settings: Settings, inputs: list[Any], *, prompt: str | None = None, device: Any = None, **given: Any
) -> Any:
    """SentenceTransformer._inference with its arguments. Does not use batch_size: batches have a number of tokens."""
    where = st._resolve_inference_device(device)
    names = "batch_size", "show_progress_bar", "output_value", "save_to_cpu", "normalize_embeddings", "truncate_dim"
    options = {name: x for name, x in given.items() if name not in names}
    output = given["output_value"]
    theirs = partial(type(st)._inference, st, inputs, prompt=prompt, device=device, **given)
    if output not in ("sentence_embedding", "token_embeddings"):
        return theirs()
    if why_not(st) or why_not_call(inputs, False, options, where):
        return theirs()
    vectors = Collected(len(inputs), given["save_to_cpu"])
    tokens_of: list[Any] = [None] * len(inputs)
    try:
        for texts, lengths, features in _batches(st, settings, inputs, prompt, options, where, given):
            if output == "token_embeddings":
                for i, rows in zip(texts, features[output][0].split(lengths), strict=True):
                    tokens_of[i] = rows
                continue
            rows = features[output][..., : given["truncate_dim"]]
            rows = normalize(rows, p=2, dim=1) if given["normalize_embeddings"] else rows
            vectors.add(rows, texts, features["texts"])
    except NoTokens:
        return theirs()
    return tokens_of if output == "token_embeddings" else vectors.all()


@torch.inference_mode()
def _scores(
    ce: Any, settings: Settings, inputs: list[Any], *, prompt: str | None = None, device: Any = None, **given: Any
) -> Any:
    """CrossEncoder._inference with its arguments. Does not use batch_size: batches have a number of tokens."""
    where = ce._resolve_inference_device(device)
    names = "batch_size", "show_progress_bar", "activation_fn", "apply_softmax"
    options = {name: x for name, x in given.items() if name not in names}
    theirs = partial(type(ce)._inference, ce, inputs, prompt=prompt, device=device, **given)
    if why_not(ce) or why_not_call(inputs, True, options, where):
        return theirs()
    activation, labels, scores = given["activation_fn"], ce.num_labels, Collected(len(inputs), to_cpu=False)
    try:
        for texts, _, features in _batches(ce, settings, inputs, prompt, options, where, given):
            rows = features["scores"]
            rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
            rows = rows if activation is None else activation(rows)
            rows = rows.squeeze(-1) if labels == 1 and rows.ndim > 1 else rows
            rows = torch.softmax(rows, 1) if given["apply_softmax"] and rows.ndim > 1 else rows
            scores.add(rows, texts, features["texts"])
    except NoTokens:
        return theirs()
    return scores.all()


def _batches(
    st: Any,
    settings: Settings,
    inputs: list[Any],
    prompt: str | None,
    options: dict[str, Any],
    device: torch.device,
    given: dict[str, Any],
) -> Iterator[tuple[list[int], list[int], dict[str, Any]]]:
    """For each batch the numbers of its texts among the inputs, their lengths, and what the model's modules compute.
    Raises NoTokens."""
    st.eval()
    parts = windows(len(inputs))
    coming = ahead(lambda part: tokenized(st, inputs[part], prompt, options), parts)
    whole = None if st[0].module_output_name == "scores" else packable(st[0].model)
    most, padded, count = settings.most(device), whole is None, 0
    # closing waits for the other thread
    with tqdm(total=len(inputs), desc="Texts", disable=not given["show_progress_bar"]) as bar, closing(coming):
        for tokens, batches in batched(coming, len(inputs), most, padded):
            if 0 in tokens.lengths:
                raise NoTokens
            for texts, features in _features(st, whole, tokens, batches, device):
                lengths = [tokens.lengths[i] for i in texts]
                count += sum(lengths)
                yield tokens.numbers[texts].tolist(), lengths, features
                bar.update(len(texts))
    settings.tokens += count


def _features(
    st: Any, whole: Any, tokens: Tokens, batches: list[list[int]], device: torch.device
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Each batch, and what the model's modules compute for it. whole: the model that `hidden_states` takes, or None."""
    transformer, *others = st.children()
    packed = iter(_packed(tokens, batches, device) if whole is not None else [])
    for texts in batches:
        if transformer.module_output_name == "scores":
            # of heads, which read a padded batch; an optimized encoder leaves out its padding
            batch, (numbers,) = _padded(transformer, tokens, texts, [tokens.numbers[texts]], device)
            features = {**transformer(batch), "texts": numbers}
        else:
            if whole is not None:
                flat, (columns, starts, numbers, each) = next(packed)
                hidden = hidden_states(whole, flat, [tokens.lengths[i] for i in texts], columns)
            else:
                hidden, starts, numbers, each = _unpadded(transformer, tokens, texts, device)
            features = {
                "token_embeddings": hidden[None],
                "cu_seq_lens_q": starts,
                "texts": numbers,
                "seq_idx": each[None],
            }
        if tokens.prompt is not None:
            features["prompt_length"] = tokens.prompt
        for module in others:
            features = module(features)
        yield texts, features


def _packed(
    tokens: Tokens, batches: list[list[int]], device: torch.device
) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """For each batch of texts, on the device: its input_ids and token_type_ids [T] by name, and where each token is in
    its text [T], followed by `_places`. They are copied at once."""
    names, arrays = ["input_ids", *(["token_type_ids"] if tokens.types is not None else [])], []
    for texts in batches:
        starts, numbers, each = _places(tokens, texts)
        flat = [np.concatenate(some) for some in tokens.of(texts) if some is not None]
        arrays.append([*flat, np.arange(len(each)) - starts[each], starts, numbers, each])
    tensors = iter(_moved([*chain.from_iterable(arrays)], device))
    parts = [[next(tensors) for _ in some] for some in arrays]
    return [(dict(zip(names, some, strict=False)), some[len(names) :]) for some in parts]


def _unpadded(transformer: Any, tokens: Tokens, texts: list[int], device: torch.device) -> tuple[Tensor, ...]:
    """The last hidden states of texts [T, width] by a model that needs padding, and their `_places`, on the device."""
    batch, places = _padded(transformer, tokens, texts, _places(tokens, texts), device)
    hidden = transformer(batch)["token_embeddings"]
    return hidden[batch["attention_mask"].bool()], *places


def _padded(
    transformer: Any, tokens: Tokens, texts: list[int], others: list[Any], device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """What the Transformer takes for a padded batch of texts, and other arrays, on the device."""
    ids, types = tokens.of(texts)
    lengths = [tokens.lengths[i] for i in texts]
    tokenizer, longest = transformer.tokenizer, max(lengths)
    left = tokenizer.padding_side == "left"
    mask = np.arange(longest) < np.array(lengths)[:, None]
    mask = mask[:, ::-1] if left else mask
    batch = [mask.astype(np.int64), np.full(mask.shape, tokenizer.pad_token_id or 0, np.int64)]
    batch[1][mask] = np.concatenate(ids)
    if types is not None:
        batch.append(np.full(mask.shape, tokenizer.pad_token_type_id, np.int64))
        batch[2][mask] = np.concatenate(types)
    moved = _moved([*batch, *others], device)
    features = dict(zip(("attention_mask", "input_ids", "token_type_ids"), moved[: len(batch)], strict=False))
    return {**features, "modality": "text"}, moved[len(batch) :]


def _places(tokens: Tokens, texts: list[int]) -> list[Any]:
    """Three arrays of int64: the first token of each text of a batch [texts + 1], the texts' numbers among the inputs
    [texts], and the index of each token's text in the batch [T]."""
    lengths = [tokens.lengths[i] for i in texts]
    starts = np.array([*accumulate(lengths, initial=0)])
    return [starts, tokens.numbers[texts], np.repeat(np.arange(len(texts)), lengths)]


def _moved(arrays: list[Any], device: torch.device) -> list[Tensor]:
    """Arrays of int64 as tensors on the device, in one copy."""
    return moved([torch.from_numpy(a) for a in arrays], device)
