// Builds the tile layout of layout.h on a GPU.
#ifdef __CUDACC__
#include "sparse/spmm/smem_tiles/layout.h"

#include <climits>

#include "glue/handles.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 256;

// A block per panel and tile.
__global__ void __launch_bounds__(kThreads)
    lay_out_kernel(const TileLayout m, const int* crow, const int* col, int4* heads, TileSlot* slots) {
  __shared__ int steps[kMostPanelRows], until[kMostPanelRows][kTileStages];  // per row; per slice
  const int tile = static_cast<int>(blockIdx.y), panel = static_cast<int>(blockIdx.x);
  const int of_slice = 32 / m.lanes, step = m.lanes * kEach, base = (tile * m.panels + panel) * m.slices;
  const int first_row = panel * m.panel_rows, first_column = tile * m.tile_rows;
  const auto edges_of = [&](int row, int (&edges)[kTileStages + 1]) {
    int at = crow[first_row + row];
    const int end = crow[first_row + row + 1];
    for (int s = 0; s <= kTileStages; ++s)
      edges[s] = at = first_from(col, at, end, first_column + m.tile_rows / kTileStages * s);
  };
  const int many = min(m.panel_rows, m.rows - first_row);  // the last panel may be empty
  for (int r = static_cast<int>(threadIdx.x); r < m.slices; r += kThreads)
    for (int s = 0; s < kTileStages; ++s) until[r][s] = s < kTileStages - 1 ? INT_MAX : 0;
  for (int r = static_cast<int>(threadIdx.x); r < many; r += kThreads) {
    int edges[kTileStages + 1];
    edges_of(r, edges);
    steps[r] = (edges[kTileStages] - edges[0] + step - 1) / step;
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < m.slices * of_slice; r += kThreads) {
    TileSlot slot{-1, 0, 0};
    int rank = r;
    if (r < many) {
      int edges[kTileStages + 1];
      edges_of(r, edges);
      slot = {r, edges[0], edges[kTileStages]};
      rank = 0;
      for (int q = 0; q < many; ++q) rank += steps[q] > steps[r] || (steps[q] == steps[r] && q < r);
      const int slice = rank / of_slice;
      for (int s = 0; s < kTileStages - 1; ++s)
        if (edges[s + 1] < edges[kTileStages]) atomicMin(&until[slice][s], (edges[s + 1] - edges[0]) / step);
      atomicMax(&until[slice][kTileStages - 1], steps[r]);
    }
    slots[base * of_slice + rank] = slot;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < m.slices; i += kThreads) {
    const int all = until[i][3];
    heads[base + i] = {all, min(until[i][0], all) | min(until[i][1], all) << 16, min(until[i][2], all) | all << 16, 0};
  }
}

// Replaces each slice's number of steps by its first step: an exclusive prefix sum, by one block.
__global__ void __launch_bounds__(kSparseThreads) first_steps_kernel(int4* heads, int slices) {
  int first = 0;
  for (int from = 0; from < slices; from += kSparseThreads) {
    const int i = from + static_cast<int>(threadIdx.x);
    const auto [before, all] = count_before(i < slices ? heads[i].x : 0);
    if (i < slices) heads[i].x = first + before;
    first += all;
  }
}

// A warp per slice.
__global__ void __launch_bounds__(kThreads)
    fill_tiles_kernel(const TileLayout m, const int4* heads, const TileSlot* slots, const int* col, const int* order,
                      const float* values, uint16_t* places, float* packed, int room) {
  const int slice = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, all = m.tiles * m.panels * m.slices;
  if (slice >= all) return;
  const int4 head = heads[slice];
  const TileSlot slot = slots[slice * (32 / m.lanes) + lane / m.lanes];
  const int first_column = slice / (m.panels * m.slices) * m.tile_rows;
  const int steps = min((head.z >> 16) + (slice == all - 1 ? 1 : 0), room - head.x);
  for (int i = 0; i < steps; ++i)
    for (int e = 0; e < kEach; ++e) {
      const int64_t p = int64_t{slot.begin} + (i * m.lanes + lane % m.lanes) * kEach + e;
      const int64_t to = (int64_t{head.x + i} * 32 + lane) * kEach + e;
      places[to] = static_cast<uint16_t>(p < slot.end ? col[p] - first_column : m.tile_rows);
      packed[to] = p < slot.end ? values[order ? order[p] : p] : 0;
    }
}

}  // namespace

void lay_out_on_gpu(const Pattern& p, const TileLayout& m, const at::Tensor& heads, const at::Tensor& slots) {
  const OperationGuard guard("csr_tiles", p.crow);
  const dim3 grid(static_cast<unsigned>(m.panels), static_cast<unsigned>(m.tiles));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto* const at = static_cast<int4*>(heads.mutable_data_ptr());
  lay_out_kernel<<<grid, kThreads, 0, stream>>>(m, p.crow.const_data_ptr<int>(), p.col.const_data_ptr<int>(), at,
                                                static_cast<TileSlot*>(slots.mutable_data_ptr()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  first_steps_kernel<<<1, kSparseThreads, 0, stream>>>(at, m.tiles * m.panels * m.slices);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void fill_tiles_on_gpu(const Pattern& p, const at::Tensor& values, const TileLayout& m, const at::Tensor& heads,
                       const at::Tensor& slots, const at::Tensor& places, const at::Tensor& packed) {
  const OperationGuard guard("csr_tile_entries", values);
  const int64_t warps = int64_t{m.tiles} * m.panels * m.slices;
  fill_tiles_kernel<<<static_cast<unsigned>(ceil_of(warps, kThreads / 32)), kThreads, 0,
                      c10::cuda::getCurrentCUDAStream()>>>(
      m, static_cast<const int4*>(heads.const_data_ptr()), static_cast<const TileSlot*>(slots.const_data_ptr()),
      p.col.const_data_ptr<int>(), indices_or_null<int>(p.order), values.const_data_ptr<float>(),
      static_cast<uint16_t*>(places.mutable_data_ptr()), packed.mutable_data_ptr<float>(),
      static_cast<int>(packed.size(0) / kStepNonzeros));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace matmuls
#endif
