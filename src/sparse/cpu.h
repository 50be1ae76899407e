// Products of a sparse matrix by rows on the CPU, vectorised over the dense side for the machine they run on.
//
// Sums are float32, float64 for float64. Rows of the dense side are prefetched ahead of the nonzeros that need them:
// they lie anywhere in memory, and waiting for them is all the time there is.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "glue/scalar_types.h"

namespace matmuls {

// T: double, float, c10::Half or c10::BFloat16; I: int32_t or int64_t. Instantiated for all of them.

// One sparse matrix times one dense one: out = alpha * A @ dense + beta * out, with `mean` each row over its length.
template <class T, class I>
struct Spmm {
  const I *crow, *col, *order;  // order may be null
  const T* values;
  const T* dense;
  T* out;
  int64_t nonzeros, n, dense_stride, out_stride;
  arithmetic_t<T> alpha, beta;
  bool mean;
  bool prefetch;  // the dense side is larger than a cache

  int64_t value_at(int64_t p) const { return order != nullptr ? static_cast<int64_t>(order[p]) : p; }
};

// Rows begin to end.
template <class T, class I>
void spmm_rows(const Spmm<T, I>& m, int64_t begin, int64_t end);

// sums[0, n) = what nonzeros begin to end, of one row, add up to.
template <class T, class I>
void spmm_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums);

// One row of a result from its sums: out = alpha * sums (over the row's length) + beta * out.
template <class T, class I>
void spmm_finish(const Spmm<T, I>& m, int64_t row, const arithmetic_t<T>* sums);

// Rows begin to end: the largest (or smallest) value * dense over each row's nonzeros, NaN above all, and in arg,
// [rows, n] where it is not null, the value's index that it came from. 0 and -1 for an empty row.
template <class T, class I>
void extremum_rows(const Spmm<T, I>& m, bool largest, int64_t begin, int64_t end, I* arg);

// The sum of `batches` products of row a and row b of `n` columns each, their rows a_step and b_step apart.
template <class T>
arithmetic_t<T> dot_rows(const T* a, const T* b, int64_t n, int64_t batches, int64_t a_step, int64_t b_step);

// True if all indices are from 0 to last.
template <class I>
bool lie_within(const I* indices, int64_t count, I last);

// True if offsets[0, count) are not negative and none is larger than the one after it, offsets[count] included.
template <class I>
bool never_decrease(const I* offsets, int64_t count);

}  // namespace matmuls
