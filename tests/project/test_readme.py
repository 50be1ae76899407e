"""README: its Python blocks run as pasted, its figures are those of the results, its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
import torchgen

import matmuls

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_blocks_run_in_order_in_one_namespace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        if "transformers" in block:
            pytest.importorskip("transformers")
        if "pyg" in block:
            pytest.importorskip("torch_geometric")
            pytest.importorskip("sentence_transformers")
        exec(block, names)
    names["pyg"].disable()
    torch.testing.assert_close(names["C"], names["A"].to_dense() @ names["B"])
    torch.testing.assert_close(names["B"].grad, names["A"].to_dense().sum(0)[:, None].expand(-1, 64))
    assert names["y"].data_ptr() == names["h"].data_ptr()
    assert len(names["attentions"]) == 2
    assert names["handle"].layers


def test_the_first_two_commands():
    """The checks of CI run these two; they are README's first code block."""
    first = re.search(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1].splitlines()
    checks = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert len(first) == 2
    assert all(command in checks for command in first)


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 180
    for table in re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE):
        assert table.count("\n") <= 14, table.splitlines()[0]


def test_links_lead_to_files_and_headings():
    for name, target in re.findall(r"\[([^\]]*)\]\(([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), f"{name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_sentences_with_figures_are_those_of_the_performance_pages():
    """`matmuls report` writes both from the results."""
    generated = (ROOT / "docs/performance/index.md").read_text(encoding="utf-8")
    for page in (README, (ROOT / "docs/index.md").read_text(encoding="utf-8")):
        sentences = dict(re.findall(r"<!-- report:(\w+) -->(.*?)<!-- /report -->", page, re.DOTALL))
        assert {"attention", "sparse", "memory"} <= set(sentences)
        assert not [text for text in sentences.values() if text not in generated]


def test_what_torch_lacks():
    """README says so: no mean, max or min of a sparse product on a GPU, and no tracing of sparse tensors."""
    operators = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    (reduces,) = re.findall(r"^- func: _sparse_mm_reduce_impl\(.*\n(?:  .*\n)+", operators.read_text(), re.MULTILINE)
    assert "SparseCsrCPU:" in reduces
    assert "CUDA" not in reduces
    a, b = torch.eye(8).to_sparse_csr(), torch.ones(8, 4)
    with pytest.raises(Exception, match=r"[Ss]parse"):
        torch.compile(lambda a, b: a @ b, fullgraph=True, backend="eager")(a, b)
    plan = matmuls.plan(a)
    y = torch.compile(lambda b: matmuls.spmm(plan, b), fullgraph=True, backend="eager")(b)
    torch.testing.assert_close(y, b)


def test_submodules_load_on_access():
    assert matmuls.nn.SparseLinear
    assert matmuls.attention.attend
    assert {"attention", "blocks", "integrations", "nn"} <= set(dir(matmuls))
    with pytest.raises(AttributeError, match="module 'matmuls' has no attribute 'tensorrt'"):
        _ = matmuls.tensorrt
