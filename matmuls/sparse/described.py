"""What a plan says of itself."""

from typing import Any


def described(plan: Any) -> list[str]:
    """A SparsePlan in a few lines: the matrix, the selected kernels, the times that were measured."""
    s = plan._pattern
    mean = s.nonzeros / max(s.rows, 1)
    density = s.nonzeros / max(s.rows * s.columns, 1)
    transposed = "kept" if s._transposed is not None else "made when B first requires a gradient"
    batch = f", {s.batch} blocks on the diagonal" if s.batch is not None else ""
    order = "in the order of rows" if s.order is None else "by an order of their own"
    if s.blocks is not None:
        order += f", in {s.blocks.pattern.nonzeros} blocks of {s.blocks.height} x {s.blocks.width}"
    lines = [
        f"{' x '.join(map(str, plan.shape))}: {s.nonzeros} nonzeros ({density:.2%}), {plan.dtype}, {plan.device}",
        f"nonzeros a row: mean {mean:.1f}, most {s.longest}{batch}",
        f"indices: {s.crow.dtype}, values {order}",
        f"transposed matrix: {transposed}",
        f"{plan.nbytes} bytes",
    ]
    return lines + ([] if plan._selector is None else plan._selector.explain())
