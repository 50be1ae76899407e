// csr_check on a GPU: validates CSR indices and collects statistics. Called by csr_ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// The first kind of invalid index that csr_check found.
enum class Problem : int64_t { none, first_offset, last_offset, decreasing, column };
// Result of csr_check, [kFacts] int64:
//   0 Problem   1 index at which it occurs   2 value found there   3 longest row (nonzeros)
//   4 1 if columns increase strictly within every row
//   5 nonzeros whose column lies in the same aligned group of 4 as that of the nonzero two before (about: the
//     comparison ignores row ends); these exceed 2:4 sparsity
//   6 rows whose first nonzero is kFar columns or more from the diagonal
constexpr int64_t kFacts = 7;
constexpr int64_t kFar = 1 << 14;

// crow and col are contiguous and on the current device. own_crow and own_col, if defined, receive int32 copies of
// them.
at::Tensor csr_check_on_gpu(const at::Tensor& crow, const at::Tensor& col, int64_t columns,
                            const at::Tensor& own_crow = {}, const at::Tensor& own_col = {});

}  // namespace matmuls
