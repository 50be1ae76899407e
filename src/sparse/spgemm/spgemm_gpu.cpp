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
// csr_spgemm_size returns as its state what the first kernels wrote, in int32: begin [rows] int64, then the columns of
// row r from begin[r] on, with room for a column for each product. If that is more than kMostKept columns, the state is
// empty and csr_spgemm_pattern runs the kernels again.
#ifdef MATMULS_CUDA
#include <ATen/ops/_unique.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "glue/handles.h"
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

// offsets of C and the state.
std::tuple<Tensor, Tensor> size_of(const Numbered& given) {
  const int64_t rows = given.a.rows();
  const auto options = given.a.crow.options();
  const Tensor none = at::empty({0}, options.dtype(at::kInt));
  if (rows == 0 || given.a.nonzeros() == 0 || given.b.nonzeros() == 0)
    return {at::zeros({rows + 1}, options.dtype(at::kLong)), none};
  const Classes classes = classify(given.a, given.b, given.columns);
  if (classes.room > kMostKept) {
    count_distinct(given.a, given.b, given.columns, classes, classes.begin, {});
    return {at::cumsum(classes.counts, 0), none};
  }
  const Tensor state = at::empty({2 * rows + classes.room}, none.options());
  state.narrow(0, 0, 2 * rows).copy_(classes.begin.view(at::kInt));
  count_distinct(given.a, given.b, given.columns, classes, classes.begin, state.narrow(0, 2 * rows, classes.room));
  return {at::cumsum(classes.counts, 0), state};
}

std::tuple<Tensor, Tensor> size_cuda(TensorList a, TensorList b, c10::SymInt columns) {
  const Product given = checked(kSize, a, b, columns);
  const OperationGuard guard(kSize, given.a.crow);
  return size_of(numbered(kSize, given));
}

bool is_state(const Tensor& state, int64_t rows) {
  return state.scalar_type() == at::kInt && state.is_contiguous() && state.numel() > 2 * rows &&
         reinterpret_cast<uintptr_t>(state.const_data_ptr()) % sizeof(int64_t) == 0;
}

// crow and col of C.
std::pair<Tensor, Tensor> indices_by(const Numbered& given, const Tensor& offsets, const Tensor& state,
                                     int64_t nonzeros) {
  const int64_t rows = given.a.rows();
  const auto options = given.a.crow.options();
  const Tensor crow = at::empty({rows + 1}, options), col = at::empty({nonzeros}, options);
  if (nonzeros == 0) return {crow.zero_(), col};
  if (is_state(state, rows)) {
    compact(offsets, state.narrow(0, 0, 2 * rows).view(at::kLong), state.slice(0, 2 * rows), given.names, crow, col);
    return {crow, col};
  }
  const Classes classes = classify(given.a, given.b, given.columns);
  const Tensor columns = at::empty({nonzeros}, options.dtype(at::kInt));
  count_distinct(given.a, given.b, given.columns, classes, offsets, columns);
  compact(offsets, offsets, columns, given.names, crow, col);
  return {crow, col};
}

Made pattern_cuda(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor& state,
                  c10::SymInt sym_nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  const Product call = checked_pattern(a, b, columns, offsets, sym_nonzeros, a_values, b_values);
  const OperationGuard guard(kPattern, call.a.crow);
  const Numbered given = numbered(kPattern, call);
  const bool is_counted = sym_nonzeros != -1;
  const auto [counted, kept] = is_counted ? std::tuple(offsets.contiguous(), state) : size_of(given);
  const int64_t nonzeros = is_counted ? sym_nonzeros.expect_int() : counted[-1].item<int64_t>();
  expect_reachable(call, nonzeros);
  const auto [crow, col] = indices_by(given, counted, kept, nonzeros);
  return {crow, col, values_of_pattern(call, crow, col)};
}

Tensor product_cuda(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                    c10::SymInt columns) {
  const Product call = checked(kProduct, a_values, b_values, a, b, c, columns);
  const OperationGuard guard(kProduct, a_values);
  const Tensor out = at::empty({call.c.nonzeros()}, a_values.options());
  if (out.numel() > 0)
    values_on_gpu(contiguous(call.a), contiguous(call.b), contiguous(call.c), a_values.contiguous(),
                  b_values.contiguous(), out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_spgemm_size", size_cuda);
  m.impl("csr_spgemm_pattern", pattern_cuda);
  m.impl("csr_spgemm", product_cuda);
}

}  // namespace matmuls::spgemm
#endif
