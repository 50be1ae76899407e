// The list of cuSPARSE's analyses that csr_solve_triangular keeps for a matrix on a GPU, as SolvePlan reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace matmuls::solve {

// An analysis that a state keeps, for b of so many columns.
struct KeptSolve {
  int64_t columns;
  at::ScalarType type;
  bool transpose, captured;
  int64_t nbytes;
};
std::vector<KeptSolve> kept_solves(const at::Tensor& state);

}  // namespace matmuls::solve
