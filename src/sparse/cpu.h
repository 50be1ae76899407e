// CPU kernels of sparse products in CSR, vectorized over the columns of B (the dense operand) for the machine's
// instruction set.
//
// Sums are float32, float64 for float64. Rows of B are prefetched ahead of the nonzeros that need them: they lie
// anywhere in memory, and waiting for them is what takes the time.
#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "glue/scalar_types.h"

namespace matmuls {

// T: double, float, c10::Half or c10::BFloat16; I: int32_t or int64_t. Instantiated for all of them.

// One sparse matrix times one dense one: out = alpha * A @ dense + beta * out; `mean` divides each row by its nonzeros.
// dense has at most 2^32 rows.
template <class T, class I>
struct Spmm {
  const I *crow, *col, *order;  // order may be null
  const T* values;
  const T* dense;
  T* out;
  int64_t nonzeros, n, dense_stride, out_stride;
  arithmetic_t<T> alpha, beta;
  bool mean;
  bool prefetch;  // B is larger than a cache

  int64_t value_at(int64_t p) const { return order != nullptr ? static_cast<int64_t>(order[p]) : p; }
};

// What the sums of Spmm read, compiled once for both types of indices: that takes the compiler half as long.
template <class T>
struct SpmmSums {
  template <class I>
  SpmmSums(const Spmm<T, I>& m, const T* values)
      : crow(m.crow),
        col(reinterpret_cast<const char*>(m.col)),
        index_bytes(sizeof(I)),
        values(values),
        dense(m.dense),
        out(m.out),
        last(m.nonzeros - 1),
        n(m.n),
        dense_stride(m.dense_stride),
        out_stride(m.out_stride),
        alpha(m.alpha),
        beta(m.beta),
        mean(m.mean),
        prefetch(m.prefetch) {}

  const void* crow;
  const char* col;
  int64_t index_bytes;
  const T* values;  // in the order of col
  const T* dense;
  T* out;
  int64_t last, n, dense_stride, out_stride;
  arithmetic_t<T> alpha, beta;
  bool mean, prefetch;

  C10_ALWAYS_INLINE int64_t row_begin(int64_t row) const {
    return index_bytes == 4 ? static_cast<const int32_t*>(crow)[row] : static_cast<const int64_t*>(crow)[row];
  }
};

// Computes rows [begin, end) of out.
template <class T>
void spmm_rows(const SpmmSums<T>& m, int64_t begin, int64_t end);

// sums [n] <- the products of nonzeros [begin, end), which belong to one row.
template <class T>
void spmm_piece(const SpmmSums<T>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums);

// Writes one row of out from its sums: out = alpha * sums (mean: / nonzeros of the row) + beta * out.
template <class T>
void spmm_finish(const SpmmSums<T>& m, int64_t row, const arithmetic_t<T>* sums);

// Rows [begin, end) of out: the largest (or smallest) value * dense over each row's nonzeros; NaN wins. arg [rows, n],
// if not null, receives the index of the value it came from. An empty row gives 0 and -1.
template <class T, class I>
void extremum_rows(const Spmm<T, I>& m, bool largest, int64_t begin, int64_t end, I* arg);

// The sum of `batches` dot products of a and b, of n columns each; a_step and b_step lie between batches.
template <class T>
arithmetic_t<T> dot_rows(const T* a, const T* b, int64_t n, int64_t batches, int64_t a_step, int64_t b_step);

// True if all indices lie in [0, last].
template <class I>
bool lie_within(const I* indices, int64_t count, I last);

// True if offsets[0, count) are not negative and none exceeds the next one, offsets[count] included.
template <class I>
bool never_decrease(const I* offsets, int64_t count);

}  // namespace matmuls
