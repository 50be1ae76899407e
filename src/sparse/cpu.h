// CPU kernels of sparse products in CSR, vectorized over the columns of B (the dense operand) for the machine's
// instruction set.
//
// Sums are float32, float64 for float64. Rows of B are prefetched ahead of the nonzeros that need them: they lie
// anywhere in memory, and waiting for them is what takes the time.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "glue/scalar_types.h"

namespace matmuls {

// T: double, float, c10::Half or c10::BFloat16; I: int32_t or int64_t. Instantiated for all of them.

// One sparse matrix times one dense one: out = alpha * A @ dense + beta * out; `mean` divides each row by its nonzeros.
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

// Computes rows [begin, end) of out.
template <class T, class I>
void spmm_rows(const Spmm<T, I>& m, int64_t begin, int64_t end);

// As spmm_rows for complex numbers, T double or float: values are pairs of a real and an imaginary part, and so are the
// columns of B and out. n and the strides count numbers of T.
template <class T, class I>
void complex_rows(const Spmm<T, I>& m, int64_t begin, int64_t end);

// sums [n] <- the products of nonzeros [begin, end), which belong to one row.
template <class T, class I>
void spmm_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums);

// Writes one row of out from its sums: out = alpha * sums (mean: / nonzeros of the row) + beta * out.
template <class T, class I>
void spmm_finish(const Spmm<T, I>& m, int64_t row, const arithmetic_t<T>* sums);

// Rows [begin, end) of out: the largest (or smallest) value * dense over each row's nonzeros; NaN wins. arg [rows, n],
// if not null, receives the index of the value it came from. An empty row gives 0 and -1.
template <class T, class I>
void extremum_rows(const Spmm<T, I>& m, bool largest, int64_t begin, int64_t end, I* arg);

// out[p] = alpha * dot(row of a, row of b) at the nonzeros p of a pattern, summed up over `batches` pairs of a and b,
// a_step and b_step apart. Rows have n columns.
template <class T, class I>
struct Sddmm {
  const I *crow, *col, *order;  // order may be null; else nonzero p is written to out[order[p]]
  const T *a, *b;
  T* out;
  int64_t nonzeros, n, a_stride, b_stride, batches, a_step, b_step;
  arithmetic_t<T> alpha;
  bool prefetch;  // b is larger than a cache
};

// Nonzeros [begin, end), the first of which lies in `row`.
template <class T, class I>
void sddmm_nonzeros(const Sddmm<T, I>& m, int64_t row, int64_t begin, int64_t end);

// True if none of the numbers is inf or NaN.
template <class T>
bool are_finite(const T* numbers, int64_t count);

// True if all indices lie in [0, last].
template <class I>
bool lie_within(const I* indices, int64_t count, I last);

// True if offsets[0, count) are not negative and none exceeds the next one, offsets[count] included.
template <class I>
bool never_decrease(const I* offsets, int64_t count);

}  // namespace matmuls
