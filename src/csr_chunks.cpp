// csr_spmm_chunks: A @ dense as csr_spmm, by chunks of A's nonzeros that were made once (spmm_chunks.h).
#include <torch/library.h>

#include "sparse_operators.h"
#include "spmm_chunks.h"

namespace matmuls::spmm {
namespace {

using at::Tensor;

MATMULS_OPERATOR(SpmmChunksOp, "custom_mm::csr_spmm_chunks", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, c10::SymInt, int64_t, const OptionalTensor&, int64_t));

Tensor by_rows(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor& crow, const Tensor& col,
               const Tensor& values, const Tensor& dense, c10::SymInt columns, int64_t, const OptionalTensor& order,
               int64_t longest) {
  return SpmmOp::call(crow, col, values, dense, std::move(columns), "sum", 1, order, {}, {}, {}, {}, false, longest,
                      -1);
}

// A product that records a gradient is csr_spmm's.
Tensor autograd(const Tensor& begins, const Tensor& ends, const Tensor& cut, const Tensor& empty, const Tensor& crow,
                const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns, int64_t slots,
                const OptionalTensor& order, int64_t longest) {
  const auto go = needs_gradient(kOp, {values, dense}) ? by_rows : SpmmChunksOp::below_autograd;
  return go(begins, ends, cut, empty, crow, col, values, dense, std::move(columns), slots, order, longest);
}

#ifdef MATMULS_CUDA
Tensor on_gpu(const Tensor& begins, const Tensor& ends, const Tensor& cut, const Tensor& empty, const Tensor& crow,
              const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns, int64_t slots,
              const OptionalTensor& order, int64_t longest) {
  const ChunkedCall c{{crow, col, tensor_or_none(order)}, values, dense, begins, ends, cut, empty, slots};
  if (!can_go_by_chunks(c, columns.expect_int()))
    return by_rows(begins, ends, cut, empty, crow, col, values, dense, columns, slots, order, longest);
  return run_chunks(c);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "csr_spmm_chunks(Tensor begins, Tensor ends, Tensor cut, Tensor empty, Tensor crow, Tensor col, Tensor values, "
      "Tensor dense, SymInt columns, int slots, Tensor? order=None, int longest=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(custom_mm, CPU, m) { m.impl("csr_spmm_chunks", by_rows); }
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl("csr_spmm_chunks", on_gpu); }
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) { m.impl("csr_spmm_chunks", by_rows); }
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) { m.impl("csr_spmm_chunks", autograd); }

}  // namespace matmuls::spmm
