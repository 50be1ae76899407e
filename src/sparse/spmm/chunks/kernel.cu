// csr_spmm_chunks on a GPU: checks whether the chunk kernel can run and chooses its configuration.
#ifdef __CUDACC__
#include "sparse/spmm/chunks/kernel.cuh"

#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "sparse/spmm/chunks/kernel.h"

namespace matmuls::spmm {
namespace {

using at::Tensor;

template <int V, int L, int U, int kThreads, int kBlocks, class T>
void launch_chunks(ChunkArgs<T>& m) {
  constexpr int kGroups = kThreads / L;
  m.slices = static_cast<unsigned>(ceil_of(m.n, L * V));
  m.chunk_blocks = static_cast<unsigned>(ceil_of(m.chunks, kGroups));
  m.blocks = m.chunk_blocks + static_cast<unsigned>(ceil_of(m.empties, kGroups * kEmptyRows));
  const int64_t blocks = static_cast<int64_t>(m.blocks) * m.slices;
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of chunks, got ", blocks);
  launch_programmatic(spmm_chunks_kernel<T, V, L, U, kThreads, kBlocks>, static_cast<unsigned>(blocks), kThreads, m);
}

template <int L, class T>
void launch_pieces(const ChunkArgs<T>& m) {
  const dim3 grid(static_cast<unsigned>(m.cuts), static_cast<unsigned>(ceil_of(m.n, L * 4)));
  launch_programmatic(spmm_pieces_kernel<T, L>, grid, kSparseThreads, m);
}

template <class T>
Tensor multiply(const ChunkedCall& c) {
  const int64_t rows = c.pattern.rows(), n = c.dense.size(1);
  const Tensor out = empty({rows, n}, c.dense.options());
  const Tensor partial = empty({c.slots, n}, c.dense.options().dtype(at::kFloat));
  const Tensor values = c.values.contiguous();
  ChunkArgs<T> m{};
  m.begins = c.begins.const_data_ptr<int>(), m.ends = c.ends.const_data_ptr<int>();
  m.cut = c.cut.const_data_ptr<int>(), m.empty = c.empty.const_data_ptr<int>();
  m.col = c.pattern.col.const_data_ptr<int>(), m.order = indices_or_null<int>(c.pattern.order);
  m.values = values.template const_data_ptr<T>(), m.dense = c.dense.template const_data_ptr<T>();
  m.out = out.template mutable_data_ptr<T>(), m.partial = partial.template mutable_data_ptr<float>();
  m.chunks = static_cast<int>(c.begins.size(0) - 1), m.cuts = static_cast<int>(c.cut.size(0));
  m.empties = static_cast<int>(c.empty.size(0)), m.rows = static_cast<int>(rows), m.n = static_cast<int>(n);
  m.dense_row_bytes = static_cast<uint32_t>(c.dense.stride(0) * sizeof(T));
  // As measured on an H200: wide rows of B by many warps with few loads in flight, narrow ones by fewer warps with
  // more. In 16 bits up to 128 columns, 8 bytes per lane, so that fewer groups of lanes wait for one another at row
  // ends. Blocks are small, because a multiprocessor takes the next block only when the longest chunk of one has ended;
  // with fewer than 128 threads, wide rows would find fewer of their neighbours' rows of B in the L1.
  if constexpr (sizeof(T) == 4) {
    if (n <= 32)
      launch_chunks<4, 8, 8, 64, 12>(m);
    else if (n <= 64)
      launch_chunks<4, 16, 4, 128, 10>(m);
    else
      launch_chunks<4, 32, 4, 128, 10>(m);
  } else {
    if (n <= 32)
      launch_chunks<4, 8, 8, 64, 16>(m);
    else if (n <= 64)
      launch_chunks<4, 16, 4, 128, 10>(m);
    else if (n <= 128)
      launch_chunks<4, 32, 4, 128, 10>(m);
    else
      launch_chunks<8, 32, 4, 128, 8>(m);
  }
  if (m.cuts > 0) n <= 32 ? launch_pieces<8>(m) : launch_pieces<32>(m);
  return out;
}

}  // namespace

bool can_go_by_chunks(const ChunkedCall& c, int64_t columns) {
  const Pattern& p = c.pattern;
  const auto is_kept = [&](const Tensor& t, int64_t dims) {
    return t.dim() == dims && t.scalar_type() == at::kInt && t.is_contiguous() && t.device() == c.dense.device();
  };
  const auto is_index = [&](const Tensor& t) { return !t.defined() || (is_kept(t, 1) && t.size(0) == p.col.size(0)); };
  const auto dtype = c.dense.scalar_type();
  if ((dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) || c.values.scalar_type() != dtype ||
      c.dense.dim() != 2 || c.values.dim() != 1 || c.dense.size(0) != columns || c.dense.stride(1) != 1 ||
      c.values.device() != c.dense.device() || !is_kept(p.crow, 1) || !is_index(p.col) || !is_index(p.order) ||
      c.values.size(0) != p.col.size(0) || c.values.size(0) == 0 || c.dense.numel() == 0 ||
      !of_vectors(c.dense.unsqueeze(0)) || c.dense.size(1) > 65535 * 128 ||
      c.dense.stride(0) * c.dense.element_size() > UINT32_MAX)
    return false;
  TORCH_CHECK_VALUE(is_kept(c.begins, 1) && c.begins.size(0) >= 1 && is_kept(c.ends, 1) &&
                        c.ends.size(0) == p.col.size(0) && is_kept(c.cut, 2) && c.cut.size(1) == 3 &&
                        is_kept(c.empty, 1) && c.slots >= 0 && p.rows() + c.slots <= INT32_MAX,
                    kOp, ": expected chunks of a matrix of ", p.col.size(0), " nonzeros");
  return true;
}

Tensor run_chunks(const ChunkedCall& c) {
  const OperationGuard guard(kOp, c.dense);
  const auto dtype = c.dense.scalar_type();
  if (dtype == at::kFloat) return multiply<float>(c);
  return dtype == at::kHalf ? multiply<c10::Half>(c) : multiply<c10::BFloat16>(c);
}

}  // namespace matmuls::spmm
#endif
