// Operators csr_regions, csr_reads and csr_reorder: reorder a matrix's rows (layout.h). A plan calls them once.
#include <ATen/ops/cumsum.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "glue/operator.h"
#include "sparse/index_checks.h"
#include "sparse/spmm/layout_ops.h"
#include "sparse/spmm/reordered/layout.h"

namespace matmuls {
namespace {

using at::Tensor;
using Moved = std::tuple<Tensor, Tensor, Tensor>;

MATMULS_OPERATOR(CsrRegionsOp, "custom_mm::csr_regions", "",
                 Tensor(const Tensor&, const Tensor&, c10::SymInt, int64_t, int64_t));
MATMULS_OPERATOR(CsrReadsOp, "custom_mm::csr_reads", "",
                 Tensor(const Tensor&, const Tensor&, c10::SymInt, int64_t, int64_t, const OptionalTensor&));
MATMULS_OPERATOR(CsrReorderOp, "custom_mm::csr_reorder", "", Moved(const Tensor&, const Tensor&, const Tensor&));

Pattern square(const char* op, const Tensor& crow, const Tensor& col, const c10::SymInt& columns) {
  const Pattern p = pattern_of(crow, col, {});
  check_pattern(op, p, crow);
  TORCH_CHECK_VALUE(p.crow.scalar_type() == at::kInt && p.sym_rows() == columns && columns <= INT32_MAX / 2, op,
                    ": expected a square matrix in Int of at most ", INT32_MAX / 2, " rows, got ", p.sym_rows(), " x ",
                    columns, " in ", p.crow.scalar_type());
  return p;
}

void grow_nothing(const Pattern&, int, int, const Tensor&, const Tensor&) {}
void count_nothing(const Pattern&, const Tensor&, const Windows&, const Tensor&, const Tensor&) {}
void move_nothing(const Pattern&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}

template <decltype(grow_on_gpu) grow>
Tensor csr_regions(const Tensor& crow, const Tensor& col, c10::SymInt columns, int64_t size, int64_t rounds) {
  const Pattern p = square(kRegionsOp, crow, col, columns);
  TORCH_CHECK_VALUE(size > 0 && size <= INT32_MAX && rounds > 0 && rounds <= 1024, kRegionsOp,
                    ": expected regions of 1 row at least and 1 to 1024 rounds, got ", size, " and ", rounds);
  const c10::SymDimVector shape{p.sym_rows()};
  const Tensor regions = at::empty_symint(shape, crow.options()), before = at::empty_symint(shape, crow.options());
  if constexpr (grow == grow_nothing) return regions;
  if (p.rows() > 0) grow(contiguous(p), static_cast<int>(size), static_cast<int>(rounds), regions, before);
  return regions;
}

template <decltype(count_reads_on_gpu) count>
Tensor csr_reads(const Tensor& crow, const Tensor& col, c10::SymInt columns, int64_t at_once, int64_t every,
                 const OptionalTensor& maybe_order) {
  const Pattern p = square(kReadsOp, crow, col, columns);
  const Tensor order = tensor_or_none(maybe_order);
  check_of_rows(kReadsOp, "the order", p, order);
  TORCH_CHECK_VALUE(at_once > 0 && at_once <= INT32_MAX && every > 0 && every <= INT32_MAX, kReadsOp,
                    ": expected windows of 1 row at least, and every window or fewer, got ", at_once, " and ", every);
  const Tensor found = at::zeros({1}, crow.options().dtype(at::kLong));
  if constexpr (count == count_nothing) return found;
  if (p.rows() == 0) return found;
  const Windows windows{static_cast<int>(at_once), static_cast<int>(every)};
  const Tensor seen = at::zeros({windows.of(p.rows()), ceil_of(p.rows(), 32)}, crow.options());
  count(contiguous(p), order.defined() ? order.contiguous() : order, windows, seen, found);
  return found;
}

template <decltype(move_rows_on_gpu) move>
Moved csr_reorder(const Tensor& crow, const Tensor& col, const Tensor& order) {
  const Pattern p = pattern_of(crow, col, {});
  check_pattern(kReorderOp, p, crow);
  TORCH_CHECK_VALUE(crow.scalar_type() == at::kInt && p.sym_rows() <= INT32_MAX / 2, kReorderOp,
                    ": expected crow in Int and at most ", INT32_MAX / 2, " rows, got ", p.sym_rows(), " in ",
                    crow.scalar_type());
  check_of_rows(kReorderOp, "the order", p, order);
  Moved made{at::zeros_symint(crow.sym_sizes(), crow.options()), at::empty_symint(col.sym_sizes(), col.options()),
             at::empty_symint(col.sym_sizes(), col.options())};
  if constexpr (move == move_nothing) return made;
  if (p.rows() == 0) return made;
  const auto& [new_crow, new_col, place] = made;
  Tensor ends = new_crow.narrow(0, 1, p.rows());
  at::cumsum_out(ends, at::diff(crow).index_select(0, order), 0, at::kInt);
  move(contiguous(p), order.contiguous(), new_crow, new_col, place);
  return made;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_regions(Tensor crow, Tensor col, SymInt columns, int size, int rounds) -> Tensor", tags);
  m.def("csr_reads(Tensor crow, Tensor col, SymInt columns, int at_once, int every, Tensor? order=None) -> Tensor",
        tags);
  m.def("csr_reorder(Tensor crow, Tensor col, Tensor order) -> (Tensor, Tensor, Tensor)", tags);
}
MATMULS_KERNELS("csr_regions", CsrRegionsOp::gpu_only, csr_regions<grow_on_gpu>, csr_regions<grow_nothing>,
                CsrRegionsOp::below_autograd)
MATMULS_KERNELS("csr_reads", CsrReadsOp::gpu_only, csr_reads<count_reads_on_gpu>, csr_reads<count_nothing>,
                CsrReadsOp::below_autograd)
MATMULS_KERNELS("csr_reorder", CsrReorderOp::gpu_only, csr_reorder<move_rows_on_gpu>, csr_reorder<move_nothing>,
                CsrReorderOp::below_autograd)

}  // namespace matmuls
