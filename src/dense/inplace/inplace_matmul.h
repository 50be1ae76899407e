// The one-kernel in-place product of Hopper, for dense/inplace/inplace_matmul.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// a <- a @ op(b) + bias over a's first columns; false, and nothing done, where this is not for it.
// a: [M, K] with rows at any distance; b: [K, N], or [N, K] with transb; the device is the current one.
bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb);

}  // namespace matmuls
