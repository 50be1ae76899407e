// compact_kernel: crow and col of C, from the columns of each row that lie anywhere.
#pragma once

#include "sparse/csr.cuh"

namespace matmuls::spgemm {

constexpr int kCompactPerWarp = 256;  // nonzeros of C: a search for the first one's row for 8 by each lane

// offsets [rows + 1]: of C. The columns of row r are `from` from begin[r] on, or names[those] if names are given.
template <class I>
__global__ void __launch_bounds__(kSparseThreads)
    compact_kernel(const int64_t* offsets, const int64_t* begin, const uint32_t* from, int64_t room, const I* names,
                   I* crow, I* col, int64_t rows, int64_t nonzeros) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSparseThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kSparseThreads;
  for (int64_t r = thread; r <= rows; r += threads) crow[r] = static_cast<I>(offsets[r]);
  const int64_t first = thread / 32 * kCompactPerWarp;
  if (first >= nonzeros) return;
  int64_t row = row_of_group<32>(offsets, rows, first);
  for (int64_t i = first + threadIdx.x % 32; i < min(first + kCompactPerWarp, nonzeros); i += 32) {
    row = row_from(offsets, rows, row, i);
    const int64_t at = begin[row] + i - offsets[row];
    if (at < 0 || at >= room) continue;  // offsets or a state of other matrices
    const uint32_t column = from[at];
    col[i] = names == nullptr ? static_cast<I>(column) : names[column];
  }
}

}  // namespace matmuls::spgemm
