// Kernels of the values of C = A @ B, whose pattern is known: every product finds its column's place in C's row.
//
// A row's sums are in shared memory, and so are its columns. Neighbouring lanes compute neighbouring products. Where
// several of these meet one column, they are added one after the other, in the order of the products. So every sum has
// the order of A's nonzeros, and the same bits at each call.
//
//   short_rows_kernel   a group of 8 lanes: rows of up to 64 columns of C; or a warp: up to 512
//   tiles_kernel        a block: a tile of a longer row, kTile columns of it. It takes the parts of B's rows between
//                       the tile's first and last columns, if all columns of B rise
#pragma once

#include "sparse/spgemm/products.cuh"

namespace matmuls::spgemm {

constexpr int kValueThreads = 128, kTileThreads = 256;
constexpr int kByLanes = 64, kByWarp = 512;  // columns of C: 1 KiB of sums and columns for 8 lanes, 4 KiB for a warp

// The arguments of the kernels. T: values; a.crow to c.order may be those of plans.
template <class T, class I>
struct Call {
  Indices<I> a, b, c;
  const T *a_values, *b_values;
  T* out;
  int64_t rows, b_rows;
};

struct Tile {
  uint32_t row, tile;
};
// Written by short_rows_kernel, for the kernels after it.
struct Later {
  unsigned long long warp_rows, tiles, taken;
  unsigned long long split, falls;  // not 0 if a row has several tiles; if columns of a row of B do not rise
};
struct Work {
  Later* later;
  uint32_t* warp_rows;  // rows of C that a warp computes
  Tile* tiles;
};

template <class F, class I>
__host__ __device__ constexpr int tile_of() {  // columns of C: 32 KiB of sums and columns at most
  return sizeof(F) + sizeof(I) <= 8 ? 4096 : 2048;
}

// sums[place] += product for the lanes of a group that are valid, in the order of the lanes.
template <int L, class F>
__device__ void add_in_order(F* sums, int place, F product, bool is_valid) {
  const unsigned shift = threadIdx.x % 32 / L * L, own_group = L == 32 ? kWarp : ((1u << L % 32) - 1) << shift;
  const int key = is_valid ? place : -1;
  const unsigned equal = __match_any_sync(kWarp, key) & own_group;
  const int rank = is_valid ? __popc(equal & ((1u << threadIdx.x % 32) - 1)) : -1;
  for (int turn = 0; __any_sync(kWarp, rank >= turn); ++turn) {
    if (rank == turn) sums[place] += product;
    __syncwarp();
  }
}

template <class T, class F, class I>
__device__ F product_of(const Call<T, I>& call, int64_t p, int64_t q) {
  return static_cast<F>(call.a_values[call.a.place(p)]) * static_cast<F>(call.b_values[call.b.place(q)]);
}

// C's row for each group of L lanes, of at most N columns; row < 0: none.
template <int L, class T, class F, class I>
__device__ void compute_row(const Call<T, I>& call, int64_t row, F* sums, I* columns) {
  const int lane = threadIdx.x % L;
  const int64_t first = row < 0 ? 0 : call.c.crow[row];
  const int count = row < 0 ? 0 : static_cast<int>(call.c.crow[row + 1] - first);
  for (int i = lane; i < count; i += L) sums[i] = 0, columns[i] = call.c.col[first + i];
  __syncwarp();
  const int64_t from = count == 0 ? 0 : call.a.crow[row], end = count == 0 ? 0 : call.a.crow[row + 1];
  struct Loaded {
    bool is_valid;
    I column;
    F product;
  };
  const auto load = [&](bool is_valid, int64_t, int64_t p, int64_t q) {
    return is_valid ? Loaded{true, call.b.col[q], product_of<T, F>(call, p, q)} : Loaded{false, 0, 0};
  };
  for_products<L>(call.a, call.b, from, end, load, [&](const Loaded& x) {
    const int place = x.is_valid ? first_not_before(columns, 0, count, x.column) : count;
    add_in_order<L>(sums, place, x.product, place < count && columns[place] == x.column);
  });
  for (int i = lane; i < count; i += L) call.out[call.c.place(first + i)] = static_cast<T>(sums[i]);
  __syncwarp();
}

// Rows [0, call.rows) if all_rows, else those that an earlier launch listed. Longer rows are listed for later.
template <int L, int N, bool all_rows, class T, class F, class I>
__global__ void __launch_bounds__(kValueThreads, 8) short_rows_kernel(const Call<T, I> call, const Work work) {
  constexpr int kGroups = kValueThreads / L;
  __shared__ F sums[kGroups][N];
  __shared__ I columns[kGroups][N];
  const int group = threadIdx.x / L, lane = threadIdx.x % L;
  const auto count = all_rows ? call.rows : static_cast<int64_t>(work.later->warp_rows);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * kGroups; block_row < count; block_row += step) {
    const int64_t i = block_row + group;
    int64_t row = i < count ? (all_rows ? i : static_cast<int64_t>(work.warp_rows[i])) : -1;
    const int64_t length = row < 0 ? 0 : static_cast<int64_t>(call.c.crow[row + 1]) - call.c.crow[row];
    if (length > N) {
      if (lane == 0 && length <= kByWarp)
        work.warp_rows[atomicAdd(&work.later->warp_rows, 1ull)] = static_cast<uint32_t>(row);
      if (lane == 0 && length > kByWarp) {
        const auto tiles = static_cast<uint32_t>((length - 1) / tile_of<F, I>() + 1);
        Tile* const to = work.tiles + atomicAdd(&work.later->tiles, static_cast<unsigned long long>(tiles));
        if (tiles > 1) atomicOr(&work.later->split, 1ull);
        for (uint32_t k = 0; k < tiles; ++k) to[k] = {static_cast<uint32_t>(row), k};
      }
      row = -1;
    }
    compute_row<L, T, F, I>(call, row, sums[group], columns[group]);
  }
  if constexpr (N == kByWarp) {  // the last launch before that of tiles_kernel
    if (!all_rows && work.later->split == 0) return;
    for (int64_t r = static_cast<int64_t>(blockIdx.x) * kGroups + group; r < call.b_rows; r += step) {
      const int64_t begin = call.b.crow[r], end = call.b.crow[r + 1];
      bool falls = false;
      for (int64_t q = begin + 1 + lane; q < end; q += L) falls |= call.b.col[q] <= call.b.col[q - 1];
      if (falls) atomicOr(&work.later->falls, 1ull);
    }
  }
}

// Adds the products of a block's threads to sums[place], of equal places that of the lower thread first. Places with
// one claim take turns too, which does not change the order of any sum. claims: all of them kFree, before and after.
constexpr int kClaims = 2048;
constexpr unsigned kFree = 0xffffffffu;
template <class F>
__device__ void add_claimed(F* sums, unsigned* claims, int place, F product, bool is_valid) {
  unsigned* const claim = claims + place % kClaims;
  while (__syncthreads_or(is_valid)) {
    if (is_valid) atomicMin(claim, threadIdx.x);
    __syncthreads();
    if (is_valid && *claim == threadIdx.x) {
      sums[place] += product;
      *claim = kFree;
      is_valid = false;
    }
  }
}

template <class T, class F, class I>
__global__ void __launch_bounds__(kTileThreads) tiles_kernel(const Call<T, I> call, const Work work) {
  constexpr int kTile = tile_of<F, I>();
  __shared__ F sums[kTile];
  __shared__ I columns[kTile];
  __shared__ unsigned claims[kClaims];
  __shared__ BlockProducts<kTileThreads> products;
  __shared__ int64_t shared_item;
  const int t = threadIdx.x;
  for (int i = t; i < kClaims; i += kTileThreads) claims[i] = kFree;
  Taken taken(&work.later->taken, static_cast<int64_t>(work.later->tiles), &shared_item);
  for (int64_t item = taken.first(); item >= 0; item = taken.next()) {
    const Tile tile = work.tiles[item];
    const int64_t row = tile.row, row_begin = call.c.crow[row], row_end = call.c.crow[row + 1];
    const int64_t first = row_begin + static_cast<int64_t>(tile.tile) * kTile;
    const int count = static_cast<int>(min(row_end - first, static_cast<int64_t>(kTile)));
    for (int i = t; i < count; i += kTileThreads) sums[i] = 0, columns[i] = call.c.col[first + i];
    __syncthreads();
    const I low = columns[0], high = columns[count - 1];
    const bool is_part = row_end - row_begin > kTile && work.later->falls == 0;
    const int64_t end = call.a.crow[row + 1];
    for (int64_t p = call.a.crow[row]; p < end; p += kTileThreads) {
      const int64_t all = products.load(call.a, call.b, p, end, [&](int64_t& q, int64_t& q_end) {
        if (!is_part) return;
        q = first_not_before(call.b.col, q, q_end, low);
        q_end = first_not_before(call.b.col, q, q_end, static_cast<int64_t>(high) + 1);
      });
      int j = 0;
      for (int64_t e = t; e - t < all; e += kTileThreads) {
        bool is_valid = e < all;
        int place = 0;
        F product = 0;
        if (is_valid) {
          j = products.nonzero_of(e, j);
          const int64_t q = products.shift[j] + e;
          const I column = call.b.col[q];
          product = product_of<T, F>(call, p + j, q);
          place = first_not_before(columns, 0, count, column);
          is_valid = place < count && columns[place] == column;
        }
        add_claimed(sums, claims, place, product, is_valid);
      }
    }
    __syncthreads();
    for (int i = t; i < count; i += kTileThreads) call.out[call.c.place(first + i)] = static_cast<T>(sums[i]);
  }
}

}  // namespace matmuls::spgemm
