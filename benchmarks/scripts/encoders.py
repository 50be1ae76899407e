"""Times a BERT-base in bfloat16 on a GPU as a user calls it: single calls compared with torch.compile, and
SentenceTransformer.encode on docstrings.

Usage: python benchmarks/scripts/encoders.py OUT [--only calls | encode] [--texts N] [--tokenizer FOLDER]. Writes
OUT/cuda/encoders.json (calls) and OUT/cuda/encoders-encode.json. The weights are random. All times are wall clock with
the host included. The ways of a case alternate (A B A B). A call is timed alone, with the GPU idle before it
("latency"), and in a row ("throughput"); the median of the rounds counts. The fastest of three rounds of encode
counts; "first_seconds" are those of the first round, before which each model encoded 500 of the texts.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from docstrings import drawn
from transformers import AutoTokenizer, BertConfig, BertModel

from matmuls.bert import model_folder
from matmuls.integrations.transformers import optimize
from matmuls_bench import machine, timing

CASES = [(1, 32, False), (1, 128, False), (4, 64, False), (8, 128, True), (32, 512, False), (32, 512, True)]
ROUNDS = 7
SIZES = 32, 64, 128, 256  # batch_size of SentenceTransformer.encode


def batch_of(batch: int, length: int, half: bool) -> dict[str, torch.Tensor]:
    """What a tokenizer returns: ids and mask. half: of text i, (i + 1) / batch of the tokens; about half in all."""
    ids = torch.randint(1000, 20000, (batch, length), device="cuda")
    counts = (torch.arange(batch, device="cuda") + 1) * length // batch if half else torch.full_like(ids[:, 0], length)
    return {"input_ids": ids, "attention_mask": (torch.arange(length, device="cuda") < counts[:, None]).long()}


def case(batch: int, length: int, half: bool, models: dict[str, Any]) -> dict[str, Any]:
    given = batch_of(batch, length, half)
    ways = {name: (lambda model=model: model(**given)) for name, model in models.items()}
    first: dict[str, float] = {}
    peak: dict[str, int] = {}
    for name, way in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first[name] = timing.seconds_of(way, 1)
        for _ in range(4):
            way()
        torch.cuda.synchronize()
        peak[name] = torch.cuda.max_memory_allocated() - before  # what a graph keeps included
    calls = 200 if batch * length < 4096 else 20
    found: dict[str, dict[str, list[float]]] = {name: {"latency": [], "throughput": []} for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name]["latency"].append(timing.seconds_of(way, calls, alone=True))
            found[name]["throughput"].append(timing.seconds_of(way, calls))
    row: dict[str, Any] = {"batch": batch, "length": length, "half_padded": half}
    row["first_seconds"] = first
    row["peak_bytes"] = peak
    for kind in ("latency", "throughput"):
        row[f"{kind}_seconds"] = {name: statistics.median(times[kind]) for name, times in found.items()}
    return row


def single_calls() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    stock = BertModel(BertConfig()).eval().cuda().to(torch.bfloat16)
    models: dict[str, Any] = {"sdpa": stock}
    for name in ("matmuls", "compiled"):
        models[name] = BertModel(BertConfig()).eval().cuda().to(torch.bfloat16)
        models[name].load_state_dict(stock.state_dict())
    compiled = models.pop("compiled")
    models["compiled, reduce-overhead"] = torch.compile(compiled, mode="reduce-overhead")
    models["compiled"] = torch.compile(compiled)
    handle = optimize(models["matmuls"])
    rows = []
    torch._dynamo.config.recompile_limit = 2 * len(CASES)
    with torch.inference_mode():
        for sizes in CASES:
            torch.compiler.reset()  # one shape each, as a service of one shape compiles it
            small = sizes[0] * sizes[1] < 4096
            left_out = "compiled" if small else "compiled, reduce-overhead"
            rows.append(case(*sizes, {name: m for name, m in models.items() if name != left_out}))
            rows[-1]["graphs"] = handle.graphs
            print(json.dumps(rows[-1]), flush=True)
    return rows


def encoding(texts: list[str], tokenizer: Path) -> dict[str, Any]:
    """SentenceTransformer.encode of docstrings, and the speed of the optimized model in whole batches."""
    from sentence_transformers import SentenceTransformer, models

    from matmuls.integrations import sentence_transformers as integration

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        BertModel(BertConfig()).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)

        def made() -> SentenceTransformer:
            encoder = models.Transformer(folder, max_seq_length=512, model_kwargs={"dtype": torch.bfloat16})
            pooling = models.Pooling(encoder.get_embedding_dimension())
            return SentenceTransformer(modules=[encoder, pooling], device="cuda").eval()

        stock, ours, compiled = made(), made(), made()
        exact = made().float()
    handle = integration.optimize(ours)
    compiled[0].auto_model.compile(dynamic=True)
    ways: dict[str, Callable[[], Any]] = {"matmuls": lambda: ours.encode(texts)}
    for size in SIZES:
        ways[f"sdpa, batch_size={size}"] = lambda size=size: stock.encode(texts, batch_size=size)
    for size in SIZES[1:3]:
        ways[f"compiled, batch_size={size}"] = lambda size=size: compiled.encode(texts, batch_size=size)
    whole = batch_of(32, 512, False)
    for _ in range(3):
        once = timing.seconds_of(lambda: ours[0].auto_model(**whole), 20)
    compiled.encode(texts[:500], batch_size=64)
    ours.encode(texts[:500])
    stock.encode(texts[:500])
    times: dict[str, list[float]] = {name: [] for name in ways}
    vectors: dict[str, Any] = {}
    tokens = 0
    for _ in range(3):
        for name, way in ways.items():
            before = handle.tokens
            times[name].append(timing.seconds_of(lambda way=way, name=name: vectors.update({name: way()})))
            tokens = max(tokens, handle.tokens - before)
    start = time.perf_counter()
    ours.tokenizer(texts, truncation=True, max_length=512)
    alone = time.perf_counter() - start
    right = torch.from_numpy(exact.encode(texts[:1000], batch_size=64)).double()
    errors = {
        name: (torch.from_numpy(v[:1000]).double() - right)
        .norm(dim=1)
        .div(right.norm(dim=1))
        .pow(2)
        .mean()
        .sqrt()
        .item()
        for name, v in vectors.items()
    }
    return {
        "texts": len(texts),
        "tokens": tokens,
        "seconds": {name: min(t) for name, t in times.items()},
        "first_seconds": {name: t[0] for name, t in times.items()},
        "tokenizer_tokens_per_second": tokens / alone,
        "whole_batch_tokens_per_second": 32 * 512 / once,
        "relative_error_to_float32": errors,
        "graphs": handle.encoder.graphs if handle.encoder else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=["calls", "encode"])
    parser.add_argument("--texts", type=int, default=12_000)
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    texts = [] if options.only == "calls" else drawn(options.texts)  # it forks: before the GPU is used
    if options.only != "encode":
        rows = single_calls()
        machine.save(options.out / "cuda/encoders.json", "cuda", rows=rows)
    if options.only != "calls":
        with torch.inference_mode():
            encoded = encoding(texts, options.tokenizer or model_folder())
        print(json.dumps(encoded), flush=True)
        machine.save(options.out / "cuda/encoders-encode.json", "cuda", rows=[], encode=encoded)


if __name__ == "__main__":
    main()
