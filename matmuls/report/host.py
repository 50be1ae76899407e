"""The page on small calls, whose time is the host's."""

from .format import losses, number
from .page import Page
from .results import Results

FILE = "cuda/host-times.json"


def page(results: Results) -> Page:
    page = Page("performance/host.md", "Small calls, as called")
    run = results.run(FILE)
    page.say(
        "For operands of 64 x 64 the GPU needs only a few microseconds, so the host determines the time of a call.",
        "The table has the wall-clock time of one of many calls, in microseconds: lower is better.",
        "Layers and products are float32. `masked_linear` and `masked_ffn` are float16. SparseLinear has 90 % zeros.",
        "In the column *torch's way*:",
    )
    page.items(
        "*blend* computes both experts by torch and adds them, weighted by the mask.",
        "*eager* is torch's softmax of the scaled and masked scores.",
        "torch has no `mask_plan`. Its row shows a `torch.matmul` for comparison, and *Slower cases* "
        "does not count this row.",
    )
    page.table(
        "There is one row for each call. *ratio* is the time of matmuls divided by the time of torch's way: below "
        "1 matmuls is faster. A speed in *Slower cases* is 1 / ratio.",
        ("call", "us", "torch's way", "us of torch's way", "ratio"),
        (
            (r["call"], f"{r['us']:.1f}", r["rival"], f"{r['rival_us']:.1f}", number(r["us"] / r["rival_us"]))
            for r in run.rows
        ),
    )
    ratios = [(r["rival_us"] / r["us"], r["call"]) for r in run.rows if r["call"] != "mask_plan"]
    page.say(losses(ratios, "torch's way"))
    page.measured(run)
    return page
