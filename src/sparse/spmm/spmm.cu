// csr_spmm on a GPU: launches what sparse/spmm/choose.h chooses, the row kernels (sparse/spmm/by_rows/by_rows.cuh) or a
// densified product (sparse/spmm/densified/densified.h).
#ifdef __CUDACC__
#include "sparse/spmm/by_rows/by_rows.cuh"

#include <ATen/Dispatch.h>

#include <utility>

#include "glue/checks.h"
#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "sparse/spmm/choose.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {
namespace {

using at::Tensor;

template <class T, class I>
using Args = SpmmArgs<T, I>;

// max and min: a warp per row of A, a lane per column of B.
template <class T, class I, bool largest>
__global__ void __launch_bounds__(kSparseThreads) extremum_kernel(const __grid_constant__ Args<T, I> m, I* arg) {
  using F = arithmetic_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (row >= m.rows) return;
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch;
    for (int64_t c = blockIdx.y * 32 + threadIdx.x % 32; c < m.n; c += gridDim.y * 32) {
      F best = 0;
      I from = -1;
#pragma unroll 4
      for (int64_t p = m.crow[row]; p < m.crow[row + 1]; ++p) {
        const I at = m.order ? m.order[p] : static_cast<I>(p);
        const F x = static_cast<F>(values[at]) * static_cast<F>(dense[m.col[p] * m.dense_stride + c]);
        if (from < 0 || (largest ? x > best : x < best) || (x != x && best == best)) best = x, from = at;
      }
      T* const out = m.out + batch * m.out_batch + row * m.out_stride + c;
      *out = T(m.beta != 0 ? m.alpha * best + m.beta * static_cast<F>(*out) : m.alpha * best);
      if (arg) arg[(batch * m.rows + row) * m.n + c] = from;
    }
  }
}

// Sum over the selected values: a warp per row of A, a lane per column of B.
template <class T, class I>
__global__ void __launch_bounds__(kSparseThreads)
    selected_kernel(const __grid_constant__ Args<T, I> m, const I* selected, int64_t selected_rows, bool by_column) {
  using F = arithmetic_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (row >= m.rows) return;
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch;
    const I* const chosen = selected + batch * selected_rows * m.n;
    for (int64_t c = blockIdx.y * 32 + threadIdx.x % 32; c < m.n; c += gridDim.y * 32) {
      F sum = 0;
      for (int64_t p = m.crow[row]; p < m.crow[row + 1]; ++p) {
        const I at = m.order ? m.order[p] : static_cast<I>(p);
        const int64_t column = m.col[p];
        if (chosen[(by_column ? column : row) * m.n + c] == at)
          sum += static_cast<F>(values[at]) * static_cast<F>(dense[column * m.dense_stride + c]);
      }
      T* const out = m.out + batch * m.out_batch + row * m.out_stride + c;
      *out = T(m.beta != 0 ? m.alpha * sum + m.beta * static_cast<F>(*out) : m.alpha * sum);
    }
  }
}

dim3 grid_of(int64_t blocks, int64_t tiles, int64_t batches) {
  TORCH_CHECK_VALUE(blocks <= INT32_MAX && tiles <= 65535, kOp,
                    ": expected at most 2^31 - 1 blocks of rows and 65535 tiles of columns, got ", blocks, " and ",
                    tiles);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles),
              static_cast<unsigned>(std::min<int64_t>(batches, 65535)));
}

template <class T, class I>
void launch_long_rows(const Args<T, I>& m, bool vectors, bool counts_rows) {
  constexpr int V = 16 / sizeof(arithmetic_t<T>);
  const int64_t tiles = ceil_of(m.n, 32 * (vectors ? V : 1));
  const dim3 grid = grid_of(ceil_of(m.slots, kSparseThreads / 32), std::min<int64_t>(tiles, 64), m.batches);
  launch_programmatic(vectors ? spmm_long_rows_kernel<T, I, V> : spmm_long_rows_kernel<T, I, 1>, grid, kSparseThreads,
                      m, counts_rows);
}

template <bool vectors, class T, class I>
void launch_split(const Args<T, I>& m, const RowsChoice& choice) {
  static constexpr auto kCompiled = rows_kernels(sizeof(T), vectors);
  const dim3 grid = grid_of(static_cast<int64_t>(m.blocks) * m.slices, 1, m.batches);
  const auto launch = [&]<size_t i>() {
    constexpr RowsKernel k = kCompiled[i];
    if (!k.is(choice)) return false;
    constexpr int V = vectors ? 16 / sizeof(T) : 1, R = k.vectors, U = k.ahead;
    if constexpr (k.share_blocks > 0) {
      launch_programmatic(spmm_shares_kernel<T, I, V, k.lanes, R, U, k.share_blocks>, grid, kSparseThreads, m);
    } else {
      constexpr int kBlocks = U * R * Words<T, V>::kCount < 32 ? 4 : 3;  // 64 registers per thread, or 80
      launch_programmatic(spmm_rows_kernel<T, I, V, k.lanes, k.parts, R, U, kBlocks>, grid, kSparseThreads, m);
    }
    return true;
  };
  const bool launched = [&]<size_t... i>(std::index_sequence<i...>) {
    return (launch.template operator()<i>() || ...);
  }(std::make_index_sequence<kCompiled.size()>());
  TORCH_INTERNAL_ASSERT(launched);
}

ProductFacts facts_of(const Call& c) {
  return {.rows = c.pattern.rows(),
          .columns = c.dense.size(1),
          .nonzeros = c.pattern.nonzeros(),
          .longest = c.longest,
          .n = c.out.size(2),
          .batches = c.out.size(0),
          .element_bytes = static_cast<int>(c.dense.element_size()),
          .vectors = of_vectors(c.dense) && of_vectors(c.out),
          .multiprocessors = device_limits().multiprocessors};
}

template <class T, class I>
void sum_cuda(const Call& c, Args<T, I>& m) {
  using F = arithmetic_t<T>;
  if (m.dense_stride * sizeof(T) > UINT32_MAX) {
    Call packed = c;
    packed.dense = c.dense.contiguous();
    m.dense = packed.dense.template const_data_ptr<T>();
    m.dense_batch = packed.dense.stride(0), m.dense_stride = packed.dense.stride(1);
    TORCH_CHECK_VALUE(m.dense_stride * sizeof(T) <= UINT32_MAX, kOp, ": expected rows of dense below 4 GiB, got ", m.n,
                      " columns");
    return sum_cuda(packed, m);
  }
  TORCH_CHECK_VALUE(c.dense.size(1) <= UINT32_MAX, kOp, ": expected a sparse matrix of at most 2^32 - 1 columns, got ",
                    c.dense.size(1));
  m.dense_row_bytes = static_cast<uint32_t>(m.dense_stride * sizeof(T));
  const ProductFacts facts = facts_of(c);
  const bool vectors = facts.vectors;
  const RowsChoice choice = choose_rows(facts, m.facts != nullptr);
  m.blocks = choice.blocks, m.piece_blocks = choice.piece_blocks, m.slices = choice.slices;
  m.rows_each = choice.rows_each, m.slices_first = choice.slices_first;
  m.slot = choice.slot, m.slots = choice.slots;
  const auto launch = [&] { vectors ? launch_split<true>(m, choice) : launch_split<false>(m, choice); };
  if (m.slots == 0) return launch();
  const Tensor partial =
      empty({m.batches, m.slots, 2, m.n}, c.dense.options().dtype(c10::CppTypeToScalarType<F>::value));
  const Tensor begins = empty({m.slots}, c.dense.options().dtype(at::kLong));
  m.partial = partial.template mutable_data_ptr<F>();
  m.begins = begins.mutable_data_ptr<int64_t>();
  launch();
  if (!choice.shares || c.longest < 0 || c.longest > m.slot) launch_long_rows(m, vectors, choice.shares);
}

DensifyFacts densify_facts_of(const Call& c) {
  const auto dtype = c.dense.scalar_type();
  return {.plain = c.reduce == Reduce::sum && !c.selected.defined() && c.beta == 0,
          .alpha_one = c.alpha == 1,
          .fp16x2 = dtype == at::kFloat && can_multiply_fp16x2(c.dense),
          .cublas = c.dense.element_size() == 2 && !must_be_deterministic() && Borrowed::is_available(Library::cublas)};
}

Call padded(const Call& c) {
  const int64_t n = c.out.size(2), width = ceil_of(n, 8) * 8;
  Call wide = c;
  wide.dense = zeros({1, c.dense.size(1), width}, c.dense.options());
  wide.dense.narrow(2, 0, n).copy_(c.dense);
  wide.out = empty({1, c.out.size(1), width}, c.out.options());
  return wide;
}

// Whether the 16-bit 2:4 kernel can run on these operands.
bool may_multiply_sparse24(const Call& c) {
  return is_aligned(facts_of(c)) && c.dense.numel() > 0 && c.dense.stride(1) >= c.dense.size(2) &&
         has_hopper_kernels(c.dense.get_device());
}

// The product with densified A; the row kernel recomputes what needs it.
template <class T, class I>
void sum_densified(const Call& c, Args<T, I>& m, const DensifiedMatrix& densified) {
  const Tensor dense = c.dense[0], out = c.out[0];
  if constexpr (sizeof(T) == 4) {
    multiply_fp16x2(densified, c.pattern, c.values, dense, out, c.alpha);
  } else if constexpr (sizeof(T) == 2) {
    const Tensor facts = find_nonfinite(dense);
    multiply_dense(densified.parts.narrow(1, 0, dense.size(0)), dense, out);
    m.facts = static_cast<const FitFlags*>(densified.facts.const_data_ptr());
    m.dense_facts = static_cast<const FitFlags*>(facts.const_data_ptr());
    sum_cuda(c, m);
  }
}

template <class T, class I>
Args<T, I> args_of(const Call& c) {
  using F = arithmetic_t<T>;
  TORCH_CHECK_VALUE(c.out.size(2) <= INT32_MAX, kOp, ": expected at most 2^31 - 1 columns, got ", c.out.size(2));
  Args<T, I> m{};
  m.crow = c.pattern.crow.const_data_ptr<I>();
  m.col = c.pattern.col.const_data_ptr<I>();
  m.order = indices_or_null<I>(c.pattern.order);
  m.values = c.values.const_data_ptr<T>();
  m.dense = c.dense.const_data_ptr<T>();
  m.out = c.out.mutable_data_ptr<T>();
  m.rows = c.pattern.rows(), m.nonzeros = c.pattern.nonzeros();
  m.n = static_cast<int>(c.out.size(2));
  m.values_batch = c.values.stride(0), m.dense_batch = c.dense.stride(0), m.out_batch = c.out.stride(0);
  m.dense_stride = c.dense.stride(1), m.out_stride = c.out.stride(1);
  m.batches = c.out.size(0);
  m.alpha = static_cast<F>(c.alpha), m.beta = static_cast<F>(c.beta);
  m.mean = c.reduce == Reduce::mean;
  return m;
}

// Densifies A for this product alone.
template <class T, class I>
void sum_densified(const Call& c) {
  const DensifiedMatrix densified = densify(c.pattern, c.values[0], c.dense.size(1));
  const Call aligned = is_aligned(facts_of(c)) ? c : padded(c);
  auto m = args_of<T, I>(aligned);
  sum_densified(aligned, m, densified);
  if (!aligned.out.is_same(c.out)) c.out.copy_(aligned.out.narrow(2, 0, c.out.size(2)));
}

template <class T, class I>
void launch_extremum(const Args<T, I>& m, const Call& c, const dim3& grid) {
  I* const arg = c.arg.defined() ? c.arg.mutable_data_ptr<I>() : nullptr;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (c.reduce == Reduce::max)
    extremum_kernel<T, I, true><<<grid, kSparseThreads, 0, stream>>>(m, arg);
  else
    extremum_kernel<T, I, false><<<grid, kSparseThreads, 0, stream>>>(m, arg);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class I>
void launch_selected(const Args<T, I>& m, const Call& c, const dim3& grid) {
  selected_kernel<T, I><<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      m, c.selected.const_data_ptr<I>(), c.selected.size(1), c.by_column);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void run_cuda(const Call& c) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.dense.scalar_type(), kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      auto m = args_of<scalar_t, index_t>(c);
      const bool extremum = c.reduce == Reduce::max || c.reduce == Reduce::min;
      if (!c.selected.defined() && !extremum) {
        if (choose_densified(facts_of(c), densify_facts_of(c))) return sum_densified<scalar_t, index_t>(c);
        return sum_cuda(c, m);
      }
      const dim3 warps =
          grid_of(ceil_of(m.rows, kSparseThreads / 32), std::min<int64_t>(ceil_of(m.n, 32), 1024), m.batches);
      c.selected.defined() ? launch_selected(m, c, warps) : launch_extremum(m, c, warps);
    });
  });
}

void run_densified(const Call& c, const DensifiedMatrix& kept) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_SWITCH(c.dense.scalar_type(), kOp, AT_DISPATCH_CASE(at::kFloat, [&] {
                       AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
                         auto m = args_of<float, index_t>(c);
                         const ProductFacts facts = facts_of(c);
                         const bool fits = is_aligned(facts) && densified_kernel(facts, densify_facts_of(c));
                         fits ? sum_densified(c, m, kept) : sum_cuda(c, m);
                       });
                     }) AT_DISPATCH_CASE_REDUCED_FLOATING_TYPES([&] {
                       if (may_multiply_sparse24(c)) return multiply_sparse24(kept, c.dense[0], c.out[0]);
                       AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
                         auto m = args_of<scalar_t, index_t>(c);
                         sum_cuda(c, m);
                       });
                     }));
}

DensifiedMatrix densify_on_gpu(const Pattern& p, const Tensor& values, int64_t columns, bool sparse24, int64_t beyond) {
  const OperationGuard guard(kOp, values);
  return densify(p, values, columns, sparse24, beyond);
}

}  // namespace matmuls::spmm
#endif
