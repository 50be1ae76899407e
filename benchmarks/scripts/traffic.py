"""Sends random requests from many threads to one optimized BERT for minutes, and checks results, progress and memory.

Usage: python benchmarks/scripts/traffic.py OUT --minutes M --device cuda|cpu [--threads 8] [--every 20]. Writes
OUT/DEVICE/traffic.json. The weights are random: BERT base in bfloat16 on a GPU, a small BERT in float32 on a CPU. A
request is SentenceTransformer.encode, encode_tokens, or a plain call of the model on a whole or a half padded batch, of
texts of mixed lengths, now and then the longest. Every k-th result of a thread is compared with an eager copy of the
model in the same dtype, text by text: the norm of the difference, divided by that of the result. The tolerance is twice
the largest such difference between eager attention in that dtype and in the next wider one (float32 for bfloat16,
float64 for float32). Exits with 1 at the first wrong result or exception, or if a thread stands still for 60 s.
"""

import argparse
import json
import math
import os
import random
import resource
import sys
import tempfile
import threading
import time
import traceback
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from matmuls.integrations.sentence_transformers import optimize
from matmuls.integrations.transformers import encode_tokens
from matmuls_bench import machine

STILL = 60.0  # seconds without an answer after which a thread is said to stand still
SPECIAL = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
KINDS = {"encode": 4, "half padded": 3, "whole": 2, "packed": 2}  # how often
LONGEST_EVERY = 40  # requests, of which one has a text of maximum length
SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
SETTINGS = {  # device: dtype, next wider dtype, longest text, most texts of a request, configuration
    "cuda": (torch.bfloat16, torch.float32, 512, 32, {}),
    "cpu": (torch.float32, torch.float64, 128, 12, SMALL | {"vocab_size": 3000, "max_position_embeddings": 128}),
}


@dataclass(frozen=True)
class Request:
    """Texts as token ids, [CLS] and [SEP] included, and the way to send them."""

    kind: str
    texts: list[list[int]]

    def words(self) -> list[str]:
        return [" ".join(f"w{i}" for i in ids[1:-1]) for ids in self.texts]


@dataclass
class Traffic:
    """What the threads share. latencies: seconds by kind. seen: when each thread got its last answer."""

    seen: list[float]
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    checking: threading.Lock = field(default_factory=threading.Lock)
    latencies: dict[str, "array[float]"] = field(default_factory=lambda: {kind: array("d") for kind in KINDS})
    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    failure: str | None = None

    def fail(self, why: str) -> None:
        with self.lock:
            self.failure = self.failure or why
        self.stop.set()


def made(device: str, dtype: torch.dtype, folder: Path) -> SentenceTransformer:
    """A SentenceTransformer of the weights in a folder."""
    longest = SETTINGS[device][2]
    first = Transformer(str(folder), max_seq_length=longest, model_kwargs={"dtype": dtype})
    pooling = Pooling(first.get_embedding_dimension())
    return SentenceTransformer(modules=[first, pooling], device=device).eval()


def save(device: str, folder: Path) -> None:
    """A BERT with random weights and a tokenizer whose word wN has the id N."""
    torch.manual_seed(0)
    config = BertConfig(**SETTINGS[device][4])
    BertModel(config).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{i}": i for i in range(len(SPECIAL), config.vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def drawn(draw: random.Random, device: str, number: int) -> Request:
    """A random request."""
    _, _, longest, most, options = SETTINGS[device]
    kind = draw.choices([*KINDS], [*KINDS.values()])[0]
    count = max(1, int(math.exp(draw.uniform(0, math.log(most + 1)))))
    if kind == "whole":
        lengths = [max(2, int(math.exp(draw.uniform(math.log(2), math.log(longest / 2)))))] * count
    elif kind == "half padded":
        length = draw.randint(8, longest // 2)
        lengths = [max(2, (i + 1) * length // count) for i in range(count)]
        draw.shuffle(lengths)
    else:
        lengths = [max(2, int(math.exp(draw.uniform(math.log(2), math.log(longest / 2))))) for _ in range(count)]
    if number % LONGEST_EVERY == 0:
        lengths[draw.randrange(count)] = longest
    vocabulary = options.get("vocab_size", 30_000)
    inner = ([draw.randrange(len(SPECIAL), vocabulary) for _ in range(length - 2)] for length in lengths)
    return Request(kind, [[2, *ids, 3] for ids in inner])


@torch.inference_mode()
def answer(st: Any, request: Request, packs: bool) -> list[Tensor]:
    """The vector, or the last hidden states, of each text. packs: encode_tokens can run the model."""
    if request.kind == "encode":
        return list(torch.from_numpy(st.encode(request.words())))
    model, lengths = st[0].model, [len(ids) for ids in request.texts]
    if request.kind == "packed" and packs:
        flat = torch.tensor([i for ids in request.texts for i in ids], device=model.device)
        return list(encode_tokens(model, flat, lengths).float().cpu().split(lengths))
    longest = max(lengths)
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in request.texts], device=model.device)
    given = {"input_ids": ids}
    if min(lengths) < longest:
        given["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(model.device)
    states = model(**given).last_hidden_state.cpu()
    return [x[:n] for x, n in zip(states, lengths, strict=True)]


def difference(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest of a text: norm of the difference / norm of the right result. NaN counts as infinite."""
    parts = zip(found, right, strict=True)
    errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in parts]
    return max(math.inf if math.isnan(x) else x for x in errors)


def sends(number: int, traffic: Traffic, ours: Any, eager: Any, device: str, every: int, tolerance: float) -> None:
    """One thread: requests until `stop`."""
    draw, count = random.Random(number), 0
    try:
        while not traffic.stop.is_set():
            count += 1
            request = drawn(draw, device, count)
            start = time.perf_counter()
            found = answer(ours, request, packs=True)
            seconds = time.perf_counter() - start
            error = None
            if count % every == 0:
                with traffic.checking:
                    error = difference(found, answer(eager, request, packs=False))
            with traffic.lock:
                traffic.latencies[request.kind].append(seconds)
                traffic.counts.update(texts=len(found), tokens=sum(map(len, request.texts)))
                if error is not None:
                    traffic.counts["checked"] += 1
                    traffic.worst[request.kind] = max(traffic.worst[request.kind], error)
            traffic.seen[number] = time.monotonic()
            if error is not None and error > tolerance:
                lengths = [len(ids) for ids in request.texts]
                traffic.fail(f"a difference of {error:g} from eager in request {count} of thread {number}: {lengths}")
    except Exception:
        traffic.fail(f"thread {number}, request {count}: {traceback.format_exc()}")


def memory(device: str) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    reserved = {"cuda_reserved_bytes": torch.cuda.memory_reserved()} if device == "cuda" else {}
    return {"rss_bytes": pages * resource.getpagesize()} | reserved


def tolerance_of(eager: Any, wider: Any, device: str) -> float:
    """Twice the largest difference of 100 requests between eager attention in two dtypes."""
    draw = random.Random(-1)
    requests = [drawn(draw, device, number) for number in range(1, 101)]
    return 2 * max(difference(answer(eager, r, False), answer(wider, r, False)) for r in requests)


def watched(traffic: Traffic, minutes: float, device: str, start: float) -> list[dict[str, Any]]:
    """Waits for the end; memory at the start and after each minute."""
    found: list[dict[str, Any]] = []
    while not traffic.stop.wait(0.2):
        now = time.monotonic()
        if now - start >= 60 * len(found):
            found.append({"minute": len(found), **memory(device), "requests": _requests(traffic)})
            print(json.dumps(found[-1]), flush=True)
        still = [i for i, seen in enumerate(traffic.seen) if now - seen > STILL]
        if still:
            traffic.fail(f"threads {still} stand still since {STILL:g} s")
        elif now - start >= 60 * minutes:
            traffic.stop.set()
    found.append({"minute": round((time.monotonic() - start) / 60, 2), **memory(device)})
    return found


def _requests(traffic: Traffic) -> int:
    return sum(map(len, traffic.latencies.values()))


def percentiles(seconds: "array[float]") -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)} if ordered else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the JSON file")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", choices=[*SETTINGS], default="cuda")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--every", type=int, default=20, help="how many requests of a thread for each that is checked")
    options = parser.parse_args()
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device to run on")
    dtype, wide = SETTINGS[device][:2]
    with tempfile.TemporaryDirectory() as folder:
        save(device, Path(folder))
        ours, eager, wider = (made(device, kind, Path(folder)) for kind in (dtype, dtype, wide))
    for st in (eager, wider):
        st[0].model.set_attn_implementation("eager")
    tolerance = tolerance_of(eager, wider, device)
    del wider
    handle = optimize(ours)
    if handle.reason is not None:
        sys.exit(f"the model is not optimized: {handle.reason}")
    start = time.monotonic()
    traffic = Traffic([start] * options.threads)
    given = traffic, ours, eager, device, options.every, tolerance
    threads = [threading.Thread(target=sends, args=(i, *given), daemon=True) for i in range(options.threads)]
    for thread in threads:
        thread.start()
    by_minute = watched(traffic, options.minutes, device, start)
    for thread in threads:
        thread.join(STILL)
    found: dict[str, Any] = {
        "threads": options.threads,
        "failure": traffic.failure,
        "requests": {kind: len(seconds) for kind, seconds in traffic.latencies.items()},
        **{name: traffic.counts[name] for name in ("texts", "tokens", "checked")},
        "tolerance": tolerance,
        "worst_difference": traffic.worst,
        "latency_seconds": {kind: percentiles(seconds) for kind, seconds in traffic.latencies.items()},
        "memory": by_minute,
        "graphs": handle.encoder.graphs if handle.encoder else 0,
    }
    target = options.out / device / "traffic.json"
    machine.save(target, device, **found)
    print(json.dumps(found), flush=True)
    os._exit(1 if traffic.failure else 0)  # threads that stand still do not end


if __name__ == "__main__":
    main()
