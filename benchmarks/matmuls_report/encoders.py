"""The page on encoders: BERT with our attention, optimized or not."""

import math
from typing import Any

from .format import losses, number
from .headlines import WAYS, memory_plot, rival
from .page import Page
from .plot import Panel, Plot
from .results import Results, Run

FILE = "bert-cuda.json"
TEXTS = "cpu/encode-texts.json"
INT8 = "cpu/encode-int8.json"
CALLS = "cuda/encoders.json", "cuda/encoders-2.json"  # two runs on one machine
ENCODE = "cuda/encoders-encode.json", "cuda/encoders-encode-2.json"
HEADINGS = {
    "probabilities": "Inference that returns probabilities",
    "hidden states": "Inference of hidden states",
    "hidden states, padded": "Inference of hidden states, with padding",
    "training": "Training",
    "training, probabilities returned": "Training that returns probabilities",
}
NOTES = {
    "training": "A step is forward + backward. `custom_mm` is registered with `sdpa=False`. It then computes the "
    "probabilities, as `eager` does.",
}


def page(results: Results) -> Page:
    page = Page("performance/encoders.md", "Encoders: BERT base and large")
    run = results.run(FILE)
    page.say("BERT models with random weights ran on a GPU in bfloat16. The ways to run a model are:")
    page.items(
        "`eager`, `sdpa`: the stock model with this attention of transformers. `sdpa` returns no probabilities.",
        '`custom_mm`: after `register()` and `set_attn_implementation("custom_mm")`.',
        "`custom_mm, recompute`: the same with `register(recompute=True)`.",
        "`custom_mm, optimized`: `custom_mm` and in addition `optimize(model)`, for inference.",
    )
    page.say(
        "Speed and memory are relative to the stock model marked *(stock)*. Memory is the peak without weights; the "
        "tables also leave out returned probabilities.",
    )
    page.plot(memory_plot(results))
    page.plot(_speeds(run))
    tasks = dict.fromkeys(r["task"] for r in run.rows)
    for task in tasks:
        _task(page, run, task)
    page.heading("Slower cases of these models")
    page.lost(*(_losses(run, task) for task in tasks))
    page.measured(run)
    _calls(page, *map(results.run, CALLS))
    first, second = ENCODE
    _encode(page, results.encoding(first), results.encoding(second), results.run(first), results.run(second))
    _texts(page, results.run(TEXTS))
    _int8(page, results.run(INT8), results.encoding(INT8, "drift"))
    return page


def _calls(page: Page, run: Run, again: Run) -> None:
    page.heading("Single calls of BERT base, as called")
    page.say(
        "These are times of `model(**batch)` as called, in bfloat16, in ms, of the first of two runs. The columns are:",
    )
    page.items(
        "*optimized*: after `optimize(model)`.",
        '*compiled*: `torch.compile(model)`, for small batches with `mode="reduce-overhead"`.',
        "*sdpa*: the stock model.",
        "*alone*: one call, with the GPU idle before it. *in a row*: one of many calls.",
        "*first*: the first call of its shape, in seconds.",
        "*half*: about half of the batch's tokens are padding.",
    )
    ways = {"optimized": "matmuls", "compiled": "compiled", "sdpa": "sdpa"}
    rows, ratios, speeds = [], [], []
    second = {_batch(r): r for r in again.rows}
    for r in run.rows:
        name = _batch(r)
        named = {way: next(k for k in r["latency_seconds"] if k.startswith(start)) for way, start in ways.items()}
        times = [r[f"{kind}_seconds"][named[way]] * 1e3 for kind in ("latency", "throughput") for way in ways]
        first = [r["first_seconds"][named[way]] for way in ("optimized", "compiled")]
        rows.append((name, *(f"{t:.3f}" for t in times), *(f"{t:.2f}" for t in first)))
        found = [
            (rival(times := of[f"{kind}_seconds"]) / times["matmuls"], f"{name}, {words}{of_run}")
            for of, of_run in ((r, ""), (second[name], ", second run"))
            for kind, words in (("latency", "alone"), ("throughput", "in a row"))
        ]
        ratios.extend(found)
        speeds.append((name, *(number(speed) for speed, _ in found)))
    columns = [f"{way}, {kind}" for kind in ("alone", "in a row") for way in ways]
    page.table(
        "Each row is one batch (texts x tokens).",
        ("batch", *columns, "first, optimized", "first, compiled"),
        rows,
    )
    page.table(
        "Each row is one batch, with the speeds over the faster of compiled and sdpa. Both runs were on one machine, "
        "while another process used another of its GPUs.",
        ("batch", *(f"{kind}, {which} run" for which in ("first", "second") for kind in ("alone", "in a row"))),
        speeds,
    )
    page.say(losses(ratios, "the faster of compiled and sdpa"))
    page.measured(run, again)


def _batch(row: dict[str, Any]) -> str:
    return f"{row['batch']} x {row['length']}{', half' if row['half_padded'] else ''}"


def _encode(page: Page, found: dict[str, Any], second: dict[str, Any], run: Run, again: Run) -> None:
    page.heading("Texts with sentence-transformers, on a GPU")
    tokens, seconds, again_seconds = found["tokens"], found["seconds"], second["seconds"]
    page.say(
        f"`SentenceTransformer.encode` ran on {found['texts']:,} docstrings ({tokens:,} tokens) with BERT base in "
        "bfloat16. *compiled* is `model.compile(dynamic=True)`. *error* is the relative difference of the vectors from "
        "float32.",
    )
    names = {"matmuls": "optimized"}
    page.table(
        "Each row is one way. The speed is relative to the fastest of the others.",
        ("way", "thousand tokens a second", "speed", "error"),
        (
            (
                names.get(way, way),
                f"{tokens / t / 1e3:,.0f}",
                number(rival(seconds) / t),
                f"{found['relative_error_to_float32'][way]:.4f}",
            )
            for way, t in seconds.items()
        ),
    )
    page.say(
        "In batches of 32 x 512 the optimized model alone computes "
        f"{found['whole_batch_tokens_per_second'] / 1e3:,.0f} thousand tokens a second. The tokenizer of transformers "
        f"alone, called once with all texts, makes {found['tokenizer_tokens_per_second'] / 1e3:,.0f} thousand; the "
        "optimized model calls the tokenizers library below it. Each way's fastest of three rounds counts. In the "
        "first round, which captures CUDA graphs, the optimized model took "
        f"{found['first_seconds']['matmuls']:.2f} s, not {seconds['matmuls']:.2f} s. In a second run "
        f"on the same machine it took {again_seconds['matmuls']:.2f} s and was "
        f"{number(rival(again_seconds) / again_seconds['matmuls'])} times as fast as the fastest of the others."
    )
    page.measured(run, again)


def _speeds(run: Run) -> Plot:
    panels = []
    for task in ("probabilities", "hidden states", "training"):
        rows = [r for r in run.rows if r["task"] == task]
        cases = list(dict.fromkeys(r["case"] for r in rows))
        first = rows[0]["way"]
        by = {(r["case"], r["way"]): r["speed"] for r in rows}
        ways = sorted({way for _, way in by} - {first}, key=lambda way: (not way.startswith("custom_mm"), way))
        panels.append(
            Panel(
                "bars",
                HEADINGS[task],
                f"speed relative to the stock model with {first} attention (higher is better)",
                "BERT, batch x tokens",
                {WAYS.get(way, f"stock, {way}"): [by[case, way] for case in cases] for way in ways},
                cases,
                ratio=True,
            )
        )
    return Plot("performance/encoders", "Speed of BERT with attention of matmuls", run.machine, panels)


def _task(page: Page, run: Run, task: str) -> None:
    rows = [r for r in run.rows if r["task"] == task]
    page.heading(HEADINGS.get(task, task))
    page.say(NOTES[task]) if task in NOTES else None
    page.table(
        "Each row is one model (batch x tokens) and way.",
        ("model", "way", "time, ms", "speed", "memory, MiB", "memory, relative"),
        (
            [
                *(r["case"], f"`{r['way']}`" + (" (stock)" if r["way"] == rows[0]["way"] else "")),
                *(number(r[key]) for key in ("ms", "speed", "above_mib", "memory")),
            ]
            for r in rows
        ),
    )


def _losses(run: Run, task: str) -> tuple[str, list[tuple[float, str]]]:
    """The name of a task with the stock attentions that matmuls is compared with, and the speeds with their cases."""
    rows = [r for r in run.rows if r["task"] == task]
    best: dict[str, tuple[float, str]] = {}  # of each case: time and name of the fastest stock attention
    for r in rows:
        if not r["way"].startswith("custom_mm"):
            timed = r["ms"], r["way"]
            best[r["case"]] = min(timed, best.get(r["case"], timed))
    ours = [r for r in rows if r["way"].startswith("custom_mm")]
    fastest = " or ".join(f"`{way}`" for way in sorted({way for _, way in best.values()}))
    ratios = [(best[r["case"]][0] / r["ms"], f"{r['case']}, `{r['way']}`") for r in ours]
    return f"{HEADINGS.get(task, task)}, over {fastest}", ratios


def _texts(page: Page, run: Run) -> None:
    page.heading("Texts with sentence-transformers, on a CPU")
    page.say(
        "`SentenceTransformer.encode` ran on docstrings with all-MiniLM-L6-v2 in float32. Batches of 32 texts are the "
        "default of the stock model. Batches of 8 need the least CPU time.",
    )
    rows = []
    ratios = []
    for r in run.rows:
        stock = {way: s for way, s in r["cpu_seconds"].items() if way != "optimized"}
        best = min(stock, key=stock.__getitem__)
        for way, seconds in r["cpu_seconds"].items():
            speeds = (r[key][best] / r[key][way] for key in ("cpu_seconds", "seconds"))
            shown = number(r["seconds"][way] * 1e3), number(seconds * 1e3), *map(number, speeds)
            rows.append((f"{r['texts']} ({r['tokens']} tokens)", way, *shown))
        ratios.append((stock[best] / r["cpu_seconds"]["optimized"], f"{r['texts']} texts"))
    page.table(
        "Each row is one number of texts and way. *time* is wall-clock time. *CPU time* is the sum over all threads. "
        "Speeds are relative to the stock model at its best batch size.",
        ("texts", "way", "time, ms", "CPU time, ms", "speed, CPU time", "speed, time"),
        rows,
    )
    page.say(losses(ratios, "the stock model at its best batch size (CPU time)"))
    least = math.floor(min(r["cosine"] for r in run.rows) * 1e7) / 1e7
    page.say(f"The cosine similarity to the stock model's vectors is at least {least:.7f}.")
    page.measured(run)


def _int8(page: Page, run: Run, drift: dict[str, Any]) -> None:
    page.heading("Texts in int8, on a CPU")
    page.say(
        "The model and the texts are those of the section above, on one thread, after `optimize(model, int8=True)`.",
    )
    rows = []
    for r in run.rows:
        stock = r["cpu_seconds"]["stock, batch_size=8"]
        for way, seconds in r["cpu_seconds"].items():
            rows.append((str(r["texts"]), way, number(seconds * 1e3), number(stock / seconds)))
    page.table(
        "Each row is one number of texts and way. The speed is relative to the stock model, in CPU time.",
        ("texts", "way", "CPU time, ms", "speed"),
        rows,
    )
    page.say(
        f"The cosine similarity to the float32 vectors is {drift['cosine_mean']:.4f} on average and at least "
        f"{math.floor(drift['cosine_min'] * 1e4) / 1e4:.4f}, for {2 * drift['pairs']} texts. The similarity of a pair "
        f"of texts changes by at most {drift['largest_change_of_a_similarity']:.3f}.",
    )
    page.measured(run)
