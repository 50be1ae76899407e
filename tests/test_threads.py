"""Operations on a CPU have as many threads as torch has, and one in a child of fork(), where torch's are not."""

import subprocess
import sys
from textwrap import dedent

OPERATIONS = """
import os, signal, numpy, torch, custom_mm

def tensor(array):  # torch's own operations on as much would wake its threads
    return torch.from_numpy(numpy.ascontiguousarray(array))

ops, rows, columns, each = torch.ops.custom_mm, 4096, 64, 32
numbers = numpy.random.default_rng(0)
x, grad = (tensor(numbers.standard_normal((rows, columns), "float32")) for _ in range(2))
dense = tensor(numbers.standard_normal((each, columns), "float32"))
values, rstd = tensor(numbers.standard_normal(rows * each, "float32")), tensor(numpy.ones(rows, "float32"))
pattern = tensor(numpy.arange(0, rows * each + 1, each)), tensor(numpy.tile(numpy.arange(each), rows))

calls = {
    "softmax": lambda: ops.softmax(x),
    "softmax_backward": lambda: ops.softmax_backward(x, grad),
    "norm_keep_": lambda: ops.norm_keep_(tensor(x.numpy().copy()), None, None, 1e-5, None, False)[1],
    "norm_backward": lambda: ops.norm_backward(grad, x, rstd, None, False, True, False)[0],
    "csr_spmm": lambda: ops.csr_spmm(*pattern, values, dense, each),
    "csr_spmm, max": lambda: ops.csr_spmm(*pattern, values, dense, each, "max"),
    "csr_sddmm": lambda: ops.csr_sddmm(*pattern, x, dense, each),
    "csr_softmax": lambda: ops.csr_softmax(pattern[0], values),
    "csr_check": lambda: ops.csr_check(*pattern, each),
    "csr_transpose": lambda: ops.csr_transpose(*pattern, each)[2],
}
"""


def python(code):
    return subprocess.run(
        [sys.executable, "-c", OPERATIONS + dedent(code)], capture_output=True, text=True, timeout=300
    )


def test_every_operation_has_torchs_threads():
    """Each in turn may have one more than the one before: OpenMP makes it then, and only then."""
    run = python(
        """
        def alive():
            return len(os.listdir("/proc/self/task"))

        several = []
        for n, (name, call) in enumerate(calls.items()):
            torch.set_num_threads(n + 2)
            before = alive()
            several.append(call())
            assert alive() == before + 1, (name, before, alive())
        torch.set_num_threads(1)
        for (name, call), expected in zip(calls.items(), several):
            assert torch.equal(call(), expected), name
        """
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    run = python(
        """
        torch.set_num_threads(2)
        expected = [call() for call in calls.values()]
        if os.fork() == 0:
            signal.alarm(60)
            same = [call().numpy().tobytes() for call in calls.values()] == [e.numpy().tobytes() for e in expected]
            os._exit(0 if same else 1)
        assert os.wait()[1] == 0
        """
    )
    assert (run.returncode, run.stderr) == (0, "")
