// Offsets of the first element of each row of a tensor, computed on the GPU.
#pragma once

#include <ATen/cuda/detail/IntegerDivider.cuh>

#include <climits>

#include "glue/rows.h"

namespace matmuls {

// The last column that an unmasked row can see. kLastColumn + 1 still fits an int.
constexpr int kLastColumn = INT32_MAX - 1;
__device__ inline int last_column(int64_t column) { return static_cast<int>(min(column, int64_t{kLastColumn})); }

// Maps a row number to offsets. Up to `straight` dimensions take no loop, whose latency would delay the loads: three if
// there are masks. Other persistent kernels are slower with three: float32 layer norm of 262144 columns at 0.89 of a
// copy, 0.91 with two.
template <int N, int straight = 2>
struct RowIndex {
  static_assert(straight == 2 || straight == 3);
  explicit RowIndex(const Rows<N>& rows) : dims(rows.dims), wide(rows.count > INT32_MAX) {
    for (int d = 0; d < dims; ++d) {
      sizes[d] = rows.sizes[d];
      if (!wide) dividers[d] = at::cuda::detail::IntDivider<uint32_t>(static_cast<uint32_t>(rows.sizes[d]));
      for (int t = 0; t < N; ++t) strides[t][d] = rows.strides[t][d];
    }
  }

  // Offset of the row's first element in each tensor.
  struct Offsets {
    int64_t at[N];
  };
  __device__ Offsets operator()(int64_t row) const {
    Offsets offsets;
    if (wide) return divided(row);
    const auto narrow = static_cast<uint32_t>(row);
    if (dims <= 1) {
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] = narrow * strides[t][0];
      return offsets;
    }
    if (dims <= straight) {
      const uint32_t rest = dividers[0].div(narrow), inner = narrow - rest * static_cast<uint32_t>(sizes[0]);
      const uint32_t outer = straight == 3 && dims == 3 ? dividers[1].div(rest) : 0;
      const uint32_t middle = straight == 3 ? rest - outer * static_cast<uint32_t>(sizes[1]) : rest;
#pragma unroll
      for (int t = 0; t < N; ++t) {
        offsets.at[t] = inner * strides[t][0] + middle * strides[t][1];
        if constexpr (straight == 3) offsets.at[t] += outer * strides[t][2];
      }
      return offsets;
    }
#pragma unroll
    for (int t = 0; t < N; ++t) offsets.at[t] = 0;
    uint32_t rest = narrow;
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const uint32_t next = d + 1 < dims ? dividers[d].div(rest) : 0;
      const uint32_t index = rest - next * static_cast<uint32_t>(sizes[d]);
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      rest = next;
    }
    return offsets;
  }

  // Number of rows from this one on with constant strides: the rest of the innermost dimension.
  __device__ int following(int64_t row) const {
    if (dims <= 1) return INT_MAX;
    const int64_t outer = wide ? row / sizes[0] : dividers[0].div(static_cast<uint32_t>(row));
    return static_cast<int>(min((outer + 1) * sizes[0] - row, int64_t{INT_MAX}));
  }

  int dims;
  bool wide;
  at::cuda::detail::IntDivider<uint32_t> dividers[Rows<N>::kMaxDims];
  int64_t sizes[Rows<N>::kMaxDims] = {};
  int64_t strides[N][Rows<N>::kMaxDims] = {};

 private:
  // 64-bit division, for more than 2^31 rows.
  __device__ __noinline__ Offsets divided(int64_t row) const {
    Offsets offsets{};
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const int64_t rest = d + 1 < dims ? row / sizes[d] : 0;
      const int64_t index = row - rest * sizes[d];
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      row = rest;
    }
    return offsets;
  }
};

}  // namespace matmuls
