"""attend_packed: attention of packed texts, compared with float64 segment by segment."""

import math

import pytest
import torch

from custom_mm import _C

segments = pytest.importorskip("matmuls.integrations.transformers.segments")

ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = torch.bfloat16, torch.float16
WINDOWS = [(3, 3), (0, 0), (40, 40), (63, 0), (64, 64), (5, -1), (-1, 7), (-1, 0), (10**12, 10**12)]


def expected(q, k, v, queries, keys, scale, left=-1, right=-1):
    """The context [T, H, D] in float64, NaN for rows of no segment."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    result, queries, keys = torch.full_like(q, math.nan), queries.tolist(), keys.tolist()
    for first, end, key, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
        n, m = end - first, last - key
        scores = torch.einsum("qhd,khd->hqk", q[first:end], k[key:last]) * scale
        distances = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
        hidden = (distances < -left) & (left >= 0) | (distances > right) & (right >= 0)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)
        result[first:end] = torch.einsum("hqk,khd->qhd", weights, v[key:last])
    return result


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def drawn(rows, heads, fewer, size, dtype, device, keys=None):
    """q, k and v: views of one product of all three, or apart if there are other keys."""
    generator = torch.Generator().manual_seed(rows)
    sizes = [(rows, heads + 2 * fewer)] if keys is None else [(rows, heads), (keys, fewer), (keys, fewer)]
    tensors = [torch.randn(*s, size, generator=generator).to(device, dtype) for s in sizes]
    return tensors[0].split([heads, fewer, fewer], 1) if keys is None else tensors


def check(qkv, queries, keys, longest, left=-1, right=-1, scale=0.2):
    device, dtype = qkv[0].device, qkv[0].dtype
    given = queries.to(device), keys.to(device), longest, scale, left, right
    result = _C.attend_packed(*qkv, *given)
    assert result.dtype == dtype
    assert result.is_contiguous()
    right_one = expected(*qkv, queries, keys, scale, left, right)
    seen = ~right_one.isnan().all(-1).all(-1)
    result = result.view(qkv[0].shape).double().cpu()
    torch.testing.assert_close(result[seen], right_one[seen], atol=ALLOWED[dtype], rtol=0)
    return result


@pytest.mark.cuda
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
def test_ragged_texts(size):
    for dtype in DTYPES:
        of_all = starts(1, 7, 16, 17, 64, 65, 130)
        check(drawn(300, 2, 2, size, dtype, "cuda"), of_all, of_all, 130)
        of_all = starts(300, 33, 67)
        check(drawn(400, 2, 1, size, dtype, "cuda"), of_all, of_all, 300)


@pytest.mark.cuda
@pytest.mark.parametrize("length", [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 257])
def test_each_length(length):
    for dtype in DTYPES:
        qkv = drawn(length, 2, 2, 64, dtype, "cuda")
        for right in (-1, 0):
            check(qkv, starts(length), starts(length), length, -1, right)


@pytest.mark.cuda
@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_windows(left, right):
    for dtype in DTYPES:
        check(drawn(320, 2, 1, 64, dtype, "cuda"), starts(5, 70, 245), starts(5, 70, 245), 245, left, right)
        check(drawn(300, 2, 1, 64, dtype, "cuda"), starts(5, 295), starts(5, 295), 295, left, right)
        check(drawn(70, 2, 2, 64, dtype, "cuda", 200), starts(30, 40), starts(150, 50), 64, left, right)
        check(drawn(200, 2, 2, 64, dtype, "cuda", 70), starts(150, 50), starts(30, 40), 192, left, right)


@pytest.mark.cuda
def test_hidden_first_tokens_empty_segments_and_rows_of_none():
    texts = [(5, True), (1, True), (1, False), (64, True), (65, False), (90, True)]
    queries, keys = segments.Segments.starts(texts, True).unbind(0)
    for dtype in DTYPES:
        qkv = drawn(260, 6, 2, 64, dtype, "cuda")
        for right in (-1, 0):
            assert not check(qkv, queries, keys, 128, -1, right)[5].any()  # a text of a masked token alone
        check(qkv, starts(40, 20, 0, 0, 0), starts(40, 20, 0, 0, 0), 64)
        assert not check(qkv, starts(20, 30), starts(0, 30), 512)[:20].any()
        assert _C.attend_packed(*qkv, starts().to("cuda"), starts().to("cuda"), 0, 1.0, -1, -1).shape == (260, 384)


@pytest.mark.cuda
def test_equal_scores_weigh_alike_in_all_tiles():
    keys = 16384
    for dtype in DTYPES:
        q, k, v = (torch.full((n, 1, 32), 13.0).to("cuda", dtype) for n in (1, keys, keys))
        v.zero_()[:64] = keys // 64
        result = _C.attend_packed(q, k, v, starts(1).to("cuda"), starts(keys).to("cuda"), 1, 0.37, -1, -1)
        torch.testing.assert_close(result, torch.ones_like(result), atol=1e-3, rtol=0)


@pytest.mark.cuda
def test_nan_and_infinity_stay_in_their_text():
    dtype, of_all = torch.bfloat16, starts(20, 70).to("cuda")

    def run(which, *places):
        qkv = [x.clone() for x in drawn(90, 2, 2, 64, dtype, "cuda")]
        if places:
            qkv[which][places[:-1]] = places[-1]
        return _C.attend_packed(*qkv, of_all, of_all, 128, 0.125, -1, -1).view(90, 2, 64)

    plain = run(0)
    for value in (math.nan, math.inf):
        for which in range(3):
            assert torch.equal(run(which, slice(20, None), value)[:20], plain[:20])
    of_query, of_key, of_value = (run(which, 3, 1, 5, math.nan) for which in range(3))
    assert of_query[3, 1].isnan().all()
    assert torch.equal(of_query[4:], plain[4:])
    assert of_key[:20, 1].isnan().all()
    assert of_value[:20, 1, 5].isnan().all()
    assert of_value.isnan().sum() == 20


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_segments_attend_as_by_varlen_attn(window, causal, monkeypatch):
    texts = [(250, False), (20, False), (64, False), (1, False)]
    columns = torch.cat([torch.arange(length) for length, _ in texts]).cuda()
    qkv = [x.transpose(0, 1)[None] for x in drawn(335, 4, 4, 64, torch.bfloat16, "cuda")]
    ours = segments.Segments.of(texts, columns).attend(qkv, 0.125, window, None, causal)
    monkeypatch.setattr(segments, "LONGEST_OWN", {})
    other = segments.Segments.of(texts, columns).attend(qkv, 0.125, window, None, causal)
    torch.testing.assert_close(ours, other, atol=2e-2, rtol=0)
    assert not torch.equal(ours, other)  # two kernels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": lambda x: x[:, :0]}, r"expected q \[T, H, D\], k and v \[keys, h, D\]"),
        ({"v": lambda x: x[..., :32]}, r"expected q \[T, H, D\], k and v \[keys, h, D\]"),
        ({"q": lambda x: x[:, :3]}, r"h a divisor of H"),
        ({"k": lambda x: x.double()}, r"expected k of dtype BFloat16"),
        ({"query_starts": lambda x: x.long()}, r"expected contiguous query_starts \[segments \+ 1\] in Int"),
        ({"key_starts": lambda x: x[:-1]}, r"expected contiguous key_starts"),
        ({"scale": lambda x: -x}, r"expected longest from 0 to 2\^31 - 1 and scale > 0"),
        ({"longest": lambda x: -x}, r"expected longest from 0 to 2\^31 - 1 and scale > 0"),
    ],
)
def test_refused(change, message, device):
    q, k, v = drawn(60, 4, 2, 64, torch.bfloat16, device)
    of_all = starts(40, 20).to(device)
    given = {"q": q, "k": k, "v": v, "query_starts": of_all, "key_starts": of_all, "longest": 40, "scale": 0.1}
    given |= {name: changed(given[name]) for name, changed in change.items()}
    with pytest.raises(RuntimeError, match=message):
        _C.attend_packed(**given, left=-1, right=-1)


def test_a_cpu_is_refused():
    of_all = starts(60)
    with pytest.raises(NotImplementedError, match=r"^attend_packed: expected q on a GPU, got it on cpu"):
        _C.attend_packed(*drawn(60, 2, 2, 64, torch.float16, "cpu"), of_all, of_all, 60, 0.1, -1, -1)


@pytest.mark.cuda
def test_refused_on_a_gpu():
    of_all = starts(60).cuda()
    for size, dtype, message in [(64, torch.float32, "Half or BFloat16"), (48, torch.float16, "heads of 32, 64, 80")]:
        with pytest.raises(RuntimeError, match=message):
            _C.attend_packed(*drawn(60, 2, 2, size, dtype, "cuda"), of_all, of_all, 60, 0.1, -1, -1)
    odd = [x[..., 1:65] for x in drawn(60, 2, 2, 72, torch.float16, "cuda")]
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        _C.attend_packed(*odd, of_all, of_all, 60, 0.1, -1, -1)
