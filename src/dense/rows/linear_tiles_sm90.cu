// linear_tiles on Hopper (linear_rows.h): many rows, y = activation(x @ w^T + bias) in tiles of 128 x 256 results.
//
// A cluster of two blocks computes two tiles below each other, then the next two, until none is left. Each block loads
// its own tile of x and half of w's tile, which is multicast to both. The warps of a block:
//
//   4, multiplying   ring -> 64 x 256 sums in registers -> + bias, rounded -> buffer in shared memory
//   4, multiplying   (the same for the other 64 rows)
//   3, activating    buffer -> activation -> y, while the next tile is multiplied
//   1, loading       x, w by TMA -> ring of stages
//
// So neither the activation's arithmetic nor the writes of y take time from the products. The last tile of a cluster is
// activated and written by the multiplying warps: nothing is left to multiply, and they are more. The sum is rounded to
// 16 bits before the activation, as in torch.
//
//   barrier    completes when                                        waited for by
//   full       a stage's bytes have arrived                          multiplying warpgroups
//   empty      both blocks have multiplied a stage                   loading thread
//   has_bias   the tile's bias is in shared memory                   multiplying warpgroups
//   staged     both warpgroups have written their sums               activating warps
//   drained    the activating warps have read the buffer             multiplying warpgroups
//
// No block waits for one that is not running: only for the other block of its cluster, which starts with it.
#ifdef __CUDACC__
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <type_traits>

#include "dense/rows/linear_rows.h"
#include "dense/rows/operands.cuh"
#include "gpu/launch.cuh"

namespace matmuls::dense_rows {
namespace {

constexpr int kPair = 2;                    // blocks of a cluster
constexpr int kRows = 128, kColumns = 256;  // of a block's tile
constexpr int kStages = 3;
constexpr int kMultiplying = 2;  // warpgroups
constexpr int kActivating = 3;   // warps
constexpr int kThreads = (kMultiplying + 1) * kGroup;
constexpr int kXBytes = kRows * kRowBytes, kStageBytes = kXBytes + kColumns * kRowBytes;
constexpr int kOutBytes = kColumns * 2;  // of a row of the buffer: 16-byte chunk c of row r is stored at c ^ (r % 8)
constexpr int kBarriers = 2 * kStages + 3;
constexpr int kShared = kStages * kStageBytes + kRows * kOutBytes + kColumns * 4 + 8 * kBarriers;
static_assert(kShared <= 227 << 10);

struct Shape {
  int rows, columns, steps;  // of the result; K steps
  int across, tiles;         // tiles of the result, of kPair * kRows rows
  int64_t stride;            // row stride of y
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Barriers {
  uint64_t *full, *empty, *has_bias, *staged, *drained;
  __device__ explicit Barriers(uint64_t* all)
      : full(all), empty(all + kStages), has_bias(all + 2 * kStages), staged(has_bias + 1), drained(has_bias + 2) {}
  __device__ void init() const {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], kPair * kMultiplying);
    }
    ptx::mbarrier_init(has_bias, kActivating * 32);
    ptx::mbarrier_init(staged, kMultiplying * kGroup);
    ptx::mbarrier_init(drained, kActivating * 32);
    ptx::fence_mbarrier_init();
  }
};

// Calls f(first row of this block's tile, first column, parity of its number, whether it is the last) for each of the
// cluster's tiles.
__device__ inline void each_tile(const Shape& shape, const auto& f) {
  const int clusters = gridDim.x / kPair, rank = static_cast<int>(ptx::cluster_rank());
  unsigned turn = 0;
  for (int tile = blockIdx.x / kPair; tile < shape.tiles; tile += clusters, turn ^= 1)
    f((tile / shape.across * kPair + rank) * kRows, tile % shape.across * kColumns, turn,
      tile + clusters >= shape.tiles);
}

// The loading thread.
__device__ inline void load_tiles(const CUtensorMap& x_map, const CUtensorMap& w_map, unsigned char* stages,
                                  const Barriers& b, const Shape& shape) {
  constexpr int half = kColumns / kPair;
  constexpr uint16_t both = (1 << kPair) - 1;
  const int rank = static_cast<int>(ptx::cluster_rank());
  unsigned n = 0;
  each_tile(shape, [&](int row0, int column0, unsigned, bool) {
    for (int k = 0; k < shape.steps; ++k, ++n) {
      const int s = n % kStages;
      unsigned char* const tile = stages + s * kStageBytes;
      // Both blocks must have read this stage: half of w goes to both.
      ptx::mbarrier_wait(&b.empty[s], n / kStages % 2 ^ 1);
      ptx::mbarrier_arrive_expect_tx(&b.full[s], kStageBytes);
      hopper::tma_load_2d(x_map, tile, &b.full[s], k * kWide, row0);
      hopper::tma_load_2d_multicast(both, w_map, tile + kXBytes + rank * half * kRowBytes, &b.full[s], k * kWide,
                                    column0 + rank * half);
    }
  });
}

// A warpgroup's 64 rows of each tile: products, + bias, to the buffer; of the last tile, the activation too, to y.
template <Activation activation, class T>
__device__ inline void multiply_tiles(const unsigned char* stages, unsigned char* buffer, const float* biases, T* y,
                                      const Barriers& b, const Shape& shape) {
  // Uniform within a warp, which the compiler knows only of a shuffle's result.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0), thread = threadIdx.x % kGroup, lane = threadIdx.x % 32;
  unsigned char* const out = buffer + (threadIdx.x / 32 * 16 + lane % 16) * kOutBytes;
  float acc[kColumns / 2];
  unsigned n = 0;
  const auto release = [&](unsigned step) {  // one thread for each block of the cluster
    if (thread < kPair) hopper::mbarrier_arrive_remote(&b.empty[step % kStages], thread);
  };
  each_tile(shape, [&](int row0, int column0, unsigned turn, bool is_last) {
    for (int k = 0; k < shape.steps; ++k, ++n) {
      const unsigned char* const tile = stages + n % kStages * kStageBytes;
      const uint64_t rows = hopper::smem_descriptor(tile + group * 64 * kRowBytes);
      const uint64_t columns = hopper::smem_descriptor(tile + kXBytes);
      ptx::mbarrier_wait(&b.full[n % kStages], n / kStages % 2);
      hopper::warpgroup_fence_operand(acc);
      hopper::wgmma_fence();
#pragma unroll
      for (int part = 0; part < 4; ++part)  // 32 bytes of K each; descriptor units of 16 bytes
        hopper::wgmma_ss<T, false>(acc, rows + part * 2, columns + part * 2, k > 0 || part > 0);
      hopper::wgmma_commit_group();
      hopper::warpgroup_fence_operand(acc);
      hopper::wgmma_wait_group<1>();
      if (k > 0) release(n - 1);
    }
    hopper::wgmma_wait_group<0>();
    hopper::warpgroup_fence_operand(acc);
    release(n - 1);
    ptx::mbarrier_wait(b.has_bias, turn);
    if (is_last) {
#pragma unroll
      for (int unit = 0; unit < kColumns / 16; ++unit)
        write_unit<activation, true>(acc, unit, biases, y, shape.stride, row0 + threadIdx.x / 32 * 16, column0,
                                     shape.rows, shape.columns);
      return;
    }
    ptx::mbarrier_wait(b.drained, turn ^ 1);
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {  // 16 rows of 16 columns a warp
      const float* const sums = acc + 8 * j;
      const float2 left = *reinterpret_cast<const float2*>(biases + 16 * j + 2 * (lane % 4));
      const float2 right = *reinterpret_cast<const float2*>(biases + 16 * j + 8 + 2 * (lane % 4));
      hopper::stmatrix_x4(
          out + ((2 * j + lane / 16) ^ lane % 8) * 16, hopper::pack2<T>(sums[0] + left.x, sums[1] + left.y),
          hopper::pack2<T>(sums[2] + left.x, sums[3] + left.y), hopper::pack2<T>(sums[4] + right.x, sums[5] + right.y),
          hopper::pack2<T>(sums[6] + right.x, sums[7] + right.y));
    }
    ptx::mbarrier_arrive(b.staged);
  });
}

// The activating warps: each reads, activates and writes a row of 512 bytes at a time.
template <Activation activation, class T>
__device__ inline void activate_tiles(const unsigned char* buffer, float* biases, T* y, const T* bias,
                                      const Barriers& b, const Shape& shape) {
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;
  each_tile(shape, [&](int row0, int column0, unsigned turn, bool is_last) {
    for (int c = thread; c < kColumns; c += kActivating * 32)
      biases[c] = bias && column0 + c < shape.columns ? static_cast<float>(bias[column0 + c]) : 0.f;
    ptx::mbarrier_arrive(b.has_bias);
    if (is_last) return;
    ptx::mbarrier_wait(b.staged, turn);
    const int column = column0 + lane * 8;
#pragma unroll 4
    for (int r = warp; r < kRows; r += kActivating) {
      uint4 words = *reinterpret_cast<const uint4*>(buffer + r * kOutBytes + (lane ^ r % 8) * 16);
      uint32_t* const word = &words.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* const z = reinterpret_cast<const T*>(&word[i]);
        word[i] = hopper::pack2<T>(activated_16bit<activation>(static_cast<float>(z[0])),
                                   activated_16bit<activation>(static_cast<float>(z[1])));
      }
      if (row0 + r < shape.rows && column < shape.columns)
        *reinterpret_cast<uint4*>(y + (row0 + r) * shape.stride + column) = words;
    }
    ptx::mbarrier_arrive(b.drained);
  });
}

#endif

template <Activation activation, class T>
__global__ void __launch_bounds__(kThreads, 1)
    linear_tiles_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, T* y,
                        const T* bias, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char stages[];
  unsigned char* const buffer = stages + kStages * kStageBytes;
  float* const biases = reinterpret_cast<float*>(buffer + kRows * kOutBytes);
  const Barriers barriers(reinterpret_cast<uint64_t*>(biases + kColumns));
  const int group = threadIdx.x / kGroup;
  if (threadIdx.x == 0) {
    hopper::prefetch_tensormap(x_map);
    hopper::prefetch_tensormap(w_map);
    barriers.init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the barriers of both blocks are initialized
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Registers of the three warpgroups: 200 + 200 + 104 = 3 x 168, of 128 threads each.
  if (group < kMultiplying) {
    hopper::setmaxnreg_inc<200>();
    multiply_tiles<activation>(stages, buffer, biases, y, barriers, shape);
  } else {
    hopper::setmaxnreg_dec<104>();
    if (threadIdx.x < kMultiplying * kGroup + kActivating * 32)
      activate_tiles<activation>(buffer, biases, y, bias, barriers, shape);
    else if (threadIdx.x % 32 == 0)
      load_tiles(x_map, w_map, stages, barriers, shape);
  }
  __syncwarp();  // the warp of the loading thread
  // The other block may still signal this block's barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

// ----------------------------------------------------------------------------------------------------------- launch

template <Activation activation, class T>
bool launch_as(const Gemm& g, const at::Tensor& bias) {
  constexpr auto kernel = linear_tiles_kernel<activation, T>;
  const int clusters = clusters_at_once<kernel, kThreads, kShared>(kPair);
  if (clusters == 0) return false;
  // In BLAS form g.x is w, of g.m rows, and g.y is x, of g.n rows.
  const int across = up(g.m, kColumns), tiles = up(g.n, kPair * kRows) * across;
  const Shape shape{static_cast<int>(g.n), static_cast<int>(g.m), up(g.k, kWide), across, tiles, g.ldd};
  const CUtensorMap x_map = map_of<T>(g.y, g.n, g.k, kRows), w_map = map_of<T>(g.x, g.m, g.k, kColumns / kPair);
  Launch launch(static_cast<unsigned>(std::min(clusters, tiles) * kPair), kThreads, kShared);
  launch.in_clusters(kPair);
  launch.programmatic();
  launch(kernel, x_map, w_map, static_cast<T*>(g.d), bias.defined() ? bias.const_data_ptr<T>() : nullptr, shape);
  return true;
}

}  // namespace

bool launch_tiles(const Gemm& g, const at::Tensor& bias, Activation activation) {
  const auto launched = [&]<Activation how>(std::integral_constant<Activation, how>) {
    return g.out.scalar_type() == at::kBFloat16 ? launch_as<how, c10::BFloat16>(g, bias)
                                                : launch_as<how, c10::Half>(g, bias);
  };
  switch (activation) {
    case Activation::relu: return launched(std::integral_constant<Activation, Activation::relu>());
    case Activation::gelu: return launched(std::integral_constant<Activation, Activation::gelu>());
    case Activation::gelu_tanh: return launched(std::integral_constant<Activation, Activation::gelu_tanh>());
    default: return launched(std::integral_constant<Activation, Activation::none>());
  }
}

}  // namespace matmuls::dense_rows
#endif
