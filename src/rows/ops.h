// Declarations that a row operation and its gradient share: the gradient operators, argument checks.
#pragma once

#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "glue/operator.h"

namespace matmuls {

MATMULS_OPERATOR(ScaledMaskedSoftmaxOp, "custom_mm::scaled_masked_softmax", "",
                 at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, double, bool));
MATMULS_OPERATOR(SoftmaxBackwardOp, "custom_mm::softmax_backward", "",
                 at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, double, bool));
MATMULS_OPERATOR(SoftmaxBackwardOutOp, "custom_mm::softmax_backward", "out",
                 void(const at::Tensor&, const at::Tensor&, int64_t, double, bool, at::Tensor));
MATMULS_OPERATOR(NormBackwardOp, "custom_mm::norm_backward", "",
                 std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                                const std::optional<at::Tensor>&, bool, bool, bool));

// Returns dim as a non-negative index. A scalar has one dimension, as in torch.
inline int64_t check_dim(const char* op, const at::Tensor& x, int64_t dim) {
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  TORCH_CHECK(-dims <= dim && dim < dims, op, ": expected dim between ", -dims, " and ", dims - 1, ", got ", dim);
  return dim < 0 ? dim + dims : dim;
}
inline at::Tensor at_least_1d(const at::Tensor& x) { return x.dim() == 0 ? x.view({1}) : x; }

inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, op, ": expected ", name, " to be a strided tensor, got layout ", t.layout());
  TORCH_CHECK(is_real(t.scalar_type()), op, ": expected ", name, " of a floating-point dtype, got ", t.scalar_type());
}
inline void check_floating_or_complex(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, op, ": expected ", name, " to be a strided tensor, got layout ", t.layout());
  TORCH_CHECK(is_real_or_complex(t.scalar_type()), op, ": expected ", name,
              " of a floating-point or complex dtype, got ", t.scalar_type());
}
// Checks that t has the device and dtype of x.
inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* x_name, const at::Tensor& x) {
  TORCH_CHECK(t.layout() == at::kStrided && t.device() == x.device() && t.scalar_type() == x.scalar_type(), op,
              ": expected ", name, " to be a strided tensor in ", x.scalar_type(), " on ", x.device(), " as ", x_name,
              " is, got ", t.layout(), " in ", t.scalar_type(), " on ", t.device());
}

}  // namespace matmuls
