// The dense products, called through the dispatcher by other operations.
#pragma once

#include <ATen/core/Tensor.h>

#include "glue/operator.h"

namespace matmuls {

MATMULS_OPERATOR(MatmulOp, "custom_mm::matmul", "", at::Tensor(const at::Tensor&, const at::Tensor&, bool, bool));
MATMULS_OPERATOR(MatmulOutOp, "custom_mm::matmul", "out",
                 void(const at::Tensor&, const at::Tensor&, bool, bool, at::Tensor));
MATMULS_OPERATOR(LtMatmulOp, "custom_mm::cublaslt_matmul", "",
                 at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            std::optional<std::string_view>, bool, bool));
MATMULS_OPERATOR(LtMatmulOutOp, "custom_mm::cublaslt_matmul", "out",
                 void(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                      std::optional<std::string_view>, bool, bool, at::Tensor));
MATMULS_OPERATOR(GeluOp, "custom_mm::gelu", "", at::Tensor(const at::Tensor&, bool));

}  // namespace matmuls
