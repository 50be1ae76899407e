#include "sparse/index_checks.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "cpu/threads.h"
#include "sparse/cpu.h"

namespace matmuls {
namespace {

using at::Tensor;

enum class Kind { offsets, indices, permutation };

// Result of a validation, stored with its tensor. Copies and views of the tensor do not inherit it.
struct Looked : c10::BackendMeta {
  Looked(const Tensor& t, Kind kind, int64_t size)
      : kind(kind), size(size), version(t._version()), count(t.size(0)), data(t.const_data_ptr()) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override { return {}; }

  Kind kind;
  int64_t size;  // offsets: the last offset; else the exclusive upper bound that the indices were checked against
  int64_t version, count;
  const void* data;
};

// True if `t` was validated with a bound at least this strict and has not been written to since. Then it has a version
// counter.
bool is_known(const Tensor& t, Kind kind, int64_t size) {
  const auto* const seen = dynamic_cast<const Looked*>(t.unsafeGetTensorImpl()->get_backend_meta());
  if (seen == nullptr) return false;
  const bool is_kind = seen->kind == kind || (kind == Kind::indices && seen->kind == Kind::permutation);
  return is_kind && (kind == Kind::indices ? seen->size <= size : seen->size == size) &&
         seen->version == t._version() && seen->count == t.size(0) && seen->data == t.const_data_ptr();
}

// True if f(begin, end) holds for all parts of [0, count); parts run in parallel.
template <class F>
bool all_of_parts(int64_t count, const F& f) {
  if (count <= kGrain) return f(0, count);
  std::atomic<bool> all{true};
  parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    if (!f(begin, end)) all = false;
  });
  return all;
}

template <class I>
I last_of(int64_t size) {
  return size <= 0 ? I(-1) : static_cast<I>(std::min<int64_t>(size - 1, std::numeric_limits<I>::max()));
}

template <class I>
void expect_offsets(const char* op, const I* offsets, int64_t rows, int64_t nonzeros, const char* what) {
  TORCH_CHECK_VALUE(offsets[0] == 0, op, ": expected the first offset to be 0, got ", offsets[0]);
  TORCH_CHECK_VALUE(offsets[rows] == nonzeros, op, ": expected the last offset to be ", nonzeros,
                    ", as many as there are ", what, ", got ", offsets[rows]);
  // The first is 0, the last is nonzeros: if they never decrease, all are in range.
  const auto rise = [&](int64_t begin, int64_t end) { return never_decrease(offsets + begin, end - begin); };
  if (all_of_parts(rows, rise)) return;
  int64_t row = 0;
  while (row + 1 < rows && rise(row, row + 1)) ++row;
  TORCH_CHECK_VALUE(false, op, ": expected offsets that do not decrease after row ", row, ", got ", offsets[row + 1]);
}

template <class I>
void expect_indices(const char* op, const char* what, const I* indices, int64_t count, int64_t size) {
  const I last = last_of<I>(size);
  const auto good = [&](int64_t begin, int64_t end) { return lie_within(indices + begin, end - begin, last); };
  if (all_of_parts(count, good)) return;
  int64_t at = 0;
  while (at + 1 < count && good(at, at + 1)) ++at;
  TORCH_CHECK_VALUE(false, op, ": expected ", what, " from 0 to ", size - 1, " at nonzero ", at, ", got ", indices[at]);
}

template <class I>
void expect_permutation(const char* op, const I* order, int64_t count) {
  std::vector<bool> seen(count);
  for (int64_t p = 0; p < count; ++p) {
    TORCH_CHECK_VALUE(!seen[order[p]], op, ": expected order to name every value once, got ", order[p],
                      " again at nonzero ", p);
    seen[order[p]] = true;
  }
}

// Checks what with_data relies on. Sizes only on a CPU: those of traced tensors may be symbols.
void expect_index_vector(const char* op, const char* what, const Tensor& t, int64_t least) {
  const bool is_index = t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(t.layout() == at::kStrided && t.dim() == 1 && is_index && (!t.is_cpu() || t.size(0) >= least), op,
                    ": expected ", what, " of one dimension with at least ", least,
                    " elements, in Int or Long, got shape ", t.sym_sizes(), " in ", t.scalar_type(), ", ", t.layout());
}

template <class F>
void with_data(const Tensor& indices, const F& f) {
  const Tensor whole = indices.contiguous();
  if (indices.scalar_type() == at::kInt)
    f(whole.const_data_ptr<int32_t>());
  else
    f(whole.const_data_ptr<int64_t>());
}

}  // namespace

bool has_data(const Tensor& indices) {
  const auto keys = indices.key_set();
  return keys.has(c10::DispatchKey::CPU) && !keys.has(c10::DispatchKey::Python) && indices.has_storage();
}

void validate_offsets(const char* op, const Tensor& offsets, int64_t nonzeros, const char* what) {
  expect_index_vector(op, "offsets", offsets, 1);
  if (!offsets.is_cpu() || is_known(offsets, Kind::offsets, nonzeros)) return;
  with_data(offsets, [&](const auto* data) { expect_offsets(op, data, offsets.size(0) - 1, nonzeros, what); });
}

void validate_indices(const char* op, const char* what, const Tensor& indices, int64_t size) {
  expect_index_vector(op, what, indices, 0);
  if (!indices.is_cpu() || is_known(indices, Kind::indices, size)) return;
  with_data(indices, [&](const auto* data) { expect_indices(op, what, data, indices.size(0), size); });
}

void validate_order(const char* op, const Tensor& order, int64_t nonzeros) {
  expect_index_vector(op, "order", order, 0);
  if (!order.is_cpu() || is_known(order, Kind::permutation, nonzeros)) return;
  TORCH_CHECK_VALUE(order.size(0) == nonzeros, op, ": expected order of ", nonzeros, " values, got ", order.size(0));
  with_data(order, [&](const auto* data) {
    expect_indices(op, "order", data, nonzeros, nonzeros);
    expect_permutation(op, data, nonzeros);
  });
}

Pattern readable(const char* op, const Pattern& p, int64_t columns) {
  const Pattern whole = contiguous(p);
  if (!p.crow.is_cpu()) return whole;
  validate_offsets(op, whole.crow, whole.nonzeros());
  validate_indices(op, "columns", whole.col, columns);
  if (whole.order.defined()) validate_order(op, whole.order, whole.nonzeros());
  return whole;
}

void trust_indices(const Tensor& crow, const Tensor& col, const OptionalTensor& order, int64_t columns) {
  const char* const op = "plan";
  const Pattern p = pattern_of(crow, col, order);
  check_pattern(op, p, crow);
  const auto may_trust = [](const Tensor& t) {
    return !t.defined() || (has_data(t) && !t.is_inference() && t.is_contiguous());
  };
  if (!may_trust(p.crow) || !may_trust(p.col) || !may_trust(p.order)) return;
  readable(op, p, columns);
  const auto keep = [](const Tensor& t, Kind kind, int64_t size) {
    t.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Looked>(t, kind, size));
  };
  keep(p.crow, Kind::offsets, p.nonzeros());
  keep(p.col, Kind::indices, columns);
  if (p.order.defined()) keep(p.order, Kind::permutation, p.nonzeros());
}

}  // namespace matmuls
