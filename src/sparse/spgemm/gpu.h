// The launches of the GPU's SpGEMM, on the current device and stream. spgemm_gpu.cpp calls them in turn.
//
// Patterns are contiguous, and their indices were checked. rows and columns are fewer than 2^32 - 1.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls::spgemm {

// Rows of A @ B by their number of products. counts [rows + 1] int64 are 0 until count_distinct has run.
struct Classes {
  at::Tensor totals, begin, lists, counts;
  int64_t room = 0;                                      // the columns that all rows may have, at most
  int64_t few_warps = 0, many_warps = 0, long_rows = 0;  // warps that sort: a row of few keys a lane, of many
};

Classes classify(const Pattern& a, const Pattern& b, int64_t columns);  // waits for the GPU
// Writes the number of distinct columns of each row to classes.counts; and the columns of row r, in order, to `to` from
// begin[r] on, if `to` is defined (int32, read as uint32).
void count_distinct(const Pattern& a, const Pattern& b, int64_t columns, const Classes& classes,
                    const at::Tensor& begin, const at::Tensor& to);
// crow and col of C; `names` may be undefined.
void compact(const at::Tensor& offsets, const at::Tensor& begin, const at::Tensor& from, const at::Tensor& names,
             const at::Tensor& crow, const at::Tensor& col);
// The values of C.
void values_on_gpu(const Pattern& a, const Pattern& b, const Pattern& c, const at::Tensor& a_values,
                   const at::Tensor& b_values, const at::Tensor& out);

}  // namespace matmuls::spgemm
