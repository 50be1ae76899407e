// What a call of a row operation would run, without running it: the kernel on a GPU, the function of
// cpu/row_functions.h on a CPU. For custom_mm.explain, by way of rows/bindings.h.
#pragma once

#include <optional>

#include "glue/checks.h"
#include "rows/facts.h"

namespace matmuls {

struct RowPlan {
  RowFacts facts;
  std::optional<RowChoice> choice;     // on a GPU, unless there is nothing to compute
  const char* cpu_function = nullptr;  // on a CPU
};

// The GPU to choose for, where it is not that of the tensors.
using OtherGpu = std::optional<RowDevice>;

// The plan of a call whose first tensor is x. cpu_function: what computes its rows on the CPU.
RowPlan plan_of(const char* op, const at::Tensor& x, const RowFacts& facts, const OtherGpu& gpu,
                const char* cpu_function);

// Arguments as those of the operator `op`; outputs that it would make are taken to be aligned. An operator in place has
// its tensor as `out`.
RowPlan explain_softmax(const char* op, const at::Tensor& x, int64_t dim, const OptionalTensor& out,
                        const OtherGpu& gpu);
RowPlan explain_masked_softmax(const at::Tensor& x, const OptionalTensor& mask, double scale, bool causal,
                               const OptionalTensor& out, const OtherGpu& gpu);
RowPlan explain_softmax_backward(const at::Tensor& y, const at::Tensor& grad, int64_t dim, double scale, bool causal,
                                 const OptionalTensor& out, const OtherGpu& gpu);
RowPlan explain_norm(const char* op, const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps, const OptionalTensor& residual, bool rms, bool keep, const OtherGpu& gpu);
RowPlan explain_norm_backward(const at::Tensor& grad, const at::Tensor& xhat, const at::Tensor& rstd,
                              const OptionalTensor& weight, bool rms, bool need_dx, bool need_columns,
                              const OtherGpu& gpu);

}  // namespace matmuls
