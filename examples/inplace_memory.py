"""Memory saved by in-place operations: one layer's projection, softmax and norm, in place and out of place.

    python examples/inplace_memory.py --rows 40000 --columns 1024

Prints the peak memory above the inputs, and the largest difference between the two results. Without arguments:

    x: 4096 x 512, 8.0 MiB
                  linear:    0.25 MiB in place,    8.00 MiB else, difference 0.0e+00
                 softmax:    0.00 MiB in place,    8.00 MiB else, difference 1.5e-08
     layer norm of x + r:    0.00 MiB in place,   16.03 MiB else, difference 1.9e-06
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which measures memory on a CPU, logs otherwise

import torch
import torch.nn.functional as F

import matmuls
from matmuls.timing import peak_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=512)
    a = parser.parse_args()
    if min(a.rows, a.columns) < 1:
        parser.error(f"--rows and --columns are at least 1, got {a.rows} and {a.columns}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, r = torch.randn(2, a.rows, a.columns, device=device)
    weight = torch.randn(a.columns, a.columns, device=device) / a.columns**0.5
    bias, gamma, beta = torch.randn(3, a.columns, device=device)
    ways: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "linear": (
            lambda x: matmuls.linear_(x, weight, bias, workspace=256 << 10),
            lambda x: F.linear(x, weight, bias),
        ),
        "softmax": (matmuls.softmax_, lambda x: torch.softmax(x, -1)),
        "layer norm of x + r": (
            lambda x: matmuls.layer_norm_(x, gamma, beta, residual=r),
            lambda x: F.layer_norm(x + r, (a.columns,), gamma, beta),
        ),
    }
    print(f"x: {a.rows} x {a.columns}, {x.nbytes / 2**20:.1f} MiB")
    with torch.no_grad():
        for name, (in_place, plain) in ways.items():
            given = x.clone()
            result = plain(x)
            peaks = [peak_memory(lambda f=f, t=t: f(t), device) / 2**20 for f, t in ((in_place, given), (plain, x))]
            difference = (given - result).abs().max().item()
            print(f"{name:>20}: {peaks[0]:7.2f} MiB in place, {peaks[1]:7.2f} MiB else, difference {difference:.1e}")


if __name__ == "__main__":
    main()
