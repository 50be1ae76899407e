// The check of a triangle's diagonal on a GPU, for csr_solve_triangular. Called by cusparse/solve.cpp.
#pragma once

#include "sparse/csr.h"

namespace matmuls {

// [1] int64 on the GPU: 2 r + 1 for the first row r whose diagonal is 0 after duplicates were added up, 2 r if it has
// no nonzero there; -1 if no row is so. The pattern and the values are contiguous and on the current device.
at::Tensor first_bad_diagonal(const Pattern& a, const at::Tensor& values);
// Launches the same check without finding the first row: sets *is_bad, in pinned memory, to 0; the kernel sets it to 1
// if there is such a row.
void flag_bad_diagonal(const Pattern& a, const at::Tensor& values, int64_t* is_bad);

}  // namespace matmuls
