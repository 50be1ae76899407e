// first_bad_diagonal on a GPU (diagonal.h): one pass over the columns, a few lanes of a warp a row.
#ifdef __CUDACC__
#include "sparse/diagonal.h"

#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "gpu/vector_io.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // a row: 8 columns in int32 are one sector of 32 bytes
constexpr unsigned kWarp = 0xffffffffu;

// *first: all ones before, which is -1 after if no row is bad. is_bad: where 1 is written instead, or null.
template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    diagonal_kernel(const I* crow, const I* col, const I* order, const T* values, int64_t rows,
                    unsigned long long* first, int64_t* is_bad) {
  const int64_t r = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int64_t begin = r < rows ? crow[r] : 0, end = r < rows ? crow[r + 1] : 0;
  arithmetic_t<T> sum = 0;
  int has = 0;
#pragma unroll 1  // else ptxas spills
  for (int64_t p = begin + threadIdx.x % kLanes; p < end; p += kLanes)
    if (static_cast<int64_t>(col[p]) == r) {
      has = 1;
      sum += static_cast<arithmetic_t<T>>(values[order == nullptr ? p : static_cast<int64_t>(order[p])]);
    }
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(kWarp, sum, lanes);
    has |= __shfl_xor_sync(kWarp, has, lanes);
  }
  if (r >= rows || threadIdx.x % kLanes != 0 || sum != 0) return;
  if (is_bad != nullptr)
    *is_bad = 1;
  else
    atomicMin(first, 2 * static_cast<unsigned long long>(r) + static_cast<unsigned long long>(has));
}

void launch(const Pattern& a, const at::Tensor& values, unsigned long long* first, int64_t* is_bad) {
  if (a.rows() == 0) return;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto blocks = static_cast<unsigned>(ceil_of(a.rows(), kThreads / kLanes));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "diagonal", [&] {
    AT_DISPATCH_INDEX_TYPES(a.crow.scalar_type(), "diagonal", [&] {
      diagonal_kernel<<<blocks, kThreads, 0, stream>>>(
          a.crow.const_data_ptr<index_t>(), a.col.const_data_ptr<index_t>(), indices_or_null<index_t>(a.order),
          values.const_data_ptr<scalar_t>(), a.rows(), first, is_bad);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace

at::Tensor first_bad_diagonal(const Pattern& a, const at::Tensor& values) {
  at::Tensor first = empty({1}, a.crow.options().dtype(at::kLong));
  auto* const at = reinterpret_cast<unsigned long long*>(first.mutable_data_ptr<int64_t>());
  C10_CUDA_CHECK(cudaMemsetAsync(at, 0xff, sizeof(*at), c10::cuda::getCurrentCUDAStream()));
  launch(a, values, at, nullptr);
  return first;
}

void flag_bad_diagonal(const Pattern& a, const at::Tensor& values, int64_t* is_bad) {
  *is_bad = 0;
  launch(a, values, nullptr, is_bad);
}

}  // namespace matmuls
#endif
