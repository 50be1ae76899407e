// run_few: a thread computes an element of y = x A^T + bias, so that few operands take one launch. Neighbouring threads
// share a row of x and have neighbouring rows of A, whose nonzeros they add in their order.
#ifdef __CUDACC__
#include "sparse/spmm/few.h"

#include <ATen/Dispatch.h>

#include "glue/handles.h"
#include "sparse/csr.cuh"

namespace matmuls::linear {
namespace {

template <class T, class I>
struct Args {
  const I *crow, *col, *order;  // order may be null
  const T *values, *x, *bias;   // bias may be null
  T* y;
  int rows, elements;
  int64_t x_stride;
};

template <class T, class I>
__global__ void __launch_bounds__(kSparseThreads) few_kernel(const __grid_constant__ Args<T, I> m) {
  using F = arithmetic_t<T>;
  const int at = static_cast<int>(blockIdx.x * kSparseThreads + threadIdx.x);
  if (at >= m.elements) return;
  const int row = at % m.rows;
  const T* const x = m.x + at / m.rows * m.x_stride;
  const I end = m.crow[row + 1];
  F sum = 0;
#pragma unroll 4
  for (I p = m.crow[row]; p < end; ++p)
    sum += static_cast<F>(m.values[m.order ? m.order[p] : p]) * static_cast<F>(x[m.col[p]]);
  const T product = T(sum);
  m.y[at] = m.bias ? T(static_cast<F>(product) + static_cast<F>(m.bias[row])) : product;
}

}  // namespace

void run_few(const Pattern& p, const at::Tensor& values, const at::Tensor& x, const at::Tensor& bias,
             const at::Tensor& y) {
  const OperationGuard guard("csr_linear", x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "csr_linear", [&] {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "csr_linear", [&] {
      Args<scalar_t, index_t> m{};
      m.crow = p.crow.const_data_ptr<index_t>();
      m.col = p.col.const_data_ptr<index_t>();
      m.order = indices_or_null<index_t>(p.order);
      m.values = values.const_data_ptr<scalar_t>();
      m.x = x.const_data_ptr<scalar_t>();
      m.bias = bias.defined() ? bias.const_data_ptr<scalar_t>() : nullptr;
      m.y = y.mutable_data_ptr<scalar_t>();
      m.rows = static_cast<int>(p.rows());
      m.elements = static_cast<int>(y.numel());
      m.x_stride = x.stride(0);
      few_kernel<<<up(m.elements, kSparseThreads), kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace matmuls::linear
#endif
