// Dispatcher entry points of csr_transpose, csr_spmm and csr_sddmm, for operators that are composed of them.
#pragma once

#include <ATen/ops/view_as_real.h>

#include <string_view>
#include <utility>

#include "rows/ops.h"
#include "sparse/csr.h"

namespace matmuls {

MATMULS_OPERATOR(CsrTransposeOp, "custom_mm::csr_transpose", "",
                 std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, c10::SymInt));
MATMULS_OPERATOR(SpmmOp, "custom_mm::csr_spmm", "",
                 at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
                            std::string_view, double, const OptionalTensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool, int64_t,
                            int64_t));
MATMULS_OPERATOR(SpmmOutOp, "custom_mm::csr_spmm", "out",
                 void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
                      std::string_view, double, const OptionalTensor&, double, int64_t, at::Tensor));
MATMULS_OPERATOR(SddmmOp, "custom_mm::csr_sddmm", "",
                 at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
                            double, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, bool, bool));

// A complex tensor [..., n] whose rows are contiguous, as a view [..., 2 n] of its real and imaginary parts in turn.
inline at::Tensor as_real_columns(const at::Tensor& t) { return at::view_as_real(t).flatten(-2); }

}  // namespace matmuls
