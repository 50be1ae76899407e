// What filled.h says but the product itself: A with its zeros, and the dense side in halves.
#ifdef __CUDACC__
#include "filled.h"

#include <ATen/Dispatch.h>

#include "filled.cuh"
#include "sparse.cuh"

namespace matmuls {
namespace {

static_assert(sizeof(FillFacts) == kFillFacts * sizeof(int));

constexpr int kFillColumns = 8192;  // of a row at a time, in shared memory
constexpr int kAtOnce = 4;          // nonzeros of a thread
constexpr unsigned kAbsent = ~0u;   // a NaN that no 16-bit number is; a float32 one does not fit in any case

struct FillShape {
  int64_t rows, part;  // part: elements of one half
  int stride;          // columns to a multiple of 8, of two of four to whole steps
};

// Eight columns of a row, of which every four keep two, as StepOfTile has them; the others are told as a mask of bits.
__device__ unsigned keep_two_of_four(const float (&x)[8], unsigned there, StepOfTile& step, int row, int eighth) {
  unsigned left = 0, places = 0;
  uint2 high, low;
#pragma unroll
  for (int four = 0; four < 2; ++four) {
    unsigned taken = there >> 4 * four & 15;
    if (__popc(taken) < 2) taken |= taken & 8 ? 4 : 8;
    if (__popc(taken) < 2) taken |= 4;
    const unsigned second = taken & (taken - 1), others = second & (second - 1);
    left |= others << 4 * four;
    const int at = __ffs(taken) - 1, then = __ffs(second) - 1;
    places |= (at | then << 2) << 4 * four;
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) a = i == at ? x[4 * four + i] : a, b = i == then ? x[4 * four + i] : b;
    split_two(a, b, four ? high.y : high.x, four ? low.y : low.x);
  }
  uint4* const pieces = step.numbers[row];
  const int piece = eighth / 2;
  reinterpret_cast<uint2*>(&pieces[piece ^ row % 8])[eighth % 2] = high;
  reinterpret_cast<uint2*>(&pieces[(piece + 4) ^ row % 8])[eighth % 2] = low;
  step.places[row / 16][row % 8][piece][row / 8 % 2][eighth % 2] = static_cast<unsigned char>(places);
  return left;
}

// A block a row, or kFillColumns of it.
template <class T, class I, bool two_of_four = false>
__global__ void __launch_bounds__(kSparseThreads)
    fill_kernel(const I* crow, const I* col, const I* order, const T* values, uint4* out, int* exponents,
                FillFacts* facts, int2* rest, const FillShape shape) {
  extern __shared__ __align__(16) float numbers[];
  __shared__ unsigned largest;
  __shared__ int tiny, large, stored;
  const int64_t row = blockIdx.x;
  const int first = blockIdx.y * kFillColumns, width = min(kFillColumns, shape.stride - first);
  if (threadIdx.x == 0) largest = 0, tiny = 0, large = 0, stored = 0;
  for (int i = threadIdx.x; i < width / 4; i += kSparseThreads)
    reinterpret_cast<uint4*>(numbers)[i] = {kAbsent, kAbsent, kAbsent, kAbsent};
  __syncthreads();
  const bool within = row < shape.rows;  // tiles of two of four go on
  const int64_t begin = within ? crow[row] : 0, end = within ? crow[row + 1] : 0;
  unsigned own = 0;
  bool twice = false;
  for (int64_t p = begin + threadIdx.x; p < end; p += kAtOnce * kSparseThreads) {
    float value[kAtOnce];
    int64_t c[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // all on their way at once
      const int64_t at = p + i * kSparseThreads;
      c[i] = -1, value[i] = 0;
      if (at >= end) continue;
      c[i] = static_cast<int64_t>(ptx::load_first_out(col + at)) - first;
      value[i] = static_cast<float>(ptx::load_first_out(values + (order ? static_cast<int64_t>(order[at]) : at)));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own = max(own, __float_as_uint(value[i]) & 0x7fffffffu);
      if (c[i] >= 0 && c[i] < width) twice |= __float_as_uint(atomicExch(&numbers[c[i]], value[i])) != kAbsent;
    }
  }
  if constexpr (sizeof(T) == 4) {
    for (int step = 16; step > 0; step /= 2) own = max(own, __shfl_xor_sync(0xffffffffu, own, step));
    if (threadIdx.x % 32 == 0) atomicMax(&largest, own);
  }
  if (__syncthreads_or(twice) && threadIdx.x == 0) facts->unfit = 1;
  const int e = exponent_for(largest);
  const float scale = power_of_two(e);
  if (sizeof(T) == 4 && threadIdx.x == 0 && first == 0 && within) {
    exponents[row] = e;
    if (largest >= kInfinite) facts->unfit = 1;
  }
  uint4* const to = out + (row * shape.stride + first) / 8;
  int own_tiny = 0, own_large = 0, own_stored = 0;
  [[maybe_unused]] int64_t next = shape.rows + begin / 2;  // of rest: no more than half of a row's go there
  [[maybe_unused]] const int64_t first_rest = next;
  for (int i0 = 0; i0 < width / 8; i0 += kSparseThreads) {
    const int i = i0 + threadIdx.x;
    [[maybe_unused]] unsigned left = 0;
    if (i < width / 8) {
      float x[8];
      const auto [a, b, c, d] = reinterpret_cast<const float4*>(numbers)[2 * i];
      const auto [f, g, h, k] = reinterpret_cast<const float4*>(numbers)[2 * i + 1];
      x[0] = a, x[1] = b, x[2] = c, x[3] = d, x[4] = f, x[5] = g, x[6] = h, x[7] = k;
      [[maybe_unused]] unsigned there = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        there |= (__float_as_uint(x[j]) != kAbsent) << j;
        x[j] = __float_as_uint(x[j]) == kAbsent ? 0 : x[j];
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (float& number : x) {
          number *= scale;
          own_tiny += is_tiny(number), own_large += is_large(number), own_stored += number != 0;
        }
        if constexpr (two_of_four) {
          auto* const steps = reinterpret_cast<StepOfTile*>(out) + row / kTileRows * (shape.stride / kStepColumns);
          left = keep_two_of_four(x, there, steps[i / 8], static_cast<int>(row % kTileRows), i % 8);
        } else {
          uint4 high, low;
          split_two(x[0], x[1], high.x, low.x), split_two(x[2], x[3], high.y, low.y);
          split_two(x[4], x[5], high.z, low.z), split_two(x[6], x[7], high.w, low.w);
          to[i] = high, to[i + shape.part / 8] = low;
        }
      } else {
        const auto packed = pack<T, 8>(x);
        to[i] = {packed.at[0], packed.at[1], packed.at[2], packed.at[3]};
      }
    }
    if constexpr (two_of_four) {
      const auto [before, all] = count_before(__popc(left));
      for (int64_t at = next + before; left != 0; left &= left - 1, ++at) {
        const int c = 8 * i + __ffs(left) - 1;
        rest[at] = {c, static_cast<int>(__float_as_uint(numbers[c]))};
      }
      next += all;
    }
  }
  if constexpr (two_of_four)
    if (threadIdx.x == 0 && within) rest[row] = {static_cast<int>(first_rest), static_cast<int>(next)};
  if constexpr (sizeof(T) == 4) {
    if (own_tiny > 0) tiny = 1;
    if (own_stored > 0) atomicAdd(&large, own_large), stored = 1;
    __syncthreads();
    if (threadIdx.x == 0 && tiny) facts->tiny = 1;
    if (threadIdx.x == 0 && stored && INT_MAX - large > facts->missing) atomicMax(&facts->missing, INT_MAX - large);
  }
}

template <class T>
__global__ void __launch_bounds__(kSparseThreads)
    infinite_kernel(const T* dense, int64_t rows, int n, int64_t stride, FillFacts* facts) {
  constexpr int V = 16 / sizeof(T);
  constexpr unsigned mask = std::is_same_v<T, c10::Half> ? 0x7c00 : 0x7f80;
  bool found = false;
  const int64_t across = n / V, step = static_cast<int64_t>(gridDim.x) * kSparseThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSparseThreads + threadIdx.x; i < rows * across; i += step) {
    const Words<T, V> words = load_vector<T, V>(dense + i / across * stride + i % across * V);
#pragma unroll
    for (const unsigned word : words.at) found |= (word & mask) == mask || (word >> 16 & mask) == mask;
  }
  if (found) facts->unfit = 1;
}

}  // namespace

Filled fill(const Pattern& p, const at::Tensor& values, int64_t columns, bool two_of_four) {
  const bool wide = values.scalar_type() == at::kFloat;
  const int64_t rows = p.rows(), many = two_of_four ? kStepColumns : 8, stride = ceil_of(columns, many) * many,
                chunks = ceil_of(stride, kFillColumns), tiles = ceil_of(rows, kTileRows);
  TORCH_CHECK(rows <= INT32_MAX - kTileRows && chunks <= 65535, "spmm: expected a smaller matrix to fill, got ", rows,
              " x ", columns);
  const auto ints = values.options().dtype(at::kInt), halves = values.options().dtype(at::kHalf);
  Filled made;
  if (two_of_four) {
    TORCH_CHECK(wide && chunks <= 1 && rows + values.size(0) / 2 <= INT32_MAX, "spmm: expected float32 and at most ",
                kFillColumns, " columns to keep two of four, got ", values.scalar_type(), " and ", columns);
    made.parts = empty({tiles, stride / kStepColumns, kStepHalves}, halves);
    made.rest = zeros({rows + values.size(0) / 2, 2}, ints);
  } else {
    made.parts = wide ? empty({2, rows, stride}, halves) : empty({rows, stride}, values.options());
    if (wide) made.rest = empty({0, 2}, ints);
  }
  if (wide) made.exponents = empty({rows}, ints);
  made.facts = empty({kFillFacts}, ints);
  auto* const facts = static_cast<FillFacts*>(made.facts.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, sizeof(FillFacts), stream));
  if (made.parts.numel() == 0) return made;
  const FillShape shape{rows, rows * stride, static_cast<int>(stride)};
  const dim3 grid(static_cast<unsigned>(two_of_four ? tiles * kTileRows : rows), static_cast<unsigned>(chunks));
  const auto shared = static_cast<size_t>(std::min<int64_t>(stride, kFillColumns)) * sizeof(float);
  const auto launch = [&]<class T, bool with_rest = false>(T) {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "spmm", [&] {
      fill_kernel<T, index_t, with_rest><<<grid, kSparseThreads, shared, stream>>>(
          p.crow.const_data_ptr<index_t>(), p.col.const_data_ptr<index_t>(), indices_or_null<index_t>(p.order),
          values.const_data_ptr<T>(), static_cast<uint4*>(made.parts.mutable_data_ptr()),
          wide ? made.exponents.mutable_data_ptr<int>() : nullptr, facts,
          with_rest ? static_cast<int2*>(made.rest.mutable_data_ptr()) : nullptr, shape);
    });
  };
  if (two_of_four)
    launch.operator()<float, true>(0);
  else if (wide)
    launch(float());
  else if (values.scalar_type() == at::kHalf)
    launch(c10::Half());
  else
    launch(c10::BFloat16());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return made;
}

at::Tensor look_for_infinite(const at::Tensor& dense) {
  const int64_t rows = dense.size(0), n = dense.size(1), stride = dense.stride(0);
  const int64_t blocks = std::clamp<int64_t>(ceil_of(rows * n / 8, 4 * kSparseThreads), 1, 1024);
  at::Tensor made = empty({kFillFacts}, dense.options().dtype(at::kInt));
  auto* const facts = static_cast<FillFacts*>(made.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, sizeof(FillFacts), stream));
  const auto launch = [&]<class T>(T) {
    infinite_kernel<T><<<static_cast<unsigned>(blocks), kSparseThreads, 0, stream>>>(
        dense.const_data_ptr<T>(), rows, static_cast<int>(n), stride, facts);
  };
  dense.scalar_type() == at::kHalf ? launch(c10::Half()) : launch(c10::BFloat16());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return made;
}

}  // namespace matmuls
#endif
