// csr_check on a GPU, for sparse/csr_ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// What is wrong with a matrix's indices, if anything, where, what is there, the longest row, whether the columns of
// every row increase, about how many nonzeros are not the first two in their four columns, and how many rows begin
// kFar columns or more from the diagonal.
enum class Problem : int64_t { none, first_offset, last_offset, decreasing, column };
constexpr int64_t kFacts = 7;
constexpr int64_t kFar = 1 << 14;

// Both contiguous, on the current device. own_crow, own_col: undefined, or what gets copies of them in int32.
at::Tensor csr_check_on_gpu(const at::Tensor& crow, const at::Tensor& col, int64_t columns,
                            const at::Tensor& own_crow = {}, const at::Tensor& own_col = {});

}  // namespace matmuls
