// Short rows that do not start or end on 16 bytes, but lie side by side: a warp brings several at once to shared memory
// by 16 bytes, works on them there number by number, and takes them back. Nothing is then asked of a row's ends, which
// cost rows.cuh's kernels as much as the rest of a short row.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "row_index.cuh"
#include "row_inputs.cuh"
#include "row_team.cuh"

namespace matmuls {

constexpr int kTileWarps = 4;     // of a block: each has its own rows, none waits for another
constexpr int kTileBytes = 2048;  // of each input that a warp has at a time, and a row at least
constexpr int kMostHeld = 33;     // numbers of a lane
constexpr int kTilesAtOnce = 24;  // of a multiprocessor: its warps

struct TileShape {
  int64_t rows;
  int columns;
  int each;   // rows of a warp
  int bytes;  // of shared memory for each input of a warp
};

// A thread's numbers of a row in shared memory, of which each of so many lanes has every so many'th: what is asked of
// number i is one instruction.
template <class T, int lanes>
struct TileSpan {
  static constexpr bool kRagged = false, kEven = false;
  int first, columns, held;  // held: numbers of the lane that has most

  __device__ int column(int i) const { return first + i * lanes; }
  __device__ bool sees(int i, int end) const { return end - first > i * lanes; }
  __device__ bool begins(int i) const { return sees(i, columns); }
  __device__ bool past(int i) const { return i % 4 == 0 && i >= held; }  // asked seldom: it costs as much as a number
  __device__ bool whole(int i, int end) const { return sees(i, end); }
  __device__ bool holds(int i, int, int end) const { return sees(i, end); }
  template <class F>
  __device__ void clear_outside(int i, int end, F fill, F (&values)[1]) const {
    values[0] = sees(i, end) ? values[0] : fill;
  }
  template <class F>
  __device__ void store(T* row, int64_t, int i, const F (&values)[1]) const {
    const uint32_t word = pack<T, 1>(values).at[0], to = ptx::shared_address(row + first) + i * lanes * sizeof(T);
    if (!begins(i)) return;
    if constexpr (sizeof(T) == 2)
      ptx::store_shared_half(to, word);
    else
      ptx::store_shared(to, word);
  }
};

// words(i, k) as of Inputs, out of shared memory.
template <class T, int lanes, int K>
struct TileInputs {
  const TileSpan<T, lanes>& span;
  const T* own[K];  // this thread's first

  __device__ Words<T, 1> words(int i, int k) const {
    return span.begins(i) ? load_one(own[k] + i * lanes) : Words<T, 1>{};
  }
};

// A warp's numbers from memory to shared memory, or back: 16 bytes at a time but for its two ends. There they lie as
// far from a multiple of 16 as in memory.
template <class T>
struct WarpTile {
  unsigned char* shared;  // on 16 bytes
  int bytes;

  template <class Whole, class One>
  __device__ void each(uintptr_t memory, bool over_front, bool over_back, const Whole& whole, const One& one) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, shift = static_cast<int>(memory % 16), size = sizeof(T);
    const int end = shift + bytes, first = shift > 0 && !over_front ? 16 : 0, last = (over_back ? end + 15 : end) & ~15;
#pragma unroll 1
    for (int at = first + 16 * lane; at < last; at += 4 * 16 * 32) {
      const uintptr_t from = memory - shift + at;
      unsigned char* const here = shared + at;
#pragma unroll
      for (int n = 0; n < 4 * 16 * 32; n += 16 * 32)
        if (at + n < last) whole(from + n, here + n);
    }
    const int head = shift + lane * size, tail = last + lane * size;
    if (head < min(first, end)) one(memory - shift + head, shared + head);
    if (last >= first && tail < end) one(memory - shift + tail, shared + tail);
  }
  // Others of the tensor may lie in front and at the back: they come along where they share 16 bytes with these.
  __device__ void fetch(const T* from, bool others_in_front, bool others_at_back, const ptx::L2Policy* policy) const {
    each(
        reinterpret_cast<uintptr_t>(from), others_in_front, others_at_back,
        [=](uintptr_t memory, unsigned char* here) {
          const auto* const from = reinterpret_cast<const void*>(memory);
          policy ? ptx::copy_ahead(here, from, *policy) : ptx::copy_ahead(here, from);
        },
        [](uintptr_t memory, unsigned char* here) {
          *reinterpret_cast<T*>(here) = *reinterpret_cast<const T*>(memory);
        });
  }
  __device__ void put(T* to) const {
    each(
        reinterpret_cast<uintptr_t>(to), false, false,
        [](uintptr_t memory, unsigned char* here) {
          ptx::store(reinterpret_cast<void*>(memory), *reinterpret_cast<const uint4*>(here));
        },
        [](uintptr_t memory, unsigned char* here) {
          *reinterpret_cast<T*>(memory) = *reinterpret_cast<const T*>(here);
        });
  }
};

// Of an operation of rows.cuh it wants: row.output(), and row.place(tiles), with which the row lies in shared memory,
// what is written in the place of input 0.
template <class Op, int lanes>
__global__ void __launch_bounds__(32 * kTileWarps, 6)
    tiled_rows_kernel(const __grid_constant__ Op op, const TileShape shape) {
  using T = typename Op::Storage;
  constexpr int K = Op::kInputs;
  extern __shared__ __align__(16) unsigned char tiles[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kTileWarps + warp) * shape.each;
  ptx::let_next_start();  // and wait here
  ptx::wait_for_earlier();
  if (first >= shape.rows) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(shape.each), shape.rows - first));
  const typename Op::Row top = op.row(first);
  const int row_bytes = shape.columns * static_cast<int>(sizeof(T)), bytes = rows * row_bytes,
            shift = static_cast<int>(reinterpret_cast<uintptr_t>(top.input(0)) % 16);
  unsigned char* const mine = tiles + warp * K * shape.bytes;
  const ptx::L2Policy policy = ptx::l2_policy(true);
#pragma unroll
  for (int k = 0; k < K; ++k)
    WarpTile<T>{mine + k * shape.bytes, bytes}.fetch(top.input(k), first > 0, first + rows < shape.rows, &policy);
  ptx::end_group_ahead();
  ptx::wait_ahead<0>();
  __syncwarp();
  const int team = lane / lanes, rank = lane % lanes;
  const auto constants = [](int, int, typename Op::F(&)[1]) {};
  ColumnSums<typename Op::F, 1, 0> none;
#pragma unroll 1
  for (int r = team; r - team < rows; r += 32 / lanes) {
    const bool own = r < rows;
    typename Op::Row row = op.row(own ? first + r : first);
    T* placed[K];
#pragma unroll
    for (int k = 0; k < K; ++k) placed[k] = reinterpret_cast<T*>(mine + k * shape.bytes + shift + r * row_bytes);
    row.place(placed);
    const TileSpan<T, lanes> span{rank, shape.columns, (shape.columns + lanes - 1) / lanes};
    TileInputs<T, lanes, K> inputs{span, {}};
#pragma unroll
    for (int k = 0; k < K; ++k) inputs.own[k] = placed[k] + rank;
    typename Op::State state = Op::identity();
    typename Op::template Held<1, kMostHeld> held;
    if (own) op.fold(state, held, row, span, inputs, constants);
    const auto result = op.finish(op.template merge_even<lanes>(state, 0));
    if (own) op.write(row, result, held, span, inputs, constants, none);
  }
  __syncwarp();
  WarpTile<T>{mine, bytes}.put(top.output());
}

// Whether every row follows the one before it, in the first P tensors.
template <int P, int N>
bool side_by_side(const Rows<N>& rows) {
  for (int t = 0; t < P; ++t) {
    int64_t next = rows.columns;
    for (int d = 0; d < rows.dims; next *= rows.sizes[d++])
      if (rows.strides[t][d] != next) return false;
  }
  return true;
}

// Whether they are short enough. Longer float32 rows, with ends of 4 bytes, are as fast by row_kernel, and longer
// gradients faster: of 785, 899 and 1023 bfloat16 columns at 0.93, 1.04 and 1.02 of a copy, here 0.84, 0.83 and 0.80.
template <class Op>
bool launch_tiled(const Op& op, int64_t rows, int64_t columns) {
  using T = typename Op::Storage;
  if (columns > (sizeof(T) == 2 ? (Op::kInputs == 1 ? 32 * kMostHeld : 768) : 2 * kMostHeld)) return false;
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
  const auto go = [&]<int lanes>() {
    constexpr int teams = 32 / lanes;
    // As many as are worth a wait for memory, unless that left warps without any.
    const int64_t shares = teams * int64_t{kTilesAtOnce} * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const int64_t each = teams * std::clamp<int64_t>(rows / shares, 1, ceil_of(kTileBytes, teams * row_bytes));
    const int64_t bytes = ceil_of(each * row_bytes + 16, 16) * 16, blocks = ceil_of(rows, each * kTileWarps);
    if (blocks > INT32_MAX) return false;
    Launch launch(static_cast<unsigned>(blocks), 32 * kTileWarps, kTileWarps * Op::kInputs * bytes);
    launch.early();
    launch(tiled_rows_kernel<Op, lanes>, op,
           TileShape{rows, static_cast<int>(columns), static_cast<int>(each), static_cast<int>(bytes)});
    return true;
  };
  if (columns <= 2 * kMostHeld) return go.template operator()<2>();
  if constexpr (sizeof(T) == 2) {
    // Rows of about as many 128 bytes lie in the same banks, where four of a warp would wait for each other.
    const bool meet = columns > 96 && (columns + 3) % 64 <= 6;
    if (columns <= 8 * kMostHeld && !meet) return go.template operator()<8>();
    return go.template operator()<32>();
  }
  return false;
}

}  // namespace matmuls
