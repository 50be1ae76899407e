"""Every public name says what it computes, its arguments, results and errors, and has an example, which runs here."""

import doctest
import importlib.util
import inspect
import re
import warnings

import pytest
import torch

MODULES = (
    "matmuls",
    "custom_mm",
    "matmuls.attention",
    "matmuls.blocks",
    "matmuls.distributed",
    "matmuls.nn",
    "matmuls.integrations.pyg",
    "matmuls.integrations.sentence_transformers",
    "matmuls.integrations.transformers",
)
NEEDS = {
    "matmuls.integrations.pyg": "torch_geometric",
    "matmuls.integrations.sentence_transformers": "sentence_transformers",
    "matmuls.integrations.transformers": "transformers",
}
# What raises nothing of its own, but what a forward pass that it makes raises.
WITHOUT_ERRORS = {"attention_mask", "can_pack", "explain", "in_use", "optimize", "register", "stats", "takes"}
WITHOUT_ERRORS |= {"unsupported"}


def documented():
    """Names, with their modules, of everything public: also the public methods that our classes define."""
    for path in MODULES:
        if path in NEEDS and importlib.util.find_spec(NEEDS[path]) is None:
            continue
        module = importlib.import_module(path)
        for name in module.__all__:
            yield path, name, getattr(module, name)


def methods(cls):
    """The public methods and properties that one of our classes defines itself."""
    for name, x in vars(cls).items():
        if name.startswith("_") or name in ("forward", "backward", "extra_repr"):
            continue
        x = getattr(x, "__func__", x)
        if isinstance(x, property) or inspect.isfunction(x):
            yield name, x


def sections(doc):
    return set(re.findall(r"^(Args|Returns|Raises|Examples|Attributes):$", inspect.cleandoc(doc), re.M))


def parameters(x):
    """Names of the parameters, without self."""
    try:
        found = inspect.signature(x).parameters
    except ValueError:
        return []
    return [name for name, p in found.items() if name not in ("self", "cls") and p.kind != p.VAR_KEYWORD]


def described(doc):
    """The names under Args or Attributes."""
    text = inspect.cleandoc(doc)
    found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", text + "\n", re.M)
    return re.findall(r"^    ([\w, *]+):", found[1], re.M) if found else []


CASES = list(documented())
IDS = [f"{path}.{name}" for path, name, _ in CASES]


def is_data(x):
    """A class of values that the package returns and nobody makes."""
    return isinstance(x, type) and not issubclass(x, torch.nn.Module) and not hasattr(x, "apply")


@pytest.mark.parametrize(("path", "name", "x"), CASES, ids=IDS)
def test_what_is_computed_its_arguments_and_errors(path, name, x):
    doc = x.__doc__ or ""
    first = doc.strip().split("\n\n")[0]
    assert first.endswith((".", ":")), "a first sentence"
    assert len(first) <= 240
    have = sections(doc)
    assert "Examples" in have
    if is_data(x):
        return
    takes = parameters(x) if not isinstance(x, type) or issubclass(x, torch.nn.Module) else ["apply"]
    if takes:
        assert "Args" in have
        assert "Raises" in have or name in WITHOUT_ERRORS
    if not isinstance(x, type) and inspect.signature(x).return_annotation not in (None, "None"):
        assert "Returns" in have
    if isinstance(x, type) and issubclass(x, torch.autograd.Function):
        assert described(doc) == parameters(x), "the arguments of apply"
    elif takes not in (["apply"], []):
        told = {n.strip("* ") for group in described(doc) for n in group.split(",")}
        assert not set(takes) - told, "arguments that are not described"


@pytest.mark.parametrize(
    ("cls", "name", "x"),
    [(cls, n, m) for _, _, cls in CASES if isinstance(cls, type) for n, m in methods(cls)],
    ids=lambda x: getattr(x, "__name__", str(x)) if not isinstance(x, property) else "property",
)
def test_methods_say_what_they_do(cls, name, x):
    assert (x.__doc__ or "").strip(), f"{cls.__name__}.{name}"
    if not isinstance(x, property) and parameters(x):
        assert {"Args", "Returns"} <= sections(x.__doc__), f"{cls.__name__}.{name}"


@pytest.mark.parametrize(("path", "name", "x"), CASES, ids=IDS)
def test_examples(path, name, x):
    """As pasted: an example imports what it needs."""
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(x, f"{path}.{name}", module=False, globs={})
    owned = [finder.find(m, f"{path}.{name}.{n}", module=False, globs={}) for n, m in methods(x)] if is_class(x) else []
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    report = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's sparse tensors are in beta
        for one in (test, *(t for found in owned for t in found if t.examples)):
            torch.manual_seed(0)
            runner.run(one, out=report.append)
    assert runner.failures == 0, "".join(report)


def is_class(x):
    return isinstance(x, type)
