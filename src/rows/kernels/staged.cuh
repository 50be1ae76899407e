// staged: for short unaligned rows that are contiguous. Rows are staged through shared memory, several at a time.
//
//   global memory   [row 0][row 1][row 2]...    copied as aligned 16-byte blocks, whatever the rows' boundaries
//   shared memory   the same bytes              lane l of a team holds columns l, l + lanes, l + 2 lanes, ...
//   global memory   [row 0][row 1][row 2]...    copied back as 16-byte blocks
//
// No bounds test for row ends is needed, which costs one_pass as much as the rest of a short row: each lane's columns
// have a stride known at compile time. The grid has many small blocks: RMS norm reaches 0.92 to 1.0 of a copy; a
// persistent grid reached 0.79 to 0.87.
#pragma once

#include <algorithm>
#include <climits>

#include "rows/kernel_sizes.h"
#include "rows/kernels/direct.cuh"

namespace matmuls {

// Copies a warp's rows from global to shared memory, or back: 16-byte blocks except at the two ends. The data keeps its
// misalignment in shared memory.
template <class T>
struct WarpTile {
  unsigned char* shared;  // aligned to 16 bytes
  int bytes;

  template <int together, class Whole, class One>
  __device__ void each(uintptr_t memory, bool over_front, bool over_back, const Whole& whole, const One& one) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, shift = static_cast<int>(memory % 16), size = sizeof(T);
    const int end = shift + bytes, first = shift > 0 && !over_front ? 16 : 0, last = (over_back ? end + 15 : end) & ~15;
#pragma unroll 1
    for (int at = first + 16 * lane; at < last; at += together * 16 * 32) {
      const uintptr_t from = memory - shift + at;
      unsigned char* const here = shared + at;
#pragma unroll
      for (int n = 0; n < together * 16 * 32; n += 16 * 32)
        if (at + n < last) whole(from + n, here + n);
    }
    const int head = shift + lane * size, tail = last + lane * size;
    if (head < min(first, end)) one(memory - shift + head, shared + head);
    if (last >= first && tail < end) one(memory - shift + tail, shared + tail);
  }
  // Neighbouring elements of the tensor that share a 16-byte block with these rows are copied too. An L2 policy makes
  // float32 rows 3 % faster. ptxas 13.0 generates illegal instructions for several such copies in a row.
  __device__ void fetch(const T* from, bool others_in_front, bool others_at_back, ptx::L2Policy policy) const {
    constexpr bool by_policy = sizeof(T) == 4;
    each<by_policy ? 1 : 4>(
        reinterpret_cast<uintptr_t>(from), others_in_front, others_at_back,
        [=](uintptr_t memory, unsigned char* here) {
          const auto* const number = reinterpret_cast<const void*>(memory);
          by_policy ? ptx::cp_async(here, number, policy) : ptx::cp_async(here, number);
        },
        [](uintptr_t memory, unsigned char* here) {
          *reinterpret_cast<T*>(here) = *reinterpret_cast<const T*>(memory);
        });
  }
  __device__ void put(T* to) const {
    each<4>(
        reinterpret_cast<uintptr_t>(to), false, false,
        [](uintptr_t memory, unsigned char* here) {
          ptx::store(reinterpret_cast<void*>(memory), *reinterpret_cast<const uint4*>(here));
        },
        [](uintptr_t memory, unsigned char* here) {
          *reinterpret_cast<T*>(memory) = *reinterpret_cast<const T*>(here);
        });
  }
};

// True if the operation looks up per-row data (a mask).
template <class Op>
constexpr bool kRuns = requires(const Op& op) { op.run_from(0); };

// Blocks per SM, from the registers of a lane.
template <class Op, int N>
constexpr int kTileBlocks = [] {
  constexpr int held = N * (Op::kInputs + Op::kConstants + (Op::kColumnSums ? 2 : 0) + kRuns<Op>);
  return held <= 36 ? 6 : held <= 48 ? 5 : held <= 76 ? 4 : 3;
}();

// Kernel for rows staged in tiles. Beyond the interface in rows/device/operation.cuh, except fold and write, the
// operation provides
//
//   row_for_copies(r, offset)       row r, with inputs and outputs at `offset` of each tensor (contiguous rows)
//   run_from(r), row_in(run, r) optional: look-up of per-row data once for the run.rows rows after run.first; row_in
//                               also takes other rows, more slowly
//   row.place(tiles)            redirects input 0 and the outputs to shared memory: output 0 replaces input 0, output 1
//                               the second tile
//   row.output(n)               where output n goes in global memory
//   whole_row<N>(...)           processes a row; `own` is false for lanes without a row
template <class Op, int lanes, int N>
__global__ void __launch_bounds__(32 * kTileWarps, kTileBlocks<Op, N>)
    staged_kernel(const __grid_constant__ Op op, const TileShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Row = typename Op::Row;
  constexpr int K = Op::kInputs, C = Op::kConstants;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int team = lane / lanes, rank = lane % lanes, row_bytes = shape.columns * static_cast<int>(sizeof(T));
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kTileWarps + warp) * shape.each * shape.tiles;
  const int64_t end = min(first + shape.each * shape.tiles, shape.rows);
  unsigned char *now = shared + warp * kTileStages * shape.stage, *next = now + shape.stage;
  const auto row_at = [&](int64_t r) { return op.row_for_copies(r, r * shape.columns); };
  const auto rows_from = [&](int64_t r) { return r + shape.each <= end ? shape.each : static_cast<int>(end - r); };
  const auto numbers_of = [&](unsigned char* tile) {  // each row's own number
    return reinterpret_cast<uint32_t*>(tile + shape.stage) - (shape.each + 3) / 4 * 4;
  };
  const ptx::L2Policy policy = ptx::l2_policy(true);
  const auto fetch = [&](int64_t r, unsigned char* tile) {
    if (r < end) {
      const Row top = row_at(r);
      const int rows = rows_from(r);
#pragma unroll
      for (int k = 0; k < K; ++k)
        WarpTile<T>{tile + k * shape.region, rows * row_bytes}.fetch(top.input(k), r > 0, r + rows < shape.rows,
                                                                     policy);
      if constexpr (Op::kNumber) {
        for (int i = lane; i < rows; i += 32)
          ptx::cp_async_word(numbers_of(tile) + i, reinterpret_cast<const uint32_t*>(top.number) + i);
      }
    }
    ptx::cp_async_commit_group();
  };
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  fetch(first, now);
  fetch(first + shape.each, next);

  const ShortShare<lanes, N> span{rank, shape.columns, true};
  F kept[std::max(C, 1)][N];
#pragma unroll
  for (int c = 0; c < C; ++c)
#pragma unroll
    for (int i = 0; i < N; ++i)
      kept[c][i] = span.begins(i) && op.constant(c) ? F(op.constant(c)[span.column(i)]) : op.absent(c);
  const auto constants = [&](int c, int i) { return kept[c][i]; };
  ColumnSums<F, 1, Op::kColumnSums ? N : 0> sums;
  const auto run_from = [&](int64_t r) {
    if constexpr (kRuns<Op>)
      return op.run_from(r);
    else
      return 0;
  };
  auto run = run_from(first);
  const auto row_of = [&](int64_t r) {
    if constexpr (kRuns<Op>)
      return op.row_in(run, r);
    else
      return op.row_for_copies(r, 0);
  };
#pragma unroll 1
  for (; first < end; first += shape.each) {
    int rows = rows_from(first), shift = static_cast<int>(reinterpret_cast<uintptr_t>(row_at(first).input(0)) % 16);
    ptx::opaque(rows);  // keeps the compiler from recomputing them for each row
    ptx::opaque(shift);
    if constexpr (kRuns<Op>)
      if (first - run.first >= run.rows) run = run_from(first);
    ptx::cp_async_wait_group<kTileStages - 1>();
    __syncwarp();
#pragma unroll 1
    for (int r = team; r - team < rows; r += 32 / lanes) {
      T* placed[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) placed[k] = reinterpret_cast<T*>(now + k * shape.region + shift + r * row_bytes);
      const bool own = r < rows;
      Inputs<T, 1, N, K> inputs{};
      F number = 0;
      // Results past the last row are not stored, but column sums must see 0 there.
      if (own || !Op::kColumnSums) {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int k = 0; k < K; ++k)
            if (span.begins(i)) inputs.at[i][k] = load_one(placed[k] + rank + i * lanes);
        if constexpr (Op::kNumber) number = __uint_as_float(numbers_of(now)[r]);
      }
      Row row = row_of(own ? first + r : first);
      row.place(placed);
      op.template whole_row<N>(row, own, span, inputs, constants, sums, FixedLanes<lanes>{}, number);
    }
    __syncwarp();
    const Row top = row_at(first);
#pragma unroll
    for (int n = 0; n < Op::kOutputs; ++n)
      if (T* const to = top.output(n)) WarpTile<T>{now + n * shape.region, rows * row_bytes}.put(to);
    __syncwarp();
    fetch(first + kTileStages * shape.each, now);
    const auto before = now;
    now = next;
    next = before;
  }
  if constexpr (Op::kColumnSums) {
    if (!op.partial) return;
    ptx::cp_async_wait_group<0>();
    // Adds up the teams of a warp, then the warps of the block, in order.
    float* const all = reinterpret_cast<float*>(shared);
#pragma unroll 1
    for (int w = 0; w < kTileWarps; ++w) {
      __syncthreads();  // in the first iteration, also for the tiles, which occupied this memory
      if (w != warp) continue;
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) {
          F sum = sums.at[s][i][0];
#pragma unroll
          for (int apart = lanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
          float* const to = all + s * shape.columns + span.column(i);
          if (team == 0 && span.begins(i)) *to = w == 0 ? sum : *to + sum;
        }
    }
    __syncthreads();
    for (int n = static_cast<int>(threadIdx.x); n < 2 * shape.columns; n += 32 * kTileWarps)
      op.partial_of(blockIdx.x)[n] = all[n];
  }
}

// Hands the kernel of a choice to `use`.
template <class Op, class Use>
void with_staged(const RowChoice& c, const Use& use) {
  constexpr int most = staged_columns(Op::kTraits, Op::kTraits.staged);
  with_instance<kStaged>(c, [&]<StagedRow k>() {
    if constexpr (has_staged(Op::kTraits, most, k))
      use.template operator()<RowKernel::staged, staged_kernel<Op, k.lanes, k.held>>();
    else
      not_compiled(c);
  });
}

}  // namespace matmuls
