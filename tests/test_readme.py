"""Runs README's Python blocks unchanged."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import matmuls

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def tensors(**shapes):
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def test_ten_lines():
    names = {}
    exec(BLOCKS[0], names)
    torch.testing.assert_close(names["c"], names["a"] @ names["b"])


def test_an_operation_of_each_kind(capsys):
    names = tensors(x=(8, 8), weight=(8, 8), bias=(8,), r=(8, 8), w1=(16, 8), b1=(16,), w2=(8, 16), b2=(8,))
    names |= tensors(a=(8, 8), b=(8, 8), c=(8, 8), query=(2, 3, 5, 4), key=(2, 3, 5, 4))
    names |= tensors(q=(2, 3, 8, 4), k=(2, 3, 8, 4), v=(2, 3, 8, 4))
    sparse = (torch.randn(8, 8) * (torch.rand(8, 8) < 0.5)).to_sparse_csr()
    crow, col, values = sparse.crow_indices(), sparse.col_indices(), sparse.values()
    names |= {"A": sparse, "pattern": sparse, "crow": crow, "col": col, "values": values, "M": 8, "K": 8}
    names |= tensors(gamma=(8,), beta=(8,))
    names |= {"mask": torch.rand(2, 1, 1, 5) > 0.5, "linear": nn.Linear(8, 8)}
    exec(BLOCKS[1], names)
    torch.testing.assert_close(names["y"], sparse.to_dense() @ names["x"])
    assert names["p"] is names["scores"]
    assert 1 - names["layer"].values.numel() / 64 == pytest.approx(0.9, abs=0.02)
    assert "8 x 8" in capsys.readouterr().out


def test_two_experts():
    names = tensors(x=(2, 5, 8), w_image=(8, 8), w_text=(8, 8), b_image=(8,), b_text=(8,))
    names |= tensors(w1=(16, 8), w2=(8, 16), w3=(16, 8), u1=(16, 8), u2=(8, 16), u3=(16, 8))
    image = torch.rand(2, 5) > 0.5
    names |= {"matmuls": matmuls, "is_image": image}
    exec(BLOCKS[2], names)
    of_each = [names["x"] @ names[f"w_{kind}"].T + names[f"b_{kind}"] for kind in ("image", "text")]
    torch.testing.assert_close(names["y"], torch.where(image[..., None], *of_each))


def test_in_a_model(capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval()
    names = {"model": model, "batch": {"input_ids": torch.randint(30, (2, 7))}}
    with torch.no_grad():
        before = model(**names["batch"]).last_hidden_state
        exec(BLOCKS[3], names)
        after = model(**names["batch"]).last_hidden_state
    assert len(names["attentions"]) == 2
    torch.testing.assert_close(after, before)
    assert capsys.readouterr().out


def test_every_block_is_tested():
    assert len(BLOCKS) == 4


def test_submodules_load_on_access():
    assert matmuls.nn.SparseLinear
    assert matmuls.attention.attend
    assert {"attention", "blocks", "integrations", "nn"} <= set(dir(matmuls))
    with pytest.raises(AttributeError, match="module 'matmuls' has no attribute 'tensorrt'"):
        _ = matmuls.tensorrt
