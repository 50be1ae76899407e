// csr_solve_triangular: x of op(T) x = b, T the upper or lower triangle of a sparse matrix A [n, n], b [n, k].
//
// op(T) is T or its transpose. Nonzeros of A beyond the triangle are not read, nor is a unit diagonal.
#pragma once

#include "glue/autograd.h"
#include "rows/ops.h"
#include "sparse/csr.h"

namespace matmuls::solve {

constexpr const char* kOp = "csr_solve_triangular";

struct Call {
  Pattern a;
  at::Tensor values, b;
  bool upper, transpose, unit_diagonal;
};

// Everything that can be checked without reading indices or values.
Call checked(const at::Tensor& crow, const at::Tensor& col, const at::Tensor& values, const at::Tensor& b, bool upper,
             bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
             const OptionalTensor& t_col, const OptionalTensor& t_order);

}  // namespace matmuls::solve
