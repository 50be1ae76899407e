"""The page on what runs where: operations by dtype and device, models, GPUs."""

from .. import figures
from ..specs import ALL, TABLE
from .page import Page
from .results import Results, Run

# Architectures of transformers besides those that `optimize` knows: what `takes` says of each is looked up.
OTHERS = (
    *("albert", "bart", "clip_text_model", "deberta", "deberta-v2", "dinov2", "gemma3_text", "gpt2", "llama"),
    *("modernbert", "mpnet", "qwen3", "siglip_vision_model", "t5", "wav2vec2", "whisper"),
)


def page(results: Results) -> Page:
    page = Page("support.md", "What runs where")
    _operations(page)
    _models(page)
    _gpus(page, results)
    return page


def _operations(page: Page) -> None:
    dtypes = [str(d).removeprefix("torch.") for d in ALL]
    page.heading("Operations")
    page.say(
        "Every operation has a kernel for CPU tensors and one for CUDA tensors (compute capability 7.5 or "
        "later), in each "
        "dtype of its row; the same tests run on both."
    )
    page.table(
        "A row is an operation. `compile` says whether `torch.compile(fullgraph=True)` traces it, `strides` "
        "whether it takes "
        "tensors that are not contiguous.",
        ("operation", *(d.replace("complex", "c") for d in dtypes), "gradient", "compile", "strides"),
        (
            [
                f"`{spec.name}`",
                *("yes" if d in spec.dtypes else "" for d in ALL),
                *("yes" if fact else "no" for fact in (spec.gradient, not spec.static, not spec.contiguous)),
            ]
            for spec in TABLE
        ),
    )
    page.table(
        "The same operations with their arguments.",
        ("operation", "what it computes"),
        ([f"`{spec.name}`", spec.summary] for spec in TABLE),
    )


def _models(page: Page) -> None:
    page.heading("Hugging Face models")
    page.say(
        "`register()` serves every architecture whose attention modules look up their function by name; "
        "`takes(model)` says for a model of yours whether they do. `optimize(model)` knows the families of this table.",
        "Models with capped attention scores (Gemma 2) or attention sinks (GPT-OSS) look up the function too, "
        "but their calls "
        "are refused with an error.",
    )
    page.table(
        "A row is a model family: what each of the two functions does for it.",
        ("family", "`register()`", "`optimize()`"),
        (
            [f"`{name}`", "yes" if takes else "no: computes attention itself", "yes" if known else "no"]
            for name, takes, known in _families()
        ),
    )


def _families() -> list[tuple[str, bool, bool]]:
    """Name, whether its attention modules call the function that is set, and whether `optimize` knows it."""
    try:
        import torch
        from transformers import CONFIG_MAPPING, AutoModel

        from ..integrations.transformers import takes
        from ..integrations.transformers.optimized import FAMILIES
    except ImportError as error:
        raise ValueError(
            f"the table of models needs transformers ({error}); run: pip install 'matmuls[bert]'"
        ) from None
    known = {family.split(".")[0].replace("_", "-") for family in FAMILIES}
    found = []
    for name in sorted(known | set(OTHERS)):
        with torch.device("meta"):
            model = AutoModel.from_config(CONFIG_MAPPING[name]())  # type: ignore[no-untyped-call]
        found.append((name, bool(takes(model)), name in known))
    return found


def _gpus(page: Page, results: Results) -> None:
    by: dict[str, list[Run]] = {}
    for run in results.everything():
        by.setdefault(figures.device(run.environment), []).append(run)
    page.heading("What was measured on which machine")
    page.say(
        "H100 and H200 are GPUs of the Hopper architecture, which has kernels of its own; others run other kernels.",
        "Configurations of `masked_linear` and `masked_ffn` were tuned on an H200; elsewhere defaults run until "
        "`matmuls tune` "
        "has run. No speed is claimed for a machine that is not in this table.",
    )
    page.table(
        "A row is a machine with the torch versions and the result files of it in `benchmarks/results`.",
        ("machine", "torch", "dates", "results"),
        (
            [
                device,
                ", ".join(sorted({str(run.environment["torch"]) for run in runs})),
                _span([str(run.environment["date"])[:10] for run in runs if run.environment.get("date")]),
                ", ".join(f"`{run.file.removesuffix('.json')}`" for run in runs),
            ]
            for device, runs in sorted(by.items())
        ),
    )


def _span(dates: list[str]) -> str:
    return f"{min(dates)} to {max(dates)}" if len(set(dates)) > 1 else "".join(dates[:1])
