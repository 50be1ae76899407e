// classify_kernel: the number of products of each row, the class of rows that it puts the row in, and where the row's
// columns may be written.
#pragma once

#include "sparse/spgemm/products.cuh"

namespace matmuls::spgemm {

// Classes of rows by their number of products. Rows of up to kLongest are sorted by lanes, `keys` products a lane; the
// last class has the longer rows.
constexpr int kClasses = 7, kLongClass = kClasses - 1, kLongest = 512;
__host__ __device__ constexpr int64_t most_products(int of_class) { return int64_t{16} << of_class; }
static_assert(most_products(kLongClass - 1) == kLongest);

// What the host reads after classify_kernel. A block adds to it once, so that few atomics meet.
struct Totals {
  unsigned long long room;            // columns that the rows may have, at most
  unsigned long long rows[kClasses];  // of each class
  unsigned long long taken;           // of the long rows, by blocks
};

constexpr int kClassifyThreads = 256, kClassifyLanes = 8;
// A longer row of A is read by the whole block, not by 8 lanes: 64 rounds of two reads in turn, about 50 us.
// Estimated, not measured.
constexpr int64_t kReadByLanes = 512;

// begin [rows]: where the columns of a row may be written, in no order of rows; lists [kClasses, rows]: the rows of
// each class, in any order; counts [rows + 1]: 0 for rows without products, after a 0 that belongs to none.
template <class I>
__global__ void __launch_bounds__(kClassifyThreads)
    classify_kernel(const Indices<I> a, const Indices<I> b, int64_t rows, int64_t columns, Totals* totals,
                    int64_t* begin, uint32_t* lists, int64_t* counts) {
  constexpr int kRows = kClassifyThreads, kGroups = kClassifyThreads / kClassifyLanes;
  __shared__ unsigned long long products[kRows], room_before;
  __shared__ unsigned long long room;
  __shared__ unsigned in_class[kClasses], read_by_block[kRows], read_by_block_count;
  __shared__ unsigned long long class_before[kClasses];
  const int t = threadIdx.x, lane = t % kClassifyLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  const auto length_of = [&](int64_t p) {
    const int64_t k = a.col[p];
    return static_cast<unsigned long long>(static_cast<int64_t>(b.crow[k + 1]) - static_cast<int64_t>(b.crow[k]));
  };
  products[t] = 0;
  if (t == 0) room = 0, read_by_block_count = 0;
  if (t < kClasses) in_class[t] = 0;
  __syncthreads();
  for (int i = t / kClassifyLanes; i < kRows; i += kGroups) {
    unsigned long long sum = 0;
    if (first + i < rows) {
      const int64_t from = a.crow[first + i], end = a.crow[first + i + 1];
      if (end - from <= kReadByLanes)
        for (int64_t p = from + lane; p < end; p += kClassifyLanes) sum += length_of(p);
      else if (lane == 0)
        read_by_block[atomicAdd(&read_by_block_count, 1u)] = i;
    }
    for (int step = kClassifyLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
    if (lane == 0) products[i] = sum;
  }
  __syncthreads();
  for (unsigned n = 0; n < read_by_block_count; ++n) {
    const int64_t row = first + read_by_block[n], end = a.crow[row + 1];
    unsigned long long sum = 0;
    for (int64_t p = a.crow[row] + t; p < end; p += kClassifyThreads) sum += length_of(p);
    if (sum > 0) atomicAdd(&products[read_by_block[n]], sum);
  }
  __syncthreads();
  const auto count = static_cast<int64_t>(products[t]);
  int own_class = -1;
  if (count > 0)
    for (own_class = 0; own_class < kLongClass && count > most_products(own_class);) ++own_class;
  const auto own_room = static_cast<unsigned long long>(count < columns ? count : columns);
  const unsigned long long upto = up_to_lane_of<32>(own_room);
  unsigned long long before_warp = 0;
  if (t % 32 == 31 && upto > 0) before_warp = atomicAdd(&room, upto);
  before_warp = __shfl_sync(kWarp, before_warp, 31);
  unsigned place = 0;
  for (int c = 0; c < kClasses; ++c) {
    const unsigned votes = __ballot_sync(kWarp, own_class == c);
    unsigned from = 0;
    if (t % 32 == 0 && votes != 0) from = atomicAdd(&in_class[c], static_cast<unsigned>(__popc(votes)));
    from = __shfl_sync(kWarp, from, 0);
    if (own_class == c) place = from + __popc(votes & ((1u << t % 32) - 1));
  }
  __syncthreads();
  if (t < kClasses && in_class[t] > 0)
    class_before[t] = atomicAdd(&totals->rows[t], static_cast<unsigned long long>(in_class[t]));
  if (t == kClasses && room > 0) room_before = atomicAdd(&totals->room, room);
  __syncthreads();
  if (first + t == 0) counts[0] = 0;
  if (first + t >= rows) return;
  begin[first + t] = static_cast<int64_t>(count > 0 ? room_before + before_warp + upto - own_room : 0);
  counts[first + t + 1] = 0;
  if (own_class >= 0) lists[own_class * rows + class_before[own_class] + place] = static_cast<uint32_t>(first + t);
}

}  // namespace matmuls::spgemm
