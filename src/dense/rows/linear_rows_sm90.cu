// linear_rows on Hopper (linear_rows.h): one tile of the result per block, or per K part of one.
//
// A block has one warp that loads tiles by TMA into a ring of stages, one warp that prefetches w to the L2 and loads
// the bias, and a warpgroup that multiplies for each 64 rows. The blocks of a cluster share a tile of the result: each
// sums a part of K. They exchange partial sums through distributed shared memory, in the ring's memory once all blocks
// of the cluster have multiplied: each of them adds up, activates and writes some units of the tile.
//
// Blocks wait only for blocks of their cluster, which start together.
//
// With programmatic dependent launch a block may start while the previous kernel runs. Until that has ended it only
// prefetches w to the L2, which consumes no data: w may be written by the previous kernel. The loads of w into shared
// memory follow the wait.
#ifdef __CUDACC__
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <type_traits>

#include "dense/rows/linear_rows.h"
#include "dense/rows/operands.cuh"
#include "gpu/launch.cuh"

namespace matmuls::dense_rows {
namespace {

constexpr int kAhead = 8;                   // K steps that a block prefetches to the L2 at most
constexpr int kMultiprocessor = 228 << 10;  // bytes of shared memory, of which each block takes 1 KiB more than it asks

constexpr int kResident = 2;  // blocks that a multiprocessor has room for

constexpr int stages_of(const Configuration& c) { return (112 << 10) / ((c.rows + c.columns) * kRowBytes); }

template <int rows_, int columns_>
struct Tile {
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int stages = stages_of({rows, columns, 1});
  static constexpr int products = 2 * rows;      // threads that multiply
  static constexpr int threads = products + 64;  // plus one warp that loads and one that prefetches
  static constexpr int x_bytes = rows * kRowBytes, stage_bytes = x_bytes + columns * kRowBytes;
  static constexpr int units = columns / 16;  // of sums that are exchanged, see `each_unit`
  static constexpr int barriers = 2 * stages + 2;
  static constexpr int shared = stages * stage_bytes + columns * 4 + 8 * barriers;
  static_assert(columns % 32 == 0 && kResident * (shared + 1024) <= kMultiprocessor);
};

// The sums that a block receives fit into its ring.
constexpr bool is_sound(const Configuration& c) {
  const int ring = stages_of(c) * (c.rows + c.columns) * kRowBytes;
  return (c.parts - 1) * ((c.columns / 16 + c.parts - 1) / c.parts) * 2 * c.rows * 32 <= ring;
}
static_assert(std::ranges::all_of(kConfigurations, is_sound));

struct Shape {
  int rows, columns, steps;  // of the result; K steps
  int down, across;          // clusters
  int parts;                 // of K: blocks of a cluster
  int64_t stride;            // row stride of y
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A stage's tiles in shared memory and its barriers' phase parity.
template <int stages>
struct Stage {
  int index = 0;
  unsigned turn = 0;
  __device__ void advance() {
    if (++index == stages) index = 0, turn ^= 1;
  }
};

// What a block computes.
struct Place {
  int part, parts;    // its rank in the cluster
  int row0, column0;  // of the result
  int first, steps;   // K steps
  int own;            // units of the tile that a part writes; the last parts may have less or none
};

template <class Tile>
__device__ inline Place place_of(const Shape& shape) {
  const int cluster = blockIdx.x / shape.parts;
  Place at;
  at.parts = shape.parts;
  at.part = ptx::cluster_rank();
  at.row0 = cluster / shape.across * Tile::rows;
  at.column0 = cluster % shape.across * Tile::columns;
  at.first = shape.steps * at.part / at.parts;
  at.steps = shape.steps * (at.part + 1) / at.parts - at.first;
  at.own = (Tile::units + at.parts - 1) / at.parts;
  return at;
}

// Calls f(unit, owner, which) for each unit of a tile's sums (operands.cuh). It is number `which` of those that part
// `owner` writes.
template <class Tile>
__device__ inline void each_unit(int own, const auto& f) {
  int owner = 0, which = 0;
#pragma unroll
  for (int unit = 0; unit < Tile::units; ++unit) {
    f(unit, owner, which);
    if (++which == own) which = 0, ++owner;
  }
}

// The loading thread.
template <class Tile>
__device__ inline void load_tiles(const CUtensorMap& x_map, const CUtensorMap& w_map, unsigned char* tiles,
                                  uint64_t* full, uint64_t* empty, const Place& at) {
  Stage<Tile::stages> stage;
  for (int n = 0; n < at.steps; ++n, stage.advance()) {
    uint64_t* const filled = &full[stage.index];
    unsigned char* const tile = tiles + stage.index * Tile::stage_bytes;
    const int k = (at.first + n) * kWide;
    if (n >= Tile::stages) ptx::mbarrier_wait(&empty[stage.index], stage.turn ^ 1);
    ptx::mbarrier_arrive_expect_tx(filled, Tile::stage_bytes);
    hopper::tma_load_2d(x_map, tile, filled, k, at.row0);
    hopper::tma_load_2d(w_map, tile + Tile::x_bytes, filled, k, at.column0);
  }
}

// x @ w^T of a tile, 64 rows per warpgroup.
template <class T, class Tile>
__device__ inline void multiply_tiles(float (&acc)[Tile::columns / 2], const unsigned char* tiles, uint64_t* full,
                                      const uint64_t* empty, const Place& at) {
  // Uniform within a warp, which the compiler knows only of a shuffle's result.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0), thread = threadIdx.x % kGroup;
#pragma unroll
  for (float& sum : acc) sum = 0;
  Stage<Tile::stages> stage;
  int last = 0;  // the previous stage
  for (int n = 0; n < at.steps; ++n) {
    const int now = stage.index;
    ptx::mbarrier_wait(&full[now], stage.turn);
    stage.advance();
    const unsigned char* const tile = tiles + now * Tile::stage_bytes;
    const uint64_t rows = hopper::smem_descriptor(tile + group * 64 * kRowBytes);
    const uint64_t columns = hopper::smem_descriptor(tile + Tile::x_bytes);
    hopper::warpgroup_fence_operand(acc);
    hopper::wgmma_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part)  // 32 bytes of K each; descriptor units of 16 bytes
      hopper::wgmma_ss<T, false>(acc, rows + part * 2, columns + part * 2, true);
    hopper::wgmma_commit_group();
    hopper::warpgroup_fence_operand(acc);
    hopper::wgmma_wait_group<1>();
    if (n > 0 && thread == 0) ptx::mbarrier_arrive(&empty[last]);
    last = now;
  }
  hopper::wgmma_wait_group<0>();
  hopper::warpgroup_fence_operand(acc);
}

// Sends the units of other parts to their owners and adds what these send. All blocks of the cluster have multiplied.
template <class Tile>
__device__ inline void exchange(float (&acc)[Tile::columns / 2], unsigned char* tiles, uint64_t* received,
                                const Place& at) {
  float4* const sums = reinterpret_cast<float4*>(tiles);  // [sending part, without the own][unit][2][thread]
  const auto place = [&](int sender, int which) {
    return sums + (sender * at.own + which) * 2 * Tile::products + threadIdx.x;
  };
  each_unit<Tile>(at.own, [&](int unit, int owner, int which) {
    if (owner == at.part) return;
    const uint32_t there = ptx::mapa(place(at.part - (at.part > owner), which), owner);
    const uint32_t told = ptx::mapa(received, owner);
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      hopper::st_async(there + i / 4 * Tile::products * 16, acc[sum_of(unit, i)], acc[sum_of(unit, i + 1)],
                       acc[sum_of(unit, i + 2)], acc[sum_of(unit, i + 3)], told);
  });
  if (at.part * at.own >= Tile::units) return;
  ptx::mbarrier_wait(received, 0);
  each_unit<Tile>(at.own, [&](int unit, int owner, int which) {
    if (owner != at.part) return;
    for (int sender = 0; sender < at.parts - 1; ++sender)
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = place(sender, which)[i / 4 * Tile::products];
        acc[sum_of(unit, i)] += four.x, acc[sum_of(unit, i + 1)] += four.y;
        acc[sum_of(unit, i + 2)] += four.z, acc[sum_of(unit, i + 3)] += four.w;
      }
  });
}

// Writes the block's units.
template <Activation activation, class T, class Tile>
__device__ inline void write_units(const float (&acc)[Tile::columns / 2], const float* biases, T* y, const Shape& shape,
                                   const Place& at) {
  const int row = at.row0 + threadIdx.x / 32 * 16;
  each_unit<Tile>(at.own, [&](int unit, int owner, int) {
    if (owner == at.part)
      write_unit<activation, false>(acc, unit, biases, y, shape.stride, row, at.column0, shape.rows, shape.columns);
  });
}

#endif

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::threads, kResident)
    linear_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, T* y,
                       const T* bias, const Activation activation, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char tiles[];
  float* const biases = reinterpret_cast<float*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(biases + Tile::columns);
  uint64_t* const empty = full + Tile::stages;
  uint64_t *const has_bias = empty + Tile::stages, *const received = has_bias + 1;
  constexpr int kLoads = Tile::products, kPrefetches = Tile::products + 32;  // first threads of the two warps

  if (threadIdx.x == kLoads) {
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], Tile::products / kGroup);
    }
    ptx::mbarrier_init(has_bias, 32);
    ptx::mbarrier_init(received);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == kPrefetches) {
    hopper::prefetch_tensormap(x_map);
    hopper::prefetch_tensormap(w_map);
    // The clusters with the same columns of w share its K steps.
    const int cluster = blockIdx.x / shape.parts, column0 = cluster % shape.across * Tile::columns;
    const int sharers = shape.down * shape.parts, end = min(shape.steps, kAhead * sharers);
    for (int n = cluster / shape.across * shape.parts + ptx::cluster_rank(); n < end; n += sharers)
      hopper::tma_prefetch_2d(w_map, n * kWide, column0);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the barriers of all blocks are initialized
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  const Place at = place_of<Tile>(shape);

  if (threadIdx.x >= kLoads) {
    if (threadIdx.x == kLoads) {
      const int units = min(at.own, Tile::units - at.part * at.own);
      if (at.parts > 1 && units > 0)
        ptx::mbarrier_arrive_expect_tx(received, (at.parts - 1) * units * Tile::products * 32);
      load_tiles<Tile>(x_map, w_map, tiles, full, empty, at);
    } else if (threadIdx.x >= kPrefetches) {
      for (int c = threadIdx.x - kPrefetches; c < Tile::columns; c += 32)
        biases[c] = bias && at.column0 + c < shape.columns ? static_cast<float>(bias[at.column0 + c]) : 0.f;
      ptx::mbarrier_arrive(has_bias);
    }
    __syncwarp();
    if (at.parts > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }
  float acc[Tile::columns / 2];
  multiply_tiles<T, Tile>(acc, tiles, full, empty, at);
  // After the cluster's barrier all rings may be written over: their loads have arrived and the products have read
  // them. Nothing else has been written, so the arrival needs no fence.
  if (at.parts > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
    exchange<Tile>(acc, tiles, received, at);
  }
  ptx::mbarrier_wait(has_bias, 0);
  switch (activation) {
    case Activation::none: write_units<Activation::none, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::relu: write_units<Activation::relu, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::gelu: write_units<Activation::gelu, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::gelu_tanh: write_units<Activation::gelu_tanh, T, Tile>(acc, biases, y, shape, at); break;
  }
#endif
}

// ----------------------------------------------------------------------------------------------------------- launch

constexpr const char* kName = "linear_rows";

// False, launching nothing, if the GPU has no room for a cluster: a slice of a GPU (MIG) may have few multiprocessors.
// In BLAS form g.x is w, of g.m rows, and g.y is x, of g.n rows.
template <class T, class Tile>
bool launch_tile(const Gemm& g, const at::Tensor& bias, Activation activation, const Configuration& c) {
  constexpr auto kernel = linear_rows_kernel<T, Tile>;
  if (clusters_at_once<kernel, Tile::threads, Tile::shared>(c.parts) == 0) return false;
  const int down = up(g.n, Tile::rows), across = up(g.m, Tile::columns);
  const Shape shape{static_cast<int>(g.n), static_cast<int>(g.m), up(g.k, kWide), down, across, c.parts, g.ldd};
  const CUtensorMap x_map = map_of<T>(g.y, g.n, g.k, Tile::rows), w_map = map_of<T>(g.x, g.m, g.k, Tile::columns);
  Launch launch(static_cast<unsigned>(down * across * c.parts), Tile::threads, Tile::shared);
  if (c.parts > 1) launch.in_clusters(c.parts);
  launch.programmatic();
  launch(kernel, x_map, w_map, static_cast<T*>(g.d), bias.defined() ? bias.const_data_ptr<T>() : nullptr, activation,
         shape);
  return true;
}

template <class T>
bool launch_as(const Gemm& g, const at::Tensor& bias, Activation activation, const Configuration& c) {
  const auto launched = [&]<class Tile>(std::type_identity<Tile>) {
    return c.rows == Tile::rows && c.columns == Tile::columns && launch_tile<T, Tile>(g, bias, activation, c);
  };
  const auto one_of = [&]<class... Tiles>(std::type_identity<Tiles>... tiles) { return (launched(tiles) || ...); };
  using std::type_identity;
  return one_of(type_identity<Tile<64, 64>>(), type_identity<Tile<128, 64>>(), type_identity<Tile<128, 96>>(),
                type_identity<Tile<128, 128>>());
}

}  // namespace

bool fits(const Gemm& g) {
  constexpr int64_t kMost = 1 << 27;               // sizes, so that int has room for what is counted in the kernel
  constexpr int64_t kFarthest = int64_t{1} << 36;  // row stride, of which a tensor map takes 2^40 bytes
  const auto walkable = [](const void* data, int64_t ld) {
    return ld % 8 == 0 && ld < kFarthest && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  const auto dtype = g.out.scalar_type();
  return (dtype == at::kBFloat16 || dtype == at::kHalf) && g.d_row_major && g.x.transposed && !g.y.transposed &&
         g.strided.size == 1 && g.outer.empty() && g.m % 8 == 0 && g.k % 8 == 0 && std::min({g.m, g.n, g.k}) > 0 &&
         std::max({g.m, g.n, g.k}) < kMost && walkable(g.x.data, g.x.ld) && walkable(g.y.data, g.y.ld) &&
         walkable(g.d, g.ldd) && has_hopper_kernels(c10::cuda::current_device());
}

void launch(const Gemm& g, const at::Tensor& bias, Activation activation, const Configuration& c) {
  const auto launched = [&](const Configuration& how) {
    return g.out.scalar_type() == at::kBFloat16 ? launch_as<c10::BFloat16>(g, bias, activation, how)
                                                : launch_as<c10::Half>(g, bias, activation, how);
  };
  TORCH_CHECK(launched(c) || launched(kConfigurations[0]), kName, ": the GPU has no room for a block of ",
              name_of(kConfigurations[0]));
}

}  // namespace matmuls::dense_rows
#endif
