// Short rows of an operation with constants, that lie side by side but do not start or end on 16 bytes: a weight, a
// bias. Warps walk over them, several at a time: some are worked on in shared memory, number by number, while the next
// ones come there by 16 bytes. A lane's columns stay the same, so that it has its constants and column sums in
// registers, and nothing is asked of a row's ends.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "rows.cuh"

namespace matmuls {

// A thread's numbers of a row: every so many'th of each of so many lanes.
template <int lanes, int N>
struct TileShare {
  static constexpr int kSure = N > 4 ? N - 3 : 0;  // numbers that every lane has
  int first, columns;

  __device__ int column(int i) const { return first + i * lanes; }
  __device__ bool begins(int i) const { return i < kSure || column(i) < columns; }
  template <class T, class F>
  __device__ void store(T* row, int i, const F (&number)[1]) const {
    if (!begins(i)) return;
    const uint32_t word = pack<T, 1>(number).at[0], to = ptx::shared_address(row + first) + i * lanes * sizeof(T);
    if constexpr (sizeof(T) == 2)
      ptx::store_shared_half(to, word);
    else
      ptx::store_shared(to, word);
  }
};

template <int N>
struct DirectShare : TileShare<32, N> {
  template <class T, class F>
  __device__ void store(T* row, int i, const F (&number)[1]) const {
    if (this->begins(i)) row[this->column(i)] = T(number[0]);
  }
};

struct WalkingTiles {
  TileShape tile;
  int regions;  // of a tile: one for each input, or output if they are more
  int stage;    // bytes of a warp's tile with all of them
  int stages, tiles;
  bool staying;
};

constexpr int kTileStages = 2;
// How many blocks run at once, by what a lane holds in registers.
template <class Op, int N>
constexpr int kTileBlocks = [] {
  constexpr int held = N * (Op::kInputs + Op::kConstants + (Op::kColumnSums ? 2 : 0));
  return held <= 36 ? 6 : held <= 48 ? 5 : held <= 76 ? 4 : 3;
}();

// Of an operation of rows.cuh it wants: row_beside(r, offset), where all rows lie side by side; row.place(tiles), with
// which what is written lies in shared memory; row.output(n), where it then goes; and whole_row, from fold to write.
template <class Op, int lanes, int N>
__global__ void __launch_bounds__(32 * kTileWarps, kTileBlocks<Op, N>)
    walking_tiles_kernel(const __grid_constant__ Op op, const WalkingTiles shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Row = typename Op::Row;
  constexpr int K = Op::kInputs, C = Op::kConstants;
  extern __shared__ __align__(16) unsigned char tiles[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int team = lane / lanes, rank = lane % lanes, columns = shape.tile.columns, each = shape.tile.each;
  const int row_bytes = columns * static_cast<int>(sizeof(T)), region = shape.tile.bytes;
  const int64_t all_rows = shape.tile.rows, step = each;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kTileWarps + warp) * each * shape.tiles;
  const int64_t last = min(first + each * shape.tiles, all_rows);
  unsigned char* const mine = tiles + warp * shape.stages * shape.stage;
  unsigned char *now = mine;
  const auto row_at = [&](int64_t r) { return op.row_beside(r, r * columns); };
  const auto rows_from = [&](int64_t r) { return r + each <= all_rows ? each : static_cast<int>(all_rows - r); };
  const auto numbers_of = [&](unsigned char* tile) { return reinterpret_cast<uint32_t*>(tile + shape.regions * region); };
  const ptx::L2Policy policy = ptx::l2_policy(shape.staying);
  const auto fetch = [&](int64_t r, unsigned char* tile) {
    if (r < last) {
      const Row top = row_at(r);
      const int rows = rows_from(r);
#pragma unroll
      for (int k = 0; k < K; ++k)
        WarpTile<T>{tile + k * region, rows * row_bytes}.fetch(top.input(k), r > 0, r + each < all_rows, Op::kColumnSums ? nullptr : &policy);
      if constexpr (Op::kNumber) {
        for (int i = lane; i < rows; i += 32)
          ptx::copy_word_ahead(numbers_of(tile) + i, reinterpret_cast<const uint32_t*>(top.number) + i);
      }
    }
    ptx::end_group_ahead();
  };
  ptx::let_next_start();  // and wait here
  ptx::wait_for_earlier();
  for (int s = 0; s < shape.stages; ++s) fetch(first + s * step, now + s * shape.stage);

  const TileShare<lanes, N> span{rank, columns};
  F kept[C][N];
#pragma unroll
  for (int c = 0; c < C; ++c)
#pragma unroll
    for (int i = 0; i < N; ++i)
      kept[c][i] = span.begins(i) && op.constant(c) ? F(op.constant(c)[span.column(i)]) : op.absent(c);
  const auto constants = [&](int c, int i, F(&number)[1]) { number[0] = kept[c][i]; };
  ColumnSums<F, 1, Op::kColumnSums ? N : 0> sums;
#pragma unroll 1
  for (; first < last; first += step) {
    const int rows = rows_from(first);
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row_at(first).input(0)) % 16);
    ptx::wait_ahead(shape.stages - 1);
    __syncwarp();
#pragma unroll 1
    for (int r = team; r - team < rows; r += 32 / lanes) {
      T* placed[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) placed[k] = reinterpret_cast<T*>(now + k * region + shift + r * row_bytes);
      const bool own = r < rows;  // lanes without a row go along with zeros
      Inputs<T, 1, N, K> inputs{};
      F number = 0;
      if (own) {
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int k = 0; k < K; ++k)
            if (span.begins(i)) inputs.at[i][k] = load_one(placed[k] + rank + i * lanes);
        if constexpr (Op::kNumber) number = __uint_as_float(numbers_of(now)[r]);
      }
      Row row = op.row_beside(first + r, 0);
      row.place(placed);
      op.template whole_row<N>(row, own, span, inputs, constants, sums, FixedLanes<lanes>{}, number);
    }
    __syncwarp();
    const Row top = row_at(first);
#pragma unroll
    for (int n = 0; n < Op::kOutputs; ++n)
      if (T* const to = top.output(n)) WarpTile<T>{now + n * region, rows * row_bytes}.put(to);
    __syncwarp();
    fetch(first + shape.stages * step, now);
    now = now + shape.stage == mine + shape.stages * shape.stage ? mine : now + shape.stage;
  }
  if constexpr (Op::kColumnSums) {
    if (!op.partial) return;
    ptx::wait_ahead<0>();
    // A warp's teams, then the block's warps, in order.
    float* const all = reinterpret_cast<float*>(tiles);
#pragma unroll 1
    for (int w = 0; w < kTileWarps; ++w) {
      __syncthreads();  // the first time, for the tiles, which lay there
      if (w != warp) continue;
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) {
          F sum = sums.at[s][i][0];
#pragma unroll
          for (int apart = lanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
          float* const to = all + s * columns + span.column(i);
          if (team == 0 && span.begins(i)) *to = w == 0 ? sum : *to + sum;
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < 2 * columns; n += 32 * kTileWarps) op.partial_of(blockIdx.x)[n] = all[n];
  }
}


template <class Op, int N>
__global__ void __launch_bounds__(128, N > 22 ? (Op::kInputs > 1 ? 4 : 6) : 8) direct_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Row = typename Op::Row;
  constexpr int K = Op::kInputs;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  ptx::let_next_start();
  ptx::wait_for_earlier();
  if (r >= shape.rows) return;
  const TileShare<32, N> span{static_cast<int>(threadIdx.x), shape.columns};
  const Row row = op.row_beside(r, r * shape.columns);
  const ptx::L2Policy policy = ptx::l2_policy(shape.large);
  Inputs<T, 1, N, K> inputs;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) inputs.at[i][k].at[0] = ptx::load_if(span.begins(i), reinterpret_cast<const uint32_t*>(row.input(k) + span.column(i)), policy);
  const auto constants = [&](int c, int i, F(&number)[1]) { number[0] = op.constant(c) && span.begins(i) ? __ldg(op.constant(c) + span.column(i)) : op.absent(c); };
  ColumnSums<F, 1, 0> none;
  op.template whole_row<N>(row, true, DirectShare<N>{span}, inputs, constants, none, FixedLanes<32>{}, F(0));
}

// Whether the rows went so. regions: tensors that are read and written, at most as many as are read but for one.
// prepare(op, blocks) is called before the launch of an operation with column sums.
template <class Op, int N, class Prepare = decltype(kNothingToPrepare)>
bool launch_walking_tiles(Op op, const Rows<N>& rows, int outputs, const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  if (!side_by_side<N>(rows)) return false;
  if constexpr (sizeof(T) == 4 && !Op::kColumnSums) {
    const char* d = getenv("MM_DIRECT");
    if (d) {
      const int warps = atoi(d);
      const auto direct = [&]<int held>() {
        if (rows.columns > 32 * held) return false;
        launch_early(direct_rows_kernel<Op, held>, dim3(ceil_of(rows.count, warps)), dim3(32, warps), op, shape_of<Op>(rows.count, rows.columns));
        return true;
      };
      return direct.template operator()<5>() || direct.template operator()<7>() || direct.template operator()<10>() || direct.template operator()<13>() ||
      direct.template operator()<16>() || direct.template operator()<19>() || direct.template operator()<22>() || direct.template operator()<25>() || direct.template operator()<28>() || direct.template operator()<32>();
    }
  }
  const auto go = [&]<int lanes, int held>() {
    if (rows.columns > lanes * held) return false;
    constexpr auto kernel = walking_tiles_kernel<Op, lanes, held>;
    constexpr int teams = 32 / lanes;
    const int64_t row_bytes = rows.columns * static_cast<int64_t>(sizeof(T));
    const auto env=[](const char* n,int d){const char* v=getenv(n); return v?atoi(v):d;};
    const int kTileStages=env("MM_STAGES",2), kTileBytes=env("MM_TILE",3072);
    const int64_t shares =
        teams * int64_t{kTilesAtOnce} * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const int64_t each = teams * std::clamp<int64_t>(rows.count / shares, 1, ceil_of(kTileBytes, teams * row_bytes));
    const int64_t bytes = ceil_of(each * row_bytes + 16, 16) * 16;
    const int regions = std::max(Op::kInputs, outputs);
    const int64_t stage = regions * bytes + (Op::kNumber ? ceil_of(each, 4) * 16 : 0);
    Launch launch(1, 32 * kTileWarps,
                  std::max(kTileWarps * kTileStages * stage, Op::kColumnSums ? 8 * rows.columns : 0));
    const int resi = resident<kernel>(launch.config, 1);
    int64_t tiles = env("MM_M", 4);
    if (Op::kColumnSums) tiles = std::max<int64_t>(1, ceil_of(rows.count, each * kTileWarps * env("MM_B", 8) * resi));
    int64_t blocks = ceil_of(rows.count, each * kTileWarps * tiles);
    launch.config.gridDim = dim3(static_cast<unsigned>(blocks));
    prepare(op, blocks);
    launch.early();
    launch(kernel, op,
           WalkingTiles{{rows.count, static_cast<int>(rows.columns), static_cast<int>(each), static_cast<int>(bytes)},
                        regions,
                        static_cast<int>(stage), kTileStages, int(tiles), true});
    return true;
  };
  return go.template operator()<8, 4>() || go.template operator()<8, 7>() || go.template operator()<8, 10>() ||
         go.template operator()<8, 13>() || go.template operator()<16, 8>() || go.template operator()<16, 10>() ||
         go.template operator()<16, 13>() || go.template operator()<32, 8>() || go.template operator()<32, 10>() ||
         go.template operator()<32, 13>() || go.template operator()<32, 16>() || go.template operator()<32, 19>();
}

}  // namespace matmuls
