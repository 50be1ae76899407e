// RowSums: the kernel, the loop of CPUs, and the checks of both.
#include "distributed/row_sums.h"

#include "glue/scalar_types.h"

#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "glue/handles.h"
#include "gpu/vector_io.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 256, kUnroll = 4;

template <class T, int V>
__device__ Words<T, V> load(const T* from) {
  if constexpr (V == 1) {
    return load_one(from);
  } else {
    Words<T, V> words;
    load_words<16, false>(from, words.at);
    return words;
  }
}

template <class T, int V, class F>
__device__ void write(T* to, F (&sums)[V], bool adds) {
  if (adds) {
    F old[V];
    unpack(load<T, V>(to), old);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] += old[v];
  }
  if constexpr (V == 1)
    *to = T(sums[0]);
  else
    store_vector(to, pack<T, V>(sums));
}

// A team of `lanes` threads, a power of 2, with V columns of B each, sums an item. An item of the first long_rows is
// summed by all teams of a block: team i takes nonzeros i, i + teams, ..., and the first team adds up the teams' sums.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const int4* items, int count, int long_rows, const int32_t* col, const int32_t* order,
                    const T* values, const T* b, T* out, int64_t n, int lanes, bool adds) {
  using F = arithmetic_t<T>;
  __shared__ F kept[kThreads][V];
  const int teams = kThreads / lanes, team = threadIdx.x / lanes, block = static_cast<int>(blockIdx.x);
  const bool is_long = block < long_rows;
  const int64_t c = (int64_t{blockIdx.y} * lanes + threadIdx.x % lanes) * V;
  const int64_t at = is_long ? block : long_rows + int64_t{block - long_rows} * teams + team;
  const bool exists = at < count && c < n;
  F sums[V] = {};
  const int4 item = exists ? items[at] : int4{0, 0, 0, 0};
  const int step = is_long ? teams : 1;
  for (int64_t p = item.x + (is_long ? team : 0); p < item.y; p += kUnroll * step) {
    Words<T, V> words[kUnroll];
    F value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t q = p + u * step;
      words[u] = {};
      value[u] = 0;
      if (q >= item.y) continue;
      words[u] = load<T, V>(b + int64_t{col[q]} * n + c);
      value[u] = values == nullptr ? F(1) : static_cast<F>(values[order == nullptr ? q : int64_t{order[q]}]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      F numbers[V];
      unpack(words[u], numbers);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += value[u] * numbers[v];
    }
  }
  if (is_long) {
#pragma unroll
    for (int v = 0; v < V; ++v) kept[threadIdx.x][v] = sums[v];
    __syncthreads();
    if (team > 0) return;
    for (int other = 1; other < teams; ++other)
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += kept[other * lanes + threadIdx.x][v];
  }
  if (exists) write<T, V>(out + int64_t{item.z} * n + c, sums, adds);
}

template <class T, int V>
void launch(const RowSums& s, const at::Tensor& out, const at::Tensor& b, bool adds) {
  const int64_t n = b.size(1), vectors = n / V, count = s.items.size(0);
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  const int64_t blocks = s.long_rows + ceil_of(count - s.long_rows, kThreads / lanes);
  const int64_t slices = ceil_of(vectors, lanes);
  TORCH_CHECK(slices <= 65535, "distributed.plan: expected fewer columns, got ", n);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(slices));
  row_sums_kernel<T, V><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const int4*>(s.items.const_data_ptr<int32_t>()), static_cast<int>(count),
      static_cast<int>(s.long_rows), s.col.const_data_ptr<int32_t>(),
      s.order ? s.order->const_data_ptr<int32_t>() : nullptr, s.values ? s.values->const_data_ptr<T>() : nullptr,
      b.const_data_ptr<T>(), out.mutable_data_ptr<T>(), n, lanes, adds);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void sum_rows_on_gpu(const RowSums& s, const at::Tensor& out, const at::Tensor& b, bool adds) {
  const OperationGuard guard("distributed.plan", b);
  const auto addresses = reinterpret_cast<uintptr_t>(b.const_data_ptr()) | reinterpret_cast<uintptr_t>(out.data_ptr());
  const bool vectors = (addresses | static_cast<uintptr_t>(b.size(1) * b.element_size())) % 16 == 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "distributed.plan", [&] {
    vectors ? launch<scalar_t, 16 / sizeof(scalar_t)>(s, out, b, adds) : launch<scalar_t, 1>(s, out, b, adds);
  });
}

}  // namespace matmuls
#else
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "cpu/threads.h"
#include "glue/checks.h"
#include "glue/operator.h"

namespace matmuls {
namespace {

constexpr const char* kPlan = "distributed.plan";

template <class T>
void sum_rows(const RowSums& s, const at::Tensor& out, const at::Tensor& b, bool adds) {
  using F = arithmetic_t<T>;
  const int64_t n = b.size(1), count = s.items.size(0);
  const int32_t *const items = s.items.const_data_ptr<int32_t>(), *const col = s.col.const_data_ptr<int32_t>();
  const int32_t* const order = s.order ? s.order->const_data_ptr<int32_t>() : nullptr;
  const T *const values = s.values ? s.values->const_data_ptr<T>() : nullptr, *const from = b.const_data_ptr<T>();
  T* const to = out.mutable_data_ptr<T>();
  const int64_t each = std::max<int64_t>(n * (s.col.size(0) / std::max<int64_t>(count, 1)), 1);
  parallel_for(0, count, std::max<int64_t>(kGrain / each, 1), [&](int64_t first, int64_t last) {
    std::vector<F> sums(static_cast<size_t>(n));
    for (int64_t i = first; i < last; ++i) {
      const int32_t* const item = items + 4 * i;
      T* const row = to + int64_t{item[2]} * n;
      std::fill(sums.begin(), sums.end(), F(0));
      for (int32_t p = item[0]; p < item[1]; ++p) {
        const F value = values == nullptr ? F(1) : static_cast<F>(values[order == nullptr ? p : order[p]]);
        const T* const x = from + int64_t{col[p]} * n;
        for (int64_t c = 0; c < n; ++c) sums[static_cast<size_t>(c)] += value * static_cast<F>(x[c]);
      }
      for (int64_t c = 0; c < n; ++c) {
        const F sum = sums[static_cast<size_t>(c)];
        row[c] = static_cast<T>(adds ? static_cast<F>(row[c]) + sum : sum);
      }
    }
  });
}

}  // namespace

#ifndef MATMULS_CUDA
void sum_rows_on_gpu(const RowSums&, const at::Tensor&, const at::Tensor& b, bool) {
  TORCH_CHECK(false, kPlan, ": expected a build with CUDA, got tensors on ", b.device());
}
#endif

void RowSums::run(const at::Tensor& out, const at::Tensor& b, bool adds) const {
  const auto is_like = [&](const at::Tensor& t) {
    return t.scalar_type() == b.scalar_type() && t.device() == b.device();
  };
  TORCH_CHECK(b.dim() == 2 && b.size(0) == columns && b.is_contiguous() && items.device() == b.device(), kPlan,
              ": expected contiguous rows [", columns, ", n] on ", items.device(), ", got ", b.sizes(),
              " with strides ", b.strides(), " on ", b.device());
  TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == b.size(1) && out.is_contiguous() && is_like(out),
              kPlan, ": expected a contiguous result [", rows, ", ", b.size(1), "] in ", b.scalar_type(), ", got ",
              out.sizes(), " in ", out.scalar_type(), " with strides ", out.strides());
  TORCH_CHECK(!values || is_like(*values), kPlan, ": expected values in ", b.scalar_type(), ", got others");
  if (items.size(0) == 0 || b.size(1) == 0) return;
  if (b.is_cuda())
    sum_rows_on_gpu(*this, out, b, adds);
  else
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), kPlan,
                                    [&] { sum_rows<scalar_t>(*this, out, b, adds); });
  mark_written(out);
}

at::Tensor RowSums::product(const at::Tensor& b) const {
  const at::Tensor rows_of_b = b.contiguous(), out = at::empty({rows, b.size(1)}, b.options());
  run(out, rows_of_b, false);
  return out;
}

}  // namespace matmuls
#endif
