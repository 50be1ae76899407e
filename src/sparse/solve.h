// csr_solve_triangular: x of op(T) x = b, T the upper or lower triangle of a sparse matrix A [n, n], b [n, k].
//
// op(T) is T or its transpose. Nonzeros of A beyond the triangle are not read, nor is a unit diagonal.
//
// csr_solve_state makes an empty tensor that owns what the solves of one matrix keep: `state`. On a GPU, a solve
// without one checks the diagonal and makes cuSPARSE's analysis. With it, the analysis is made for the first solve of a
// kind only. Each solve loads its values into the analysis, and the diagonal is checked once for the same values.
// `version` says which values it is given: greater than 0: solves with the same number have equal values; 0: nothing is
// known; -1: nothing is known, and a GPU does not check the diagonal, which would wait. `constant`: values with the
// same number are not loaded again. On a CPU, a state keeps where the diagonal lies; every solve checks it.
#pragma once

#include "glue/autograd.h"
#include "rows/ops.h"
#include "sparse/csr.h"
#include "sparse/owned.h"

namespace matmuls::solve {

constexpr const char* kOp = "csr_solve_triangular";
constexpr const char* kState = "csr_solve_state";

struct Call {
  Pattern a;
  at::Tensor values, b;
  bool upper, transpose, unit_diagonal;
  at::Tensor state;  // undefined: none
  int64_t version;
};

// The analyses that solves with this matrix keep. Null if the state belongs to another matrix, as after saved-tensor
// hooks have copied the matrix of a backward pass: the solve then keeps nothing.
template <class State>
State* state_of(const Call& c) {
  State* const s = owned_by<State>(c.state);
  return s != nullptr && is_same_matrix(s->crow, s->col, c.a) ? s : nullptr;
}

// row: 2 r + 1 if row r has a diagonal that is 0, 2 r if it has none.
[[noreturn]] void fail_diagonal(int64_t row);

// Everything that can be checked without reading indices or values.
Call checked(const at::Tensor& crow, const at::Tensor& col, const at::Tensor& values, const at::Tensor& b, bool upper,
             bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
             const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& state, int64_t version);

}  // namespace matmuls::solve
