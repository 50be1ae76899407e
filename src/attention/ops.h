// Operators that attention and its gradient call through the dispatcher, apart from products.
#pragma once

#include "glue/operator.h"

namespace matmuls {

MATMULS_OPERATOR(AttentionOp, "custom_mm::attention_forward", "",
                 at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            double, bool, int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>));
MATMULS_OPERATOR(MaskedSoftmaxOp, "custom_mm::scaled_masked_softmax_", "",
                 void(at::Tensor, const std::optional<at::Tensor>&, double, bool));

}  // namespace matmuls
