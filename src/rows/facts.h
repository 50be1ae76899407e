// How the rows of a call lie in memory, as facts for rows/choose.h.
#pragma once

#include <array>
#include <climits>

#include "glue/batch_invariance.h"
#include "glue/rows.h"
#include "rows/choose.h"

namespace matmuls {

// A thread's next column, up to 8192 ahead, must fit an int.
inline void check_columns(int64_t columns) {
  TORCH_CHECK(columns < INT32_MAX - (1 << 14), "expected rows of fewer than 2^31 columns, got ", columns);
}

// True if every row follows the previous one without a gap, in the first `tensors` tensors.
template <int N>
bool side_by_side(const Rows<N>& rows, size_t tensors) {
  for (size_t t = 0; t < tensors; ++t) {
    int64_t next = rows.columns;
    for (int d = 0; d < rows.dims; next *= rows.sizes[d++])
      if (rows.strides[t][d] != next) return false;
  }
  return true;
}

// The facts that do not depend on the operation. pointers: the addresses of the first P tensors, those accessed as
// vectors. element: bytes.
template <int N, size_t P>
RowFacts facts_of(RowOperation operation, int64_t element, const Rows<N>& rows,
                  const std::array<const void*, P>& pointers) {
  check_columns(rows.columns);
  const auto off = [&](int64_t elements) { return elements * element % 16 != 0; };
  const auto address = [&](size_t t) { return reinterpret_cast<intptr_t>(pointers[t]); };
  bool vectors = true, aligned = address(0) % 16 == 0;
  for (size_t t = 0; t < P; ++t) {
    vectors &= rows.column_strides[t] == 1 && (address(t) - address(0)) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) {
      vectors &= !off(rows.strides[t][d] - rows.strides[0][d]);
      aligned &= !off(rows.strides[0][d]);
    }
  }
  // Vectors would divide a row that they do not fit among the threads by its address, and so by the rows before it.
  if (is_batch_invariant() && (!aligned || off(rows.columns))) vectors = false;
  return {.operation = operation,
          .element = static_cast<int>(element),
          .rows = rows.count,
          .columns = rows.columns,
          .constant_step = rows.dims <= 1,
          .adjacent = side_by_side(rows, P),
          .vectors = vectors,
          .aligned = vectors && aligned,
          .whole = vectors && aligned && !off(rows.columns),
          .device = {}};
}

// For rows along another dimension than the last: one row alone is contiguous, several are not, so under batch
// invariance neither is read as vectors.
inline void read_alike(RowFacts& facts, int64_t dim, int64_t dims) {
  if (is_batch_invariant() && dim != dims - 1) facts.vectors = facts.aligned = facts.whole = false;
}

#ifdef MATMULS_CUDA
// Limits of the current GPU.
RowDevice row_device();
#endif

}  // namespace matmuls
