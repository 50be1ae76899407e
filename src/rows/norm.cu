// layer_norm_ and rms_norm_: x <- xhat * weight + bias over the last dimension, in place, with xhat = (h - mean(h)) *
// rstd, h = x + residual, rstd = 1 / sqrt(var(h) + eps). rms_norm_ subtracts no mean: its var is mean(h^2).
//
// Statistics are float32 (float64 for float64), and h is not rounded before them. The gradient needs xhat and rstd.
// Without weight and bias xhat is x itself, and only rstd is saved.
//
// This file launches the GPU kernels; rows/norm_ops.cpp has the CPU and the operators.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>

#include "glue/handles.h"
#include "rows/launch_rows.cuh"
#include "rows/norm.h"
#include "rows/norm_math.cuh"

namespace matmuls {
namespace {

using at::Tensor;
using Call = NormCall;

template <class Op>
struct Kernels {
  template <class Use>
  static void with(const RowFacts&, const RowChoice& c, const Use& use) {
    with_kernel<Op>(c, use);
  }
};

template <class T, bool rms, bool with_residual>
void launch(const Call& c, const Rows<3>& rows, const RowFacts& facts) {
  using F = arithmetic_t<T>;
  const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
  using Op = Norm<T, rms, with_residual>;
  const Op op{RowIndex<3>(rows),
              c.x.mutable_data_ptr<T>(),
              c.xhat.defined() ? c.xhat.mutable_data_ptr<T>() : nullptr,
              data(c.residual),
              data(c.weight),
              data(c.bias),
              c.rstd.defined() ? c.rstd.mutable_data_ptr<F>() : nullptr,
              {rows.column_strides[0], rows.column_strides[1], rows.column_strides[2]},
              static_cast<F>(rows.columns),
              static_cast<F>(c.eps)};
  launch_rows<Kernels<Op>>(facts, [&]<class>() { return op; });
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.x.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  const auto rows = rows_of_call(c);
  RowFacts facts = facts_of_call(c, rows);
  facts.device = row_device();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "norm", [&] {
    if (c.rms)
      facts.residual ? launch<scalar_t, true, true>(c, rows, facts) : launch<scalar_t, true, false>(c, rows, facts);
    else
      facts.residual ? launch<scalar_t, false, true>(c, rows, facts) : launch<scalar_t, false, false>(c, rows, facts);
  });
}

}  // namespace matmuls
#endif
