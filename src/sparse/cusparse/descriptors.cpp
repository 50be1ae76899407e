// Checks, conversion to CSR and cuSPARSE descriptors of the matrices in descriptors.h.
#include "sparse/cusparse/descriptors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_convert_indices_from_coo_to_csr.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/sort.h>

#include "rows/ops.h"
#include "sparse/index_checks.h"

namespace matmuls {

using at::Tensor;

Layout layout_of_name(const char* op, std::string_view name) {
  if (name == "csr") return Layout::csr;
  if (name == "csc") return Layout::csc;
  if (name == "coo") return Layout::coo;
  TORCH_CHECK_VALUE(name == "bsr", op, ": expected layout to be csr, csc, coo or bsr, got ", name);
  return Layout::bsr;
}

void check_parts(const char* op, const SparseParts& a, const Tensor& like) {
  check_floating(op, "values", a.values);
  check_like(op, "values", a.values, "the dense side", like);
  for (const auto& [name, t] : {std::pair("offsets", a.offsets), std::pair("indices", a.indices)}) {
    TORCH_CHECK_VALUE(t.layout() == at::kStrided && t.dim() == 1 &&
                          (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) &&
                          t.scalar_type() == a.offsets.scalar_type(),
                      op, ": expected offsets and indices of one dimension, both in Int or both in Long, got ", name,
                      " of shape ", t.sym_sizes(), " in ", t.scalar_type());
    TORCH_CHECK(t.device() == like.device(), op, ": expected ", name, " on ", like.device(),
                " as the operands are, got ", t.device());
  }
  const bool blocks = a.layout == Layout::bsr;
  TORCH_CHECK_VALUE(a.values.dim() == (blocks ? 3 : 1) && a.values.sym_size(0) == a.indices.sym_size(0), op,
                    ": expected values of shape [", a.indices.sym_size(0), blocks ? ", height, width" : "",
                    "], one for each index, got ", a.values.sym_sizes());
  TORCH_CHECK_VALUE(a.rows >= 0 && a.columns >= 0, op, ": expected rows and columns >= 0, got ", a.rows, " and ",
                    a.columns);
  c10::SymInt offsets = a.rows + 1;
  if (a.layout == Layout::csc) offsets = a.columns + 1;
  if (a.layout == Layout::coo) offsets = a.indices.sym_size(0);
  if (blocks) {
    const auto height = a.values.sym_size(1), width = a.values.sym_size(2);
    TORCH_CHECK_VALUE(height > 0 && width > 0 && a.rows % height == 0 && a.columns % width == 0, op,
                      ": expected blocks that ", a.rows, " rows and ", a.columns, " columns consist of, got ", height,
                      " x ", width);
    offsets = a.rows / height + 1;
  }
  TORCH_CHECK_VALUE(a.offsets.sym_size(0) == offsets, op, ": expected offsets of shape [", offsets, "], got ",
                    a.offsets.sym_sizes());
}

void validate_parts(const char* op, const SparseParts& a) {
  // A traced or transformed backward pass has no data; the forward's operator validates the same indices.
  if (!has_data(a.offsets) || !has_data(a.indices)) return;
  const int64_t rows = a.rows.expect_int(), columns = a.columns.expect_int(), count = a.indices.size(0);
  switch (a.layout) {
    case Layout::csr:
      validate_offsets(op, a.offsets, count);
      return validate_indices(op, "columns", a.indices, columns);
    case Layout::csc:
      validate_offsets(op, a.offsets, count, "rows");
      return validate_indices(op, "rows", a.indices, rows);
    case Layout::coo:
      validate_indices(op, "rows", a.offsets, rows);
      TORCH_CHECK_VALUE(at::diff(a.offsets).ge(0).all().item<bool>(), op,
                        ": expected rows that do not decrease, got rows in another order");
      return validate_indices(op, "columns", a.indices, columns);
    case Layout::bsr:
      validate_offsets(op, a.offsets, count);
      return validate_indices(op, "columns", a.indices, columns / a.values.size(2));
  }
}

namespace {

Tensor offsets_of_sorted(const Tensor& rows, const c10::SymInt& size) {
  // torch reads rows as if they were contiguous.
  return at::_convert_indices_from_coo_to_csr(rows.contiguous(), size.guard_int(__FILE__, __LINE__),
                                              rows.scalar_type() == at::kInt);
}

// Converts blocks to single entries: sorted by row, with `order` into the flattened values.
Pattern entries_of_blocks(const SparseParts& a) {
  const Tensor offsets = a.offsets.to(at::kLong), block_column = a.indices.to(at::kLong);
  const Tensor block_row = at::repeat_interleave_symint(offsets.diff(), std::optional(block_column.sym_size(0)));
  const auto entries = [&](const Tensor& block, int64_t dim) {
    const c10::SymInt size = a.values.sym_size(dim);
    const Tensor within = at::arange(size, block.options()).view({dim == 1 ? -1 : 1, dim == 1 ? 1 : -1});
    return (block.view({-1, 1, 1}) * size + within).expand_symint(a.values.sym_sizes()).reshape(-1);
  };
  const auto [row, order] = at::sort(entries(block_row, 1), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  return {offsets_of_sorted(row, a.rows), entries(block_column, 2).index_select(0, order), order, {}, {}, {}};
}

}  // namespace

Pattern by_rows(const SparseParts& a, bool transposed) {
  switch (a.layout) {
    case Layout::csc: {
      const Pattern by_columns{a.offsets, a.indices, {}, {}, {}, {}};
      return transposed ? by_columns : by_columns.transposed(a.rows);
    }
    case Layout::coo: {
      const Pattern p{offsets_of_sorted(a.offsets, a.rows), a.indices, {}, {}, {}, {}};
      return transposed ? p.transposed(a.columns) : p;
    }
    case Layout::bsr: {
      const Pattern p = entries_of_blocks(a);
      return transposed ? p.transposed(a.columns) : p;
    }
    default: {
      const Pattern p{a.offsets, a.indices, {}, {}, {}, {}};
      return transposed ? p.transposed(a.columns) : p;
    }
  }
}

#ifdef MATMULS_CUDA

cudaDataType_t cuda_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return CUDA_R_64F;
    case at::kFloat: return CUDA_R_32F;
    case at::kHalf: return CUDA_R_16F;
    case at::kBFloat16: return CUDA_R_16BF;
    default: TORCH_CHECK(false, "cuSPARSE: expected float64, float32, float16 or bfloat16, got ", dtype);
  }
}

void fail(const char* call, cusparseStatus_t status, const std::string& what_for) {
  TORCH_CHECK(false, call, " failed with ", cusparseGetErrorName(status), " (", cusparseGetErrorString(status), ")",
              what_for);
}

std::optional<Order> order_of(const Tensor& t) {
  const auto lies = [&](int64_t outer, int64_t inner) -> std::optional<Order> {
    const int64_t length = t.size(inner), lines = t.size(outer);
    if (length > 1 && t.stride(inner) != 1) return std::nullopt;
    if (lines > 1 && t.stride(outer) != length) return std::nullopt;
    return Order{inner == 1, std::max<int64_t>(length, 1)};
  };
  if (!is_aligned(t)) return std::nullopt;
  const auto rows = lies(0, 1);
  return rows ? rows : lies(1, 0);
}

SparseDescriptor describe(const SparseParts& a) {
  const int64_t rows = a.rows.expect_int(), columns = a.columns.expect_int(), count = a.indices.size(0);
  const auto index = a.offsets.scalar_type() == at::kInt ? CUSPARSE_INDEX_32I : CUSPARSE_INDEX_64I;
  const auto type = cuda_type(a.values.scalar_type());
  // cuSPARSE takes non-const pointers because values may be replaced; only cusparseSDDMM writes through them.
  void* const offsets = const_cast<void*>(a.offsets.const_data_ptr());
  void* const indices = const_cast<void*>(a.indices.const_data_ptr());
  void* const values = const_cast<void*>(a.values.const_data_ptr());
  constexpr auto base = CUSPARSE_INDEX_BASE_ZERO;
  cusparseSpMatDescr_t d = nullptr;
  switch (a.layout) {
    case Layout::csr:
      MATMULS_CUSPARSE_CHECK(
          cusparseCreateCsr(&d, rows, columns, count, offsets, indices, values, index, index, base, type));
      break;
    case Layout::csc:
      MATMULS_CUSPARSE_CHECK(
          cusparseCreateCsc(&d, rows, columns, count, offsets, indices, values, index, index, base, type));
      break;
    case Layout::coo:
      MATMULS_CUSPARSE_CHECK(cusparseCreateCoo(&d, rows, columns, count, offsets, indices, values, index, base, type));
      break;
    case Layout::bsr: {
      const int64_t height = a.values.size(1), width = a.values.size(2);
      MATMULS_CUSPARSE_CHECK(cusparseCreateBsr(&d, rows / height, columns / width, count, height, width, offsets,
                                               indices, values, index, index, base, type, CUSPARSE_ORDER_ROW));
      break;
    }
  }
  return SparseDescriptor(d);
}

DenseDescriptor describe(const Tensor& matrix) {
  const Order order = *order_of(matrix);
  cusparseDnMatDescr_t d = nullptr;
  MATMULS_CUSPARSE_CHECK(
      cusparseCreateDnMat(&d, matrix.size(0), matrix.size(1), order.ld, const_cast<void*>(matrix.const_data_ptr()),
                          cuda_type(matrix.scalar_type()), order.by_rows ? CUSPARSE_ORDER_ROW : CUSPARSE_ORDER_COL));
  return DenseDescriptor(d);
}

#endif

}  // namespace matmuls
