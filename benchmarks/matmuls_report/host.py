"""The page on small calls, whose time is the host's."""

from .format import losses, number
from .page import Page
from .results import Results

FILE = "cuda/host-times.json"


def page(results: Results) -> Page:
    page = Page("performance/host.md", "Small calls, as called")
    run = results.run(FILE)
    page.say(
        "These are times as called of small operands (64 x 64), in µs. Layers and products are "
        "float32, `masked_linear` and `masked_ffn` float16. `SparseLinear` has 90 % zeros.",
    )
    page.table(
        "Each row is one call. *blend* computes both experts and adds them. `mask_plan` has no counterpart in torch: "
        "its row shows the time of a `torch.matmul` for comparison, and is not counted as a case.",
        ("call", "us", "torch's way", "us of torch's way", "speed"),
        (
            (r["call"], f"{r['us']:.1f}", r["rival"], f"{r['rival_us']:.1f}", number(r["rival_us"] / r["us"]))
            for r in run.rows
        ),
    )
    ratios = [(r["rival_us"] / r["us"], r["call"]) for r in run.rows if r["call"] != "mask_plan"]
    page.say(losses(ratios, "torch's way"))
    page.measured(run)
    return page
