// csr_spgemm_size, csr_spgemm_pattern and csr_spgemm on a GPU (sparse/spgemm.h), by kernels of our own.
//
//   crow, col of A, crow of B
//     | classify_kernel      classes.cuh      products of each row, classes of rows by them
//     | (host waits: how many rows each class has, and how much memory the columns take)
//     | sorted_rows_kernel   sorted_rows.cuh  distinct columns of a row in order: up to 512 products, sorted
//     | long_rows_kernel     long_rows.cuh    more products: bits, a block for each row
//     | cumsum                                offsets of C's rows
//     | (host waits: nonzeros of C)
//     | compact_kernel       compact.cuh      crow, col of C
//     | values' kernels      values.cuh       each product added at its column's place, in the order of A's nonzeros
//     v
//   C
//
// csr_spgemm_size returns a state that owns what the first kernels wrote (Kept), with room for a column for each
// product. Of more than kMostKept columns it owns the offsets alone, and csr_spgemm_pattern runs the kernels again, as
// it does for a state of other matrices. With nonzeros = -1 it runs all steps itself.
#ifdef MATMULS_CUDA
#include <ATen/ops/_unique.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "glue/handles.h"
#include "sparse/owned.h"
#include "sparse/spgemm.h"
#include "sparse/spgemm/gpu.h"

namespace matmuls::spgemm {
namespace {

using at::Tensor;
using at::TensorList;

constexpr int64_t kMostKept = int64_t{1} << 28;  // columns: 1 GiB

// B with columns below 2^32 - 1, few enough for a bit each in a block's memory: numbered by the order of those that
// occur if there are more. names [distinct columns]: of the numbers; undefined if B kept its columns.
struct Numbered {
  Pattern a, b;
  int64_t columns;
  Tensor names;
};

Numbered numbered(const char* op, const Product& call) {
  Numbered made{contiguous(call.a), contiguous(call.b), call.columns.expect_int(), {}};
  const auto check = [&](const char* what, int64_t count) {
    TORCH_CHECK_VALUE(count < UINT32_MAX, op, ": expected fewer than 2^32 - 1 ", what, " on a GPU, got ", count);
  };
  check("rows", std::max(made.a.rows(), made.b.rows()));
  const int64_t most = std::max(int64_t{1} << 26, 8 * made.b.nonzeros());  // bits of a block: 8 MiB, or as B's columns
  if (made.columns > std::min<int64_t>(most, UINT32_MAX - 1)) {
    const auto [names, numbers] = at::_unique(made.b.col, /*sorted=*/true, /*return_inverse=*/true);
    made.b.col = numbers.to(names.scalar_type()), made.columns = names.numel(), made.names = names;
  }
  check("columns that are not empty", made.columns);
  return made;
}

// What the first kernels found: the columns of row r are from begin[r] on. Without columns if they are not kept.
struct Found {
  Tensor offsets, begin, columns;
};

// What csr_spgemm_size leaves to csr_spgemm_pattern, of these matrices.
struct Kept {
  Pattern a, b;
  int64_t columns;
  Numbered given;
  Found found;

  // The state's storage does not belong to the caching allocator, so that recording a stream on it would not reach
  // these.
  void record_stream() const {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    for (const Tensor& t :
         {given.a.crow, given.a.col, given.b.crow, given.b.col, given.names, found.offsets, found.begin, found.columns})
      if (t.defined()) t.record_stream(stream.unwrap());
  }

  bool is_of(const Product& p) const {
    return is_same_matrix(a.crow, a.col, p.a) && is_same_matrix(b.crow, b.col, p.b) && p.columns == columns;
  }
};

Found found_in(const Numbered& given) {
  const int64_t rows = given.a.rows();
  const auto options = given.a.crow.options();
  if (rows == 0 || given.a.nonzeros() == 0 || given.b.nonzeros() == 0)
    return {at::zeros({rows + 1}, options.dtype(at::kLong)), {}, {}};
  const Classes classes = classify(given.a, given.b, given.columns);
  Tensor columns;
  if (classes.room <= kMostKept) columns = at::empty({classes.room}, options.dtype(at::kInt));
  count_distinct(given.a, given.b, given.columns, classes, classes.begin, columns);
  return {at::cumsum(classes.counts, 0), classes.begin, columns};
}

std::tuple<Tensor, Tensor> size_cuda(TensorList a, TensorList b, c10::SymInt columns) {
  const Product given = checked(kSize, a, b, columns);
  const OperationGuard guard(kSize, given.a.crow);
  Numbered numbers = numbered(kSize, given);
  Found found = found_in(numbers);
  const Tensor offsets = found.offsets.clone();  // the caller's may be written to
  auto kept =
      std::make_unique<Kept>(Kept{given.a, given.b, given.columns.expect_int(), std::move(numbers), std::move(found)});
  return {offsets, tensor_with(std::move(kept), given.a.crow)};
}

// crow and col of C.
std::pair<Tensor, Tensor> crow_and_col(const Numbered& given, const Found& found, int64_t nonzeros) {
  const int64_t rows = given.a.rows();
  const auto options = given.a.crow.options();
  const Tensor crow = at::empty({rows + 1}, options), col = at::empty({nonzeros}, options);
  if (nonzeros == 0) return {crow.zero_(), col};
  if (found.columns.defined()) {
    compact(found.offsets, found.begin, found.columns, given.names, crow, col);
    return {crow, col};
  }
  const Classes classes = classify(given.a, given.b, given.columns);
  const Tensor columns = at::empty({nonzeros}, options.dtype(at::kInt));
  count_distinct(given.a, given.b, given.columns, classes, found.offsets, columns);
  compact(found.offsets, found.offsets, columns, given.names, crow, col);
  return {crow, col};
}

Tensor values_of(const Pattern& a, const Pattern& b, const Pattern& c, const Tensor& a_values, const Tensor& b_values) {
  const Tensor out = at::empty({c.nonzeros()}, a_values.options());
  TORCH_CHECK_VALUE(c.rows() > 0 || out.numel() == 0, kProduct,
                    ": expected C without nonzeros, as it has no rows, got ", out.numel());
  if (out.numel() > 0)
    values_on_gpu(contiguous(a), contiguous(b), contiguous(c), a_values.contiguous(), b_values.contiguous(), out);
  return out;
}

Made pattern_cuda(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor& state,
                  c10::SymInt sym_nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  const Product call = checked_pattern(a, b, columns, offsets, sym_nonzeros, a_values, b_values);
  const OperationGuard guard(kPattern, call.a.crow);
  const bool is_counted = sym_nonzeros != -1;
  const Kept* kept = is_counted ? owned_by<Kept>(state) : nullptr;
  if (kept != nullptr && !kept->is_of(call)) kept = nullptr;
  const Numbered given = kept != nullptr ? kept->given : numbered(kPattern, call);
  const Found found = kept != nullptr ? kept->found : found_in(given);
  if (kept != nullptr) kept->record_stream();
  const int64_t nonzeros = found.offsets[-1].item<int64_t>();
  TORCH_CHECK_VALUE(!is_counted || sym_nonzeros == nonzeros, kPattern, ": expected the ", nonzeros,
                    " nonzeros of the product's size, got ", sym_nonzeros);
  expect_reachable(call, nonzeros);
  const auto [crow, col] = crow_and_col(given, found, nonzeros);
  if (!call.a_values.defined()) return {crow, col, at::empty({0}, crow.options())};
  return {crow, col, values_of(call.a, call.b, {crow, col, {}, {}, {}, {}}, call.a_values, call.b_values)};
}

Tensor product_cuda(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                    c10::SymInt columns) {
  const Product call = checked(kProduct, a_values, b_values, a, b, c, columns);
  const OperationGuard guard(kProduct, a_values);
  return values_of(call.a, call.b, call.c, a_values, b_values);
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_spgemm_size", size_cuda);
  m.impl("csr_spgemm_pattern", pattern_cuda);
  m.impl("csr_spgemm", product_cuda);
}

}  // namespace matmuls::spgemm
#endif
