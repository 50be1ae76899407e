// The one-kernel in-place product on Hopper, used by inplace_matmul.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// a <- a @ op(b) + bias over a's first columns. Returns false, doing nothing, if the kernel does not support the call.
// a: [M, K], any row stride; b: [K, N], or [N, K] with transb; must be on the current device.
bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb);

}  // namespace matmuls
