// The launches for the pattern of C = A @ B on a GPU.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "gpu/device_limits.h"
#include "sparse/spgemm/compact.cuh"
#include "sparse/spgemm/gpu.h"
#include "sparse/spgemm/indices_of.cuh"
#include "sparse/spgemm/long_rows.cuh"

namespace matmuls::spgemm {

namespace {

using at::Tensor;

constexpr const char* kName = "csr_spgemm_size";
// Bits of the blocks that share the long rows of many columns. Clearing them takes 0.1 ms. Estimated, not measured.
constexpr int64_t kMostBitBytes = int64_t{256} << 20;

Totals* totals_of(const Tensor& t) { return reinterpret_cast<Totals*>(t.mutable_data_ptr<int64_t>()); }
uint32_t* as_uint32(const Tensor& t) { return reinterpret_cast<uint32_t*>(t.mutable_data_ptr<int>()); }

template <class I>
void launch_long_rows(const Indices<I>& a, const Indices<I>& b, const Rows& rows, int64_t columns,
                      const Classes& classes) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int64_t at_once = std::min<int64_t>(classes.long_rows, 8 * device_limits().multiprocessors);
  Totals* const totals = totals_of(classes.totals);
  if (columns <= kColumnsInShared) {
    long_rows_kernel<true>
        <<<static_cast<unsigned>(at_once), kLongThreads, 0, stream>>>(a, b, rows, columns, nullptr, totals);
  } else {
    const int64_t words = words_of_block(columns);
    const int64_t blocks = std::clamp<int64_t>(kMostBitBytes / 4 / words, 1, at_once);
    const Tensor memory = zeros({blocks * words}, classes.totals.options().dtype(at::kInt));
    long_rows_kernel<false>
        <<<static_cast<unsigned>(blocks), kLongThreads, 0, stream>>>(a, b, rows, columns, as_uint32(memory), totals);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

Classes classify(const Pattern& a, const Pattern& b, int64_t columns) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int64_t rows = a.rows();
  const auto options = a.crow.options().dtype(at::kLong);
  Classes made{empty({sizeof(Totals) / sizeof(int64_t)}, options), empty({rows}, options),
               empty({kClasses * rows}, options.dtype(at::kInt)), empty({rows + 1}, options)};
  Totals* const totals = totals_of(made.totals);
  C10_CUDA_CHECK(cudaMemsetAsync(totals, 0, sizeof(Totals), stream));
  AT_DISPATCH_INDEX_TYPES(a.crow.scalar_type(), kName, [&] {
    classify_kernel<<<static_cast<unsigned>(ceil_of(rows, kClassifyThreads)), kClassifyThreads, 0, stream>>>(
        indices_of<index_t>(a), indices_of<index_t>(b), rows, columns, totals, made.begin.mutable_data_ptr<int64_t>(),
        as_uint32(made.lists), made.counts.mutable_data_ptr<int64_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  Totals found;
  C10_CUDA_CHECK(cudaMemcpyAsync(&found, totals, sizeof(found), cudaMemcpyDeviceToHost, stream));
  c10::cuda::stream_synchronize(stream);
  made.room = static_cast<int64_t>(found.room), made.long_rows = static_cast<int64_t>(found.rows[kLongClass]);
  made.few_warps = ceil_of(static_cast<int64_t>(found.rows[0]), 2);
  for (int c = 1; c < kLongClass; ++c)
    (c < kFirstOfMany ? made.few_warps : made.many_warps) += static_cast<int64_t>(found.rows[c]);
  return made;
}

void count_distinct(const Pattern& a, const Pattern& b, int64_t columns, const Classes& classes, const Tensor& begin,
                    const Tensor& to) {
  Totals* const totals = totals_of(classes.totals);
  const Rows rows{as_uint32(classes.lists),
                  totals,
                  begin.const_data_ptr<int64_t>(),
                  classes.counts.mutable_data_ptr<int64_t>(),
                  to.defined() ? as_uint32(to) : nullptr,
                  a.rows(),
                  to.defined() ? to.numel() : 0};
  AT_DISPATCH_INDEX_TYPES(a.crow.scalar_type(), kName, [&] {
    const auto a_indices = indices_of<index_t>(a), b_indices = indices_of<index_t>(b);
    const auto sort = [&](auto* kernel, int64_t warps) {
      if (warps == 0) return;
      const int64_t blocks = ceil_of(warps, kSortThreads / 32);
      kernel<<<static_cast<unsigned>(blocks), kSortThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(a_indices,
                                                                                                    b_indices, rows);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    sort(sorted_rows_kernel<0, kFirstOfMany, index_t>, classes.few_warps);
    sort(sorted_rows_kernel<kFirstOfMany, kLongClass, index_t>, classes.many_warps);
    if (classes.long_rows > 0) launch_long_rows(a_indices, b_indices, rows, columns, classes);
  });
}

void compact(const Tensor& offsets, const Tensor& begin, const Tensor& from, const Tensor& names, const Tensor& crow,
             const Tensor& col) {
  constexpr int kWarps = kSparseThreads / 32;
  const int64_t rows = crow.size(0) - 1, nonzeros = col.size(0);
  const int64_t for_rows = std::min<int64_t>(ceil_of(rows + 1, kSparseThreads), 8 * device_limits().multiprocessors);
  const int64_t blocks = std::max(for_rows, ceil_of(nonzeros, kWarps * kCompactPerWarp));
  AT_DISPATCH_INDEX_TYPES(crow.scalar_type(), kName, [&] {
    compact_kernel<<<static_cast<unsigned>(blocks), kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        offsets.const_data_ptr<int64_t>(), begin.const_data_ptr<int64_t>(), as_uint32(from), from.numel(),
        indices_or_null<index_t>(names), crow.mutable_data_ptr<index_t>(), col.mutable_data_ptr<index_t>(), rows,
        nonzeros);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace matmuls::spgemm
#endif
