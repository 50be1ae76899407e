// Kernels of the values of C = A @ B, whose pattern is known: every product finds its column's place in C's row.
//
// A row's sums are in shared memory, and so are its columns. Neighbouring lanes compute neighbouring products. Where
// several of these meet one column, they are added one after the other, in the order of the products. So every sum has
// the order of A's nonzeros, and the same bits at each call.
//
//   short_rows_kernel   a group of 8 lanes: rows of up to 64 columns of C; or a warp: up to 512
//   tiles_kernel        a warp: a tile of a longer row, up to 512 columns of it. It takes the parts of B's rows between
//                       the tile's first and last columns, if all columns of B rise
#pragma once

#include <limits>

#include "sparse/spgemm/products.cuh"

namespace matmuls::spgemm {

constexpr int kValueThreads = 128;
constexpr int kByLanes = 64, kByWarp = 512;  // columns of C: 1 KiB of sums and columns for 8 lanes, 4 KiB for a warp

// The arguments of the kernels. T: values; a.crow to c.order may be those of plans.
template <class T, class I>
struct Call {
  Indices<I> a, b, c;
  const T *a_values, *b_values;
  T* out;
  int64_t rows, b_rows, nonzeros;  // of C, of B, of C

  // The nonzeros of a row of C: those of `out`, whatever the offsets are.
  __device__ int64_t begin_of(int64_t row) const {
    return min(max(static_cast<int64_t>(c.crow[row]), int64_t{0}), nonzeros);
  }
  __device__ int64_t end_of(int64_t row) const { return max(begin_of(row + 1), begin_of(row)); }
};

struct Tile {
  uint32_t row, tile, tiles;  // tile of [0, tiles), all of almost the same number of columns
};
// Written by short_rows_kernel, for the kernels after it.
struct Later {
  unsigned long long warp_rows, tiles, taken;
  unsigned long long falls;  // not 0 if columns of a row of B do not rise
};
struct Work {
  Later* later;
  uint32_t* warp_rows;  // rows of C that a warp computes
  Tile* tiles;
  unsigned long long most_rows, most_tiles;  // room, enough for offsets that do not fall
};

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

// Nonzeros [first, first + count) of C, of one row. is_part: only the parts of B's rows between their columns are read.
struct Span {
  int64_t row, first;
  int count;
  bool is_part;
};

// Sums and columns of a group. Number i is at word(i): one word after every 32 is left free, so that the reads of a
// step of place_of, which are of addresses a power of two apart, are of different banks.
template <int N, class F, class I>
struct Sums {
  F sums[N + N / 32];
  I columns[N + N / 32];

  __device__ static int word(int i) { return i + i / 32; }

  // The word of `column`, or that of another one. `padded`, a power of two of up to N: the number of columns, those
  // that are missing after the last filled with the largest number. Each step has one read, at a constant distance.
  __device__ int place_of(I column, int padded) const {
    int place = 0;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
      if (half < padded && columns[place + word(half - 1)] < column) place += word(half);
    return place;
  }
};

// The sums of a span for each group of L lanes, of at most N columns; those with count 0 have none.
template <int L, int N, class T, class F, class I>
__device__ void compute(const Call<T, I>& call, const Span& span, Sums<N, F, I>& own) {
  const int lane = threadIdx.x % L, count = span.count, padded = count < 2 ? 1 : 1 << (32 - __clz(count - 1));
  for (int i = lane; i < padded; i += L) {
    own.sums[own.word(i)] = 0;
    own.columns[own.word(i)] = i < count ? call.c.col[span.first + i] : std::numeric_limits<I>::max();
  }
  __syncwarp();
  const int64_t from = count == 0 ? 0 : call.a.crow[span.row], end = count == 0 ? 0 : call.a.crow[span.row + 1];
  struct Loaded {  // what was read, without arithmetic, which would wait for it
    I column;      // -1: none
    T of_a, of_b;
  };
  const auto load = [&](bool is_valid, int64_t, int64_t p, int64_t q) {
    Loaded x{-1, T(0), T(0)};
    if (is_valid) x = {call.b.col[q], call.a_values[call.a.place(p)], call.b_values[call.b.place(q)]};
    return x;
  };
  const auto add = [&](const Loaded& x) {
    const int place = own.place_of(x.column, padded);
    const F product = static_cast<F>(x.of_a) * static_cast<F>(x.of_b);
    add_in_order<L>(own.sums, place, product, own.columns[place] == x.column);
  };
  if constexpr (L == 32) {
    const I low = own.columns[0], high = own.columns[own.word(max(count - 1, 0))];
    for_products<L>(call.a, call.b, from, end, load, add, [&](int64_t& q, int64_t& q_end) {
      if (span.is_part) narrow(call.b.col, q, q_end, low, high);
    });
  } else {
    for_products<L>(call.a, call.b, from, end, load, add);
  }
  for (int i = lane; i < count; i += L) call.out[call.c.place(span.first + i)] = static_cast<T>(own.sums[own.word(i)]);
  __syncwarp();
}

// Lists the tiles of a row of more than kByWarp columns, for each group of L lanes that has one.
template <int L>
__device__ void list_tiles(const Work& work, int64_t row, int64_t length) {
  const int lane = threadIdx.x % L;
  const auto tiles = length <= kByWarp ? 0 : static_cast<uint32_t>((length - 1) / kByWarp + 1);
  unsigned long long at = lane == 0 && tiles > 0 ? atomicAdd(&work.later->tiles, 1ull * tiles) : 0;
  at = __shfl_sync(kWarp, at, 0, L);
  for (uint32_t k = lane; k < tiles && at + k < work.most_tiles; k += L)
    work.tiles[at + k] = {static_cast<uint32_t>(row), k, tiles};
}

// Rows [0, call.rows) if all_rows, else those that an earlier launch listed. Longer rows are listed for later.
template <int L, int N, bool all_rows, class T, class F, class I>
__global__ void __launch_bounds__(kValueThreads, 8) short_rows_kernel(const Call<T, I> call, const Work work) {
  constexpr int kGroups = kValueThreads / L;
  __shared__ Sums<N, F, I> sums[kGroups];
  const int group = threadIdx.x / L, lane = threadIdx.x % L;
  const auto count = all_rows ? call.rows : static_cast<int64_t>(min(work.later->warp_rows, work.most_rows));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * kGroups; block_row < count; block_row += step) {
    const int64_t i = block_row + group;
    const int64_t row = i < count ? (all_rows ? i : static_cast<int64_t>(work.warp_rows[i])) : -1;
    const int64_t first = row < 0 ? 0 : call.begin_of(row), length = row < 0 ? 0 : call.end_of(row) - first;
    if (lane == 0 && length > N && length <= kByWarp) {
      const unsigned long long at = atomicAdd(&work.later->warp_rows, 1ull);
      if (at < work.most_rows) work.warp_rows[at] = static_cast<uint32_t>(row);
    }
    if (__any_sync(kWarp, length > kByWarp)) list_tiles<L>(work, row, length);
    const Span span{row, first, length > N ? 0 : static_cast<int>(length), false};
    compute<L, N, T, F, I>(call, span, sums[group]);
  }
  if constexpr (N == kByWarp) {  // the last launch before that of tiles_kernel
    if (!all_rows && work.later->tiles == 0) return;
    for (int64_t r = static_cast<int64_t>(blockIdx.x) * kGroups + group; r < call.b_rows; r += step) {
      const int64_t begin = call.b.crow[r], end = call.b.crow[r + 1];
      bool falls = false;
      for (int64_t q = begin + 1 + lane; q < end; q += L) falls |= call.b.col[q] <= call.b.col[q - 1];
      if (falls) atomicOr(&work.later->falls, 1ull);
    }
  }
}

template <class T, class F, class I>
__global__ void __launch_bounds__(kValueThreads, 8) tiles_kernel(const Call<T, I> call, const Work work) {
  __shared__ Sums<kByWarp, F, I> sums[kValueThreads / 32];
  const unsigned long long count = min(work.later->tiles, work.most_tiles);
  const bool rises = work.later->falls == 0;
  for (;;) {  // warps take tiles as they get free: these differ in their products
    unsigned long long item = threadIdx.x % 32 == 0 ? atomicAdd(&work.later->taken, 1ull) : 0;
    item = __shfl_sync(kWarp, item, 0);
    if (item >= count) return;
    const Tile tile = work.tiles[item];
    const int64_t begin = call.begin_of(tile.row), length = call.end_of(tile.row) - begin;
    const int64_t first = length * tile.tile / tile.tiles, end = length * (tile.tile + 1) / tile.tiles;
    const Span span{tile.row, begin + first, static_cast<int>(end - first), rises};
    compute<32, kByWarp, T, F, I>(call, span, sums[threadIdx.x / 32]);
  }
}

}  // namespace matmuls::spgemm
