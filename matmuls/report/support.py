"""The page on what runs where: operations by dtype and device, models, GPUs."""

from .. import figures
from ..specs import ALL, TABLE
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
        "Every operation runs on CPU tensors and on CUDA tensors (compute capability 7.5 or later), in each dtype that "
        "the table marks with *yes*. The same tests run on CPU and CUDA. `attention_forward` has no gradient; call "
        "`matmuls.attention.attend`, which has one."
    )
    page.table(
        "There is one row for each operation. *gradient* says whether it is differentiable. *compile* says whether "
        "`torch.compile(fullgraph=True)` can trace it. *with a plan*: torch can trace it with a plan as sparse "
        "operand, but not with a sparse tensor. *values only*: torch can trace `product.values(...)`, where "
        "`product = plan_spgemm(A, B)`. This method returns only the values of the result. *strides* says whether "
        "the operation accepts tensors that are not contiguous.",
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
        "`register()` works for most architectures that look up their attention function by name, in transformers' "
        "`ALL_ATTENTION_FUNCTIONS`. `takes(model)` says which attention classes of a model can use it. `register()` "
        "does not work for models with capped attention scores (Gemma 2) or attention sinks (GPT-OSS): their first "
        "forward pass raises an error.",
        "`optimize(model)` works for the families that the table marks with *yes*. For `whisper` it changes only "
        "the encoder.",
        "On a GPU only `bert` was measured, with both functions.",
    )
    page.table(
        "There is one row for each model family.",
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
        from ..integrations.transformers.families import FAMILIES, _kind
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
    page.say(
        "H100 and H200 are GPUs of the Hopper architecture, for which there are special kernels. Other GPUs run "
        "general kernels.",
        "The tile sizes of `masked_linear` and `masked_ffn` were tuned on an H200. All GPUs of compute capability "
        "9.0 use these sizes. Other GPUs run with default tile sizes until you run `matmuls tune`. Speed was "
        "measured only on the machines in the table.",
    )
    page.table(
        "There is one row for each machine, with the versions of torch and the result files in `benchmarks/results`.",
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
