// Packs a sparse matrix into the layout of layout.h on a GPU.
#ifdef __CUDACC__
#include "sparse/spmm/packed_mma/layout.h"

#include <ATen/Dispatch.h>

#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 1024, kAtOnce = 4;  // nonzeros that a lane loads at once
constexpr int kMasks = kPackedLanes / 2;     // words of a tile: the masks of two lanes each

// Calls do_with(row in the tile, column of A, p) for each nonzero p of 64 rows. A warp takes a row.
template <class I, class F>
__device__ void for_each_nonzero(const I* crow, const I* col, int64_t first_row, int64_t rows, const F& do_with) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < kPackedRows && first_row + r < rows; r += kThreads / 32) {
    const int64_t end = crow[first_row + r + 1];
    for (int64_t p = crow[first_row + r] + lane; p < end; p += 32 * kAtOnce) {
      int c[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) c[i] = p + 32 * i < end ? static_cast<int>(col[p + 32 * i]) : -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (c[i] >= 0) do_with(r, c[i], p + 32 * i);
    }
  }
}

// The tiles of 64 rows that this block handles: as many as its shared memory holds masks for.
struct Steps {
  int first, many;

  __device__ Steps(const PackedLayout& m, int at_once)
      : first(static_cast<int>(blockIdx.y) * at_once), many(min(at_once, m.steps - first)) {}
  // The tile of a column of A, counted from `first`; -1: another block handles it.
  __device__ int of(int column) const {
    const int step = column / kPackedColumns - first;
    return step >= 0 && step < many ? step : -1;
  }
};

// masks [steps, kMasks] <- which pairs hold a nonzero.
template <class I>
__device__ void find_pairs(const I* crow, const I* col, int64_t first_row, const PackedLayout& m, const Steps& steps,
                           unsigned* masks) {
  for (int i = static_cast<int>(threadIdx.x); i < steps.many * kMasks; i += kThreads) masks[i] = 0;
  __syncthreads();
  for_each_nonzero(crow, col, first_row, m.rows, [&](int r, int c, int64_t) {
    const int step = steps.of(c);
    if (step < 0) return;
    const PackedPlace place(r, c % kPackedColumns, m.in_order);
    atomicOr(&masks[step * kMasks + place.lane / 2], 1u << (place.lane % 2 * kPackedPairs + place.pair));
  });
  __syncthreads();
}

// A block takes 64 rows, or `at_once` of their tiles.
template <class I>
__global__ void __launch_bounds__(kThreads)
    measure_kernel(const PackedLayout m, int at_once, const I* crow, const I* col, int* least) {
  extern __shared__ unsigned masks[];
  const Steps steps(m, at_once);
  find_pairs(crow, col, int64_t{blockIdx.x} * kPackedRows, m, steps, masks);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int most = 0;
  for (int step = static_cast<int>(threadIdx.x) / 32; step < steps.many; step += kThreads / 32) {
    const unsigned* const own = masks + step * kMasks;
    most = max(most, sum_of_group<32>(__popc(own[lane]) + __popc(own[32 + lane])));
  }
  if (lane == 0) atomicMax(least, (kPackedHeads + 4 * most + kPackedUnit - 1) / kPackedUnit);
}

// A block takes 64 rows, or `at_once` of their tiles: writes the heads, then stores each nonzero into its pair. packed
// was zeroed before.
template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const PackedLayout m, int at_once, const I* crow, const I* col, const I* order, const T* values,
                unsigned bytes, unsigned char* packed) {
  extern __shared__ unsigned masks[];
  const Steps steps(m, at_once);
  const auto tile_of = [&](int step) { return packed + (int64_t{blockIdx.x} * m.steps + steps.first + step) * bytes; };
  find_pairs(crow, col, int64_t{blockIdx.x} * kPackedRows, m, steps, masks);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int step = static_cast<int>(threadIdx.x) / 32; step < steps.many; step += kThreads / 32) {
    int before = 0;
    for (int i = lane; i < kMasks; i += 32) {
      const unsigned two = masks[step * kMasks + i], first = two & 0xffff;
      const int upto = up_to_lane(__popc(two));
      const unsigned begin = 4 * (before + upto - __popc(two));
      reinterpret_cast<uint2*>(tile_of(step))[i] = {first | begin << 16, two >> 16 | (begin + 4 * __popc(first)) << 16};
      before += __shfl_sync(0xffffffffu, upto, 31);
    }
  }
  __syncthreads();
  for_each_nonzero(crow, col, int64_t{blockIdx.x} * kPackedRows, m.rows, [&](int r, int c, int64_t p) {
    const int step = steps.of(c);
    if (step < 0) return;
    const PackedPlace place(r, c % kPackedColumns, m.in_order);
    unsigned char* const tile = tile_of(step);
    const unsigned head = reinterpret_cast<const unsigned*>(tile)[place.lane];
    const unsigned at = (head >> 16) + 4 * __popc(head & ((1u << place.pair) - 1));
    if (kPackedHeads + at < bytes)
      reinterpret_cast<T*>(tile + kPackedHeads + at)[place.side] = values[order ? static_cast<int64_t>(order[p]) : p];
  });
}

// Launches a block per 64 rows, or several if shared memory cannot hold the masks of all their tiles.
template <auto kernel, class... Given>
void launch_by_rows(const PackedLayout& m, const Given&... given) {
  constexpr int64_t kOfStep = kMasks * sizeof(unsigned);
  const auto at_once = static_cast<int>(std::min<int64_t>(m.steps, device_limits().shared_per_block / kOfStep));
  const dim3 grid(static_cast<unsigned>(m.down), static_cast<unsigned>(up(m.steps, at_once)));
  allow_shared_memory<kernel>();
  Launch(grid, kThreads, at_once * kOfStep)(kernel, m, at_once, given...);
}

}  // namespace

void measure_packed_on_gpu(const Pattern& p, const PackedLayout& m, const at::Tensor& least) {
  const OperationGuard guard(kPackedOp, p.crow);
  int* const to = least.mutable_data_ptr<int>();
  C10_CUDA_CHECK(cudaMemsetAsync(to, 0, sizeof(int), c10::cuda::getCurrentCUDAStream()));
  if (m.tiles() == 0) return;
  AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kPackedOp, [&] {
    launch_by_rows<measure_kernel<index_t>>(m, p.crow.const_data_ptr<index_t>(), p.col.const_data_ptr<index_t>(), to);
  });
}

void pack_on_gpu(const Pattern& p, const at::Tensor& values, const PackedLayout& m, const at::Tensor& packed) {
  const OperationGuard guard(kPackedOp, values);
  auto* const to = static_cast<unsigned char*>(packed.mutable_data_ptr());
  if (m.tiles() == 0) return;
  C10_CUDA_CHECK(cudaMemsetAsync(to, 0, packed.nbytes(), c10::cuda::getCurrentCUDAStream()));
  AT_DISPATCH_REDUCED_FLOATING_TYPES(values.scalar_type(), kPackedOp, [&] {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kPackedOp, [&] {
      launch_by_rows<pack_kernel<scalar_t, index_t>>(
          m, p.crow.const_data_ptr<index_t>(), p.col.const_data_ptr<index_t>(), indices_or_null<index_t>(p.order),
          values.const_data_ptr<scalar_t>(), static_cast<unsigned>(packed.size(1) * 2), to);
    });
  });
}

}  // namespace matmuls
#endif
