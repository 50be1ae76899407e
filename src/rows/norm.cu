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
#include "rows/kernels/even_rows.cuh"
#include "rows/kernels/nearly_even.cuh"
#include "rows/kernels/persistent_unaligned.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/launch_rows.cuh"
#include "rows/norm.h"
#include "rows/norm_math.cuh"

namespace matmuls {
namespace {

using at::Tensor;
using Call = NormCall;

// Hands the kernel of a choice to `use`: one of those that are compiled for evenly divided rows.
template <class T, bool rms, bool with_residual, class Use>
void with_even(const RowChoice& c, const Use& use) {
  using Op = Norm<T, rms, with_residual>;
  const auto rows = [&]<int NV, bool exact, int... threads>() {
    return (with_even_rows<Op, NV, threads, exact>(c, use) || ...);
  };
  if constexpr (sizeof(T) == 4 && !with_residual) {
    if constexpr (rms) {
      if (rows.template operator()<4, true, 512>()) return;
    }
  } else if constexpr (sizeof(T) == 2 && (with_residual || !rms)) {
    if (rows.template operator()<3, false, 4, 8, 16, 32>()) return;
    if constexpr (!with_residual) {
      if (rows.template operator()<3, true, 16, 32>() || rows.template operator()<4, false, 16, 32>() ||
          rows.template operator()<8, true, 128>() || rows.template operator()<4, true, 4, 8, 16, 32, 64, 128>())
        return;
    }
  }
  not_compiled(c);
}

template <class T, bool rms, bool with_residual, class Use>
void with_kernel(const RowChoice& c, const Use& use) {
  using Op = Norm<T, rms, with_residual>;
  if constexpr (sizeof(T) <= 4) {
    switch (c.kernel) {
      case RowKernel::even_rows: return with_even<T, rms, with_residual>(c, use);
      case RowKernel::staged:
      case RowKernel::direct: return with_staged<Op>(c, use);
      case RowKernel::persistent_unaligned: return with_persistent_unaligned<Op>(c, use);
      case RowKernel::nearly_even:
        if constexpr (sizeof(T) == 4 && !with_residual)
          return with_nearly_even<Op, false, 5>(c, use);
        else if constexpr (sizeof(T) == 2 && with_residual)
          return with_nearly_even<Op, false, 3, 4>(c, use);
        else if constexpr (sizeof(T) == 2)
          return with_nearly_even<Op, false, 5, 6, 7, 8>(c, use);
        not_compiled(c);
      default: break;
    }
  }
  with_general<Op>(c, use);
}

template <class T, bool rms, bool with_residual>
bool has_room(const RowFacts&, const RowChoice& c) {
  bool room = false;
  with_kernel<T, rms, with_residual>(c, AskRoom{c, room});
  return room;
}

template <class T, bool rms, bool with_residual>
void launch(const Call& c, const Rows<3>& rows, const RowFacts& facts) {
  using F = arithmetic_t<T>;
  const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
  const Norm<T, rms, with_residual> op{RowIndex<3>(rows),
                                       c.x.mutable_data_ptr<T>(),
                                       c.xhat.defined() ? c.xhat.mutable_data_ptr<T>() : nullptr,
                                       data(c.residual),
                                       data(c.weight),
                                       data(c.bias),
                                       c.rstd.defined() ? c.rstd.mutable_data_ptr<F>() : nullptr,
                                       {rows.column_strides[0], rows.column_strides[1], rows.column_strides[2]},
                                       static_cast<F>(rows.columns),
                                       static_cast<F>(c.eps)};
  const RowChoice choice = choose(facts, has_room<T, rms, with_residual>);
  const auto make = [&]<class>() { return op; };
  with_kernel<T, rms, with_residual>(choice, LaunchRows{facts, choice, make, kNothingToPrepare});
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
