// The CSR arguments that every sparse operator takes, their checks, and the merge-path split of rows and nonzeros.
//
//   crow [rows + 1] int32 or int64: row r holds nonzeros crow[r] to crow[r + 1] - 1
//   col [nonzeros] dtype of crow: column of each nonzero
//   order [nonzeros] dtype of crow, optional: value permutation; nonzero p has the value values[order[p]], or values[p]
//     without order
//   t_crow, t_col, t_order, optional: the transposed matrix in the same form; without them a gradient that needs them
//     computes them
//
// `order` describes matrices stored in CSC, in blocks or transposed over one tensor of values. Columns of a row may be
// unsorted and may repeat. On the CPU every operator validates the indices before it reads through them
// (index_checks.h). On a GPU operators do not, because the check would synchronize with the device: csr_check validates
// once, before.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <string_view>

#include "glue/checks.h"

namespace matmuls {

constexpr int kSparseThreads = 256;  // threads of a block of the CUDA kernels

// The CSR structure of a matrix, without its values.
struct Pattern {
  at::Tensor crow, col, order, t_crow, t_col, t_order;  // order, t_crow, t_col and t_order may be undefined

  c10::SymInt sym_rows() const { return crow.sym_size(0) - 1; }
  int64_t rows() const { return crow.size(0) - 1; }
  int64_t nonzeros() const { return col.size(0); }

  // The CSR structure of the transposed matrix, which has `columns` rows. Defined in csr_ops.cpp.
  Pattern transposed(const c10::SymInt& columns) const;
};

inline OptionalTensor none_or_tensor(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

inline Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col, const OptionalTensor& order,
                          const OptionalTensor& t_crow = {}, const OptionalTensor& t_col = {},
                          const OptionalTensor& t_order = {}) {
  return {crow, col, tensor_or_none(order), tensor_or_none(t_crow), tensor_or_none(t_col), tensor_or_none(t_order)};
}

// Checks what can be checked without reading indices: layout, dtype, shape, device.
inline void check_pattern(const char* op, const Pattern& p, const at::Tensor& device_of) {
  const auto is_index = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && t.dim() == 1 && (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong);
  };
  TORCH_CHECK_VALUE(is_index(p.crow) && p.crow.sym_size(0) >= 1, op,
                    ": expected crow of shape [rows + 1] in Int or Long, got shape ", p.crow.sym_sizes(), " in ",
                    p.crow.scalar_type());
  const auto like_crow = [&](const char* name, const at::Tensor& t) {
    if (!t.defined()) return;
    TORCH_CHECK_VALUE(is_index(t) && t.scalar_type() == p.crow.scalar_type(), op, ": expected ", name,
                      " of one dimension in ", p.crow.scalar_type(), " as crow is, got shape ", t.sym_sizes(), " in ",
                      t.scalar_type());
  };
  like_crow("col", p.col);
  like_crow("order", p.order);
  like_crow("t_crow", p.t_crow);
  like_crow("t_col", p.t_col);
  like_crow("t_order", p.t_order);
  const auto of_nonzeros = [&](const char* name, const at::Tensor& t) {
    TORCH_CHECK_VALUE(!t.defined() || t.sym_size(0) == p.col.sym_size(0), op, ": expected ", name, " of shape [",
                      p.col.sym_size(0), "] as col is, got ", t.sym_sizes());
  };
  of_nonzeros("order", p.order);
  of_nonzeros("t_col", p.t_col);
  of_nonzeros("t_order", p.t_order);
  TORCH_CHECK_VALUE(p.t_crow.defined() == p.t_col.defined(), op, ": expected t_crow and t_col together");
  TORCH_CHECK_VALUE(!p.t_crow.defined() || p.t_crow.sym_size(0) >= 1, op,
                    ": expected t_crow of shape [columns + 1], got an empty one");
  for (const auto& t : {p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order})
    TORCH_CHECK(!t.defined() || t.device() == device_of.device(), op, ": expected the pattern on ", device_of.device(),
                " as the operands are, got ", t.device());
}

// Checks t, if defined, to be [rows] int32. `what` names it in the error.
inline void check_of_rows(const char* op, const char* what, const Pattern& p, const at::Tensor& t) {
  TORCH_CHECK_VALUE(!t.defined() || (t.dim() == 1 && t.sym_size(0) == p.sym_rows() && t.scalar_type() == at::kInt &&
                                     t.device() == p.crow.device()),
                    op, ": expected ", what, " of ", p.sym_rows(), " rows in Int, got ", t.sym_sizes(), " in ",
                    t.scalar_type());
}

// Lower bound: the first index in [begin, end) with increasing[index] >= least, or end.
template <class N>
C10_HOST_DEVICE int first_from(const int* increasing, int begin, int end, N least) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (increasing[middle] < least)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// True if crow and col are the pattern's own memory: what was kept for them holds for the pattern.
inline bool is_same_matrix(const at::Tensor& crow, const at::Tensor& col, const Pattern& p) {
  const auto same = [](const at::Tensor& x, const at::Tensor& y) {
    return x.const_data_ptr() == y.const_data_ptr() && x.sizes() == y.sizes();
  };
  return same(crow, p.crow) && same(col, p.col);
}

// The pattern with contiguous crow, col and order, as kernels read them; the transposed matrix is dropped.
inline Pattern contiguous(const Pattern& p) {
  const auto whole = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  return {whole(p.crow), whole(p.col), whole(p.order), {}, {}, {}};
}

template <class I>
const I* indices_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<I>() : nullptr;
}

// Returns t, or a contiguous copy if the elements of its rows are not contiguous: strided reads would recur for every
// nonzero.
inline at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.dim() == 0 || t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Merges the leading dimensions: [batch, ...] with the last `kept` dimensions unchanged, as a view where possible.
inline at::Tensor as_batch(const at::Tensor& t, at::IntArrayRef lead, int64_t batch, int64_t kept) {
  std::vector<int64_t> expanded(lead.begin(), lead.end()), flat{batch};
  for (int64_t d = t.dim() - kept; d < t.dim(); ++d) {
    expanded.push_back(t.size(d));
    flat.push_back(t.size(d));
  }
  if (batch == 1) return t.reshape(flat);
  return t.expand(expanded).reshape(flat);
}

// ------------------------------------------------------------------------------------------------- merge-path shares

// A split point of the merge path: rows before `row` are done, and of row `row` the nonzeros before `at`.
struct Place {
  int64_t row, at;
};

// Where share k begins. The merge path has rows + nonzeros steps; each share takes `share` of them. A row of at most
// `longest_whole` nonzeros is never split.
template <class I>
Place place_of(const I* crow, int64_t rows, int64_t k, int64_t share, int64_t longest_whole) {
  const int64_t target = k * share;
  int64_t low = 0, high = rows;  // the first row that is not done: the first r with r + 1 + crow[r + 1] > target
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (middle + 1 + static_cast<int64_t>(crow[middle + 1]) <= target)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == rows) return {rows, static_cast<int64_t>(crow[rows])};
  const int64_t begin = crow[low], end = crow[low + 1];
  if (end - begin <= longest_whole) return {low, begin};
  return {low, std::clamp(target - low, begin, end)};
}

inline int64_t shares_of(int64_t rows, int64_t nonzeros, int64_t share) {
  return (rows + nonzeros + share - 1) / share;
}

}  // namespace matmuls
