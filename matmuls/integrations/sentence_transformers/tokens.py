"""Texts as token ids without padding, tokenized in another thread ahead of the model, and their batches."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

FIRST, MOST = 128, 1024  # texts of the first and of the largest window
SETTINGS = {"padding", "truncation", "max_length"}  # which `preprocess` leaves to the tokenizer
# methods of the module and of its tokenizer that somebody may have replaced in an instance
REPLACED = {
    "preprocess",
    "_call_processor",
    "_call_single_modality_processor",
    "_encode_plus",
    "set_truncation_and_padding",
}
Ids = list[int]
Ints = np.ndarray[Any, np.dtype[np.int64]]
_tokenizing = threading.Lock()  # a tokenizer's settings change with a call; see `tokenized`


@dataclass(frozen=True)
class Tokens:
    """The token ids of some texts, one text after the other.

    ids: [T]. types: the token types [T], or None. lengths: tokens of each text. prompt: tokens of the prompt, or None.
    numbers: which of all inputs each text is [texts]; `batched` sets them.
    """

    ids: Ints
    types: Ints | None
    lengths: list[int]
    prompt: int | None
    numbers: Ints = field(default_factory=lambda: np.arange(0))

    def batches(self, most: int, padded: bool) -> Iterator[list[int]]:
        """The texts by descending length in batches of at most `most` tokens, but at least one text. padded: count
        every text as long as the longest of its batch."""
        batch: list[int] = []
        total = 0
        for i in sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True):
            length = self.lengths[batch[0] if padded and batch else i]
            if batch and total + length > most:
                yield batch
                batch, total, length = [], 0, self.lengths[i]
            batch.append(i)
            total += length
        if batch:
            yield batch

    def of(self, texts: Sequence[int]) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]] | None]:
        """The ids and the types of each of these texts."""
        ends = [*accumulate(self.lengths, initial=0)]
        parts = [slice(ends[i], ends[i + 1]) for i in texts]
        return [self.ids[p] for p in parts], None if self.types is None else [self.types[p] for p in parts]

    def followed(self, texts: Sequence[int], more: "Tokens") -> "Tokens":
        """The tokens of these texts, and after them all of `more`."""
        ids, types = self.of(texts)
        both = None if types is None or more.types is None else np.concatenate([*types, more.types])
        lengths = [*(self.lengths[i] for i in texts), *more.lengths]
        numbers = np.concatenate([self.numbers[texts], more.numbers])
        return Tokens(np.concatenate([*ids, more.ids]), both, lengths, more.prompt, numbers)


def tokenized(st: Any, texts: list[Any], prompt: str | None, options: dict[str, Any]) -> Tokens:
    """The tokens of texts, or of pairs of texts, as the model's own `preprocess` makes them, without padding. Calls
    wait for each other: each sets the tokenizer's truncation and padding, which fails while another thread tokenizes.

    `preprocess` takes three times as long as the tokenizer of its tokenizer (12,000 docstrings: 0.97 s against 0.32 s,
    16 cores). So it runs for the first text alone, which sets the tokenizer, and for all texts only if that one's
    tokens differ.
    """
    given = options.get("processing_kwargs") or {}
    ragged = {
        **given,
        "text": {**given.get("text", {}), "padding": False, "return_attention_mask": False},
        "common": {**given.get("common", {}), "return_tensors": None},
    }
    with _tokenizing:
        prepare = partial(st.preprocess, prompt=prompt, **{**options, "processing_kwargs": ragged})
        first = prepare(texts[:1])
        if len(texts) == 1:
            return _by_preprocess(first)
        return _by_backend(st, first, texts, prompt or "", given) or _by_preprocess(prepare(texts))


def _by_preprocess(found: dict[str, Any]) -> Tokens:
    ids, types = found["input_ids"], found.get("token_type_ids")
    lengths = [*map(len, ids)]
    return Tokens(
        _flat(ids, lengths), None if types is None else _flat(types, lengths), lengths, found.get("prompt_length")
    )


def _by_backend(st: Any, first: dict[str, Any], texts: list[Any], prompt: str, given: dict[str, Any]) -> Tokens | None:
    """The tokens of texts by the tokenizer of the model's tokenizer, as `preprocess` has just set it for the first
    text; None if that may not be all that `preprocess` does."""
    processor, settings = st[0].processor, st[0].processing_kwargs
    kind, backend = type(processor), processor._tokenizer
    stock = all(getattr(kind, f) is getattr(PreTrainedTokenizerFast, f) for f in ("__call__", "_encode_plus"))
    stock = stock and not REPLACED & (vars(st[0]).keys() | vars(processor).keys())
    if given or settings.get("common") or not settings.get("text", {}).keys() <= SETTINGS or not stock:
        return None
    prompted = [prompt + x if isinstance(x, str) else [prompt + x[0], *x[1:]] for x in texts] if prompt else texts
    before = backend.truncation
    found = backend.encode_batch_fast(prompted)
    if backend.padding is not None or backend.truncation != before:  # another thread uses the tokenizer by itself
        return None
    one, ids = found[0], [encoding.ids for encoding in found]
    if first["input_ids"] != ids[:1] or first.get("token_type_ids", [one.type_ids]) != [one.type_ids]:
        return None
    lengths = [*map(len, ids)]
    types = None
    if "token_type_ids" in first:
        # All tokens of a text that is no pair have the same type, and each special token has its own.
        zero = 0 in one.special_tokens_mask and not any(one.type_ids) and all(isinstance(x, str) for x in texts)
        types = np.zeros(sum(lengths), np.int64) if zero else _flat([e.type_ids for e in found], lengths)
    return Tokens(_flat(ids, lengths), types, lengths, first.get("prompt_length"))


def _flat(rows: list[Ids], lengths: list[int]) -> Ints:
    return np.fromiter(chain.from_iterable(rows), np.int64, sum(lengths))


def windows(count: int) -> list[slice]:
    """Windows of `count` texts: two of FIRST texts, then two of each doubled size up to MOST. The model starts early.
    It takes longer for a window than the tokenizer (50 and 36 ms for 1024 docstrings, H200 and 24 cores), so it waits
    only where the size doubles. Up to 2 * FIRST texts are one window."""
    found, start, size = [], 0, FIRST if count > 2 * FIRST else count
    while start < count:
        found.append(slice(start, min(start + size, count)))
        start += size
        size = min(2 * size, MOST) if len(found) % 2 == 0 else size
    return found


def batched(
    coming: Iterable[tuple[slice, Tokens]], count: int, most: int, padded: bool
) -> Iterator[tuple[Tokens, list[list[int]]]]:
    """The tokens of each part of `count` inputs, and their `batches`. A part with several batches leaves the last one,
    of its shortest texts, to the next part: it is seldom full, and captured passes serve batches of few sizes."""
    before: Tokens | None = None
    left: list[int] = []
    for part, found in coming:
        tokens = replace(found, numbers=np.arange(part.start, part.stop))
        tokens = before.followed(left, tokens) if before is not None and left else tokens
        batches = [*tokens.batches(most, padded)]
        before, left = tokens, batches.pop() if part.stop < count and len(batches) > 1 else []
        yield tokens, batches


def ahead(make: Callable[[slice], Tokens], parts: list[slice]) -> Generator[tuple[slice, Tokens], None, None]:
    """Each part with its tokens. Those of the next part are made in another thread meanwhile, and an exception there is
    raised here. A single part is made in this thread."""
    if len(parts) == 1:
        yield parts[0], make(parts[0])
        return
    with ThreadPoolExecutor(1, thread_name_prefix="matmuls-tokenizer") as other:
        coming = other.submit(make, parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            tokens = coming.result()
            if following is not None:
                coming = other.submit(make, following)
            yield part, tokens
