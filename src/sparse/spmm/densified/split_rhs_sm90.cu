// Splits B into float16 halves (densified.h): a cluster takes 16 columns, scales each by its largest magnitude and
// splits it. These blocks are few and mostly wait for memory, so other blocks multiply A's nonzeros beyond 2:4 on CUDA
// cores meanwhile.
#ifdef __CUDACC__
#include "gpu/ptx.cuh"
#include "sparse/spmm/densified/densified.cuh"
#include "sparse/spmm/densified/fp16x2_sm90.cuh"

namespace matmuls {
namespace {

constexpr int kSplitThreads = 512, kKeptRows = 512;  // rows of a block kept in shared memory
constexpr int kBlocksAtOnce = 3;                     // per multiprocessor; 512 columns take 32 clusters
constexpr int kRestBlocks = 396;                     // as many as an H200 runs at once

struct Rest {
  const int2* rest;
  float* out;
  int64_t out_stride;
  int rows, blocks, first_block;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Loads a number from another block's shared memory.
__device__ inline unsigned load_int(const void* shared, unsigned block) {
  unsigned x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(ptx::mapa(shared, block)) : "memory");
  return x;
}
#endif

// out <- rest @ dense in the rows that have entries. A warp takes a row, with 32 / lanes entries at a time if B is
// narrow.
template <int lanes>
__device__ inline void multiply_rest(const Rest& a, const float* dense, int n, int64_t stride, int block) {
  constexpr int at_once = 4, parts = 32 / lanes, warps = kSplitThreads / 32;
  const int lane = threadIdx.x % lanes, part = threadIdx.x % 32 / lanes, across = (n + 4 * lanes - 1) / (4 * lanes);
  const int64_t tasks = static_cast<int64_t>(a.rows) * across;
  for (int64_t task = static_cast<int64_t>(block) * warps + threadIdx.x / 32; task < tasks;
       task += static_cast<int64_t>(a.blocks) * warps) {
    const int64_t row = task / across;
    const int c = static_cast<int>(task % across) * 4 * lanes + 4 * lane;
    const int2 range = a.rest[row];
    if (range.x >= range.y) continue;
    float sum[4] = {};
    for (int i = range.x + part; c < n && i < range.y; i += at_once * parts) {
      int2 entry[at_once];
      float4 x[at_once];
#pragma unroll
      for (int j = 0; j < at_once; ++j) entry[j] = a.rest[min(i + j * parts, range.y - 1)];
#pragma unroll
      for (int j = 0; j < at_once; ++j) x[j] = *reinterpret_cast<const float4*>(dense + entry[j].x * stride + c);
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        if (i + j * parts >= range.y) break;
        const float number = __int_as_float(entry[j].y);
        sum[0] = fmaf(number, x[j].x, sum[0]), sum[1] = fmaf(number, x[j].y, sum[1]);
        sum[2] = fmaf(number, x[j].z, sum[2]), sum[3] = fmaf(number, x[j].w, sum[3]);
      }
    }
    for (int step = lanes; step < 32; step *= 2)
#pragma unroll
      for (float& x : sum) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (part == 0 && c < n)
      *reinterpret_cast<float4*>(a.out + row * a.out_stride + c) = {sum[0], sum[1], sum[2], sum[3]};
  }
}

// Each block reports its largest per-column count of numbers that are not large. The sum over a cluster bounds every
// column's count from above.
__global__ void __launch_bounds__(kSplitThreads, kBlocksAtOnce)
    split_kernel(const float* dense, int rows, int n, int64_t stride, int* exponents, uint2* halves, FitFlags* facts,
                 const Rest rest) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kQuads = kSplitColumns / 4, kStep = kSplitThreads / kQuads;
  extern __shared__ __align__(16) float4 kept[][kQuads];
  __shared__ unsigned largest[kSplitColumns];
  __shared__ int powers[kSplitColumns], missing[kSplitColumns], tiny;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (const int block = static_cast<int>(blockIdx.x) - rest.first_block; block >= 0) {
    if (n <= 32)
      multiply_rest<8>(rest, dense, n, stride, block);
    else if (n <= 64)
      multiply_rest<16>(rest, dense, n, stride, block);
    else
      multiply_rest<32>(rest, dense, n, stride, block);
    return;
  }
  const unsigned rank = ptx::cluster_rank();
  const int quad = threadIdx.x % kQuads, c = static_cast<int>(blockIdx.x) / kSplitBlocks * kSplitColumns + 4 * quad;
  const int each = (rows + kSplitBlocks - 1) / kSplitBlocks, first = static_cast<int>(rank) * each;
  const int many = c < n ? max(min(each, rows - first), 0) : 0;  // n is a multiple of 8
  if (threadIdx.x < kSplitColumns) largest[threadIdx.x] = 0, missing[threadIdx.x] = 0;
  if (threadIdx.x == 0) tiny = 0;
  __syncthreads();
  const auto at = [&](int r) { return dense + (first + r) * stride + c; };
  unsigned own[4] = {};
#pragma unroll 4
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
  ptx::cluster_arrive();  // the wait is at the end: other blocks may still read this block's largest
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
    // A column of zeros is exact whatever A's rows are.
    int most_missing = threadIdx.x < kSplitColumns && most > 0 ? missing[threadIdx.x] : 0;
    for (int step = 16; step > 0; step /= 2)
      most_missing = max(most_missing, __shfl_xor_sync(0xffffffffu, most_missing, step));
    const bool infinite = __any_sync(0xffffffffu, most >= kInfinite);
    if (threadIdx.x == 0) facts[blockIdx.x] = {infinite, tiny, most_missing};
  }
  ptx::cluster_wait();
#endif
}

}  // namespace

constexpr int kMostKept = kKeptRows * kSplitColumns * 4;  // bytes of shared memory

bool can_split_dense() { return clusters_at_once<split_kernel, kSplitThreads, kMostKept>(kSplitBlocks) > 0; }

void split_dense(const at::Tensor& dense, const SplitDense& to, const at::Tensor& rest, const at::Tensor& out) {
  const int rows = static_cast<int>(dense.size(0)), n = static_cast<int>(dense.size(1));
  allow_shared_memory<split_kernel>();
  const int shared = std::min(up(rows, kSplitBlocks), kKeptRows) * kSplitColumns * 4;
  Rest left{};
  left.first_block = static_cast<int>(SplitDense::parts(n) * kSplitBlocks);
  if (rest.size(0) > 0) {
    const int lanes = n <= 32 ? 8 : n <= 64 ? 16 : 32, out_rows = static_cast<int>(out.size(0));
    const int64_t warps = int64_t{out_rows} * up(n, 4 * lanes), blocks = warps / (kSplitThreads / 32) + 1;
    left = {static_cast<const int2*>(rest.const_data_ptr()),
            out.mutable_data_ptr<float>(),
            out.stride(0),
            out_rows,
            kSplitBlocks * up(std::min<int64_t>(blocks, kRestBlocks), kSplitBlocks),
            left.first_block};
  }
  Launch launch(left.first_block + left.blocks, kSplitThreads, shared);
  launch.in_clusters(kSplitBlocks);
  launch.programmatic();
  launch(split_kernel, dense.const_data_ptr<float>(), rows, n, dense.stride(0), to.powers,
         reinterpret_cast<uint2*>(to.halves), to.facts, left);
}

}  // namespace matmuls
#endif
