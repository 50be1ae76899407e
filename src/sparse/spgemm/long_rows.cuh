// long_rows_kernel: the distinct columns of rows of more than kLongest products, as bits. A block takes a row.
//
//   bits     1 0 1 0 ... | 0 0 ... 0 | 0 1 ...   a bit for each column: 32 to a word
//   filled   1             0           1         a bit for each word that is not 0: 32 words of bits to a word
//
// Columns come out of the bits in order. Only words with a bit in `filled` are read and cleared, so that a row costs
// columns / 1024 reads besides its products.
#pragma once

#include "sparse/spgemm/sorted_rows.cuh"

namespace matmuls::spgemm {

constexpr int kLongThreads = 256;
// Columns whose bits fit shared memory: 33 KiB, and 4 KiB for the products, of the 227 KiB of an H200.
constexpr int64_t kColumnsInShared = int64_t{1} << 18;
__host__ __device__ constexpr int64_t words_of(int64_t columns) { return (columns + 31) / 32; }
// The words of bits and of `filled` of a block, with bits up to a whole word of `filled`.
__host__ __device__ constexpr int64_t words_of_block(int64_t columns) { return 33 * words_of(words_of(columns)); }

__device__ inline void set_bit(uint32_t* bits, uint32_t* filled, uint32_t column) {
  const uint32_t w = column / 32, bit = 1u << column % 32;
  // Read first: most products of a long row meet a column that is there, and atomics on one word wait for each other.
  if ((*const_cast<volatile uint32_t*>(bits + w) & bit) != 0) return;
  if (atomicOr(bits + w, bit) == 0) atomicOr(filled + w / 32, 1u << w % 32);
}

// Calls use(s, word) for all words [first, last) of `filled` that are not 0, in order, all lanes of the warp together:
// `word` is that of the lane, of 32 words of bits.
template <class Use>
__device__ void for_filled(const uint32_t* bits, const uint32_t* filled, int64_t first, int64_t last, const Use& use) {
  const int lane = threadIdx.x % 32;
  for (int64_t s = first; s < last; s += 32) {
    const uint32_t own = s + lane < last ? filled[s + lane] : 0;
    for (unsigned any = __ballot_sync(kWarp, own != 0); any != 0; any &= any - 1) {
      const int i = __ffs(static_cast<int>(any)) - 1;
      const uint32_t of_words = __shfl_sync(kWarp, own, i);
      use(s + i, (of_words >> lane & 1) != 0 ? bits[32 * (s + i) + lane] : 0u);
    }
  }
}

template <bool in_shared, class I>
__global__ void __launch_bounds__(kLongThreads, 4)
    long_rows_kernel(const Indices<I> a, const Indices<I> b, const Rows rows, int64_t columns, uint32_t* memory,
                     Totals* totals) {
  constexpr int kWarps = kLongThreads / 32;
  __shared__ BlockProducts<kLongThreads> products;
  __shared__ int64_t of_warps[kWarps];
  __shared__ int64_t shared_item;
  __shared__ uint32_t own_memory[in_shared ? words_of_block(kColumnsInShared) : 1];
  const int64_t groups = words_of(words_of(columns));
  uint32_t* const bits = in_shared ? own_memory : memory + blockIdx.x * words_of_block(columns);
  uint32_t* const filled = bits + 32 * groups;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (in_shared)
    for (int64_t i = t; i < 33 * groups; i += kLongThreads) bits[i] = 0;
  __syncthreads();
  Taken taken(&totals->taken, static_cast<int64_t>(totals->rows[kLongClass]), &shared_item);
  for (int64_t item = taken.first(); item >= 0; item = taken.next()) {
    const int64_t row = rows.lists[kLongClass * rows.rows + item];
    const int64_t end = a.crow[row + 1];
    for (int64_t first = a.crow[row]; first < end; first += kLongThreads) {
      const int64_t all = products.load(a, b, first, end);
      int j = 0;
      for (int64_t e = t; e < all; e += kLongThreads) {
        j = products.nonzero_of(e, j);
        set_bit(bits, filled, static_cast<uint32_t>(b.col[products.shift[j] + e]));
      }
    }
    __syncthreads();
    const int64_t share = (groups + kWarps - 1) / kWarps, begin = min(warp * share, groups),
                  last = min(begin + share, groups);
    int64_t count = 0;
    for_filled(bits, filled, begin, last, [&](int64_t, uint32_t word) { count += __popc(word); });
    count = __shfl_sync(kWarp, up_to_lane_of<32>(count), 31);
    if (lane == 0) of_warps[warp] = count;
    __syncthreads();
    int64_t before = 0, distinct = 0;
    for (int w = 0; w < kWarps; ++w) before += w < warp ? of_warps[w] : 0, distinct += of_warps[w];
    if (t == 0) rows.counts[row + 1] = distinct;
    int64_t at = rows.to == nullptr ? 0 : rows.begin[row] + before;
    for_filled(bits, filled, begin, last, [&](int64_t s, uint32_t word) {
      const int upto = up_to_lane_of<32>(__popc(word));
      if (rows.to != nullptr)
        for (int64_t to = at + upto - __popc(word); word != 0; word &= word - 1, ++to)
          if (to < rows.room)
            rows.to[to] = static_cast<uint32_t>((32 * s + lane) * 32 + __ffs(static_cast<int>(word)) - 1);
      at += __shfl_sync(kWarp, upto, 31);
      bits[32 * s + lane] = 0;
    });
    __syncwarp();
    for (int64_t s = begin + lane; s < last; s += 32) filled[s] = 0;
  }
}

}  // namespace matmuls::spgemm
