// A sparse matrix by its rows (CSR) as the operators take it, and what they share.
//
// crow: [rows + 1] offsets, col: [nonzeros], both int32 or both int64. On the CPU every operator looks at them before
// it reads through them (sparse/index_checks.h); on a GPU none does, as it would wait for the device: csr_check looks
// once, before. order: nonzero p has value order[p]; without it value p. A matrix stored by columns, in blocks or
// transposed is another order over the same values. t_crow, t_col, t_order are the transposed matrix in the same form;
// without them a gradient that needs it makes it. Duplicate and unsorted columns are as good as others.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <string_view>

#include "glue/checks.h"

namespace matmuls {

// The matrix without its values.
struct Pattern {
  at::Tensor crow, col, order, t_crow, t_col, t_order;  // those from `order` on may be undefined

  c10::SymInt sym_rows() const { return crow.sym_size(0) - 1; }
  int64_t rows() const { return crow.size(0) - 1; }
  int64_t nonzeros() const { return col.size(0); }

  // The transposed matrix; `columns` of this one are its rows. In sparse/csr_ops.cpp.
  Pattern transposed(const c10::SymInt& columns) const;
};

inline OptionalTensor none_or_tensor(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

inline Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col, const OptionalTensor& order,
                          const OptionalTensor& t_crow = {}, const OptionalTensor& t_col = {},
                          const OptionalTensor& t_order = {}) {
  return {crow, col, tensor_or_none(order), tensor_or_none(t_crow), tensor_or_none(t_col), tensor_or_none(t_order)};
}

// What can be seen of a pattern without reading its indices.
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
  for (const auto& t : {p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order})
    TORCH_CHECK(!t.defined() || t.device() == device_of.device(), op, ": expected the pattern on ", device_of.device(),
                " as the operands are, got ", t.device());
}

// One int32 number for each row, where given: `what`.
inline void check_of_rows(const char* op, const char* what, const Pattern& p, const at::Tensor& t) {
  TORCH_CHECK_VALUE(!t.defined() || (t.dim() == 1 && t.sym_size(0) == p.sym_rows() && t.scalar_type() == at::kInt &&
                                     t.device() == p.crow.device()),
                    op, ": expected ", what, " of ", p.sym_rows(), " rows in Int, got ", t.sym_sizes(), " in ",
                    t.scalar_type());
}

// The first place in [begin, end) where what increases is `least` or more, or end.
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

// Kernels read indices side by side.
inline Pattern contiguous(const Pattern& p) {
  const auto whole = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  return {whole(p.crow), whole(p.col), whole(p.order), {}, {}, {}};
}

template <class I>
const I* indices_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<I>() : nullptr;
}

// Rows whose elements are not side by side are copied: N passes over the nonzeros would cost more.
inline at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.dim() == 0 || t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Leading dimensions as one: [batch, ...] with the last `kept` dimensions as they are, a view wherever there is one.
inline at::Tensor as_batch(const at::Tensor& t, at::IntArrayRef lead, int64_t batch, int64_t kept) {
  std::vector<int64_t> expanded(lead.begin(), lead.end()), flat{batch};
  for (int64_t d = t.dim() - kept; d < t.dim(); ++d) {
    expanded.push_back(t.size(d));
    flat.push_back(t.size(d));
  }
  if (batch == 1) return t.reshape(flat);
  return t.expand(expanded).reshape(flat);
}

// ------------------------------------------------------------------------------------------------ shares of the work

// A point on the way through a matrix: `row` rows are done and, of the next one, the nonzeros before `at`.
struct Place {
  int64_t row, at;
};

// Share k of the nonzeros and rows, `share` of both together each. Short rows are not cut.
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
