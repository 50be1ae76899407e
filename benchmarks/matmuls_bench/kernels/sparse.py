"""Times the kernels of A @ B with A sparse: for each product the chosen kernel and all others that take it.

"plan @ b" is the product of a constant plan, "spmm" the product without a plan.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from custom_mm import explain, only_kernel
from custom_mm.kernel_switch import FAMILIES
from matmuls import sparse
from matmuls.sparse.default_spmm import ROW_KERNELS
from matmuls.sparse.names import CHUNKS, DENSE, FP16X2, PACKED_MMA_LINEAR
from matmuls.sparse.select import Facts, default_kernel

from .. import matrices, timing
from ..spmm import Operands
from . import Case

FAMILY = "sparse products"
SHAPES, ZEROS = ("4096x4096", "3072x768"), ("0.5", "0.8", "0.9", "0.95", "0.99")
# As in benchmarks/gpu.sh.
DRAWN = (
    *("rmat:18:16", "rmat:20:8", "grid:1024"),
    *(f"pruned:{shape}:{share}" for share in ZEROS for shape in SHAPES),
)
DTYPES, WIDTHS = (torch.float32, torch.float16, torch.bfloat16), (32, 128, 512)
FAR = 4  # times the chosen kernel: a slower one is timed in one round alone
CASE_SECONDS, ROUNDS = 0.2, (5, 15)  # of all rounds, about; rounds of a case, least and most
OWN_BEFORE = 2  # see timing.time_warm
PLANLESS = "spmm "  # before the names of runs that densify A for one product

Run = Callable[[], Tensor]


def _alone(kernel: str, run: Run) -> Tensor:
    """The row kernels are chosen at every launch, so the others are off during each call, not only the first."""
    with only_kernel(kernel):
        return run()


def _runs(products: dict[str, tuple[str, Run]]) -> dict[str, Run]:
    """name -> kernel and product, of those products that their kernel alone takes."""
    found: dict[str, Run] = {}
    for name, (kernel, product) in products.items():
        run = partial(_alone, kernel, product)
        try:
            run()
        except (ValueError, RuntimeError):  # the kernel does not take it, or memory is out
            continue
        found[name] = run
    return found


def _timed(runs: dict[str, Run], chosen: list[str], device: str) -> dict[str, timing.Timing]:
    """Rounds of all kernels alternate. Those FAR behind the slowest chosen one have a single round."""
    once = dict(zip(runs, timing.time_warm(list(runs.values()), device, 1, own_before=1), strict=True))
    near = [name for name in runs if once[name].seconds <= FAR * max(once[c].seconds for c in chosen)]
    one_round = sum((2 + OWN_BEFORE) * once[name].seconds for name in near)
    rounds = int(min(ROUNDS[1], max(ROUNDS[0], CASE_SECONDS / one_round)))
    again = timing.time_warm([runs[name] for name in near], device, rounds, own_before=OWN_BEFORE)
    return once | dict(zip(near, again, strict=True))


def _chosen(made: sparse.SparsePlan, n: int, device: torch.device) -> tuple[str, str]:
    """The kernels of the plan's product, after one of n columns, and of its default product."""
    default = default_kernel(Facts(made._pattern, n, made.dtype, device))
    known = made._selector.measured.get((made.dtype, n.bit_length())) if made._selector else None
    return default if known is None else known.chosen, default


def _explained(m: Operands, made: sparse.SparsePlan, b: Tensor, default: str) -> str:
    """The kernel of spmm(A, b): chunks by the pattern, or what csr_spmm takes."""
    if default == CHUNKS:
        return default
    parts = m.crow, m.col, m.values, b, m.matrix.shape[1]
    return explain("csr_spmm", *parts, longest=made._pattern.longest).kernel


def _of_width(m: Operands, plans: dict[str, sparse.SparsePlan], made: sparse.SparsePlan, n: int) -> Iterator[Case]:
    """The cases of one matrix, dtype and number of columns of B. plans: one for each kernel; made: one that chooses."""
    b = m.dense_side(n)
    made @ b
    chosen, default = _chosen(made, n, b.device)
    products = {kernel: (kernel, partial(plan.__matmul__, b)) for kernel, plan in plans.items()}
    if m.device == "cuda" and m.fits_dense:
        products |= {PLANLESS + kernel: (kernel, partial(sparse.spmm, m.csr, b)) for kernel in (FP16X2, DENSE)}
    runs = _runs(products)
    default_runs = {name: name for name in (*ROW_KERNELS, CHUNKS) if name in runs}
    default_runs |= {PLANLESS + kernel: kernel for kernel in (FP16X2, DENSE) if PLANLESS + kernel in runs}
    own = {name: name for name in runs if not name.startswith(PLANLESS)}
    groups = [("plan @ b", chosen, own)]
    if m.device == "cuda":
        groups.append(("spmm", _explained(m, made, b, default), default_runs))
    groups = [group for group in groups if group[1] in group[2].values()]
    if not groups:
        return
    first = [next(run for run, name in names.items() if name == kernel) for _, kernel, names in groups]
    timed = _timed(runs, first, m.device)
    label, dtype = f"{m.matrix.name} x {n}", str(m.dtype).removeprefix("torch.")
    for operation, kernel, names in groups:
        seconds = {name: timed[run].seconds for run, name in names.items()}
        spread = {name: timed[run].spread for run, name in names.items()}
        yield Case(FAMILY, operation, label, dtype, kernel, seconds, spread)


@torch.no_grad()
def of_matrix(m: Operands, widths: tuple[int, ...] = WIDTHS) -> list[Case]:
    """The cases of one matrix in one dtype."""
    kernels = [kernel for kernel in FAMILIES[FAMILY].kernels if kernel != PACKED_MMA_LINEAR]
    plans = {kernel: sparse.plan(m.csr, constant=True) for kernel in kernels}
    made = sparse.plan(m.csr, constant=True)
    return [case for n in widths for case in _of_width(m, plans, made, n)]


def steps(names: list[str]) -> int:
    """How many parts `cases` has: one for each matrix and dtype."""
    return len(names) * len(DTYPES)


def cases(names: list[str], part: Callable[[str], object] = lambda now: None) -> Iterator[Case]:
    """The cases of the matrices that these files and names of drawn matrices (see matmuls_bench.matrices) stand for.

    part: called at the end of each of the `steps`, with its name. ValueError and OSError on what cannot be read.
    """
    for name in names:
        matrix = matrices.load(name)
        for dtype in DTYPES:
            yield from of_matrix(Operands(matrix, dtype, "cuda"))
            part(f"{name}, {str(dtype).removeprefix('torch.')}")
        torch.cuda.empty_cache()
