// x A^T + bias for few operands on a GPU: one kernel in place of a product between two transposes.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls::linear {

// Whether launches take longer than the arithmetic of n rows of x. longest: nonzeros of A's longest row, -1 if unknown.
constexpr int64_t kFew = 1 << 18, kShort = 64;
inline bool are_few(int64_t nonzeros, int64_t rows, int64_t n, int64_t longest) {
  return longest >= 0 && longest <= kShort && n <= kFew && nonzeros <= kFew && rows <= kFew && nonzeros * n <= kFew &&
         rows * n <= kFew;
}

// y <- x A^T + bias. x [n, columns of A] with contiguous rows, y [n, rows of A] contiguous; bias may be undefined.
void run_few(const Pattern& p, const at::Tensor& values, const at::Tensor& x, const at::Tensor& bias,
             const at::Tensor& y);

}  // namespace matmuls::linear
