"""The page on what runs where: operations by dtype and device, models, GPUs."""

from matmuls_bench import figures
from matmuls_bench.table import ALL, TABLE

from .page import Page
from .results import Results, Run

# Architectures of transformers besides those that `optimize` knows: what `takes` says of each is looked up.
OTHERS = (*("bart", "deberta", "deberta-v2", "gpt2", "llama", "qwen3", "t5", "wav2vec2"),)


# torch.compile traces these with plans alone
PLANNED = dict.fromkeys(("spmm", "sddmm", "sparse_softmax", "sparse_attention", "solve_triangular"), "with a plan")
PLANNED["spgemm"] = "values only"


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
        "Every operation runs on CPU tensors and on CUDA tensors (compute capability 7.5 or later), in each dtype with "
        "*yes*. `matmuls.attention.attend` is `attention_forward` with a gradient."
    )
    page.table(
        "*compile* says whether `torch.compile(fullgraph=True)` can trace the operation. *with a plan*: only with a "
        "plan as sparse operand. *values only*: only `product.values(...)`, where `product = plan_spgemm(A, B)`. "
        "*strides* says whether tensors may be not contiguous. `cusparse_sddmm` takes float16 and bfloat16 on a CPU, "
        "and on a GPU where cuSPARSE supports them.",
        ("operation", *(d.replace("complex", "c") for d in dtypes), "gradient", "compile", "strides"),
        (
            [
                f"`{spec.name}`",
                *("yes" if d in spec.dtypes else "" for d in ALL),
                "yes" if spec.gradient else "no",
                "no" if spec.static else PLANNED.get(spec.name, "yes"),
                "no" if spec.contiguous else "yes",
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
        "For `whisper`, `optimize()` changes only the encoder. The [guide](guides/hugging-face.md) names the models "
        "that `register()` does not support.",
    )
    page.table(
        "The families are those of transformers.",
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

        from matmuls.integrations.transformers import takes
        from matmuls.integrations.transformers.families import FAMILIES, _kind
    except ImportError as error:
        raise ValueError(
            f"the table of models needs transformers ({error}); run: pip install 'matmuls[bert]'"
        ) from None
    folders = (family.split(".")[0] for family in FAMILIES)
    names = {"gemma3_text" if name == "gemma3" else name for name in folders}  # gemma3 also has images
    known = {name if name in CONFIG_MAPPING else name.replace("_", "-") for name in names}
    found = []
    for name in sorted(known | set(OTHERS)):
        with torch.device("meta"):
            model = AutoModel.from_config(CONFIG_MAPPING[name]())  # type: ignore[no-untyped-call]
        found.append((name, bool(takes(model)), any(_kind(m) in FAMILIES for m in model.modules())))
    return found


def _gpus(page: Page, results: Results) -> None:
    by: dict[str, list[Run]] = {}
    for run in results.everything():
        by.setdefault(figures.device(run.environment), []).append(run)
    page.heading("What was measured on which machine")
    page.table(
        "The results are the files in `benchmarks/results`.",
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
