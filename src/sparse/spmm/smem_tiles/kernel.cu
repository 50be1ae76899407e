// Product by tiles (kernel.h, layout.h): out = A @ B in float32 on Hopper.
//
//   block:    one tile of B: tile_rows rows x 32 columns in shared memory
//   cluster:  all tiles of 32 columns. Its blocks process the same panel of A and send each row's sums to the block
//             that owns the row, which adds them in fixed order. With a single tile a block goes from panel to panel.
//
// (Pairs of clusters that load their tiles together, to halve reads from the L2, are slower by up to a microsecond.)
//
// A lane sums all 32 columns for its nonzeros: no shuffle per nonzero, and shared memory bandwidth, 128 bytes a cycle,
// is the only bound. Lane j of eight reads vector k ^ j of a row's eight 16-byte vectors as its k-th: eight lanes hit
// different banks whatever rows they read.
#ifdef __CUDACC__
#include "sparse/spmm/smem_tiles/kernel.h"

#include "glue/handles.h"
#include "gpu/hopper.cuh"
#include "gpu/hopper_limits.h"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int kColumns = 32, kVectors = kColumns / 4, kRowBytes = kColumns * 4;
constexpr int kMostThreads = 640;
constexpr int kMostWarps = kMostThreads / 32;

struct TileArgs {
  const int4* heads;
  const TileSlot* slots;
  const uint16_t* places;
  const float* values;
  float* out;
  int rows, n, tiles, tile_rows, panels, panel_rows, slices, share;  // share: rows of a panel that a block adds up
  int items, clusters;                                               // an item: a panel and 32 columns of B
};

// Two nonzeros: columns in the tile, the first in the lower half, and values.
struct TileEntries {
  uint32_t places;
  float2 values;
};

// The nonzeros of a lane in a step.
__device__ TileEntries tile_entries(const TileArgs& m, int step, int lane) {
  const int64_t at = (int64_t{step} * 32 + lane) * 2;
  return {__ldg(reinterpret_cast<const uint32_t*>(m.places + at)),
          __ldg(reinterpret_cast<const float2*>(m.values + at))};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ float4 load_shared(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}
__device__ void store_to_cluster(uint32_t at, const float (&x)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// Adds up, over all tiles, this block's share of a panel's rows and writes it.
__device__ void add_tiles(const TileArgs& m, int item, const float* sums, int tile) {
  const int first = tile * m.share, first_row = item % m.panels * m.panel_rows + first, c0 = item / m.panels * kColumns;
  const int many = min(min(m.share, m.panel_rows - first), m.rows - first_row);
  for (int i = static_cast<int>(threadIdx.x); i < many * kVectors; i += static_cast<int>(blockDim.x)) {
    const int c = c0 + i % kVectors * 4;
    if (c >= m.n) continue;
    float4 sum = {};
#pragma unroll 4
    for (int t = 0; t < m.tiles; ++t) {
      const float4 x = *reinterpret_cast<const float4*>(sums + t * m.share * kColumns + i * 4);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    *reinterpret_cast<float4*>(m.out + (int64_t{first_row} + i / kVectors) * m.n + c) = sum;
  }
}
#endif

template <int L>
__global__ void __launch_bounds__(kMostThreads, 1)
    spmm_tiles_kernel(const __grid_constant__ TileArgs m, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(128) unsigned char tile[];
  __shared__ uint64_t ready[kTileStages];
  const int rank = static_cast<int>(ptx::cluster_rank()), cluster = static_cast<int>(blockIdx.x) / m.tiles;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warps = static_cast<int>(blockDim.x) / 32;
  const int j = lane % kVectors, stage_rows = m.tile_rows / kTileStages;
  float* const kept = reinterpret_cast<float*>(tile + (m.tile_rows + 1) * kRowBytes);
  const uint32_t mine = ptx::shared_address(tile) + j * 16;
  if (thread < kVectors) *reinterpret_cast<uint4*>(tile + m.tile_rows * kRowBytes + thread * 16) = uint4{};
  if (thread < kTileStages) ptx::mbarrier_init(&ready[thread]);
  ptx::fence_mbarrier_init();
  __syncthreads();
  if (m.tiles > 1) ptx::cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto item_of = [&](int i) { return static_cast<int>(int64_t{i} * m.items / m.clusters); };
  const int begin = item_of(cluster), end = item_of(cluster + 1);
  bool there = false;  // the tile is loaded
  unsigned parity = 1;
  for (int item = begin; item < end; ++item) {
    const int panel = item % m.panels, c0 = item / m.panels * kColumns;
    if (item == begin || panel == 0) {
      if (item > begin) __syncthreads();
      parity ^= 1, there = false;
      if (thread < kTileStages) {
        ptx::mbarrier_arrive_expect_tx(&ready[thread], stage_rows * kRowBytes);
        hopper::tma_load_2d(map, tile + thread * stage_rows * kRowBytes, &ready[thread], c0,
                            rank * m.tile_rows + thread * stage_rows);
      }
      __syncwarp();
    }
    const int base = (rank * m.panels + panel) * m.slices;
    int slice = thread / 32;
    int4 head = slice < m.slices ? __ldg(m.heads + base + slice) : int4{};
    TileEntries entries = tile_entries(m, head.x, lane);
    if (m.tiles > 1) ptx::cluster_wait();  // all blocks have started, and may be sent to
    for (; slice < m.slices; slice += warps) {
      const int4 next_head = slice + warps < m.slices ? __ldg(m.heads + base + slice + warps) : int4{};
      const int row = m.slots[(base + slice) * (32 / L) + lane / L].row;
      const int until[kTileStages] = {head.y & 0xffff, head.y >> 16, head.z & 0xffff, head.z >> 16};
      float sums[kVectors][4] = {};
      int step = 0;
#pragma unroll
      for (int stage = 0; stage < kTileStages; ++stage) {
        if (there && stage < kTileStages - 1) continue;
        if (!there) ptx::mbarrier_wait(&ready[stage], parity);
#pragma unroll 1
        while (step < until[stage]) {
          ++step;
          const auto next = tile_entries(m, step < until[kTileStages - 1] ? head.x + step : next_head.x, lane);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32_t place = e == 0 ? entries.places & 0xffff : entries.places >> 16;
            const float value = e == 0 ? entries.values.x : entries.values.y;
#pragma unroll
            for (int k = 0; k < kVectors; ++k) {
              const float4 x = load_shared((mine + place * kRowBytes) ^ (k * 16));
              sums[k][0] += value * x.x, sums[k][1] += value * x.y;
              sums[k][2] += value * x.z, sums[k][3] += value * x.w;
            }
          }
          entries = next;
        }
      }
      there = true;
      if (until[kTileStages - 1] == 0) entries = tile_entries(m, next_head.x, lane);
      head = next_head;
      // Vector k of this lane is vector k ^ apart of its partner. Each adds the partner's sums for half of the vectors
      // and drops the other half.
#pragma unroll
      for (int apart = 1; apart < L; apart *= 2) {
#pragma unroll
        for (int k = 0; k < kVectors; k += 2 * apart)
#pragma unroll
          for (int v = 0; v < 4; ++v)
            sums[k][v] += __shfl_xor_sync(kAll, sums[apart < kVectors ? k + apart : k][v], apart);
      }
      if (row < 0 || lane % L >= kVectors) continue;
      const int owner = row / m.share;
      const uint32_t to = ptx::mapa(kept + (rank * m.share + row - owner * m.share) * kColumns, owner);
#pragma unroll
      for (int k = 0; k < kVectors; k += L) {
        const int c = (k ^ j) * 4;
        if (m.tiles > 1)
          store_to_cluster(to + c * 4, sums[k]);
        else if (c0 + c < m.n)
          *reinterpret_cast<float4*>(m.out + (int64_t{panel} * m.panel_rows + row) * m.n + c0 + c) = {
              sums[k][0], sums[k][1], sums[k][2], sums[k][3]};
      }
    }
    if (!there)  // a warp without a slice: a tile must not be loaded over one that is still in flight
      for (int stage = 0; stage < kTileStages; ++stage) ptx::mbarrier_wait(&ready[stage], parity);
    there = true;
  }
  if (m.tiles == 1) return;
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  add_tiles(m, begin, kept, rank);
#endif
}

}  // namespace

namespace spmm {
namespace {

using at::Tensor;

// Boxes of one stage, unswizzled, because lanes read arbitrary rows.
CUtensorMap map_of(const Tensor& dense, int rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(dense.size(1)), static_cast<cuuint64_t>(dense.size(0))};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(dense.stride(0)) * 4};
  const cuuint32_t box[2] = {kColumns, static_cast<cuuint32_t>(rows)};
  return tensor_map<float>(kOp, dense.const_data_ptr(), sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

int share_of(const TileLayout& m) { return (m.panel_rows + m.tiles - 1) / m.tiles; }
int shared_bytes(const TileLayout& m) {
  return (m.tile_rows + 1) * kRowBytes + (m.tiles > 1 ? m.tiles * share_of(m) * kRowBytes : 0);
}

template <int L>
int at_once(const TileLayout& m) {
  return clusters_at_once<spmm_tiles_kernel<L>, kMostThreads, kHopperBlockBytes>(m.tiles);
}
int clusters_at_once_of(const TileLayout& m) {
  return m.lanes == 2 ? at_once<2>(m) : m.lanes == 4 ? at_once<4>(m) : m.lanes == 8 ? at_once<8>(m) : at_once<16>(m);
}

template <int L>
void launch(const TileLayout& m, TileArgs& args, const Tensor& dense) {
  const int rounds = static_cast<int>(ceil_of(m.slices, kMostWarps)),
            warps = static_cast<int>(ceil_of(m.slices, rounds));
  args.clusters = m.tiles > 1 ? args.items : std::min(args.items, at_once<L>(m));
  Launch launch(args.clusters * m.tiles, 32 * warps, shared_bytes(m));
  launch.in_clusters(m.tiles);
  launch.programmatic();
  launch(spmm_tiles_kernel<L>, args, map_of(dense, m.tile_rows / kTileStages));
}

}  // namespace

bool can_go_by_tiles(const TiledCall& c) {
  const TileLayout& m = c.layout;
  const Tensor& dense = c.dense;
  if (dense.scalar_type() != at::kFloat || c.packed.scalar_type() != at::kFloat || dense.dim() != 2 ||
      dense.size(0) != m.columns || dense.numel() == 0 || dense.stride(1) != 1 || !of_vectors(dense.unsqueeze(0)) ||
      dense.size(1) > INT32_MAX / m.panels || dense.stride(0) < dense.size(1) || dense.stride(0) >= int64_t{1} << 38 ||
      !has_hopper_kernels(dense.get_device()) || shared_bytes(m) > kHopperBlockBytes)
    return false;
  const OperationGuard guard(kOp, dense);
  if (clusters_at_once_of(m) == 0) return false;
  check_tiles(m, c.heads, c.slots);
  TORCH_CHECK_VALUE(c.places.scalar_type() == at::kShort && c.places.sizes() == c.packed.sizes() &&
                        c.places.dim() == 1 && c.places.is_contiguous() && c.packed.is_contiguous() &&
                        c.places.size(0) >= 64 && c.places.size(0) % 64 == 0 && c.heads.device() == dense.device() &&
                        c.places.device() == dense.device() && c.packed.device() == dense.device(),
                    kOp, ": expected entries as csr_tile_entries makes them, got ", c.places.sizes(), " and ",
                    c.packed.sizes());
  return true;
}

Tensor run_tiles(const TiledCall& c) {
  const OperationGuard guard(kOp, c.dense);
  const TileLayout& m = c.layout;
  const int64_t n = c.dense.size(1);
  const Tensor out = empty({m.rows, n}, c.dense.options());
  TileArgs args{};
  args.heads = static_cast<const int4*>(c.heads.const_data_ptr());
  args.slots = static_cast<const TileSlot*>(c.slots.const_data_ptr());
  args.places = static_cast<const uint16_t*>(c.places.const_data_ptr());
  args.values = c.packed.const_data_ptr<float>(), args.out = out.mutable_data_ptr<float>();
  args.rows = m.rows, args.n = static_cast<int>(n), args.tiles = m.tiles, args.tile_rows = m.tile_rows;
  args.panels = m.panels, args.panel_rows = m.panel_rows, args.slices = m.slices, args.share = share_of(m);
  args.items = static_cast<int>(ceil_of(n, kColumns)) * m.panels;
  if (m.lanes == 2) launch<2>(m, args, c.dense);
  if (m.lanes == 4) launch<4>(m, args, c.dense);
  if (m.lanes == 8) launch<8>(m, args, c.dense);
  if (m.lanes == 16) launch<16>(m, args, c.dense);
  return out;
}

}  // namespace spmm
}  // namespace matmuls
#endif
