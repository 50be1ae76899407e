// RowSums: sums of few rows of B, as one kernel writes them into rows of a result, or adds them to what is there:
//
//   out[row] (+)= sum over p in [begin, end) of values[order[p]] * B[col[p]]      for each item {begin, end, row}
//
// It stands for the product with a sparse matrix that has nonzeros in few of the result's rows, such as a halo's: the
// other rows are not touched. The order of additions depends on the items and the shapes alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace matmuls {

// items [count, 4] int32: begin, end, row, unused; the first `long_rows` of them are summed by a whole block each. col
// [nonzeros] int32. order [nonzeros] int32, or none: values[p]. values [nonzeros], or none: ones. Whoever makes one has
// checked the indices.
struct RowSums {
  at::Tensor items;
  int64_t long_rows;
  at::Tensor col;
  std::optional<at::Tensor> order, values;
  int64_t rows, columns;  // of the result, of the matrix

  // out <- out + A @ b. out [rows, n], b [columns, n]: contiguous, of the dtype of values.
  void add(const at::Tensor& out, const at::Tensor& b) const { run(out, b, true); }
  // A @ b, [rows, n]. Every row must be an item.
  at::Tensor product(const at::Tensor& b) const;

 private:
  void run(const at::Tensor& out, const at::Tensor& b, bool adds) const;
};

// `adds`: to what is in out. b and out are not empty, and have been checked.
void sum_rows_on_gpu(const RowSums& sums, const at::Tensor& out, const at::Tensor& b, bool adds);

}  // namespace matmuls
