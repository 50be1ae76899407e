"""Which GPU kernel every operation on rows takes, on any machine: the choice of src/rows/choose.cpp, and explain().

data/row_kernels.json began as the launches of the code before choose.cpp, whose decisions were spread over the
launchers: that code was compiled against a stub of CUDA's launch functions, and each launch was logged. Since then
long masked and unaligned rows moved to reread, and some short ones to kernels by vectors, as `matmuls bench --kernels`
measured them.
"""

import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

from custom_mm import _C, explain

HERE = Path(__file__).resolve().parents[1]
TABLE = json.loads((HERE / "data/row_kernels.json").read_text())
KERNELS = HERE.parent / "src/rows/kernels"

GPUS = {
    "9.0": (132, 227 << 10, 228 << 10, (9, 0)),
    "8.0": (108, 163 << 10, 164 << 10, (8, 0)),
    "7.5": (40, 64 << 10, 64 << 10, (7, 5)),
    "12.0": (170, 99 << 10, 100 << 10, (12, 0)),
}
H100 = GPUS["9.0"]
# Elements after each row; elements between a 16-byte boundary and the first row; step of the columns; dimensions.
LAYOUTS = {
    "plain": (0, 0, 1, 1),
    "off1": (0, 1, 1, 1),
    "pad16": (16, 0, 1, 1),
    "strided": (0, 0, 2, 1),
    "two_dims": (16, 0, 1, 2),  # [rows / 2, 2, columns], 64 elements after two rows
}


def facts(layout, element, columns):
    """How rows lie in memory, as choose_row_kernel takes it."""
    pad, off, column_step, dims = LAYOUTS[layout]
    steps = [column_step * columns + pad]
    if dims == 2:
        steps.append(2 * steps[0] + 64)
    aligned = all(n * element % 16 == 0 for n in (off, *steps))
    return {
        "element": element,
        "vectors": column_step == 1 or columns == 1,
        "aligned": aligned,
        "adjacent": steps[0] == columns and dims == 1,
        "constant_step": dims == 1,
    }


def choose(call, columns):
    call = dict(call)
    options = facts(call.pop("layout"), call.pop("element"), columns)
    options["gpu"] = GPUS[call.pop("gpu")]
    return _C.choose_row_kernel(call.pop("operation"), columns=columns, **options, **call)


def launched(kernel, launch):
    """A choice in the table's columns."""
    cluster = launch.get("blocks_per_row", 1) if launch["scope"] == "cluster" else 0
    vectors = launch.get("kept_parts" if kernel == "two_pass" else "vectors")
    if kernel in ("norm_backward_stream", "column_sums"):  # the same for all rows
        vectors = None
    sizes = launch["threads"], launch.get("rows_per_block", 1), launch.get("shared", 0), cluster, vectors
    return [kernel, *sizes, launch.get("form")]


def cases():
    return [(call, c, n) for call, kinds in TABLE["calls"] for c, n in zip(TABLE["columns"], kinds, strict=True)]


def test_every_choice_is_that_of_the_launchers_before():
    assert TABLE["launch"] == ["kernel", "threads", "rows_per_block", "shared", "cluster", "vectors", "form"]
    assert len(cases()) > 5000
    wrong = []
    for call, columns, n in cases():
        kernel, why, launch = choose(call, columns)
        assert why, (call, columns)
        if launched(kernel, launch) != TABLE["launches"][n]:
            wrong.append((call, columns, TABLE["launches"][n], launched(kernel, launch)))
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[:3]}"


# Columns around the choosers' thresholds, which are 1 to 33 times a power of two: vectors of 16 bytes per thread.
EDGES = sorted({n * 2**p + d for n in range(1, 34) for p in range(18) for d in (-1, 0, 1)} - {0})
OPTIONS = {
    "softmax": {},
    "scaled_masked_softmax": {
        "mask": ("none", "bytes", "same", "float32"),
        "causal": (False, True),
        "scale": (0.125, 0.0, math.inf),
        "mask_vectors": (True, False),
        "mask_steps": (False, True),
    },
    "softmax_backward": {"causal": (False, True)},
    "layer_norm": dict.fromkeys(("residual", "keeps", "plain_constants"), (False, True)),
    "rms_norm": dict.fromkeys(("residual", "keeps", "plain_constants"), (False, True)),
    "norm_backward": {"wants_dx": (True, False)},
}


@pytest.mark.parametrize("operation", OPTIONS)
def test_every_choice_is_compiled(operation):
    """choose_row_kernel raises if the chosen kernel is not in the lists that launches expand."""
    generator, chosen = random.Random(0), set()
    options = {**OPTIONS[operation], "element": (2, 4, 8), "layout": tuple(LAYOUTS), "gpu": tuple(GPUS)}
    for given in itertools.product(*options.values()):
        call = {"operation": operation, **dict(zip(options, given, strict=True))}
        for columns in generator.sample(EDGES, 300 if len(options) < 7 else 60):
            chosen.add(choose({**call, "rows": generator.choice((1, 61, 4096, 2**20))}, columns)[0])
    assert chosen == {name for name, operations in KERNELS_OF.items() if operation in operations}


NORMS = {"layer_norm", "rms_norm"}
KERNELS_OF = {
    "one_pass": {"softmax", "scaled_masked_softmax", "softmax_backward"} | NORMS,
    "even_rows": {"scaled_masked_softmax", "softmax_backward"} | NORMS,
    "nearly_even": {"softmax", "scaled_masked_softmax"} | NORMS,
    "two_pass": {"softmax", "softmax_backward"},
    "persistent": set(OPTIONS),
    "persistent_unaligned": NORMS | {"norm_backward"},
    "cluster": NORMS | {"softmax_backward"},
    "staged": set(OPTIONS),
    "direct": {"softmax", "scaled_masked_softmax"} | NORMS,
    "reread": set(OPTIONS),
    "norm_backward_stream": {"norm_backward"},
    "column_sums": {"norm_backward"},
}


def test_the_table_has_every_kernel_and_every_kernel_has_a_file():
    names = _C.row_kernels()
    assert len(set(names)) == len(names)
    files = {path.stem: path.read_text() for path in KERNELS.glob("*.cu*")}
    for name in names:
        assert f"{name}_kernel(" in files[name], name
        assert re.match(rf"// {name}: ", files[name]), name
    assert {launch[0] for launch in TABLE["launches"]} == set(names)
    documented = {name for name, text in files.items() if "__global__" in text}
    assert documented == set(names), "a kernel that nothing chooses"


@pytest.mark.parametrize(
    ("columns", "kernel"),
    [
        *((n, "staged") for n in (77, 197, 577, 1023)),
        *((n, "one_pass") for n in (128, 1024, 2048, 4096)),
        *((n, "nearly_even") for n in (8191, 8192)),
        (30_522, "two_pass"),
    ],
)
def test_the_kernels_of_softmax_in_place(columns, kernel):
    x = torch.empty(64, columns, dtype=torch.bfloat16)
    explanation = explain("softmax_", x, gpu="H100")
    assert explanation.kernel == kernel
    assert str(explanation).startswith(f"softmax_: {kernel} (")
    assert explanation.launch["threads"] > 0


def bits(x):
    return x.clone().view(torch.uint8)


CALLS = [
    ("softmax", (), {}),
    ("softmax_", (), {"dim": 1}),
    ("scaled_masked_softmax", (), {"scale": 0.5, "causal": True}),
    ("scaled_masked_softmax_", (), {"mask": torch.zeros(129, 256, dtype=torch.bool)}),
    ("softmax_backward", ("grad",), {"causal": True}),
    ("softmax_backward_", ("grad",), {}),
    ("layer_norm_", (torch.ones(256), torch.zeros(256)), {"residual": torch.zeros(129, 256)}),
    ("rms_norm_", (torch.ones(256),), {"eps": 1e-6}),
    ("norm_keep_", (None, None, 1e-5, None, True), {}),
    ("norm_backward", ("grad", torch.ones(129), None, False), {"need_columns": False}),
]


@pytest.mark.parametrize(("name", "others", "options"), CALLS, ids=[c[0] for c in CALLS])
def test_explaining_writes_nothing_and_takes_the_operators_arguments(name, others, options):
    x, grad = torch.rand(129, 256), torch.rand(129, 256)
    others = [grad if other == "grad" else other for other in others]
    before, grad_before = bits(x), bits(grad)
    on_cpu = explain(name, x, *others, **options)
    on_gpu = explain(name, x, *others, **options, gpu="A100")
    assert torch.equal(bits(x), before)
    assert torch.equal(bits(grad), grad_before)
    assert on_cpu.operation == name
    assert re.fullmatch(r"cpu: \w+", on_cpu.kernel)
    assert on_cpu.kernel.removeprefix("cpu: ") in (HERE.parent / "src/cpu/row_functions.h").read_text()
    assert on_cpu.launch == {}
    assert on_gpu.kernel in _C.row_kernels()
    assert on_gpu.launch["threads"] > 0
    getattr(torch.ops.custom_mm, name).default(x, *others, **options)  # the same arguments, accepted


def test_the_loops_of_the_cpu():
    assert explain("softmax_", torch.rand(8, 1000)).kernel == "cpu: softmax_row"
    assert explain("softmax_", torch.rand(4096, 4)).kernel == "cpu: softmax_short_rows"
    assert explain("softmax_", torch.rand(16, 4096), dim=0).kernel == "cpu: softmax_side_by_side"
    y = torch.rand(16, 4096)
    assert explain("softmax_backward_", y, y.clone(), 0).kernel == "cpu: softmax_backward_side_by_side"
    assert explain("scaled_masked_softmax", y, scale=0.5).kernel == "cpu: softmax_row"
    assert explain("softmax", torch.rand(0, 4)).kernel == "nothing"


def test_the_facts_of_tensors():
    """Alignment, outputs, masks and constants decide as the launcher sees them."""
    memory = torch.zeros(64 * 4096 + 8, dtype=torch.bfloat16)
    aligned, off = memory[: 64 * 4096].view(64, 4096), memory[1 : 64 * 4096 + 1].view(64, 4096)
    kernel = lambda name, *tensors, **options: explain(name, *tensors, gpu="H100", **options).kernel  # noqa: E731
    weight, bias = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4097, dtype=torch.bfloat16)
    assert kernel("layer_norm_", aligned[:, :1024], weight[:1024], bias[:1024]) == "even_rows"
    assert kernel("layer_norm_", aligned[:, :1024], weight[:1024], bias[1:1025]) == "one_pass"
    assert kernel("layer_norm_", off, weight, bias[:-1]) == "persistent_unaligned"
    assert kernel("softmax", off.t().contiguous().t()) == "reread"  # columns are strided
    assert explain("softmax", off, gpu="H100").launch["elements"] == 1  # a new output is aligned, x is not
    assert kernel("softmax_", off) == "one_pass"
    assert explain("softmax_", off, gpu="H100").launch["elements"] == 8
    mask = torch.zeros(1, 4096, dtype=torch.bool)
    assert explain("scaled_masked_softmax_", aligned, mask, gpu="H100").launch["form"] == "half2"
    wide = torch.zeros(1, 8192, dtype=torch.bool)[:, ::2]
    assert explain("scaled_masked_softmax_", aligned, wide, gpu="H100").launch["form"] == "any_mask"
    y = torch.rand(64, 577)
    assert kernel("softmax_backward", y, y) == "one_pass"
    assert kernel("norm_backward", y, y, torch.ones(64), None, False, need_dx=False) == "column_sums"


def test_clusters_only_where_the_gpu_has_them():
    x = torch.empty(64, 262_144, dtype=torch.bfloat16)
    weight = torch.ones(262_144, dtype=torch.bfloat16)
    assert explain("rms_norm_", x, weight, gpu="H100").launch["scope"] == "cluster"
    assert explain("rms_norm_", x, weight, gpu="A100").kernel == "reread"
    facts_of_stream = {"element": 2, "rows": 4096, "columns": 65_536, "gpu": H100}
    assert _C.choose_row_kernel("norm_backward", **facts_of_stream)[0] == "norm_backward_stream"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain("soft", torch.rand(2, 2)), r"expected one of softmax, softmax_, .*csr_spmm, got 'soft'"),
        (lambda: explain("softmax_"), "expected x of softmax_, got none"),
        (lambda: explain("softmax_", torch.rand(2, 2), axis=0), "expected options of softmax_, x, dim, got axis"),
        (lambda: explain("softmax_", torch.rand(2, 2), x=0), "expected x of softmax_ once"),
        (lambda: explain("softmax_", torch.rand(2, 2), 0, 1), "expected at most 2 arguments of softmax_, got 3"),
        (lambda: explain("softmax_", torch.rand(2, 2), gpu="B9"), "expected gpu to be one of T4, A100, H100, got 'B9'"),
        (lambda: explain("softmax_", torch.rand(2, 2), gpu=(0, 1, 1, (9, 0))), "expected a GPU with multiprocessors"),
        (lambda: _C.choose_row_kernel("norm", element=2, rows=1, columns=1, gpu=H100), "an operation of softmax, "),
        (lambda: _C.choose_row_kernel("softmax", element=3, rows=1, columns=1, gpu=H100), "2, 4 or 8 bytes, got 3"),
        (
            lambda: _C.choose_row_kernel("softmax", element=2, rows=0, columns=1, gpu=H100),
            "at least one row and column",
        ),
        (
            lambda: _C.choose_row_kernel("softmax", element=2, rows=1, columns=1, mask="bits", gpu=H100),
            "expected a mask of none, bytes, same, float32, got bits",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_tensors_get_the_operators_error():
    with pytest.raises(RuntimeError, match="softmax_: expected dim between -2 and 1, got 2"):
        explain("softmax_", torch.rand(2, 2), 2)
    with pytest.raises(RuntimeError, match="rms_norm_: expected weight of shape"):
        explain("rms_norm_", torch.rand(2, 2), torch.rand(3))
    with pytest.raises(RuntimeError, match="expected tensors on a CPU or a GPU, got meta"):
        explain("softmax_", torch.empty(2, 2, device="meta"))


@pytest.mark.cuda
def test_a_call_on_this_gpu():
    """The choice by the limits of this GPU is a kernel whose name the profiler sees."""
    for columns in (128, 577, 8191, 30_522):
        x = torch.rand(512, columns, device="cuda", dtype=torch.bfloat16)
        expected = explain("softmax_", x).kernel
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.ops.custom_mm.softmax_.default(x)
            torch.cuda.synchronize()
        assert any(f"{expected}_kernel" in event.name for event in profile.events()), expected
