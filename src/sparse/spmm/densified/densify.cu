// Densifies a CSR matrix (densified.h): with explicit zeros, as float16 halves, or in 2:4 form. Also checks 16-bit B
// for non-finite numbers.
#ifdef __CUDACC__
#include "sparse/spmm/densified/densified.h"

#include <ATen/Dispatch.h>

#include "gpu/launch.cuh"
#include "sparse/csr.cuh"
#include "sparse/spmm/densified/densified.cuh"

namespace matmuls {
namespace {

static_assert(sizeof(FitFlags) == kFitFlags * sizeof(int));

constexpr int kFillColumns = 8192;        // columns of a row at a time, in shared memory
constexpr int64_t kFillStatic = 1 << 10;  // bytes of static shared memory at most
constexpr int kAtOnce = 4;                // nonzeros that a thread loads at once
// marks an empty column: a NaN that no 16-bit number converts to; a float32 NaN makes A unfit anyway
constexpr unsigned kAbsent = ~0u;

struct FillShape {
  int64_t rows, part;  // part: elements of the high halves
  int stride;          // columns of A to a multiple of 8, for 2:4 to whole steps
  int at_once;         // columns per block
  int64_t room;        // entries of `rest` after its first `rows`
};

// Stores the four numbers that a row keeps of columns 8 * eighth to 8 * eighth + 7 of a step.
template <class T>
__device__ void put(StepOfTile& step, int row, int eighth, const float (&kept)[4]) {
  uint2 high, low;
  split_two(kept[0], kept[1], high.x, low.x), split_two(kept[2], kept[3], high.y, low.y);
  uint4* const pieces = step.numbers[row];
  const int piece = eighth / 2;
  reinterpret_cast<uint2*>(&pieces[piece ^ row % 8])[eighth % 2] = high;
  reinterpret_cast<uint2*>(&pieces[(piece + 4) ^ row % 8])[eighth % 2] = low;
}
template <class T>
__device__ void put(NarrowStepOfTile& step, int row, int eighth, const float (&kept)[4]) {
  const auto packed = pack<T, 4>(kept);
  reinterpret_cast<uint2*>(&step.numbers[row][eighth / 2 ^ row / 2 % 4])[eighth % 2] = {packed.at[0], packed.at[1]};
}

// Which of eight columns exceed 2:4, as bits; `there`: those with a nonzero.
__device__ inline unsigned beyond_two(unsigned there) {
  unsigned beyond = 0;
#pragma unroll
  for (int four = 0; four < 2; ++four) {
    const unsigned own = there >> 4 * four & 15, others = own & (own - 1);
    beyond |= (others & (others - 1)) << 4 * four;
  }
  return beyond;
}

// Keeps two of every four of eight columns of a row, with their positions.
template <class T, class Step>
__device__ void store_sparse24(const float (&x)[8], unsigned there, Step& step, int row, int eighth) {
  unsigned places = 0;
  float kept[4] = {};
#pragma unroll
  for (int four = 0; four < 2; ++four) {
    unsigned taken = there >> 4 * four & 15;
    if (__popc(taken) < 2) taken |= taken & 8 ? 4 : 8;
    if (__popc(taken) < 2) taken |= 4;
    const int at = __ffs(taken) - 1, then = __ffs(taken & (taken - 1)) - 1;
    places |= (at | then << 2) << 4 * four;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i == at) kept[2 * four] = x[4 * four + i];
      if (i == then) kept[2 * four + 1] = x[4 * four + i];
    }
  }
  put<T>(step, row, eighth, kept);
  step.places[row / 16][row % 8][eighth / 2][row / 8 % 2][eighth % 2] = static_cast<unsigned char>(places);
}

// A block per row, or per kFillColumns of it; for 2:4 always a whole row.
template <class T, class I, bool sparse24 = false>
__global__ void __launch_bounds__(kSparseThreads)
    densify_kernel(const I* crow, const I* col, const I* order, const T* values, uint4* out, int* exponents,
                   FitFlags* facts, int2* rest, const FillShape shape) {
  extern __shared__ __align__(16) float numbers[];
  __shared__ unsigned largest;
  __shared__ int tiny, large, stored, before_row;
  const int64_t row = blockIdx.x;
  const int first = blockIdx.y * shape.at_once, width = min(shape.at_once, shape.stride - first);
  if (threadIdx.x == 0) largest = 0, tiny = 0, large = 0, stored = 0;
  for (int i = threadIdx.x; i < width / 4; i += kSparseThreads)
    reinterpret_cast<uint4*>(numbers)[i] = {kAbsent, kAbsent, kAbsent, kAbsent};
  __syncthreads();
  const bool within = row < shape.rows;  // tiles of 2:4 extend past the last row
  const int64_t begin = within ? crow[row] : 0, end = within ? crow[row + 1] : 0;
  unsigned own = 0;
  bool twice = false;
  for (int64_t p = begin + threadIdx.x; p < end; p += kAtOnce * kSparseThreads) {
    float value[kAtOnce];
    int64_t c[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // all loads in flight at once
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
  const auto there_of = [&](int i) {  // which of columns 8 * i to 8 * i + 7 are stored
    unsigned there = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) there |= (__float_as_uint(numbers[8 * i + j]) != kAbsent) << j;
    return there;
  };
  [[maybe_unused]] int64_t next = 0;  // index in rest
  if constexpr (sparse24) {
    int own_beyond = 0;
    for (int i = threadIdx.x; i < width / 8; i += kSparseThreads) own_beyond += __popc(beyond_two(there_of(i)));
    const int all = count_before(own_beyond).all;
    if (threadIdx.x == 0) before_row = all > 0 ? atomicAdd(&facts->beyond, all) : 0;
    __syncthreads();
    next = shape.rows + before_row;
    if (threadIdx.x == 0 && within) {
      const int64_t until = shape.rows + shape.room;
      if (next + all > until) facts->unfit = 1;  // more nonzeros exceed 2:4 than `beyond` said
      rest[row] = {static_cast<int>(min(next, until)), static_cast<int>(min(next + all, until))};
    }
  }
  for (int i0 = 0; i0 < width / 8; i0 += kSparseThreads) {
    const int i = i0 + threadIdx.x;
    [[maybe_unused]] unsigned left = 0;
    if (i < width / 8) {
      [[maybe_unused]] const unsigned there = sparse24 ? there_of(i) : 0;
      float x[8];
      const auto [a, b, c, d] = reinterpret_cast<const float4*>(numbers)[2 * i];
      const auto [f, g, h, k] = reinterpret_cast<const float4*>(numbers)[2 * i + 1];
      x[0] = a, x[1] = b, x[2] = c, x[3] = d, x[4] = f, x[5] = g, x[6] = h, x[7] = k;
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __float_as_uint(x[j]) == kAbsent ? 0 : x[j];
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (float& number : x) {
          number *= scale;
          own_tiny += is_tiny(number), own_large += is_large(number), own_stored += number != 0;
        }
      }
      if constexpr (sparse24) {
        using Step = std::conditional_t<sizeof(T) == 4, StepOfTile, NarrowStepOfTile>;
        auto* const steps = reinterpret_cast<Step*>(out) + row / kTileRows * (shape.stride / kStepColumns);
        store_sparse24<T>(x, there, steps[i / 8], static_cast<int>(row % kTileRows), i % 8);
        left = beyond_two(there);
      } else if constexpr (sizeof(T) == 4) {
        uint4 high, low;
        split_two(x[0], x[1], high.x, low.x), split_two(x[2], x[3], high.y, low.y);
        split_two(x[4], x[5], high.z, low.z), split_two(x[6], x[7], high.w, low.w);
        to[i] = high, to[i + shape.part / 8] = low;
      } else {
        const auto packed = pack<T, 8>(x);
        to[i] = {packed.at[0], packed.at[1], packed.at[2], packed.at[3]};
      }
    }
    if constexpr (sparse24) {
      const auto [before, all] = count_before(__popc(left));
      for (int64_t at = next + before; left != 0; left &= left - 1, ++at) {
        const int c = 8 * i + __ffs(left) - 1;
        if (at < shape.rows + shape.room) rest[at] = {c, static_cast<int>(__float_as_uint(numbers[c]))};
      }
      next += all;
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
    infinite_kernel(const T* dense, int64_t rows, int n, int64_t stride, FitFlags* facts) {
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

DensifiedMatrix densify(const Pattern& p, const at::Tensor& values, int64_t columns, bool sparse24, int64_t beyond) {
  const bool wide = values.scalar_type() == at::kFloat;
  const int64_t rows = p.rows(), many = sparse24 ? kStepColumns : 8, stride = ceil_of(columns, many) * many,
                at_once = sparse24 ? stride : std::min<int64_t>(stride, kFillColumns),
                chunks = stride > 0 ? ceil_of(stride, at_once) : 0, tiles = ceil_of(rows, kTileRows),
                room = std::min(beyond < 0 ? INT64_MAX : beyond, values.size(0) / 2);
  TORCH_CHECK_VALUE(rows <= INT32_MAX - kTileRows && chunks <= 65535,
                    "spmm: expected a smaller matrix to densify, got ", rows, " x ", columns);
  const auto ints = values.options().dtype(at::kInt), halves = values.options().dtype(at::kHalf);
  DensifiedMatrix made;
  const int64_t shared = at_once * static_cast<int64_t>(sizeof(float));
  if (sparse24) {
    TORCH_CHECK_VALUE(stride <= kMostPaired && rows + room <= INT32_MAX, "spmm: expected at most ", kMostPaired,
                      " columns to keep two of four, got ", columns, ", and fewer nonzeros than ", values.size(0));
    const int64_t fits = (device_limits().shared_per_block - kFillStatic) / static_cast<int64_t>(sizeof(float));
    TORCH_CHECK_VALUE(at_once <= fits, "spmm: expected at most ", fits,
                      " columns to keep two of four on this GPU, whose blocks have too little shared memory for more, "
                      "got ",
                      columns);
    made.parts = wide ? empty({tiles, stride / kStepColumns, kStepElements}, halves)
                      : empty({tiles, stride / kStepColumns, kNarrowStepElements}, values.options());
    made.rest = zeros({rows + room, 2}, ints);
  } else {
    made.parts = wide ? empty({2, rows, stride}, halves) : empty({rows, stride}, values.options());
    if (wide) made.rest = empty({0, 2}, ints);
  }
  if (wide) made.exponents = empty({rows}, ints);
  made.facts = empty({kFitFlags}, ints);
  auto* const facts = static_cast<FitFlags*>(made.facts.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, sizeof(FitFlags), stream));
  if (made.parts.numel() == 0) return made;
  const FillShape shape{rows, rows * stride, static_cast<int>(stride), static_cast<int>(at_once), room};
  const dim3 grid(static_cast<unsigned>(sparse24 ? tiles * kTileRows : rows), static_cast<unsigned>(chunks));
  const auto launch = [&]<class T, bool with_rest>(T) {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "spmm", [&] {
      constexpr auto kernel = densify_kernel<T, index_t, with_rest>;
      if (with_rest) allow_shared_memory<kernel>();  // the others take 32 KB at most
      Launch(grid, kSparseThreads, shared)(
          kernel, p.crow.const_data_ptr<index_t>(), p.col.const_data_ptr<index_t>(), indices_or_null<index_t>(p.order),
          values.const_data_ptr<T>(), static_cast<uint4*>(made.parts.mutable_data_ptr()),
          wide ? made.exponents.mutable_data_ptr<int>() : nullptr, facts,
          with_rest ? static_cast<int2*>(made.rest.mutable_data_ptr()) : nullptr, shape);
    });
  };
  const auto by_type = [&]<bool with_rest>() {
    if (wide)
      launch.template operator()<float, with_rest>(0);
    else if (values.scalar_type() == at::kHalf)
      launch.template operator()<c10::Half, with_rest>({});
    else
      launch.template operator()<c10::BFloat16, with_rest>({});
  };
  sparse24 ? by_type.template operator()<true>() : by_type.template operator()<false>();
  return made;
}

at::Tensor find_nonfinite(const at::Tensor& dense) {
  const int64_t rows = dense.size(0), n = dense.size(1), stride = dense.stride(0);
  const int64_t blocks = std::clamp<int64_t>(ceil_of(rows * n / 8, 4 * kSparseThreads), 1, 1024);
  at::Tensor made = empty({kFitFlags}, dense.options().dtype(at::kInt));
  auto* const facts = static_cast<FitFlags*>(made.mutable_data_ptr());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(facts, 0, sizeof(FitFlags), stream));
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
