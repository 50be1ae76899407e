// What filled.h says but the product itself: A with its zeros, and the dense side in halves.
#ifdef MATMULS_CUDA
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
  int stride;          // columns to a multiple of 8
};

// A block a row, or kFillColumns of it.
template <class T, class I>
__global__ void __launch_bounds__(kSparseThreads)
    fill_kernel(const I* crow, const I* col, const I* order, const T* values, uint4* out, int* exponents,
                FillFacts* facts, const FillShape shape) {
  extern __shared__ __align__(16) float numbers[];
  __shared__ unsigned largest;
  __shared__ int tiny, large, stored;
  const int64_t row = blockIdx.x;
  const int first = blockIdx.y * kFillColumns, width = min(kFillColumns, shape.stride - first);
  if (threadIdx.x == 0) largest = 0, tiny = 0, large = 0, stored = 0;
  for (int i = threadIdx.x; i < width / 4; i += kSparseThreads)
    reinterpret_cast<uint4*>(numbers)[i] = {kAbsent, kAbsent, kAbsent, kAbsent};
  __syncthreads();
  const int64_t begin = crow[row], end = crow[row + 1];
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
  if (sizeof(T) == 4 && threadIdx.x == 0 && first == 0) {
    exponents[row] = e;
    if (largest >= kInfinite) facts->unfit = 1;
  }
  uint4* const to = out + (row * shape.stride + first) / 8;
  int own_tiny = 0, own_large = 0, own_stored = 0;
  for (int i = threadIdx.x; i < width / 8; i += kSparseThreads) {
    float x[8];
    const auto [a, b, c, d] = reinterpret_cast<const float4*>(numbers)[2 * i];
    const auto [f, g, h, k] = reinterpret_cast<const float4*>(numbers)[2 * i + 1];
    x[0] = a, x[1] = b, x[2] = c, x[3] = d, x[4] = f, x[5] = g, x[6] = h, x[7] = k;
#pragma unroll
    for (float& number : x) number = __float_as_uint(number) == kAbsent ? 0 : number;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (float& number : x) {
        number *= scale;
        own_tiny += is_tiny(number), own_large += is_large(number), own_stored += number != 0;
      }
      uint4 high, low;
      split_two(x[0], x[1], high.x, low.x), split_two(x[2], x[3], high.y, low.y);
      split_two(x[4], x[5], high.z, low.z), split_two(x[6], x[7], high.w, low.w);
      to[i] = high, to[i + shape.part / 8] = low;
    } else {
      const auto packed = pack<T, 8>(x);
      to[i] = {packed.at[0], packed.at[1], packed.at[2], packed.at[3]};
    }
  }
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

Filled fill(const Pattern& p, const at::Tensor& values, int64_t columns) {
  const int64_t rows = p.rows(), stride = ceil_of(columns, 8) * 8, chunks = ceil_of(stride, kFillColumns);
  const bool wide = values.scalar_type() == at::kFloat;
  TORCH_CHECK(rows <= INT32_MAX && chunks <= 65535, "spmm: expected a smaller matrix to fill, got ", rows, " x ",
              columns);
  const auto ints = values.options().dtype(at::kInt);
  Filled made;
  if (wide) {
    made.parts = at::empty({2, rows, stride}, values.options().dtype(at::kHalf));
    made.exponents = at::empty({rows}, ints);
  } else {
    made.parts = at::empty({rows, stride}, values.options());
  }
  made.facts = at::empty({kFillFacts}, ints);
  auto* const facts = static_cast<FillFacts*>(made.facts.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, sizeof(FillFacts), stream));
  if (made.parts.numel() == 0) return made;
  const FillShape shape{rows, rows * stride, static_cast<int>(stride)};
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(chunks));
  const auto shared = static_cast<size_t>(std::min<int64_t>(stride, kFillColumns)) * sizeof(float);
  const auto launch = [&]<class T>(T) {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "spmm", [&] {
      fill_kernel<T, index_t><<<grid, kSparseThreads, shared, stream>>>(
          p.crow.const_data_ptr<index_t>(), p.col.const_data_ptr<index_t>(), indices_or_null<index_t>(p.order),
          values.const_data_ptr<T>(), static_cast<uint4*>(made.parts.mutable_data_ptr()),
          wide ? made.exponents.mutable_data_ptr<int>() : nullptr, facts, shape);
    });
  };
  if (wide)
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
  at::Tensor made = at::empty({kFactsOfPart, kFillFacts}, dense.options().dtype(at::kInt));
  auto* const facts = static_cast<FillFacts*>(made.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, kFactsOfPart * sizeof(FillFacts), stream));
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
