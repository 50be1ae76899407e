"""Times SentenceTransformer.encode in int8 on a CPU, and measures how far its vectors drift, on docstrings.

Usage: python benchmarks/scripts/encode_int8.py OUT. Writes OUT/cpu/encode-int8.json. The model is all-MiniLM-L6-v2 with
1 thread: stock, optimized in float32, and optimized in int8. The ways alternate (A B A B); the fastest round of each
counts. `cpu` is the time of the process, which other work on the machine changes less. Drift: the cosine of each text's
vectors in int8 and in float32, and for pairs of texts the cosine of the pair in int8 and in float32. The second text of
a pair is the first with a share of its words, from none to all, replaced by those of another text.
"""

import random
from typing import Any

import numpy as np
import torch
from docstrings import drawn
from encode_texts import least_of
from out_folder import out_folder

from matmuls.bert import model_folder
from matmuls_bench import machine

COUNTS = {1: 20, 10: 8, 200: 3}  # texts -> rounds
PAIRS = 300
Vectors = np.ndarray[Any, np.dtype[np.float64]]


def measured(texts: list[str], rounds: int, ways: dict[str, Any]) -> dict[str, Any]:
    """Seconds by way, with the batch size that is the fastest of the stock model."""
    calls = {name: lambda model=model: model.encode(texts, batch_size=8) for name, model in ways.items()}
    return {"texts": len(texts), **least_of(calls, rounds)}


def pairs(texts: list[str]) -> list[tuple[str, str]]:
    """Pairs of texts from equal to unrelated."""
    draw, found = random.Random(0), []
    for i, text in enumerate(texts):
        words, others = text.split(), texts[draw.randrange(len(texts))].split() or ["none"]
        share = i / (len(texts) - 1)
        found.append((text, " ".join(draw.choice(others) if draw.random() < share else word for word in words)))
    return found


def cosines(a: Vectors, b: Vectors) -> Vectors:
    result: Vectors = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return result


def spearman(a: Vectors, b: Vectors) -> float:
    ranks = [np.argsort(np.argsort(x)).astype(np.float64) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def drift(right: Any, int8: Any, texts: list[str]) -> dict[str, Any]:
    first, second = (list(part) for part in zip(*pairs(texts), strict=True))
    vectors = {
        name: [model.encode(part).astype(np.float64) for part in (first, second)]
        for name, model in (("float32", right), ("int8", int8))
    }
    of_texts = cosines(np.concatenate(vectors["int8"]), np.concatenate(vectors["float32"]))
    of_pairs = {name: cosines(*both) for name, both in vectors.items()}
    return {
        "pairs": len(texts),
        "cosine_mean": float(of_texts.mean()),
        "cosine_min": float(of_texts.min()),
        "spearman": spearman(of_pairs["int8"], of_pairs["float32"]),
        "largest_change_of_a_similarity": float(abs(of_pairs["int8"] - of_pairs["float32"]).max()),
        "similarities": [float(np.quantile(of_pairs["float32"], q)) for q in (0.01, 0.5, 0.99)],
    }


def main() -> None:
    out = out_folder(__doc__ or "", needs_gpu=False)
    from sentence_transformers import SentenceTransformer, __version__

    from matmuls.integrations.sentence_transformers import optimize

    torch.set_num_threads(1)
    names = "stock, batch_size=8", "optimized", "optimized, int8"
    ways = {name: SentenceTransformer(str(model_folder()), device="cpu") for name in names}
    optimize(ways["optimized"])
    optimize(ways["optimized, int8"], int8=True)
    texts = drawn(max(PAIRS, *COUNTS))
    rows = []
    for count, rounds in COUNTS.items():
        rows.append(measured(texts[:count], rounds, ways))
        print(rows[-1], flush=True)
    found = drift(ways[names[1]], ways[names[2]], texts[:PAIRS])
    print(found, flush=True)
    versions = {"sentence_transformers": __version__}
    machine.save(out / "cpu/encode-int8.json", "cpu", versions, rows=rows, drift=found)


if __name__ == "__main__":
    main()
