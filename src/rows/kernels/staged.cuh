// Kernels for short unaligned rows that are contiguous: rows are staged through shared memory, several at a time.
//
//   global memory   [row 0][row 1][row 2]...    copied as aligned 16-byte blocks, whatever the rows' boundaries
//   shared memory   the same bytes              lane l of a team holds columns l, l + lanes, l + 2 lanes, ...
//   global memory   [row 0][row 1][row 2]...    copied back as 16-byte blocks
//
// No bounds test for row ends is needed, which costs row_kernel as much as the rest of a short row: each lane's columns
// have a stride known at compile time. Float32 rows of more than 160 columns are read and written in place
// (direct_rows_kernel): each element is as wide as a lane's share of a memory transaction. The grid has many small
// blocks: RMS norm reaches 0.92 to 1.0 of a copy; a persistent grid reached 0.79 to 0.87.
#pragma once

#include <algorithm>

#include "rows/launch_rows.cuh"

namespace matmuls {

constexpr int kTileWarps = 4;   // per block: each warp has its own rows and waits for no other
constexpr int kTileStages = 2;  // tiles per warp: one being processed, the next in flight

// A lane's columns of a row, at most N, in shared memory or in global memory.
template <int lanes, int N>
struct ShortShare {
  static constexpr int kStep = lanes;
  static constexpr int kSure = N > 4 ? N - std::max(4, N / 4) : 0;  // elements that every lane has
  int first, columns;
  bool in_tile;

  __device__ int column(int i) const { return first + i * lanes; }
  __device__ bool begins(int i) const { return i < kSure || column(i) < columns; }
  __device__ bool holds(int i, int, int end) const { return column(i) < end; }
  template <class T, class F>
  __device__ void store(T* row, int64_t, int i, const F (&number)[1]) const {
    if (!begins(i)) return;
    if (!in_tile) {
      row[column(i)] = T(number[0]);
      return;
    }
    const uint32_t word = pack<T, 1>(number).at[0], to = ptx::shared_address(row + first) + i * lanes * sizeof(T);
    if constexpr (sizeof(T) == 2)
      ptx::store_shared_half(to, word);
    else
      ptx::store_shared(to, word);
  }
};

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
          by_policy ? ptx::copy_ahead(here, number, policy) : ptx::copy_ahead(here, number);
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

struct TileShape {
  int64_t rows;
  int columns;
  int each, tiles;    // rows per tile, tiles per warp
  int region, stage;  // bytes of shared memory: one tensor of a tile; all tensors of a tile
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

// Kernel for rows staged in tiles. Beyond the interface in row_kernels.cuh, except fold and write, the operation
// provides
//
//   row_beside(r, offset)       row r, with inputs and outputs at `offset` of each tensor (contiguous rows)
//   run_from(r), row_in(run, r) optional: look-up of per-row data once for the run.rows rows after run.first; row_in
//                               also takes other rows, more slowly
//   row.place(tiles)            redirects input 0 and the outputs to shared memory: output 0 replaces input 0, output 1
//                               the second tile
//   row.output(n)               where output n goes in global memory
//   whole_row<N>(...)           processes a row; `own` is false for lanes without a row
template <class Op, int lanes, int N>
__global__ void __launch_bounds__(32 * kTileWarps, kTileBlocks<Op, N>)
    tiled_rows_kernel(const __grid_constant__ Op op, const TileShape shape) {
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
  const auto row_at = [&](int64_t r) { return op.row_beside(r, r * shape.columns); };
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
          ptx::copy_word_ahead(numbers_of(tile) + i, reinterpret_cast<const uint32_t*>(top.number) + i);
      }
    }
    ptx::end_group_ahead();
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
      return op.row_beside(r, 0);
  };
#pragma unroll 1
  for (; first < end; first += shape.each) {
    int rows = rows_from(first), shift = static_cast<int>(reinterpret_cast<uintptr_t>(row_at(first).input(0)) % 16);
    ptx::forget(rows);  // keeps the compiler from recomputing them for each row
    ptx::forget(shift);
    if constexpr (kRuns<Op>)
      if (first - run.first >= run.rows) run = run_from(first);
    ptx::wait_ahead<kTileStages - 1>();
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
    ptx::wait_ahead<0>();
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

// One float32 row per warp, read and written in place.
template <class Op, int N>
__global__ void __launch_bounds__(32 * kTileWarps, N <= 22            ? 8
                                                   : Op::kInputs == 1 ? 6
                                                                      : 4)
    direct_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int K = Op::kInputs;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTileWarps + threadIdx.y;
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  if (r >= shape.rows) return;
  const ShortShare<32, N> span{static_cast<int>(threadIdx.x), shape.columns, false};
  const auto row = op.row_beside(r, r * shape.columns);
  const ptx::L2Policy policy = ptx::l2_policy(shape.large);
  Inputs<T, 1, N, K> inputs;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k)
      inputs.at[i][k].at[0] =
          ptx::load_if(span.begins(i), reinterpret_cast<const uint32_t*>(row.input(k) + span.column(i)), policy);
  const auto constants = [&](int c, int i) {
    return span.begins(i) && op.constant(c) ? __ldg(op.constant(c) + span.column(i)) : op.absent(c);
  };
  ColumnSums<F, 1, 0> none;
  op.template whole_row<N>(row, true, span, inputs, constants, none, FixedLanes<32>{}, F(0));
}

// True if every row follows the previous one without a gap, in the first P tensors.
template <int P, int N>
bool side_by_side(const Rows<N>& rows) {
  for (int t = 0; t < P; ++t) {
    int64_t next = rows.columns;
    for (int d = 0; d < rows.dims; next *= rows.sizes[d++])
      if (rows.strides[t][d] != next) return false;
  }
  return true;
}

// Launches a kernel for short rows with the same misalignment in the first P tensors. Returns false, launching nothing,
// if rows are not contiguous, have more columns than the compiled kernels or `limit`, or if no block fits on the GPU.
// regions: tensors per tile, inputs first. prepare(op, blocks) is called before the launch of an operation with column
// sums.
template <int P, int limit = INT_MAX, class Op, int D, class Prepare = decltype(kNothingToPrepare)>
bool launch_short_rows(Op op, const Rows<D>& rows, int regions = Op::kInputs,
                       const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  constexpr bool sums = Op::kColumnSums, wide = sizeof(T) == 4;
  // The most columns. Float32 tiles have few elements per lane; longer rows are as fast with other kernels, and
  // gradients faster.
  constexpr int kMost = std::min(limit, sums             ? (wide ? 416 : 608)
                                        : wide           ? (Op::kInputs == 1 || Op::kConstants > 0 ? 1024 : 80)
                                        : Op::kConstants ? 608
                                                         : (Op::kInputs == 1 ? 1056 : 800));
  if (rows.columns > kMost || !side_by_side<P>(rows)) return false;
  const auto shape = shape_of<Op>(rows.count, rows.columns);
  const auto direct = [&]<int N>() {
    if (rows.columns > 32 * N) return false;
    const int64_t blocks = ceil_of(rows.count, kTileWarps);
    if (blocks > INT32_MAX) return false;
    launch_early(direct_rows_kernel<Op, N>, dim3(static_cast<unsigned>(blocks)), dim3(32, kTileWarps), op, shape);
    return true;
  };
  if constexpr (wide && !sums && kMost > 160) {
    if (rows.columns > 160)
      return direct.template operator()<7>() || direct.template operator()<10>() || direct.template operator()<13>() ||
             direct.template operator()<16>() || direct.template operator()<19>() || direct.template operator()<22>() ||
             direct.template operator()<25>() || direct.template operator()<28>() || direct.template operator()<32>();
  }
  const auto tiles = [&]<int lanes, int N>() {
    if (rows.columns > lanes * N) return false;
    constexpr auto kernel = tiled_rows_kernel<Op, lanes, N>;
    constexpr int teams = 32 / lanes, kBytes = wide && sums ? 3072 : 2048;  // target size of one tensor of a tile
    const int64_t row_bytes = rows.columns * static_cast<int64_t>(sizeof(T));
    // Rows per tile: enough bytes per memory latency, but fewer if warps would have no rows.
    const int64_t warps = int64_t{24} * device_limits().multiprocessors;
    const int64_t each =
        teams * std::clamp<int64_t>(rows.count / (teams * warps), 1, ceil_of(kBytes, teams * row_bytes));
    const int64_t region = ceil_of(each * row_bytes + 16, 16) * 16;
    const int64_t stage = regions * region + (Op::kNumber ? ceil_of(each, 4) * 16 : 0);
    const int64_t bytes = std::max(kTileWarps * kTileStages * stage, sums ? 8 * rows.columns : 0);
    Launch launch(1, 32 * kTileWarps, bytes);
    // More tiles per warp with more constants to load or masks to look up (added mask, 131 columns: .88 of a copy, .83
    // with fewer). With column sums, the smallest multiple of the resident blocks that keeps all of them busy.
    int64_t count = wide ? 1 : Op::kConstants == 2 ? 4 : 2;
    if constexpr (kRuns<Op>)
      if (!wide && op.mask) count = 4;
    const int resident_blocks = resident<kernel>(launch.config, 1);
    if (resident_blocks == 0) return false;
    if (sums) count = std::max<int64_t>(ceil_of(rows.count, each * kTileWarps * (wide ? 1 : 4) * resident_blocks), 1);
    const int64_t blocks = ceil_of(rows.count, each * kTileWarps * count);
    if (blocks > INT32_MAX) return false;
    launch.config.gridDim = dim3(static_cast<unsigned>(blocks));
    prepare(op, blocks);
    launch.early();
    launch(kernel, op,
           TileShape{rows.count, shape.columns, static_cast<int>(each), static_cast<int>(count),
                     static_cast<int>(region), static_cast<int>(stage)});
    return true;
  };
  const auto some = [&]<int lanes, int... N>() { return (tiles.template operator()<lanes, N>() || ...); };
  if (some.template operator()<2, 4, 8>() || some.template operator()<4, 8>() || some.template operator()<8, 7, 10>())
    return true;
  if constexpr (kMost > 80) {
    if (some.template operator()<8, 13>() || some.template operator()<16, 8, 10>()) return true;
  }
  if constexpr (kMost > 160 && (sums || !wide)) {
    if (some.template operator()<16, 13>() || some.template operator()<32, 8, 10, 13>()) return true;
  }
  if constexpr (kMost > 416 && !wide) {
    if (some.template operator()<32, 16, 19>()) return true;
    if constexpr (kMost > 608)
      if (some.template operator()<32, 25>()) return true;
    if constexpr (kMost > 800)
      if (some.template operator()<32, 33>()) return true;
  }
  return false;
}

}  // namespace matmuls
