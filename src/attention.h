// Hopper's kernel of attention with its probabilities, for attention.cpp.
#pragma once

#include <ATen/ATen.h>

namespace matmuls {

// context <- softmax(scale * q @ k^T) @ v and the softmax itself into `probabilities`; false, and nothing done, where
// this is not for it. q: [B, H, Q, D]; k, v: [B, H, K, D], strided; mask: what check_mask in attention.cpp let pass, or
// undefined; context: [B, Q, H, D] of any batch, row and head strides; probabilities: [B, H, Q, K], contiguous; the
// device is the current one.
bool attend_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                 bool causal, const at::Tensor& context, const at::Tensor& probabilities);

}  // namespace matmuls
