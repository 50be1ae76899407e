// The product of filled.h on Hopper, and the dense side's halves.
//
// A block takes 128 rows and `columns` columns of the result and, where there are too few of those, its share of K: the
// blocks of a cluster add up their sums through one another's shared memory, always in the same order. One warp fetches
// tiles ahead, two warpgroups multiply 64 rows each. Tensor cores round their sums towards zero: they add up 64
// products at a time, and float32 registers the rest.
#ifdef MATMULS_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>

#include "filled.cuh"
#include "filled.h"
#include "hopper.cuh"
#include "tensor_map.h"

namespace matmuls {
namespace {

constexpr int kRowBytes = 128, kWide = 64;  // of a tile's row: 64 numbers
constexpr int kGroup = 128, kGroups = 2, kRows = 64 * kGroups;
constexpr int kThreads = kGroup * (kGroups + 1);
constexpr int kMostShares = 8;   // of K: blocks of a cluster
constexpr int kStepsOfTile = 4;  // of K, that take as long as a tile's begin and end

template <int columns_>
struct Tile {
  static constexpr int columns = columns_;
  static constexpr int a_bytes = kRows * kRowBytes, b_bytes = std::max(columns, kWide) * kRowBytes;  // of one half
  static constexpr int stage_bytes = 2 * (a_bytes + b_bytes), stages = columns == 128 ? 3 : 4;
  static constexpr int shared = stages * stage_bytes + 2 * stages * 8;
  static constexpr int out_stride = columns + 8;  // floats: rows that a warp writes at a time lie in different banks
  static_assert(kRows * out_stride * 4 <= stages * stage_bytes && shared <= 227 << 10);
};

// ------------------------------------------------------------------------------------------------- the dense side

constexpr int kSplitThreads = 512, kSplitColumns = 16, kSplitBlocks = kFactsOfPart;  // a cluster takes 16 columns
constexpr int kKeptRows = 512;                                                       // of a block, in shared memory

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Four numbers out of another block's shared memory, after a barrier of the cluster, where they are `there`: without a
// branch.
__device__ inline void load_from(uint32_t remote, bool there, float (&x)[4]) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
      : "r"(remote), "r"(static_cast<int>(there)));
}
// The same number in another block's shared memory.
__device__ inline unsigned load_int(const void* shared, unsigned block) {
  unsigned x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(ptx::address_in(shared, block)) : "memory");
  return x;
}
#endif

// halves: [2, rows, n]; facts: of each block, of whose columns' counts the largest is told: those of a cluster together
// are at least its largest column's.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* dense, int rows, int n, int64_t stride, int* exponents, uint2* halves, FillFacts* facts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kQuads = kSplitColumns / 4, kStep = kSplitThreads / kQuads;
  extern __shared__ __align__(16) float4 kept[][kQuads];
  __shared__ unsigned largest[kSplitColumns];
  __shared__ int powers[kSplitColumns], missing[kSplitColumns], tiny;
  ptx::wait_for_earlier();
  ptx::let_next_start();
  const unsigned rank = ptx::cluster_rank();
  const int quad = threadIdx.x % kQuads, c = static_cast<int>(blockIdx.x) / kSplitBlocks * kSplitColumns + 4 * quad;
  const int each = (rows + kSplitBlocks - 1) / kSplitBlocks, first = static_cast<int>(rank) * each;
  const int many = c < n ? max(min(each, rows - first), 0) : 0;  // n is a multiple of 8
  if (threadIdx.x < kSplitColumns) largest[threadIdx.x] = 0, missing[threadIdx.x] = 0;
  if (threadIdx.x == 0) tiny = 0;
  __syncthreads();
  const auto at = [&](int r) { return dense + (first + r) * stride + c; };
  unsigned own[4] = {};
#pragma unroll 8
  for (int r = threadIdx.x / kQuads; r < many; r += kStep) {
    const float4 x = *reinterpret_cast<const float4*>(at(r));
    if (r < kKeptRows) kept[r][quad] = x;
    own[0] = max(own[0], __float_as_uint(x.x) & 0x7fffffffu), own[1] = max(own[1], __float_as_uint(x.y) & 0x7fffffffu);
    own[2] = max(own[2], __float_as_uint(x.z) & 0x7fffffffu), own[3] = max(own[3], __float_as_uint(x.w) & 0x7fffffffu);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int step = kQuads; step < 32; step *= 2) own[i] = max(own[i], __shfl_xor_sync(0xffffffffu, own[i], step));
    if (threadIdx.x % 32 < kQuads) atomicMax(&largest[4 * quad + i], own[i]);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  unsigned most = 0;
  if (threadIdx.x < kSplitColumns) {
    for (unsigned block = 0; block < kSplitBlocks; ++block) most = max(most, load_int(&largest[threadIdx.x], block));
    powers[threadIdx.x] = exponent_for(most);
    const int column = c - 4 * quad + static_cast<int>(threadIdx.x);
    if (rank == 0 && column < n) exponents[column] = powers[threadIdx.x];
  }
  __syncthreads();
  ptx::cluster_arrive();  // waited for at the end: the others may still read this block's largest
  float scale[4];
  int own_missing[4] = {};
  bool any_tiny = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = power_of_two(powers[4 * quad + i]);
#pragma unroll 4
  for (int r = threadIdx.x / kQuads; r < many; r += kStep) {
    const float4 numbers = r < kKeptRows ? kept[r][quad] : *reinterpret_cast<const float4*>(at(r));
    const float x[4] = {numbers.x * scale[0], numbers.y * scale[1], numbers.z * scale[2], numbers.w * scale[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) any_tiny |= is_tiny(x[i]), own_missing[i] += !is_large(x[i]);
    const int64_t to = (static_cast<int64_t>(first + r) * n + c) / 4, apart = static_cast<int64_t>(rows) * n / 4;
    uint2 high, low;
    split_two(x[0], x[1], high.x, low.x), split_two(x[2], x[3], high.y, low.y);
    halves[to] = high, halves[to + apart] = low;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (own_missing[i] > 0) atomicAdd(&missing[4 * quad + i], own_missing[i]);
  if (any_tiny) tiny = 1;
  __syncthreads();
  if (threadIdx.x < 32) {
    // A column of zeros is right whatever the rows are.
    int most_missing = threadIdx.x < kSplitColumns && most > 0 ? missing[threadIdx.x] : 0;
    for (int step = 16; step > 0; step /= 2)
      most_missing = max(most_missing, __shfl_xor_sync(0xffffffffu, most_missing, step));
    const bool infinite = __any_sync(0xffffffffu, most >= kInfinite);
    if (threadIdx.x == 0) facts[blockIdx.x] = {infinite, tiny, most_missing};
  }
  ptx::cluster_wait();
#endif
}

// ---------------------------------------------------------------------------------------------------- the product

struct Shape {
  int rows, n, inner, across, steps;  // inner: K; across: tiles of columns; steps of K
};

template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_halves_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                           const Shape shape, const int* exponents, const int* powers, float* out, int64_t out_stride,
                           float alpha) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char tiles[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const empty = full + Tile::stages;
  float* const sums_of_block = reinterpret_cast<float*>(tiles);
  const unsigned rank = ptx::cluster_rank(), shares = ptx::cluster_blocks();
  const int tile = blockIdx.x / shares, row0 = tile / shape.across * kRows,
            column0 = tile % shape.across * Tile::columns;
  const int first = static_cast<int>(rank * shape.steps / shares),
            last = static_cast<int>((rank + 1) * shape.steps / shares);
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  if (threadIdx.x == 0) {
    hopper::prefetch(a_map);
    hopper::prefetch(b_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::barrier_init(&full[s]);
      ptx::barrier_init(&empty[s], kGroups);
    }
    ptx::barrier_fence();
  }
  __syncthreads();
  // A stage: both halves of a, both of b.
  if (group == kGroups) {
    hopper::leave_registers<40>();
    if (thread == 0) {
      const auto load_a = [&](int k, int stage) {
        ptx::barrier_expect(&full[stage], Tile::stage_bytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          hopper::load(a_map, tiles + stage * Tile::stage_bytes + half * Tile::a_bytes, &full[stage], k * kWide,
                       row0 + half * shape.rows);
      };
      const int ahead = min(last - first, Tile::stages);  // while the dense side's halves are being made
      for (int n = 0; n < ahead; ++n) load_a(first + n, n);
      ptx::wait_for_earlier();
      for (int k = first, n = 0; k < last; ++k, ++n) {
        const int stage = n % Tile::stages;
        if (n >= ahead) {
          ptx::barrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
          load_a(k, stage);
        }
        unsigned char* const to = tiles + stage * Tile::stage_bytes + 2 * Tile::a_bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int c = 0; c < Tile::columns; c += kWide)
            hopper::load(b_map, to + half * Tile::b_bytes + c * kRowBytes, &full[stage], column0 + c,
                         k * kWide + half * shape.inner);
      }
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    hopper::take_registers<232>();
    float sums[Tile::columns / 2] = {}, low[Tile::columns / 2] = {}, high[Tile::columns / 2] = {};
    for (int k = first, n = 0; k < last; ++k, ++n) {
      const int stage = n % Tile::stages;
      const unsigned char* const a = tiles + stage * Tile::stage_bytes + group * 64 * kRowBytes;
      const unsigned char* const b = tiles + stage * Tile::stage_bytes + 2 * Tile::a_bytes;
      const auto multiply = [&](auto& acc, int half_a, int half_b, bool accumulate) {
#pragma unroll
        for (int part = 0; part < 4; ++part)  // 16 k each
          hopper::multiply<c10::Half, true>(
              acc, hopper::descriptor(a + half_a * Tile::a_bytes + part * 32),
              hopper::descriptor(b + half_b * Tile::b_bytes + part * 16 * kRowBytes, kWide * kRowBytes),
              accumulate || part > 0);
      };
      ptx::barrier_wait(&full[stage], n / Tile::stages % 2);
      hopper::pin(low);
      hopper::pin(high);
      hopper::begin_products();
      multiply(low, 1, 0, false);
      multiply(low, 0, 1, true);
      hopper::commit_products();
      multiply(high, 0, 0, false);
      hopper::commit_products();
      hopper::wait_for_products<1>();
      hopper::pin(low);
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) sums[i] = fmaf(low[i], 1 / kLowScale, sums[i]);
      hopper::wait_for_products<0>();
      hopper::pin(high);
      if (thread == 0) ptx::barrier_arrive(&empty[stage]);
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) sums[i] += high[i];
    }
    hopper::sync(1, kGroups * kGroup);  // both groups have read the last tile
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < Tile::columns / 8; ++j) {
      float* const to = sums_of_block + row * Tile::out_stride + 8 * j + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {sums[4 * j], sums[4 * j + 1]};
      *reinterpret_cast<float2*>(to + 8 * Tile::out_stride) = {sums[4 * j + 2], sums[4 * j + 3]};
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::wait_for_earlier();  // for the columns' powers
    // Four columns of four rows at once for a thread.
    constexpr int across = Tile::columns / 4, apart = kGroups * kGroup / across, at_once = 4;
    const int c = threadIdx.x % across * 4, first_row = static_cast<int>(rank * kRows / shares);
    const int last_row = min(static_cast<int>((rank + 1) * kRows / shares), shape.rows - row0);
    const int end = column0 + c < shape.n ? last_row : 0;
    int column_exponents[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) column_exponents[i] = powers[min(column0 + c, shape.n - 4) + i];
    for (int own = first_row + threadIdx.x / across; own < end; own += at_once * apart) {
      float total[at_once][4] = {};
      int e[at_once];
#pragma unroll
      for (int j = 0; j < at_once; ++j) e[j] = exponents[row0 + min(own + j * apart, end - 1)];
#pragma unroll 4
      for (unsigned block = 0; block < shares; ++block) {
        const uint32_t from = ptx::address_in(sums_of_block + c, block);
        float part[at_once][4] = {};
#pragma unroll
        for (int j = 0; j < at_once; ++j)
          load_from(from + (own + j * apart) * Tile::out_stride * sizeof(float), own + j * apart < end, part[j]);
#pragma unroll
        for (int j = 0; j < at_once; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][i] += part[j][i];
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        if (own + j * apart >= end) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = alpha * times_power_of_two(total[j][i], -e[j] - column_exponents[i]);
        *reinterpret_cast<float4*>(out + int64_t{row0 + own + j * apart} * out_stride + column0 + c) = {
            total[j][0], total[j][1], total[j][2], total[j][3]};
      }
    }
  }
  __syncwarp();
  ptx::cluster_arrive();  // the others may still read this block's sums
  ptx::cluster_wait();
#endif
}

// A matrix of halves in boxes of 64 columns.
CUtensorMap map_of(const at::Tensor& halves, int box_rows) {
  const int64_t columns = halves.size(2);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(2 * halves.size(1))};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(box_rows)};
  return tensor_map<c10::Half>("spmm", halves.const_data_ptr(), sizes, strides, box);
}

int up(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

// How a kernel in clusters is launched: before those ahead of it have ended.
struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(int64_t clusters, int blocks_of_a_cluster, int threads, int shared) {
    const int64_t blocks = clusters * blocks_of_a_cluster;
    TORCH_CHECK(blocks <= INT32_MAX, "spmm: expected a smaller result, got ", clusters, " tiles of it");
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(blocks_of_a_cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = c10::cuda::getCurrentCUDAStream();
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  Launch(const Launch&) = delete;
};

// Clusters of `shares` blocks that run at once, asked once a device.
template <class Tile>
int clusters_at_once(int shares) {
  static std::array<std::array<std::atomic<int>, kMostShares + 1>, 64> known{};
  auto& most = known[c10::cuda::current_device() % 64][shares];
  if (most.load(std::memory_order_relaxed) == 0) {
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(multiply_halves_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::shared));
    Launch launch(1, shares, kThreads, Tile::shared);
    launch.config.numAttrs = 1;  // the cluster alone
    int fit = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, multiply_halves_kernel<Tile>, &launch.config));
    most.store(std::max(fit, 1), std::memory_order_relaxed);
  }
  return most.load(std::memory_order_relaxed);
}

template <class Tile>
void launch(const Filled& a, const at::Tensor& halves, const at::Tensor& powers, const at::Tensor& out, double alpha) {
  const int64_t rows = a.parts.size(1), inner = halves.size(1), n = halves.size(2);
  const Shape shape{static_cast<int>(rows), static_cast<int>(n), static_cast<int>(inner), up(n, Tile::columns),
                    up(inner, kWide)};
  const int64_t tiles = int64_t{up(rows, kRows)} * shape.across;
  // The shares of K with which the longest of a multiprocessor's work is shortest: steps, and what a tile costs beside.
  int best = 1;
  int64_t least = INT64_MAX;
  for (int shares = 1; shares <= kMostShares; ++shares) {
    const int64_t cost = up(tiles, clusters_at_once<Tile>(shares)) * (kStepsOfTile + up(shape.steps, shares));
    if (cost < least) best = shares, least = cost;
  }
  const Launch with(tiles, best, kThreads, Tile::shared);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&with.config, multiply_halves_kernel<Tile>, map_of(a.parts, kRows),
                                    map_of(halves, kWide), shape, a.exponents.const_data_ptr<int>(),
                                    powers.const_data_ptr<int>(), out.mutable_data_ptr<float>(), out.stride(0),
                                    static_cast<float>(alpha)));
}

void split(const at::Tensor& dense, const at::Tensor& halves, const at::Tensor& powers, const at::Tensor& facts) {
  static std::array<std::atomic<bool>, 64> known{};
  auto& ready = known[c10::cuda::current_device() % 64];
  const int rows = static_cast<int>(dense.size(0)), n = static_cast<int>(dense.size(1));
  constexpr int most = kKeptRows * kSplitColumns * 4;
  if (!ready.load(std::memory_order_relaxed)) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(split_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    ready.store(true, std::memory_order_relaxed);
  }
  const int shared = std::min(up(rows, kSplitBlocks), kKeptRows) * kSplitColumns * 4;
  const Launch with(facts.size(0) / kSplitBlocks, kSplitBlocks, kSplitThreads, shared);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&with.config, split_kernel, dense.const_data_ptr<float>(), rows, n, dense.stride(0),
                                    powers.mutable_data_ptr<int>(), static_cast<uint2*>(halves.mutable_data_ptr()),
                                    static_cast<FillFacts*>(facts.mutable_data_ptr())));
}

}  // namespace

bool can_multiply_halves() {
#ifdef MATMULS_SM90A
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  return properties->major == 9 && properties->minor == 0 && tensor_map_encoder() != nullptr;
#else
  return false;
#endif
}

at::Tensor multiply_halves(const Filled& a, const at::Tensor& dense, const at::Tensor& out, double alpha) {
  const int64_t inner = dense.size(0), n = dense.size(1);
  TORCH_CHECK(a.parts.size(1) <= INT32_MAX / 2 && inner <= INT32_MAX / 2 && n <= INT32_MAX / 2,
              "spmm: expected smaller operands, got ", a.parts.sizes(), " and ", dense.sizes());
  const auto ints = dense.options().dtype(at::kInt);
  const at::Tensor halves = at::empty({2, inner, n}, dense.options().dtype(at::kHalf)), powers = at::empty({n}, ints);
  at::Tensor facts = at::empty({int64_t{up(n, kSplitColumns)} * kSplitBlocks, kFillFacts}, ints);
  split(dense, halves, powers, facts);
  const auto product = n > 64 ? launch<Tile<128>> : n > 32 ? launch<Tile<64>> : launch<Tile<32>>;
  product(a, halves, powers, out, alpha);
  return facts;
}

}  // namespace matmuls
#endif
