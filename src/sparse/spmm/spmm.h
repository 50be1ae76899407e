// csr_spmm: out = alpha * reduce(A @ dense) + beta * out, with A sparse in CSR (sparse/csr.h) and B = dense [...,
// columns, n].
//
//   reduce: sum, mean (over the nonzeros of a row), max or min; an empty row gives 0
//   selected [..., rows, n], by_column: [..., columns, n]; dtype of crow: indices of values. A nonzero counts in column
//     c of B only if its row (by_column: its column) selected its value there. The gradients of max and min use this.
//   longest: nonzeros of A's longest row, if known; t_longest: of A's longest column. They decide how work is split.
//
// Complex operands: sum and mean, without selected; on a GPU as two products of real ones. Accumulates in float32, for
// float64 in float64. The row kernels add in an order that does not depend on timing; sparse/spmm/by_rows/by_rows.cuh
// says what it depends on.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"
#include "sparse/spmm/densified/densified.h"

namespace matmuls::spmm {

constexpr const char* kOp = "spmm";

enum class Reduce { sum, mean, max, min };

// Operands as kernels take them: values [batch, nonzeros], dense [batch, columns, n], out [batch, rows, n]; the last
// dimension is contiguous.
struct Call {
  Pattern pattern;
  at::Tensor values, dense, out;
  Reduce reduce;
  double alpha, beta;
  at::Tensor arg;       // [batch, rows, n], written if defined: index of the value that gave the maximum or minimum
  at::Tensor selected;  // [batch, rows or columns, n], read if defined
  bool by_column;
  int64_t longest;  // nonzeros of A's longest row, or an upper bound; -1: unknown
};

// Shape [..., rows, n] of the result. Raises unless the operands of a product fit each other; selected and by_column as
// above. Defined in spmm_ops.cpp.
c10::SymDimVector check_product(const Pattern& p, const at::Tensor& values, const at::Tensor& dense,
                                const c10::SymInt& columns, const at::Tensor& selected, bool by_column);

void run_cpu(const Call& c);
void run_cuda(const Call& c);

// What run_cuda needs of ATen, kept out of CUDA files because the headers cost more compile time than the kernels.
// Defined in spmm_ops.cpp.
bool must_be_deterministic();
void multiply_dense(const at::Tensor& a, const at::Tensor& dense, const at::Tensor& out);  // accumulates in float32

// The product with A as a plan keeps it densified (sparse/spmm/densified/densified.h), or by the row kernel where that
// cannot be used; and the conversion of A.
void run_densified(const Call& c, const DensifiedMatrix& kept);
DensifiedMatrix densify_on_gpu(const Pattern& p, const at::Tensor& values, int64_t columns, bool sparse24,
                               int64_t beyond);

}  // namespace matmuls::spmm
