// Attention with its probabilities: the Hopper kernel used by attention.cpp, and what attention.cpp shares with
// backward.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace matmuls {

// True if one kernel computes context and probabilities of these inputs and can return each row's sum of exponentials.
// Raises the errors of attention_forward.
bool attends_at_once(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double scale);

// A part of the scores [B, H, Q, K]: some batch elements, or some heads of one element.
struct Piece {
  int64_t batch, batches, head, heads;

  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, batch, batches).narrow(1, head, heads); }
  // View of a mask that broadcasts to the scores; undefined if mask is.
  std::optional<at::Tensor> of_mask(at::Tensor mask) const;
};

// Divides the scores into pieces of about equal size: as many whole batch elements as fit in piece_bytes of scores,
// else as many heads of one element, at least one head.
std::vector<Piece> pieces_of(const at::Tensor& q, const at::Tensor& k, int64_t piece_bytes);

// Queries and scale for scores stored in q's dtype. float16: q times a power of two, and scale divided by it, since
// unscaled scores of long vectors exceed 65504 where scaled ones do not; the products hold scores / 16 at most. Other
// dtypes: q and scale unchanged.
std::pair<at::Tensor, double> folded(const at::Tensor& q, double scale);

// True if the Hopper kernel supports the inputs. q: [B, H, Q, D]; k, v: [B, H, K, D], strided; mask: as accepted by
// check in attention.cpp, or undefined.
bool fits_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale);

// context <- softmax(scale * q @ k^T + mask) @ v, also writing the probabilities and the logarithms of the rows' sums.
// Requires fits_sm90 and inputs on the current device.
//    context        [B, Q, H, D]           rows of D contiguous
//    probabilities  [B, H, Q, K]           contiguous, 16-byte aligned
//    sums           [B, H, Q]     float32  contiguous, or undefined
void attend_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                 bool causal, const at::Tensor& context, const at::Tensor& probabilities, const at::Tensor& sums);

}  // namespace matmuls
