// The products of sparse.h by way of the dispatcher, for the operations that are made of them.
#pragma once

#include <string_view>

#include "row_operators.h"
#include "sparse.h"

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

}  // namespace matmuls
