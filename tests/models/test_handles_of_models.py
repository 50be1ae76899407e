"""The handles of `optimize`: how they are printed, and what `optimize` warns of."""

import re
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import model_of  # noqa: E402
from common.sentence_cases import small  # noqa: E402
from matmuls.integrations import sentence_transformers  # noqa: E402
from matmuls.integrations import transformers as integration  # noqa: E402
from matmuls.integrations.transformers import optimize, takes  # noqa: E402
from matmuls.integrations.transformers import optimized as module_under_test  # noqa: E402


def test_handles_are_shown_in_one_line(tmp_path):
    model = model_of("bert")
    st = sentence_transformers.optimize(small("bert", tmp_path))
    for handle in (optimize(model), integration.optimize(model_of("vit")), st, st.encoder, takes(model)):
        assert repr(handle) == str(handle)
        assert "\n" not in repr(handle)
        assert len(repr(handle)) < 300


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_without_instructions_is_warned_of(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test, "_is_emulated", lambda p: p.dtype == dtype)
    message = f"optimize: expected float32 on this CPU, which has no instructions for {dtype}: "
    message += "products are several times slower"
    for change in (lambda: optimize(model_of("bert", dtype=dtype)), lambda: of_texts(tmp_path, dtype)):
        with pytest.warns(UserWarning, match=re.escape(message)) as found:
            change()
        assert [w.filename for w in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(model_of("bert"))


def of_texts(tmp_path, dtype):
    st = small("bert", tmp_path)
    st[0].model.to(dtype)
    sentence_transformers.optimize(st)


def test_what_is_emulated(monkeypatch):
    half, brain, single = (torch.ones(1, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32))
    for supported in (True, False):
        for name in ("_is_mkldnn_fp16_supported", "_is_mkldnn_bf16_supported"):
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda supported=supported: supported)
        assert [module_under_test._is_emulated(x) for x in (half, brain)] == [not supported] * 2
        assert not module_under_test._is_emulated(single)
        assert not module_under_test._is_emulated(half.to("meta"))


def test_no_optimized_layer_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="optimize: expected a model of one of BERT, .*, got LlamaModel$"):
        optimize(model_of("grouped heads"))
    st = small("bert", tmp_path)
    for layer in st[0].model.encoder.layer:
        layer.output.dense = torch.nn.Sequential(layer.output.dense)
    with pytest.warns(UserWarning, match="optimize: no layer of BertModel was changed: 0 layers optimized") as found:
        handle = sentence_transformers.optimize(st)
    assert found[0].filename == __file__
    assert not handle.encoder.layers
