// Operators of the chunk layout:
//   csr_chunks: cuts a matrix into chunks (layout.h)
//   csr_spmm_chunks: A @ dense as csr_spmm, by chunks (kernel.h). chunk_col, chunk_values: columns and values in the
//     order of the chunks, if that differs from A's row order
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "sparse/index_checks.h"
#include "sparse/spmm/chunks/kernel.h"
#include "sparse/spmm/chunks/layout.h"
#include "sparse/spmm/layout_ops.h"

namespace matmuls::spmm {
namespace {

using at::Tensor;
using ChunkTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

MATMULS_OPERATOR(CsrChunksOp, "custom_mm::csr_chunks", "",
                 ChunkTensors(const Tensor&, const Tensor&, int64_t, int64_t, const OptionalTensor&));
MATMULS_OPERATOR(SpmmChunksOp, "custom_mm::csr_spmm_chunks", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, c10::SymInt, int64_t, const OptionalTensor&, int64_t,
                        const OptionalTensor&, const OptionalTensor&));
using ProductByChunks = SpmmByLayout<SpmmChunksOp, 4, 10>;

Chunks empty_chunks(const Pattern& p, int64_t size, int64_t piece) {
  check_pattern(kChunksOp, p, p.crow);
  TORCH_CHECK_VALUE(
      p.crow.scalar_type() == at::kInt && size > 0 && size <= kMostChunk && piece > 0 && piece <= kMostChunk, kChunksOp,
      ": expected crow and col in Int, and chunks and pieces of 1 to ", kMostChunk, " nonzeros, got crow in ",
      p.crow.scalar_type(), ", ", size, " and ", piece);
  const auto ints = p.crow.options();
  const c10::SymInt nonzeros = p.col.sym_size(0);
  TORCH_CHECK_VALUE(nonzeros + p.sym_rows() <= INT32_MAX, kChunksOp, ": expected at most ", INT32_MAX,
                    " rows and nonzeros, got ", p.sym_rows(), " and ", nonzeros);
  return {at::empty_symint({(nonzeros + size - 1) / size + 1}, ints), at::empty_symint({nonzeros}, ints),
          at::zeros_symint({nonzeros / (piece + 1), 3}, ints), at::zeros_symint({p.sym_rows()}, ints),
          at::empty({3}, ints)};
}

template <decltype(cut_on_gpu) cut>
ChunkTensors csr_chunks(const Tensor& crow, const Tensor& col, int64_t size, int64_t piece,
                        const OptionalTensor& maybe_names) {
  const Pattern p = pattern_of(crow, col, {});
  const Tensor names = tensor_or_none(maybe_names);
  const Chunks made = empty_chunks(p, size, piece);
  check_of_rows(kChunksOp, "names", p, names);
  validate_offsets(kChunksOp, crow, p.nonzeros());
  cut(contiguous(p), static_cast<int>(size), static_cast<int>(piece), names.defined() ? names.contiguous() : names,
      made);
  return {made.begins, made.ends, made.cut, made.empty, made.counts};
}

void cut_nothing(const Pattern&, int, int, const Tensor&, const Chunks&) {}

#ifdef MATMULS_CUDA
// Nonzeros from which permuted values are gathered into order first. With 4 to 8 million, the gradient of an R-MAT
// graph, this takes .73 to .99 of the time for which the product would wait for them (H100); fewer values stay in the
// L2.
constexpr int64_t kOrderedFirst = 1 << 21;

Tensor on_gpu(const Tensor& begins, const Tensor& ends, const Tensor& cut, const Tensor& empty, const Tensor& crow,
              const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns, int64_t slots,
              const OptionalTensor& order, int64_t longest, const OptionalTensor& chunk_col,
              const OptionalTensor& chunk_values) {
  TORCH_CHECK_VALUE(chunk_col.has_value() == chunk_values.has_value(), kOp,
                    ": expected chunk_col and chunk_values together");
  ChunkedCall c{{crow, col, tensor_or_none(order)}, values, dense, begins, ends, cut, empty, slots};
  if (chunk_col.has_value()) c.pattern = {crow, *chunk_col}, c.values = *chunk_values;
  if (!can_go_by_chunks(c, columns.expect_int()))
    return ProductByChunks::by_rows(begins, ends, cut, empty, crow, col, values, dense, columns, slots, order, longest,
                                    {}, {});
  if (c.pattern.order.defined() && c.pattern.nonzeros() >= kOrderedFirst)
    c.values = at::index_select(values, 0, c.pattern.order), c.pattern.order = Tensor();
  return run_chunks(c);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "csr_chunks(Tensor crow, Tensor col, int size, int piece, Tensor? names=None) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor)",
      tags);
  m.def(
      "csr_spmm_chunks(Tensor begins, Tensor ends, Tensor cut, Tensor empty, Tensor crow, Tensor col, Tensor values, "
      "Tensor dense, SymInt columns, int slots, Tensor? order=None, int longest=-1, Tensor? chunk_col=None, Tensor? "
      "chunk_values=None) -> Tensor",
      tags);
}
MATMULS_KERNELS("csr_chunks", CsrChunksOp::gpu_only, csr_chunks<cut_on_gpu>, csr_chunks<cut_nothing>,
                CsrChunksOp::below_autograd)
MATMULS_KERNELS("csr_spmm_chunks", SpmmChunksOp::gpu_only, on_gpu, ProductByChunks::by_rows, ProductByChunks::autograd)

}  // namespace matmuls::spmm
