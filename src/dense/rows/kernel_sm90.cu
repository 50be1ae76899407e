// linear_rows on Hopper (linear_rows.h): one tile of the result per block, or per K part of one.
//
// A block has one warp that loads tiles by TMA into a ring of stages, one warp that prefetches w to the L2 and loads
// the bias, and a warpgroup that multiplies for each 64 rows. Panels that share a tile of w load a share of it each,
// which is multicast. Blocks that share a tile of the result exchange partial sums through distributed shared memory,
// in the ring's memory once all blocks of the cluster have multiplied: each of them adds up, activates and writes some
// units of the tile.
//
// Blocks wait only for blocks of their cluster, which start together. A cluster whose first row is not below `count`
// ends before it loads anything, as a whole: all of its blocks read the same count.
//
// With programmatic dependent launch a block may start while the previous kernel runs. Until that has ended it only
// prefetches w to the L2, which consumes no data: w may be written by the previous kernel. The loads of w into shared
// memory follow the wait.
#ifdef __CUDACC__
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <type_traits>

#include "dense/rows/linear_rows.h"
#include "gpu/activations.cuh"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"

namespace matmuls::dense_rows {
namespace {

constexpr int kRowBytes = 128;              // of a tile's row in shared memory: the swizzle width
constexpr int kWide = kRowBytes / 2;        // K of a stage
constexpr int kGroup = 128;                 // threads of a warpgroup
constexpr int kAhead = 8;                   // K steps that a block prefetches to the L2 at most
constexpr int kMultiprocessor = 228 << 10;  // bytes of shared memory, of which each block takes 1 KiB more than it asks

constexpr int stages_of(const Configuration& c) {
  return ((c.resident() == 1 ? 224 : 112) << 10) / ((c.rows + c.columns) * kRowBytes);
}

template <int rows_, int columns_>
struct Tile {
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int resident = Configuration{rows, columns, 1, 1}.resident();
  static constexpr int stages = stages_of({rows, columns, 1, 1});
  static constexpr int products = 2 * rows;      // threads that multiply
  static constexpr int threads = products + 64;  // plus one warp that loads and one that prefetches
  static constexpr int x_bytes = rows * kRowBytes, stage_bytes = x_bytes + columns * kRowBytes;
  static constexpr int units = columns / 16;  // of sums that are exchanged, see `each_unit`
  static constexpr int barriers = 2 * stages + 2;
  static constexpr int shared = stages * stage_bytes + columns * 4 + 8 * barriers;
  static_assert(columns % 32 == 0 && resident * (shared + 1024) <= kMultiprocessor);
};

// A share of w's tile is whole groups of 8 rows, the swizzle's; the sums that a block receives fit into its ring.
constexpr bool is_sound(const Configuration& c) {
  const int ring = stages_of(c) * (c.rows + c.columns) * kRowBytes;
  for (int parts = c.parts; parts <= c.cluster; parts *= 2)
    if ((parts - 1) * ((c.columns / 16 + parts - 1) / parts) * 2 * c.rows * 32 > ring) return false;
  return c.columns % (8 * c.copies()) == 0;
}
static_assert(std::ranges::all_of(kConfigurations, is_sound));

struct Shape {
  int rows, columns, steps;  // of the result; K steps
  int down, across;          // clusters
  int cluster, parts;        // blocks of a cluster, and in how many parts they divide K at least
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
  int live;                         // rows that are computed
  int part, parts, copy, copies;    // its place in the cluster: rank = part * copies + copy
  int cluster_row0, row0, column0;  // of the result
  int first, steps;                 // K steps
  int own;                          // units of the tile that a part writes; the last parts may have less or none
};

template <class Tile>
__device__ inline Place place_of(const Shape& shape, int live) {
  const int rank = ptx::cluster_rank(), cluster = blockIdx.x / shape.cluster;
  const int panels = (live + Tile::rows - 1) / Tile::rows;
  Place at;
  at.live = live;
  at.parts = shape.parts;
  while (at.parts < shape.cluster && panels * 2 * at.parts <= shape.down * shape.cluster) at.parts *= 2;
  at.copies = shape.cluster / at.parts;
  at.part = rank / at.copies, at.copy = rank % at.copies;
  at.cluster_row0 = cluster / shape.across * at.copies * Tile::rows;
  at.row0 = at.cluster_row0 + at.copy * Tile::rows;
  at.column0 = cluster % shape.across * Tile::columns;
  at.first = shape.steps * at.part / at.parts;
  at.steps = shape.steps * (at.part + 1) / at.parts - at.first;
  at.own = (Tile::units + at.parts - 1) / at.parts;
  return at;
}

// Calls f(unit, owner, which) for each unit of a tile's sums: 8 per thread, those of half h = unit % 2 of the rows in
// the 32 columns from 32 (unit / 2) on. It is number `which` of those that part `owner` writes.
template <class Tile>
__device__ inline void each_unit(int own, const auto& f) {
  int owner = 0, which = 0;
#pragma unroll
  for (int unit = 0; unit < Tile::units; ++unit) {
    f(unit, owner, which);
    if (++which == own) which = 0, ++owner;
  }
}
// Where a thread keeps sum i of a unit: of column 8 (i / 2) + 2 (lane % 4) + i % 2, row lane / 4 + 8 h.
__device__ constexpr int sum_of(int unit, int i) { return unit / 2 * 16 + i / 2 * 4 + unit % 2 * 2 + i % 2; }

// The loading thread.
template <class Tile>
__device__ inline void load_tiles(const CUtensorMap& x_map, const CUtensorMap& w_map, unsigned char* tiles,
                                  uint64_t* full, uint64_t* empty, const Shape& shape, const Place& at) {
  const int boxes = at.parts / shape.parts, box = Tile::columns * shape.parts / shape.cluster;  // of w; rows of one
  const auto blocks = static_cast<uint16_t>(((1 << at.copies) - 1) << at.part * at.copies);
  Stage<Tile::stages> stage;
  for (int n = 0; n < at.steps; ++n, stage.advance()) {
    uint64_t* const filled = &full[stage.index];
    unsigned char* const tile = tiles + stage.index * Tile::stage_bytes;
    const int k = (at.first + n) * kWide;
    // All copies must have read this stage: a share of w goes to each.
    if (n >= Tile::stages) ptx::barrier_wait(&empty[stage.index], stage.turn ^ 1);
    ptx::barrier_expect(filled, Tile::stage_bytes);
    hopper::load(x_map, tile, filled, k, at.row0);
    for (int i = 0; i < boxes; ++i) {
      const int column = (at.copy * boxes + i) * box;
      unsigned char* const to = tile + Tile::x_bytes + column * kRowBytes;
      if (at.copies > 1)
        hopper::load_for(blocks, w_map, to, filled, k, at.column0 + column);
      else
        hopper::load(w_map, to, filled, k, at.column0 + column);
    }
  }
}

// x @ w^T of a tile, 64 rows per warpgroup.
template <class T, class Tile>
__device__ inline void multiply_tiles(float (&acc)[Tile::columns / 2], const unsigned char* tiles, uint64_t* full,
                                      const uint64_t* empty, int most_copies, const Place& at) {
  // Uniform within a warp, which the compiler knows only of a shuffle's result.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0), thread = threadIdx.x % kGroup;
#pragma unroll
  for (float& sum : acc) sum = 0;
  // The block whose stage this thread releases. A stage counts as many arrivals of a warpgroup as there may be copies:
  // several for each block where there are less.
  const unsigned reader = at.part * at.copies + thread % at.copies;
  Stage<Tile::stages> stage;
  int last = 0;  // the previous stage
  for (int n = 0; n < at.steps; ++n) {
    const int now = stage.index;
    ptx::barrier_wait(&full[now], stage.turn);
    stage.advance();
    const unsigned char* const tile = tiles + now * Tile::stage_bytes;
    const uint64_t rows = hopper::descriptor(tile + group * 64 * kRowBytes);
    const uint64_t columns = hopper::descriptor(tile + Tile::x_bytes);
    hopper::pin(acc);
    hopper::begin_products();
#pragma unroll
    for (int part = 0; part < 4; ++part)  // 32 bytes of K each; descriptor units of 16 bytes
      hopper::multiply<T, false>(acc, rows + part * 2, columns + part * 2, true);
    hopper::commit_products();
    hopper::pin(acc);
    hopper::wait_for_products<1>();
    if (n > 0 && thread < most_copies) hopper::arrive_at(&empty[last], reader);
    last = now;
  }
  hopper::wait_for_products<0>();
  hopper::pin(acc);
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
    const unsigned block = owner * at.copies + at.copy;
    const uint32_t there = ptx::address_in(place(at.part - (at.part > owner), which), block);
    const uint32_t told = ptx::address_in(received, block);
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      hopper::send(there + i / 4 * Tile::products * 16, acc[sum_of(unit, i)], acc[sum_of(unit, i + 1)],
                   acc[sum_of(unit, i + 2)], acc[sum_of(unit, i + 3)], told);
  });
  if (at.part * at.own >= Tile::units) return;
  ptx::barrier_wait(received, 0);
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

// Writes the block's units: 16 bytes per lane and row, 64 bytes per four lanes.
template <Activation activation, class T, class Tile>
__device__ inline void write_units(const float (&acc)[Tile::columns / 2], const float* biases, T* y, const Shape& shape,
                                   const Place& at) {
  const int lane = threadIdx.x % 32, row = at.row0 + threadIdx.x / 32 * 16 + lane / 4;
  each_unit<Tile>(at.own, [&](int unit, int owner, int) {
    if (owner != at.part) return;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto [left, right] = *reinterpret_cast<const float2*>(biases + unit / 2 * 32 + 8 * j + 2 * (lane % 4));
      words[j] = hopper::two<T>(activated_16bit<activation>(acc[sum_of(unit, 2 * j)] + left),
                                activated_16bit<activation>(acc[sum_of(unit, 2 * j + 1)] + right));
    }
    hopper::turn_among_four(words, lane);
    const int to_row = row + unit % 2 * 8, column = at.column0 + unit / 2 * 32 + lane % 4 * 8;
    if (to_row < at.live && column < shape.columns)
      *reinterpret_cast<uint4*>(y + to_row * shape.stride + column) = {words[0], words[1], words[2], words[3]};
  });
}

#endif

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::resident)
    linear_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, T* y,
                       const T* bias, const unsigned* count, const Activation activation, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char tiles[];
  float* const biases = reinterpret_cast<float*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(biases + Tile::columns);
  uint64_t* const empty = full + Tile::stages;
  uint64_t *const has_bias = empty + Tile::stages, *const received = has_bias + 1;
  const int most_copies = shape.cluster / shape.parts;
  constexpr int kLoads = Tile::products, kPrefetches = Tile::products + 32;  // first threads of the two warps

  if (threadIdx.x == kLoads) {
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::barrier_init(&full[s]);
      ptx::barrier_init(&empty[s], most_copies * Tile::products / kGroup);
    }
    ptx::barrier_init(has_bias);
    ptx::barrier_init(received);
    ptx::barrier_fence();
  }
  if (threadIdx.x == kPrefetches) {
    hopper::prefetch(x_map);
    hopper::prefetch(w_map);
    // The clusters with the same columns of w share its K steps.
    const int cluster = blockIdx.x / shape.cluster, column0 = cluster % shape.across * Tile::columns;
    const int sharers = shape.down * shape.cluster, box = Tile::columns / most_copies;
    const int end = min(shape.steps, kAhead * sharers);
    for (int n = cluster / shape.across * shape.cluster + ptx::cluster_rank(); n < end; n += sharers)
      for (int c = 0; c < Tile::columns; c += box) hopper::bring(w_map, n * kWide, column0 + c);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the barriers of all blocks are initialized
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  const int live = count ? min(shape.rows, max(0, static_cast<int>(ptx::load_relaxed(count)))) : shape.rows;
  const Place at = place_of<Tile>(shape, live);
  if (at.cluster_row0 >= live) return;  // all blocks of the cluster

  if (threadIdx.x >= kLoads) {
    if (threadIdx.x == kLoads) {
      const int units = min(at.own, Tile::units - at.part * at.own);
      if (at.parts > 1 && units > 0) ptx::barrier_expect(received, (at.parts - 1) * units * Tile::products * 32);
      load_tiles<Tile>(x_map, w_map, tiles, full, empty, shape, at);
    } else if (threadIdx.x >= kPrefetches) {
      for (int c = threadIdx.x - kPrefetches; c < Tile::columns; c += 32)
        biases[c] = bias && at.column0 + c < shape.columns ? static_cast<float>(bias[at.column0 + c]) : 0.f;
      __syncwarp();
      if (threadIdx.x == kPrefetches) ptx::barrier_arrive(has_bias);
    }
    __syncwarp();
    if (shape.cluster > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }
  float acc[Tile::columns / 2];
  multiply_tiles<T, Tile>(acc, tiles, full, empty, most_copies, at);
  // After the cluster's barrier no block signals another's empty stages, and all rings may be written over: their loads
  // have arrived and the products have read them. Nothing else has been written, so the arrival needs no fence.
  if (shape.cluster > 1) ptx::cluster_arrive_relaxed();
  if (at.parts > 1) {
    ptx::cluster_wait();
    exchange<Tile>(acc, tiles, received, at);
  }
  ptx::barrier_wait(has_bias, 0);
  switch (activation) {
    case Activation::none: write_units<Activation::none, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::relu: write_units<Activation::relu, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::gelu: write_units<Activation::gelu, T, Tile>(acc, biases, y, shape, at); break;
    case Activation::gelu_tanh: write_units<Activation::gelu_tanh, T, Tile>(acc, biases, y, shape, at); break;
  }
  if (shape.cluster > 1 && at.parts == 1) ptx::cluster_wait();
#endif
}

// ----------------------------------------------------------------------------------------------------------- launch

constexpr const char* kName = "linear_rows";

// The stride of a dimension of one element says nothing.
int64_t row_stride(const at::Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

template <class T>
CUtensorMap map_of(const at::Tensor& t, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(t.size(1)), static_cast<cuuint64_t>(t.size(0))};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride(t)) * sizeof(T)};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(box_rows)};
  return tensor_map<T>(kName, t.const_data_ptr(), sizes, strides, box);
}

// False, launching nothing, if the GPU has no room for a cluster: a slice of a GPU (MIG) may have few multiprocessors.
template <class T, class Tile>
bool launch_tile(const Operands& o, const Configuration& c) {
  constexpr auto kernel = linear_rows_kernel<T, Tile>;
  if (clusters_at_once<kernel, Tile::threads, Tile::shared>(c.cluster) == 0) return false;
  const int64_t rows = o.x.size(0), columns = o.w.size(0);
  const int down = up(up(rows, Tile::rows), c.copies()), across = up(columns, Tile::columns);
  const Shape shape{
      static_cast<int>(rows), static_cast<int>(columns), up(o.x.size(1), kWide), down, across, c.cluster, c.parts,
      row_stride(o.out)};
  const CUtensorMap x_map = map_of<T>(o.x, Tile::rows), w_map = map_of<T>(o.w, Tile::columns / c.copies());
  Launch launch(static_cast<unsigned>(down * across * c.cluster), Tile::threads, Tile::shared);
  if (c.cluster > 1) launch.in_clusters(c.cluster);
  launch.early();
  launch(kernel, x_map, w_map, o.out.mutable_data_ptr<T>(), o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr,
         o.count.defined() ? reinterpret_cast<const unsigned*>(o.count.const_data_ptr<int>()) : nullptr, o.activation,
         shape);
  return true;
}

template <class T>
bool launch_as(const Operands& o, const Configuration& c) {
  const auto launched = [&]<class Tile>(std::type_identity<Tile>) {
    return c.rows == Tile::rows && c.columns == Tile::columns && launch_tile<T, Tile>(o, c);
  };
  const auto one_of = [&]<class... Tiles>(std::type_identity<Tiles>... tiles) { return (launched(tiles) || ...); };
  using std::type_identity;
  return one_of(type_identity<Tile<64, 64>>(), type_identity<Tile<64, 128>>(), type_identity<Tile<128, 64>>(),
                type_identity<Tile<128, 96>>(), type_identity<Tile<128, 128>>(), type_identity<Tile<128, 192>>(),
                type_identity<Tile<128, 256>>());
}

}  // namespace

bool fits(const Operands& o) {
  constexpr int64_t kMost = 1 << 27;  // sizes, so that int has room for what is counted in the kernel
  const auto walkable = [](const at::Tensor& t) {
    return (t.stride(1) == 1 || t.size(1) == 1) && t.size(1) % 8 == 0 && row_stride(t) % 8 == 0 &&
           row_stride(t) >= t.size(1) && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  return has_hopper_kernels(c10::cuda::current_device()) && walkable(o.x) && walkable(o.w) && walkable(o.out) &&
         o.x.size(1) > 0 && std::max({o.x.size(0), o.x.size(1), o.w.size(0)}) < kMost;
}

void launch(const Operands& o, const Configuration& c) {
  const auto launched = [&](const Configuration& how) {
    return o.x.scalar_type() == at::kBFloat16 ? launch_as<c10::BFloat16>(o, how) : launch_as<c10::Half>(o, how);
  };
  TORCH_CHECK(launched(c) || launched(kConfigurations[0]), kName, ": the GPU has no room for a block of ",
              name_of(kConfigurations[0]));
}

}  // namespace matmuls::dense_rows
#endif
