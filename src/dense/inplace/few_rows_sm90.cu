// matmul_ for a few hundred rows on Hopper, in one wave.
//
// A cluster of two blocks computes a 128 x 64 tile of the result. Each block multiplies over half of K, sends half of
// its partial sums to the other block and writes the other half:
//
//            K first half   K second half
//    block 0: 128 x 64 partial sums --+-- exchange --> writes its half of the tile
//    block 1: 128 x 64 partial sums --+-- exchange --> writes its half of the tile
//
// So a block loads 192 KB of 16-bit operands at K = 1024 instead of the 256 KB of a 64 x 64 tile of its own, and such a
// product is bound by these loads. A panel of rows may be overwritten once all blocks of the panel have loaded their
// tiles of a; a counter in global memory tells when.
//
// The blocks that share a panel wait for each other: they are a team. A team of which not all blocks run is closed
// (gpu/team_start.cuh): one of its clusters then computes all tiles of the panel, one after the other, and their
// results wait in global memory.
//
// Two blocks fit on a multiprocessor. The next launch waits there for the end of this one and meanwhile prefetches its
// first operands to the L2. The prefetch consumes no data, and the L2 stays coherent with later writes.
#ifdef __CUDACC__
#include "dense/inplace/panels_sm90.cuh"

namespace matmuls::in_place {
namespace {

constexpr int kRows = kFewRows, kColumns = kFewColumns;  // of the tile of a cluster
constexpr int kDeep = 4;                                 // stages
constexpr int kBytesA = kRows * kRowBytes, kBytesB = kColumns * kRowBytes, kStageBytes = kBytesA + kBytesB;
constexpr int kAhead = 8;                 // K steps prefetched to the L2
constexpr int kProducts = 2 * kGroup;     // threads that multiply, 64 rows a warpgroup
constexpr int kThreads = kProducts + 64;  // plus one warp that loads and one that updates the counter
constexpr int kSums = kColumns / 4;       // sums per thread that are sent to the other block
constexpr int kSumBytes = kProducts * kSums * 4;
constexpr int kBarriers = 2 * kDeep + 4;  // and the team's mode
constexpr int kShared = kDeep * kStageBytes + kSumBytes + 8 * kBarriers;
static_assert(2 * (kShared + 1024) <= kMaxShared + 1024);

struct Shape {
  int rows, columns, across, steps;  // tiles across the result, K steps
  int64_t stride;                    // row stride of a, in elements
};

__device__ TeamStart counters[kCounterSlots][kMostTeams];  // by panel

// Results of the cluster that works alone; one such cluster per GPU at a time, which holds the lock.
constexpr int64_t kScratchBytes = 4 << 20;
__device__ __align__(16) unsigned char scratch[kScratchBytes];
__device__ unsigned scratch_lock;

// A stage's tiles in shared memory and its barriers' phase parity.
struct Stage {
  int index = 0;
  unsigned turn = 0;
  __device__ void advance() {
    if (++index == kDeep) index = 0, turn ^= 1;
  }
};

template <class T, bool b_k_apart>
__global__ void __launch_bounds__(kThreads, 2)
    few_rows_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, T* a,
                    const T* bias, const Shape shape, TeamStart* spare, int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool transposed_tile = kTransposedTile<T, b_k_apart>;
  constexpr int wide = kRowBytes / sizeof(T);  // columns of a box, and K of a stage
  extern __shared__ __align__(1024) unsigned char tiles[];
  // Received from the other block, [four][thread].
  float4* const sums = reinterpret_cast<float4*>(tiles + kDeep * kStageBytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(sums + kSumBytes / 16);
  uint64_t* const empty = full + kDeep;
  uint64_t *const has_read = empty + kDeep, *const free_panel = has_read + 1, *const received = free_panel + 1;
  TeamMode* const mode = reinterpret_cast<TeamMode*>(received + 1);  // valid once the panel is free
  const auto a_tile = [&](int stage) { return tiles + stage * kStageBytes; };
  const auto b_tile = [&](int stage) { return tiles + stage * kStageBytes + kBytesA; };

  const int rank = ptx::cluster_rank(), cluster = blockIdx.x / kPair;
  const int panel = cluster / shape.across, first_tile = cluster % shape.across;
  const int row0 = panel * kRows;
  int column0 = first_tile * kColumns;
  const int half = (shape.steps + 1) / 2, first = rank * half, steps = rank == 0 ? half : shape.steps - half;
  const bool count = shape.across > 1;  // a single cluster has read everything once it has exchanged its sums
  // Uniform within a warp, which the compiler knows only of a shuffle's result.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;
  const auto fetch_b = [&](int n, const auto& fetch) {  // fetch(x, y, offset in the tile)
    if constexpr (transposed_tile) {
      fetch(column0, n * wide, 0);
      fetch(column0 + wide, n * wide, kBytesB / 2);
    } else if constexpr (b_k_apart) {
      fetch(column0, n * wide, 0);
    } else {
      fetch(n * wide, column0, 0);
    }
  };
  if (threadIdx.x == kProducts) {
    for (int s = 0; s < kDeep; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], 2);  // two warpgroups
    }
    ptx::mbarrier_init(has_read, 2);
    ptx::mbarrier_init(free_panel);
    ptx::mbarrier_init(received);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(received, kSumBytes);
  }
  if (threadIdx.x == kProducts + 32) {
    hopper::prefetch_tensormap(a_map);
    hopper::prefetch_tensormap(b_map);
    const int ahead = min(steps, kAhead), panels = gridDim.x / kPair / shape.across;
    for (int n = first_tile; n < ahead; n += shape.across) hopper::tma_prefetch_2d(a_map, (first + n) * wide, row0);
    for (int n = panel; n < ahead; n += panels)
      fetch_b(first + n, [&](int x, int y, int) { hopper::tma_prefetch_2d(b_map, x, y); });
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the other block's barriers are initialized
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  const unsigned team_blocks = kPair * shape.across;
  TeamStart* const own = (spare ? spare : counters[slot]) + panel;
  Stage at;
  for (int done = 0;; ++done) {      // tiles: one, or all of the panel
    if (threadIdx.x == kProducts) {  // loading thread
      for (int n = 0; n < steps; ++n, at.advance()) {
        uint64_t* const filled = &full[at.index];
        if (n >= kDeep || done > 0) ptx::mbarrier_wait(&empty[at.index], at.turn ^ 1);
        ptx::mbarrier_arrive_expect_tx(filled, kStageBytes);
        hopper::tma_load_2d(a_map, a_tile(at.index), filled, (first + n) * wide, row0);
        fetch_b(first + n,
                [&](int x, int y, int to) { hopper::tma_load_2d(b_map, b_tile(at.index) + to, filled, x, y); });
      }
    } else if (threadIdx.x == kProducts + 32 && count && done == 0) {
      ptx::mbarrier_wait(has_read, 0);
      // No data of others is read from here on, and what has been read does not change: no fence is needed.
      arrive_at_team(own);
      const TeamMode now = wait_for_team_with_scratch(own, team_blocks, first_tile, rank, &scratch_lock);
      if (now == TeamMode::together) leave_team(own, team_blocks);
      *mode = now;
      ptx::mbarrier_arrive(free_panel);
    } else if (threadIdx.x < kProducts) {
      float acc[kColumns / 2];
#pragma unroll
      for (float& x : acc) x = 0;
      // Transposed product (kTransposedTile), as in panels_kernel_sm90.cuh: the thread has one column of the result in
      // each of the groups of four, place(0) and place(1); two warps cover 32 columns.
      const auto place = [&](int h) { return 2 * warp % 4 + h ^ lane / 16 * 5; };
      // The columns this thread writes. Transposed: two, i < 2. Otherwise: eight, in this block's half of the tile.
      const auto column_of = [&](int i) {
        return column0 + (transposed_tile ? warp / 2 * 32 + 4 * place(i) + lane / 4 % 4
                                          : rank * kColumns / 2 + i / 2 * 8 + 2 * (lane % 4) + i % 2);
      };
      float bias_values[8] = {};  // loaded in the background
      if (bias) {
#pragma unroll
        for (int i = 0; i < (transposed_tile ? 2 : 8); ++i)
          if (column_of(i) < shape.columns) bias_values[i] = static_cast<float>(bias[column_of(i)]);
      }
      int last = 0;  // previous stage
      const auto fragments = [&](uint32_t (&fragment)[4][4]) {
        ptx::mbarrier_wait(&full[at.index], at.turn);
        hopper::load_tf32_fragments(fragment, b_tile(at.index) + warp / 2 * 32 * kRowBytes, place(0), place(1), lane);
      };
      const auto release = [&](int stage) {
        if (thread == 0) ptx::mbarrier_arrive(&empty[stage]);
      };
      const auto step = [&](int n, uint32_t (&fragment)[4][4], uint32_t (&next)[4][4]) {
        const int now = at.index;
        if constexpr (!transposed_tile) ptx::mbarrier_wait(&full[now], at.turn);
        at.advance();
        const uint64_t rows = hopper::smem_descriptor(a_tile(now) + group * kBytesA / 2);
        const uint64_t columns = hopper::smem_descriptor(b_tile(now));
        hopper::warpgroup_fence_operand(acc);
        hopper::wgmma_fence();
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // 32 bytes of K each; descriptor units of 16 bytes
          if constexpr (transposed_tile)
            hopper::wgmma_rs<float, false>(acc, fragment[part], rows + part * 2, true);
          else
            hopper::wgmma_ss<T, b_k_apart>(acc, rows + part * 2, columns + part * (b_k_apart ? kRowBytes : 2), true);
        }
        hopper::wgmma_commit_group();
        hopper::warpgroup_fence_operand(acc);
        if constexpr (transposed_tile) {
          if (n + 1 < steps) fragments(next);
          hopper::wgmma_wait_group<0>();
          hopper::warpgroup_fence_operand(acc);
          release(now);
        } else {
          hopper::wgmma_wait_group<1>();
          if (n > 0) release(last);
          last = now;
        }
      };
      uint32_t even[4][4], odd[4][4];  // fragments of b for the step in flight and the next one
      if constexpr (transposed_tile) {
        if (steps > 0) fragments(even);
        for (int n = 0; n < steps; n += 2) {
          step(n, even, odd);
          if (n + 1 < steps) step(n + 1, odd, even);
        }
      } else {
        for (int n = 0; n < steps; ++n) step(n, even, odd);
      }
      if (thread == 0) ptx::mbarrier_arrive(has_read);
      if constexpr (!transposed_tile) {
        hopper::wgmma_wait_group<0>();
        hopper::warpgroup_fence_operand(acc);
        if (steps > 0) release(last);
      }

      // Send half of the sums to the other block: half of the columns, or of the rows if transposed.
      float mine[kSums];
#pragma unroll
      for (int to = 0; to < 2; ++to) {
        const float* const part = acc + to * kSums;
        if (to == rank) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) mine[i] = part[i];
        } else {
          const uint32_t there = ptx::mapa(sums + threadIdx.x, to), told = ptx::mapa(received, to);
#pragma unroll
          for (int i = 0; i < kSums; i += 4)
            hopper::st_async(there + i * kProducts * 4, part[i], part[i + 1], part[i + 2], part[i + 3], told);
        }
      }
      ptx::mbarrier_wait(received, done % 2);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float4 sum = sums[i / 4 * kProducts + threadIdx.x];
        mine[i] += sum.x, mine[i + 1] += sum.y, mine[i + 2] += sum.z, mine[i + 3] += sum.w;
      }
      // Where the results go, with the row stride: to a, or to `scratch`.
      const auto destination = [&] {
        struct Destination {
          TeamMode now;
          T* out;
          int64_t stride;
        };
        if (count) ptx::mbarrier_wait(free_panel, 0);
        const TeamMode now = count ? *mode : TeamMode::together;
        if (now == TeamMode::alone)
          return Destination{now, reinterpret_cast<T*>(scratch), int64_t{shape.across} * kColumns};
        return Destination{now, a + row0 * shape.stride, shape.stride};
      };
      // mine[4 j .. 4 j + 3] are two pairs of results, h = 0 and 1. Untransposed: the pair is two adjacent columns of
      // column group j, the rows of h = 0 and 1 are 8 apart. Transposed: the pair is two adjacent rows of row group j,
      // in column column_of(h).
      if constexpr (sizeof(T) == 2) {
        uint32_t words[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            words[h][j] = hopper::pack2<T>(mine[4 * j + 2 * h] + bias_values[2 * j],
                                           mine[4 * j + 2 * h + 1] + bias_values[2 * j + 1]);
          hopper::transpose_4x4(words[h], lane);
        }
        const auto [now, out, stride] = destination();
        if (now != TeamMode::absent) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = group * 64 + warp * 16 + lane / 4 + 8 * h;
            const int column = column0 + rank * kColumns / 2 + lane % 4 * 8;
            if (row0 + row < shape.rows && column < shape.columns)
              *reinterpret_cast<uint4*>(out + row * stride + column) = {words[h][0], words[h][1], words[h][2],
                                                                        words[h][3]};
          }
        }
      } else {
        const auto [now, out, stride] = destination();
        if (now != TeamMode::absent) {
#pragma unroll
          for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float left = mine[4 * j + 2 * h], right = mine[4 * j + 2 * h + 1];
              if constexpr (transposed_tile) {
                const int row = group * 64 + rank * 32 + 8 * j + 2 * (lane % 4), column = column_of(h);
                T* const to = out + row * stride + column;
                if (column < shape.columns && row0 + row < shape.rows) *to = left + bias_values[h];
                if (column < shape.columns && row0 + row + 1 < shape.rows) to[stride] = right + bias_values[h];
              } else {
                const int row = group * 64 + warp * 16 + lane / 4 + 8 * h, column = column_of(2 * j);
                if (row0 + row < shape.rows && column < shape.columns)
                  *reinterpret_cast<float2*>(out + row * stride + column) = {left + bias_values[2 * j],
                                                                             right + bias_values[2 * j + 1]};
              }
            }
        }
      }
    }
    if (!count) return;
    ptx::mbarrier_wait(free_panel, 0);
    if (*mode != TeamMode::alone) break;
    if (threadIdx.x == kProducts) {  // the other block may send again
      ptx::mbarrier_wait(received, done % 2);
      ptx::mbarrier_arrive_expect_tx(received, kSumBytes);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (done + 1 == shape.across) {
      // Both blocks have read the panel and written all its results to `scratch`.
      const int vectors = shape.columns * static_cast<int>(sizeof(T)) / 16;
      const int count_here = min(kRows, shape.rows - row0) * vectors;
      for (int i = rank * kThreads + threadIdx.x; i < count_here; i += kPair * kThreads) {
        const T* const from = reinterpret_cast<const T*>(scratch) + i / vectors * shape.across * kColumns;
        T* const to = a + (row0 + i / vectors) * shape.stride;
        reinterpret_cast<uint4*>(to)[i % vectors] = __ldcg(reinterpret_cast<const uint4*>(from) + i % vectors);
      }
      __syncwarp();
      ptx::cluster_arrive();
      ptx::cluster_wait();
      if (rank == 0 && threadIdx.x == 0) give_back_scratch(&scratch_lock);
      break;
    }
    column0 = (column0 / kColumns + 1) % shape.across * kColumns;
  }
  if (threadIdx.x == kProducts + 32 && *mode != TeamMode::together) leave_closed_team(own, team_blocks);
#endif
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- launch

template <class T, bool b_k_apart>
bool few_rows_fit(const Operands& o) {
  const int panels = up(o.a.size(0), kRows), clusters = panels * up(o.columns, kColumns);
  const int64_t scratch_bytes = int64_t{kRows} * up(o.columns, kColumns) * kColumns * sizeof(T);
  return panels <= kMostTeams && scratch_bytes <= kScratchBytes &&
         clusters <= clusters_at_once<few_rows_kernel<T, b_k_apart>, kThreads, kShared>(kPair);
}

template <class T, bool b_k_apart>
void multiply_few_rows(const Operands& o) {
  constexpr auto kernel = few_rows_kernel<T, b_k_apart>;
  constexpr int wide = kRowBytes / sizeof(T);
  const int64_t rows = o.a.size(0), inner = o.a.size(1);
  const int across = up(o.columns, kColumns), clusters = up(rows, kRows) * across;
  const Shape shape{static_cast<int>(rows), static_cast<int>(o.columns), across, up(inner, wide), o.a.stride(0)};
  T* const data = o.a.mutable_data_ptr<T>();
  const CUtensorMap a_map = map_of<T>(data, rows, inner, o.a.stride(0), kRows);
  const CUtensorMap b_map = b_k_apart ? map_of<T>(o.b.const_data_ptr<T>(), inner, o.columns, o.b.stride(0), wide)
                                      : map_of<T>(o.b.const_data_ptr<T>(), o.columns, inner, o.b.stride(0), kColumns);
  const Counters counters(o.a);
  Launch launch(clusters * kPair, kThreads, kShared);
  launch.balance_clusters();
  start(launch, kPair, kernel, a_map, b_map, data, o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr, shape,
        counters.own<TeamStart>(), counters.slot.value_or(0));
}

// Both, for both layouts of b.
#define MATMULS_FEW_ROWS(T)                                   \
  template bool few_rows_fit<T, false>(const Operands&);      \
  template bool few_rows_fit<T, true>(const Operands&);       \
  template void multiply_few_rows<T, false>(const Operands&); \
  template void multiply_few_rows<T, true>(const Operands&);
MATMULS_FEW_ROWS(float)
MATMULS_FEW_ROWS(c10::BFloat16)
MATMULS_FEW_ROWS(c10::Half)
#undef MATMULS_FEW_ROWS

}  // namespace matmuls::in_place
#endif
