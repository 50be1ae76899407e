// Attention with its probabilities: Hopper's kernel for attention/attention.cpp, and what that shares with its
// gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace matmuls {

// Whether one kernel makes context and probabilities of these, and can tell each row's sum of exponentials. Raises what
// attention_forward raises of them.
bool attends_at_once(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double scale);

// A part of the scores [B, H, Q, K]: some batch elements, or some heads of one.
struct Piece {
  int64_t batch, batches, head, heads;

  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, batch, batches).narrow(1, head, heads); }
  std::optional<at::Tensor> of_mask(at::Tensor mask) const;  // a view of what broadcasts to the scores, or undefined
};

// As many whole batch elements each as piece_bytes of scores hold, else as many heads of one element, one head at
// least; pieces alike.
std::vector<Piece> pieces_of(const at::Tensor& q, const at::Tensor& k, int64_t piece_bytes);

// Queries and scale for scores that are kept in q's dtype: in float16 q times a power of two and scale over it, of any
// other dtype q and scale as they are. Unscaled scores of long vectors pass 65504 where scaled ones do not; the
// products hold scores / 16 at most.
std::pair<at::Tensor, double> folded(const at::Tensor& q, double scale);

// Whether the kernel is for these. q: [B, H, Q, D]; k, v: [B, H, K, D], strided; mask: what check in
// attention/attention.cpp let pass, or undefined.
bool fits_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale);

// context <- softmax(scale * q @ k^T) @ v, the softmax itself into `probabilities` and the logarithms of its rows' sums
// into `sums`, of what fits. context: [B, Q, H, D], rows of D contiguous; probabilities: [B, H, Q, K], contiguous, from
// 16 bytes on; sums: [B, H, Q] in float32, contiguous, or undefined; the device is the current one.
void attend_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                 bool causal, const at::Tensor& context, const at::Tensor& probabilities, const at::Tensor& sums);

}  // namespace matmuls
