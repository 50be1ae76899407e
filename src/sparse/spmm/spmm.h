// csr_spmm: out = alpha * reduce(A @ dense) + beta * out, A sparse by rows (sparse/csr.h), dense [..., columns, n].
//
// reduce: sum, mean (over a row's nonzeros), max or min; an empty row gives 0. With `selected`, [..., rows, n] indices
// of values, a nonzero counts only in the columns where its own row (or its column's, by_column) selected its value:
// the gradients of max and min. `longest`, where known, is that of the rows, t_longest of the columns: how work is
// shared. Accumulation in float32, float64 for float64, in an order that depends on the shapes alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"
#include "sparse/spmm/densified/densified.h"

namespace matmuls::spmm {

constexpr const char* kOp = "spmm";

enum class Reduce { sum, mean, max, min };

// Shapes as the kernels see them: values [batch, nonzeros], dense [batch, columns, n], out [batch, rows, n], elements
// of a row side by side.
struct Call {
  Pattern pattern;
  at::Tensor values, dense, out;
  Reduce reduce;
  double alpha, beta;
  at::Tensor arg;       // written where defined: max and min alone, [batch, rows, n]
  at::Tensor selected;  // read where defined, [batch, rows or columns, n]
  bool by_column;
  int64_t longest;  // row in nonzeros, or more; -1: not known
};

void run_cpu(const Call& c);
void run_cuda(const Call& c);

// What run_cuda asks of the rest of ATen, whose headers cost CUDA code more than its kernels. In
// sparse/spmm/spmm_ops.cpp.
bool must_be_deterministic();
void multiply_filled(const at::Tensor& a, const at::Tensor& dense, const at::Tensor& out);  // sums in float32

// The product with what a plan keeps of a matrix (sparse/spmm/densified/densified.h), by rows where halves will not do;
// and what it keeps.
void run_halves(const Call& c, const Filled& kept);
Filled fill_on_gpu(const Pattern& p, const at::Tensor& values, int64_t columns, bool two_of_four, int64_t beyond);

}  // namespace matmuls::spmm
