"""Embeddings of packed tokens in one kernel, compared with torch's and with float64."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.model_cases import model_of  # noqa: E402
from custom_mm import _C  # noqa: E402
from matmuls.integrations.transformers import embedding_kernel, encode_tokens, optimize  # noqa: E402

FORMS = "bert", "roberta", "electra", "albert"


def drawn(width, dtype, device, tokens=(1, 37), seed=0):
    """Arguments of `_C.embed`."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"words": 90, "positions": 40, "types": 2}
    tables = {name: torch.randn(n, width, generator=generator).to(device, dtype) for name, n in counts.items()}
    ids = [torch.randint(n, tokens, generator=generator).to(device) for n in counts.values()]
    norm = [(torch.randn(width, generator=generator) + x).to(device, dtype) for x in (1, 0)]
    words, positions, types = tables.values()
    return [ids[0], words, ids[1], positions, ids[2], types, *norm, 1e-12]


def in_torch(ids, words, position_ids, positions, type_ids, types, weight, bias, eps):
    rows = words[ids] + (types[0] if type_ids is None else types[type_ids]) + positions[position_ids]
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], weight, bias, eps)


def errors(arguments):
    """The largest errors of the kernel and of torch."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    right = in_torch(*wide)
    return [(x.double() - right).abs().max().item() for x in (_C.embed(*arguments), in_torch(*arguments))]


def check(arguments):
    """With token types and without."""
    for types in (arguments[4], None):
        ours, theirs = errors([*arguments[:4], types, *arguments[5:]])
        assert ours <= 2 * theirs + 16 * torch.finfo(arguments[1].dtype).eps


BAD = {
    "ids in int32": (0, lambda x: x.int(), r"expected ids contiguous, in Long"),
    "other position ids": (2, lambda x: x[:, 1:], r"expected position_ids contiguous, in Long, of shape \[1, 37\]"),
    "words of one dimension": (1, lambda x: x[0], r"expected words \[V, D\] in a floating-point dtype"),
    "narrower positions": (3, lambda x: x[:, 1:], "expected positions contiguous, of 2 dimensions"),
    "other dtype": (5, lambda x: x.double(), "expected types contiguous"),
    "weight of two dimensions": (6, lambda x: x[None], "expected weight contiguous, of 1 dimensions"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_arguments_of_embed(case):
    place, change, message = case
    arguments = drawn(8, torch.float32, "cpu")
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=f"^embed: {message}"):
        _C.embed(*arguments)


def test_a_cpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"^embed: expected ids on a GPU, got it on cpu"):
        _C.embed(*drawn(8, torch.float32, "cpu"))


@pytest.mark.parametrize("name", FORMS)
def test_models_with_the_kernel(name, monkeypatch):
    model, other = model_of(name), model_of(name)
    optimize(model)
    optimize(other)
    generator = torch.Generator().manual_seed(0)
    ids, lengths = torch.randint(3, 60, (24,), generator=generator), [5, 12, 7]
    types = torch.randint(2, (24,), generator=generator)
    right = [encode_tokens(other, ids, lengths), encode_tokens(other, ids, lengths, token_type_ids=types)]
    calls = []
    monkeypatch.setattr(_C, "embed", lambda *given: calls.append(1) or in_torch(*given))
    monkeypatch.setattr(embedding_kernel, "_fits", lambda p, words: True)
    ours = [encode_tokens(model, ids, lengths), encode_tokens(model, ids, lengths, token_type_ids=types)]
    assert len(calls) == 2
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["distilbert", "nomic"])
def test_other_forms_compute_their_embeddings(name, monkeypatch):
    monkeypatch.setattr(embedding_kernel, "_fits", lambda p, words: True)
    assert embedding_kernel.in_one_kernel(model_of(name).embeddings) is None


def test_changed_embeddings_compute_themselves(monkeypatch):
    model = model_of("bert")
    assert embedding_kernel.in_one_kernel(model.embeddings) is None  # on a CPU
    monkeypatch.setattr(embedding_kernel, "_fits", lambda p, words: True)
    assert embedding_kernel.in_one_kernel(model.embeddings) is not None
    model.embeddings.word_embeddings.max_norm = 1.0
    assert embedding_kernel.in_one_kernel(model.embeddings) is None


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 768, 1024, 1032, 2048])
@pytest.mark.parametrize("tokens", [(1, 1), (1, 32), (3, 500)])
def test_embed_on_a_gpu(tokens, width, dtype):
    arguments = drawn(width, dtype, "cuda", tokens)
    check(arguments)
    assert _C.embed(*arguments).dtype == dtype
    empty = [x[:0] if isinstance(x, torch.Tensor) and x.dtype == torch.int64 else x for x in arguments]
    assert _C.embed(*empty).shape == (0, tokens[1], width)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [12, 8192])
def test_rows_that_the_kernel_does_not_take(width):
    with pytest.raises(RuntimeError, match=r"^embed: expected rows of a multiple of 16 bytes"):
        _C.embed(*drawn(width, torch.bfloat16, "cuda"))
    assert embedding_kernel._fits(*2 * [torch.zeros(3, 64, device="cuda")])
    assert not embedding_kernel._fits(*2 * [torch.zeros(3, width, device="cuda", dtype=torch.bfloat16)])
