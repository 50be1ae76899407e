// Hopper's kernel of attention with its probabilities, for attention.cpp.
#pragma once

#include <ATen/ATen.h>

namespace matmuls {

// Whether the kernel is for these. q: [B, H, Q, D]; k, v: [B, H, K, D], strided; mask: what check in attention.cpp let
// pass, or undefined.
bool fits_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale);

// context <- softmax(scale * q @ k^T) @ v, the softmax itself into `probabilities` and the logarithms of its rows' sums
// into `sums`, of what fits. context: [B, Q, H, D], rows of D contiguous; probabilities: [B, H, Q, K], contiguous, from
// 16 bytes on; sums: [B, H, Q] in float32, contiguous, or undefined; the device is the current one.
void attend_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                 bool causal, const at::Tensor& context, const at::Tensor& probabilities, const at::Tensor& sums);

}  // namespace matmuls
