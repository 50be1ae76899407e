"""Sizes of benchmark cases that no constant of the code was chosen by: drawn once from a seed, or named by a user.

SIZES is what `draw(SEED)` returned; a test compares them. Do not tune to these sizes, and do not draw again after a
measurement: a new seed needs a new measurement of every drawn case.
"""

import math
import random
from collections.abc import Callable

SEED = 20261127
Shape = tuple[int, ...]

# (M, K, N) and (rows, K) that users asked about, which the tuning had not seen
NAMED_MASKED_LINEAR: tuple[tuple[int, int, int], ...] = ((12288, 2048, 2048), (6000, 1536, 6144), (20000, 5120, 5120))
NAMED_INPLACE: tuple[tuple[int, int], ...] = ((30000, 1280), (24000, 1536), (9000, 640), (50000, 2560), (12000, 5120))

SIZES: dict[str, tuple[Shape, ...]] = {
    "product": (
        (80, 256, 144),
        (6512, 97, 128),
        (2381, 7936, 128),
        (3921, 4288, 1024),
        (1728, 639, 128),
        (2901, 6144, 128),
        (768, 4848, 7680),
        (1664, 256, 293),
        (145, 64, 1175),
    ),
    "batched product": ((5, 12, 64, 128), (58, 12, 144, 128)),
    "bias and activation": ((193233, 387), (1761, 3275)),
    "linear": ((7808, 7424, 768), (632, 640, 768), (2563, 1664, 2752), (775, 6912, 6592), (11848, 1152, 2304)),
    "in place": ((2256, 256), (58208, 4224), (35584, 1280), (27713, 4224)),
    "in place on a CPU": ((5632, 384),),
    "feed-forward": ((20480, 3200), (15360, 1408)),
    "rows": (
        (26876, 936),
        (116331, 320),
        (29362, 368),
        (62539, 93),
        (612, 46856),
        (504, 32563),
        (531, 144384),
        (78, 54592),
        (132, 195071),
        (328189, 77),
        (2115, 47616),
        (35082, 640),
        (65990, 64),
        (572908, 320),
        (981, 81456),
        (798, 5696),
        (756, 7949),
        (12065, 3472),
        (836, 8045),
        (30, 211776),
    ),
    "rows on a CPU": ((2523, 944), (2331, 1208)),
    "residual": ((194806, 1344), (33217, 377), (341192, 355), (203998, 304)),
    "masked softmax": (
        (3, 12, 328, 328),
        (4, 32, 104, 104),
        (1, 24, 320, 320),
        (11, 4, 504, 504),
        (16, 20, 256, 256),
        (6, 16, 71, 71),
    ),
    "attention": ((11, 4, 1536, 64), (3, 28, 137, 64), (8, 12, 115, 128), (1, 8, 1615, 64)),
    "masked_linear": ((1152, 1152, 1792), (17361, 640, 896)),
    "masked_ffn": ((10895, 1728, 2432), (14361, 512, 1600)),
}


def draw(seed: int) -> dict[str, tuple[Shape, ...]]:
    """Shapes by family, log-uniform in the ranges below, each rounded to a random one of plausible alignments.

    Alignment 1 means an odd number. Ranges: [low, high] of every size, and alignments; for rows the number of elements.
    """
    chance = random.Random(seed)

    def uniform(low: float, high: float) -> float:
        return math.exp(math.log(low) + (math.log(high) - math.log(low)) * chance.random())

    def aligned(x: float, alignments: Shape) -> int:
        step = alignments[int(chance.random() * len(alignments))]
        return int(x) | 1 if step == 1 else max(1, round(x / step)) * step

    def size(low: float, high: float, *alignments: int) -> int:
        return aligned(uniform(low, high), alignments)

    def rows(low: float, high: float) -> int:
        return size(low, high, 1, 8, 128)

    def width(low: float, high: float) -> int:
        return size(low, high, 64, 128)

    def by_elements(least: float, most: float, low: float, high: float) -> Shape:
        """(rows, columns) of least to most elements, columns from low to high."""
        columns = size(low, high, 1, 8, 64)
        return max(1, int(uniform(least, most) / columns)), columns

    families: dict[str, tuple[int, Callable[[], Shape]]] = {
        "product": (9, lambda: tuple(size(64, 8192, 1, 8, 64, 128) for _ in range(3))),
        "batched product": (2, lambda: (size(2, 64, 1, 2), size(4, 32, 4), size(64, 1024, 1, 8, 64), width(32, 128))),
        "bias and activation": (2, lambda: by_elements(2**22, 2**28, 256, 16384)),
        "linear": (5, lambda: (rows(512, 32768), width(256, 8192), width(256, 16384))),
        "in place": (4, lambda: (rows(512, 65536), size(256, 8192, 8, 64, 128))),
        "in place on a CPU": (1, lambda: (rows(512, 8192), width(256, 1024))),
        "feed-forward": (2, lambda: (rows(2048, 32768), width(384, 4096))),
        "rows": (20, lambda: by_elements(2**22, 2**28, 64, 262144)),
        "rows on a CPU": (2, lambda: by_elements(2**20, 2**22, 64, 65536)),
        "residual": (4, lambda: by_elements(2**22, 2**28, 256, 16384)),
        "masked softmax": (6, lambda: (size(1, 32, 1, 2), size(4, 32, 4), *(size(64, 2048, 1, 8, 64),) * 2)),
        "attention": (4, lambda: (size(1, 64, 1, 2), size(4, 32, 4), size(64, 2048, 1, 8, 64), size(48, 128, 32, 64))),
        "masked_linear": (2, lambda: (rows(512, 65536), width(512, 8192), width(512, 8192))),
        "masked_ffn": (2, lambda: (rows(1024, 16384), width(512, 3072), width(1024, 8192))),
    }
    return {name: tuple(shape() for _ in range(count)) for name, (count, shape) in families.items()}
