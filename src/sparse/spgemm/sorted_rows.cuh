// sorted_rows_kernel: the distinct columns of rows of up to kLongest products, by sorting the products' columns in
// registers. A warp takes a row, or two rows of up to 16 products.
#pragma once

#include "sparse/spgemm/classes.cuh"

namespace matmuls::spgemm {

constexpr int kSortThreads = 256, kFirstOfMany = 3;  // from this class on a lane has 4 keys or more
constexpr uint32_t kNoColumn = 0xffffffffu;          // above every column

// Rows of one class, and where the results go.
struct Rows {
  const uint32_t* lists;  // [kClasses, rows]
  const Totals* totals;
  const int64_t* begin;  // [rows]
  int64_t* counts;       // [rows + 1]: that of row r is counts[r + 1]
  uint32_t* to;          // [room]: the columns of row r are written from begin[r] on; null to count alone
  int64_t rows, room;
};

__device__ inline void order_pair(uint32_t& x, uint32_t& y, bool up) {
  const uint32_t low = min(x, y), high = max(x, y);
  x = up ? low : high;
  y = up ? high : low;
}

// Sorts the L * K keys of a group of L lanes (bitonic): afterwards lane l has keys l * K to l * K + K - 1.
template <int L, int K>
__device__ void sort_keys(uint32_t (&keys)[K]) {
  const int lane = threadIdx.x % L;
#pragma unroll
  for (int size = 2; size <= L * K; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      if (stride >= K) {
        const bool is_lower = (lane & stride / K) == 0, up = size == L * K || (lane & size / K) == 0;
#pragma unroll
        for (int i = 0; i < K; ++i) {
          const uint32_t other = __shfl_xor_sync(kWarp, keys[i], stride / K);
          keys[i] = is_lower == up ? min(keys[i], other) : max(keys[i], other);
        }
      } else {
#pragma unroll
        for (int i = 0; i < K; ++i)
          if ((i & stride) == 0)
            order_pair(keys[i], keys[i | stride], size < K ? (i & size) == 0 : size == L * K || (lane & size / K) == 0);
      }
    }
  }
}

// The row of each group of L lanes; row < 0: none. keys: shared memory of the group for L * K columns.
template <int L, int K, class I>
__device__ void sort_row(const Indices<I>& a, const Indices<I>& b, const Rows& rows, int64_t row, uint32_t* keys) {
  const int lane = threadIdx.x % L;
#pragma unroll
  for (int i = 0; i < K; ++i) keys[lane + L * i] = kNoColumn;
  __syncwarp();
  const int64_t from = row < 0 ? 0 : a.crow[row], end = row < 0 ? 0 : a.crow[row + 1];
  const int64_t begin = row < 0 || rows.to == nullptr ? 0 : rows.begin[row];  // read now: known when it is needed
  struct Key {
    int place;
    uint32_t column;
  };
  const auto load = [&](bool is_valid, int64_t e, int64_t, int64_t q) {
    return is_valid && e < L * K ? Key{static_cast<int>(e), static_cast<uint32_t>(b.col[q])} : Key{-1, 0};
  };
  for_products<L>(a, b, from, end, load, [&](const Key& key) {
    if (key.place >= 0) keys[key.place] = key.column;
  });
  __syncwarp();
  uint32_t own[K];
#pragma unroll
  for (int i = 0; i < K; ++i) own[i] = keys[lane + L * i];
  sort_keys<L, K>(own);
  uint32_t before = __shfl_up_sync(kWarp, own[K - 1], 1, L);
  if (lane == 0) before = kNoColumn;
  int distinct = 0;
#pragma unroll
  for (int i = 0; i < K; ++i) distinct += own[i] != kNoColumn && own[i] != (i == 0 ? before : own[i - 1]);
  const int upto = up_to_lane_of<L>(distinct), all = __shfl_sync(kWarp, upto, L - 1, L);
  if (rows.to != nullptr) {
    int place = upto - distinct;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < K; ++i)
      if (own[i] != kNoColumn && own[i] != (i == 0 ? before : own[i - 1])) keys[place++] = own[i];
    __syncwarp();
    if (row >= 0)
      for (int i = lane; i < all; i += L)
        if (begin + i < rows.room) rows.to[begin + i] = keys[i];
  }
  if (row >= 0 && lane == 0) rows.counts[row + 1] = all;
}

// Rows of the classes [first_class, last_class). Short rows have a kernel of their own, which needs fewer registers.
template <int first_class, int last_class, class I>
__global__ void __launch_bounds__(kSortThreads, 4)
    sorted_rows_kernel(const Indices<I> a, const Indices<I> b, const Rows rows) {
  __shared__ uint32_t memory[kSortThreads / 32][most_products(last_class - 1)];
  uint32_t* const keys = memory[threadIdx.x / 32];
  auto item = static_cast<int64_t>(blockIdx.x) * (kSortThreads / 32) + threadIdx.x / 32;
  // The longest first, so that no long row begins when most warps have ended.
  int c = last_class - 1;
  for (; c > 0; --c) {
    const auto count = static_cast<int64_t>(rows.totals->rows[c]);
    if (item < count) break;
    item -= count;
    if (c == first_class) return;
  }
  const uint32_t* const list = rows.lists + c * rows.rows;
  if constexpr (first_class == 0) {
    if (c == 0) {
      const int64_t i = 2 * item + threadIdx.x % 32 / 16;
      const bool is_any = i < static_cast<int64_t>(rows.totals->rows[0]);
      return sort_row<16, 1>(a, b, rows, is_any ? list[i] : int64_t{-1}, keys + threadIdx.x % 32 / 16 * 16);
    }
    return c == 1 ? sort_row<32, 1>(a, b, rows, list[item], keys) : sort_row<32, 2>(a, b, rows, list[item], keys);
  } else {
    switch (c) {
      case 3: return sort_row<32, 4>(a, b, rows, list[item], keys);
      case 4: return sort_row<32, 8>(a, b, rows, list[item], keys);
      default: return sort_row<32, 16>(a, b, rows, list[item], keys);
    }
  }
}

}  // namespace matmuls::spgemm
