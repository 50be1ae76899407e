// Operators on CSR indices:
//   csr_check: validates them and collects statistics (csr_check.h)
//   csr_check_copied: as csr_check, and copies them to int32
//   csr_transpose: the CSR form of the transposed matrix, i.e. CSC
//
// They run once, when a plan takes a matrix; on a GPU no later operator validates indices. There csr_transpose is a few
// ATen calls.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_convert_indices_from_coo_to_csr.h>
#include <ATen/ops/_convert_indices_from_csr_to_coo.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "cpu/threads.h"
#include "glue/checks.h"
#include "sparse/csr_check.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"

#ifdef MATMULS_CUDA
#include "glue/handles.h"
#endif

namespace matmuls {
namespace {

using at::Tensor;

void check(const char* op, const Tensor& crow, const Tensor& col) {
  check_pattern(op, pattern_of(crow, col, {}), crow);
}

// The transposed matrix has an offset for each column: refused where the nonzeros do not account for so many.
void expect_justified(const Tensor& crow, const Tensor& col, int64_t columns) {
  constexpr int64_t kMany = int64_t{1} << 28, kMost = 64;  // offsets of 1 GiB; columns for each nonzero or row
  TORCH_CHECK_VALUE(columns <= kMany || columns / kMost <= col.size(0) + crow.size(0),
                    "csr_transpose: expected at most ", std::max(kMany, kMost * (col.size(0) + crow.size(0))),
                    " columns with ", col.size(0), " nonzeros, as the transposed matrix takes memory for each, got ",
                    columns, "; number the columns that have nonzeros anew (torch.unique)");
}

void check_transposed(const Tensor& crow, const Tensor& col, const c10::SymInt& columns) {
  check("csr_transpose", crow, col);
  TORCH_CHECK_VALUE(columns >= 0, "csr_transpose: expected columns >= 0, got ", columns);
}

Tensor facts_of(Problem problem, int64_t where, int64_t found, int64_t longest = 0, bool rises = false,
                int64_t beyond_two = 0, int64_t far = 0) {
  return at::tensor({static_cast<int64_t>(problem), where, found, longest, int64_t{rises}, beyond_two, far}, at::kLong);
}

// The smallest index in [begin, end) for which is_bad holds, or end.
template <class F>
int64_t first_bad(int64_t begin, int64_t end, const F& is_bad) {
  std::atomic<int64_t> found{end};
  parallel_for(begin, end, kGrain, [&](int64_t first, int64_t last) {
    bool any = false;
    for (int64_t i = first; i < last; ++i) any |= is_bad(i);
    if (!any) return;
    int64_t i = first;
    while (!is_bad(i)) ++i;
    int64_t seen = found.load();
    while (i < seen && !found.compare_exchange_weak(seen, i)) {
    }
  });
  return found;
}

Tensor csr_check_cpu(const Tensor& crow_, const Tensor& col_, c10::SymInt sym_columns) {
  check("csr_check", crow_, col_);
  const Tensor crow_whole = crow_.contiguous(), col_whole = col_.contiguous();
  const int64_t rows = crow_.size(0) - 1, nonzeros = col_.size(0), columns = sym_columns.expect_int();
  Tensor facts;
  AT_DISPATCH_INDEX_TYPES(crow_.scalar_type(), "csr_check", [&] {
    const index_t *crow = crow_whole.const_data_ptr<index_t>(), *col = col_whole.const_data_ptr<index_t>();
    facts = [&] {
      if (crow[0] != 0) return facts_of(Problem::first_offset, 0, crow[0]);
      if (crow[rows] != nonzeros) return facts_of(Problem::last_offset, rows, crow[rows]);
      const int64_t row = first_bad(0, rows, [&](int64_t r) { return crow[r + 1] < crow[r]; });
      if (row < rows) return facts_of(Problem::decreasing, row, crow[row + 1]);
      const int64_t p = first_bad(0, nonzeros, [&](int64_t i) { return col[i] < 0 || col[i] >= columns; });
      if (p < nonzeros) return facts_of(Problem::column, p, col[p]);
      index_t longest = 0;
      int64_t far = 0;
      for (int64_t r = 0; r < rows; ++r) {
        longest = std::max(longest, static_cast<index_t>(crow[r + 1] - crow[r]));
        far += crow[r] < crow[r + 1] && std::abs(static_cast<int64_t>(col[crow[r]]) - r) >= kFar;
      }
      const int64_t falls_in = first_bad(0, rows, [&](int64_t r) {
        bool falls = false;
        for (int64_t p = crow[r] + 1; p < crow[r + 1]; ++p) falls |= col[p] <= col[p - 1];
        return falls;
      });
      std::atomic<int64_t> beyond_two{0};
      parallel_for(2, nonzeros, kGrain, [&](int64_t first, int64_t last) {
        int64_t count = 0;
        for (int64_t p = first; p < last; ++p) count += col[p] >> 2 == col[p - 2] >> 2;
        beyond_two += count;
      });
      return facts_of(Problem::none, 0, 0, longest, falls_in == rows, beyond_two, far);
    }();
  });
  return facts;
}

using Copied = std::tuple<Tensor, Tensor, Tensor>;

void check_fits(const Tensor& crow, const Tensor& col, const c10::SymInt& columns) {
  check("csr_check_copied", crow, col);
  TORCH_CHECK_VALUE(std::max({crow.size(0), col.size(0), columns.expect_int()}) <= INT32_MAX,
                    "csr_check_copied: expected a matrix that int32 indices reach, got ", crow.size(0) - 1, " x ",
                    columns, " with ", col.size(0), " nonzeros");
}

Copied csr_check_copied_cpu(const Tensor& crow, const Tensor& col, c10::SymInt columns) {
  check_fits(crow, col, columns);
  return {csr_check_cpu(crow, col, columns), crow.to(at::kInt, /*non_blocking=*/false, /*copy=*/true),
          col.to(at::kInt, /*non_blocking=*/false, /*copy=*/true)};
}

// A stable counting sort by column; the result does not depend on the number of threads. Several parts count by
// themselves; a single one counts in the offsets.
std::tuple<Tensor, Tensor, Tensor> csr_transpose_cpu(const Tensor& crow_, const Tensor& col_, c10::SymInt sym_columns) {
  check_transposed(crow_, col_, sym_columns);
  const int64_t rows = crow_.size(0) - 1, nonzeros = col_.size(0), columns = sym_columns.expect_int();
  expect_justified(crow_, col_, columns);
  const Pattern p = readable("csr_transpose", pattern_of(crow_, col_, {}), columns);
  Tensor t_crow = at::empty({columns + 1}, crow_.options());
  Tensor t_col = at::empty({nonzeros}, crow_.options()), order = at::empty({nonzeros}, crow_.options());
  AT_DISPATCH_INDEX_TYPES(crow_.scalar_type(), "csr_transpose", [&] {
    const index_t *crow = p.crow.const_data_ptr<index_t>(), *col = p.col.const_data_ptr<index_t>();
    index_t* const offsets = t_crow.mutable_data_ptr<index_t>();
    index_t* const row_at = t_col.mutable_data_ptr<index_t>();
    index_t* const from = order.mutable_data_ptr<index_t>();
    // Few enough parts that the counters do not cost more than the nonzeros that they count.
    const int64_t parts = std::clamp<int64_t>(nonzeros / std::max<int64_t>(columns, 65536), 1, at::get_num_threads());
    const int64_t part = (nonzeros + parts - 1) / parts;
    std::vector<index_t> several(parts > 1 ? parts * columns : 0, 0);
    index_t* const counters = parts > 1 ? several.data() : offsets;
    if (parts == 1) std::fill_n(offsets, columns + 1, index_t{0});
    parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        index_t* const count = counters + k * columns;
        for (int64_t p = k * part; p < std::min(nonzeros, (k + 1) * part); ++p) ++count[col[p]];
      }
    });
    index_t total = 0;
    for (int64_t c = 0; c < columns; ++c) {
      if (parts > 1) offsets[c] = total;
      for (int64_t k = 0; k < parts; ++k) total += std::exchange(counters[k * columns + c], total);
    }
    parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        index_t* const next = counters + k * columns;
        int64_t row = std::upper_bound(crow, crow + rows + 1, static_cast<index_t>(k * part)) - crow - 1;
        for (int64_t p = k * part; p < std::min(nonzeros, (k + 1) * part); ++p) {
          while (crow[row + 1] <= p) ++row;
          const index_t to = next[col[p]]++;
          row_at[to] = static_cast<index_t>(row);
          from[to] = static_cast<index_t>(p);
        }
      }
    });
    if (parts == 1) std::copy_backward(offsets, offsets + columns, offsets + columns + 1);  // each counted to its end
    offsets[0] = 0;
    offsets[columns] = total;
  });
  return {t_crow, t_col, order};
}

#ifdef MATMULS_CUDA
// Reading the result synchronizes with the device once; the caller does so where it reads the facts.
Tensor csr_check_cuda(const Tensor& crow, const Tensor& col, c10::SymInt columns) {
  check("csr_check", crow, col);
  const OperationGuard guard("csr_check", crow);
  return csr_check_on_gpu(crow.contiguous(), col.contiguous(), columns.expect_int());
}

Copied csr_check_copied_cuda(const Tensor& crow, const Tensor& col, c10::SymInt columns) {
  check_fits(crow, col, columns);
  const OperationGuard guard("csr_check_copied", crow);
  const auto narrow = crow.options().dtype(at::kInt);
  const Tensor own_crow = empty({crow.size(0)}, narrow), own_col = empty({col.size(0)}, narrow);
  return {csr_check_on_gpu(crow.contiguous(), col.contiguous(), columns.expect_int(), own_crow, own_col), own_crow,
          own_col};
}

std::tuple<Tensor, Tensor, Tensor> csr_transpose_cuda(const Tensor& crow, const Tensor& col, c10::SymInt sym_columns) {
  check_transposed(crow, col, sym_columns);
  expect_justified(crow, col, sym_columns.expect_int());
  const OperationGuard guard("csr_transpose", crow);
  const bool narrow = crow.scalar_type() == at::kInt;
  const auto [sorted, order] = at::sort(col, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor rows_of = at::_convert_indices_from_csr_to_coo(crow, col, narrow).select(0, 0);
  return {at::_convert_indices_from_coo_to_csr(sorted, sym_columns.expect_int(), narrow),
          rows_of.index_select(0, order), order.to(crow.scalar_type())};
}
#endif

Tensor csr_check_meta(const Tensor& crow, const Tensor& col, c10::SymInt) {
  check("csr_check", crow, col);
  return at::empty({kFacts}, crow.options().dtype(at::kLong));
}
Copied csr_check_copied_meta(const Tensor& crow, const Tensor& col, c10::SymInt columns) {
  const auto narrow = crow.options().dtype(at::kInt);
  return {csr_check_meta(crow, col, columns), at::empty_symint({crow.sym_size(0)}, narrow),
          at::empty_symint({col.sym_size(0)}, narrow)};
}
std::tuple<Tensor, Tensor, Tensor> csr_transpose_meta(const Tensor& crow, const Tensor& col, c10::SymInt columns) {
  check_transposed(crow, col, columns);
  return {at::empty_symint({columns + 1}, crow.options()), at::empty_symint({col.sym_size(0)}, crow.options()),
          at::empty_symint({col.sym_size(0)}, crow.options())};
}

// Indices have no gradient.
MATMULS_OPERATOR(CsrCheckOp, "custom_mm::csr_check", "", Tensor(const Tensor&, const Tensor&, c10::SymInt));
MATMULS_OPERATOR(CsrCheckCopiedOp, "custom_mm::csr_check_copied", "",
                 Copied(const Tensor&, const Tensor&, c10::SymInt));

}  // namespace

Pattern Pattern::transposed(const c10::SymInt& columns) const {
  if (t_crow.defined()) return {t_crow, t_col, t_order, crow, col, order};
  auto [tc, tr, to] = CsrTransposeOp::call(crow, col, columns);
  if (order.defined()) to = order.index_select(0, to);
  return {tc, tr, to, crow, col, order};
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_check(Tensor crow, Tensor col, SymInt columns) -> Tensor", tags);
  m.def("csr_check_copied(Tensor crow, Tensor col, SymInt columns) -> (Tensor, Tensor, Tensor)", tags);
  m.def("csr_transpose(Tensor crow, Tensor col, SymInt columns) -> (Tensor, Tensor, Tensor)", tags);
}

MATMULS_KERNELS("csr_check", csr_check_cpu, csr_check_cuda, csr_check_meta, CsrCheckOp::below_autograd)
MATMULS_KERNELS("csr_check_copied", csr_check_copied_cpu, csr_check_copied_cuda, csr_check_copied_meta,
                CsrCheckCopiedOp::below_autograd)
MATMULS_KERNELS("csr_transpose", csr_transpose_cpu, csr_transpose_cuda, csr_transpose_meta,
                CsrTransposeOp::below_autograd)

}  // namespace matmuls
