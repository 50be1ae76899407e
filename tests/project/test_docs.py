"""The documentation: every Python block runs on a CPU, every public name has an entry with an example."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import custom_mm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python(?P<title>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r'title="needs (?P<what>[^"]+)"')  # a block with this title is only compiled
ENTRY = re.compile(r"^::: (?P<name>[\w.]+)", re.MULTILINE)
PACKAGES = "torch_geometric", "transformers", "sentence_transformers"  # optional: without one, its pages are skipped


def blocks(page: Path):
    """The page's Python blocks: source padded to the line it has in the page, and what the block needs or None."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n")
        needs = NEEDS.search(match["title"])
        yield "\n" * line + match["code"], needs and needs["what"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_blocks_run_as_pasted(page, tmp_path, monkeypatch):
    """In order, in one namespace for each page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for source, needs in blocks(page):
        code = compile(source, str(page), "exec")
        if needs:
            continue
        for package in PACKAGES:
            if re.search(rf"^(from|import) {package}\b", source, re.MULTILINE):
                pytest.importorskip(package)
        exec(code, names)


def test_what_is_not_run_says_why():
    reasons = {needs for page in PAGES for _, needs in blocks(page)} - {None}
    assert reasons <= {"a GPU"}, reasons


def test_lines_of_blocks_fit_the_page():
    lines = [
        (str(page.relative_to(DOCS)), line)
        for page in PAGES
        for source, _ in blocks(page)
        for line in source.splitlines()
    ]
    assert not [line for line in lines if len(line[1]) > 88]


def test_pages_have_blocks():
    without = {str(p.relative_to(DOCS)) for p in PAGES if not list(blocks(p))}
    generated = {str(p.relative_to(DOCS)) for p in (DOCS / "performance").glob("*.md")} | {"support.md"}
    assert without <= generated | {"limits.md", "guides/command-line.md", "guides/writing-a-kernel.md"}


def public_names() -> dict[str, object]:
    """Names in the `__all__` of packages and modules, and those that users call in modules without one; with what each
    names: a function, where a submodule has the same name."""
    pytest.importorskip("torch_geometric")
    pytest.importorskip("sentence_transformers")
    names = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in (
            "matmuls",
            "custom_mm",
            "matmuls.distributed",
            "matmuls.nn",
            "matmuls.integrations.pyg",
            "matmuls.integrations.sentence_transformers",
            "matmuls.integrations.transformers",
        )
        for name in importlib.import_module(module).__all__
    }
    others = "matmuls.attention.attend", "matmuls.blocks.bsr_spmm", "matmuls.blocks.bsr_sddmm"
    return names | {name: pkgutil.resolve_name(name) for name in others}


def test_every_public_name_has_an_entry_with_an_example():
    examples = {}
    for page in (DOCS / "reference").glob("*.md"):
        _, *rest = re.split(ENTRY, page.read_text(encoding="utf-8"))
        for name, text in zip(rest[::2], rest[1::2], strict=True):
            assert name not in examples, f"{name} has two entries"
            examples[name] = "".join(m["code"] for m in BLOCK.finditer(text))
    entries = {id(pkgutil.resolve_name(name)) for name in examples}
    missing = {name for name, named in public_names().items() if id(named) not in entries}
    assert not missing, f"no entry in docs/reference: {sorted(missing)}"
    for name, code in examples.items():
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", code), f"no example of {name}"


def test_what_explain_knows_is_listed():
    """Its operators, and the names of kernels that it prints."""
    operators = set(importlib.import_module("custom_mm.explain")._EXPLAINERS)
    for text in ((DOCS / "guides/rows.md").read_text(encoding="utf-8"), custom_mm.explain.__doc__):
        assert operators <= set(re.findall(r"\w+", text))
    page = (DOCS / "reference/custom_mm.md").read_text(encoding="utf-8")
    kernels = {*custom_mm._C.row_kernels(), *custom_mm._C.inplace_kernels(), *custom_mm._C.product_kernels()}
    assert kernels == set(re.findall(r"^- `(\w+)`:", page, re.MULTILINE))


def test_no_table_of_prose_pages_is_long():
    """Longer ones are generated, on the pages of performance and support."""
    for page in PAGES:
        if page.parent.name == "performance" or page.name == "support.md":
            continue
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert table.count("\n") <= 14, f"{page}: {table.splitlines()[0]}"
