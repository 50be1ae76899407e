#include "csr_look.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "sparse_cpu.h"
#include "threads.h"

namespace matmuls {
namespace {

using at::Tensor;

// True if f(begin, end) is for all parts of a range.
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
  // Offsets that end with the number of nonzeros and never decrease lie between 0 and it.
  const auto rise = [&](int64_t begin, int64_t end) {
    bool falls = false;
    for (int64_t r = begin; r < end; ++r) falls |= offsets[r + 1] < offsets[r];
    return !falls;
  };
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

template <class F>
void with_data(const Tensor& indices, const F& f) {
  const Tensor whole = indices.contiguous();
  if (indices.scalar_type() == at::kInt)
    f(whole.const_data_ptr<int32_t>());
  else
    f(whole.const_data_ptr<int64_t>());
}

}  // namespace

void look_at_offsets(const char* op, const Tensor& offsets, int64_t nonzeros, const char* what) {
  if (!offsets.is_cpu()) return;
  with_data(offsets, [&](const auto* data) { expect_offsets(op, data, offsets.size(0) - 1, nonzeros, what); });
}

void look_at_indices(const char* op, const char* what, const Tensor& indices, int64_t size) {
  if (!indices.is_cpu()) return;
  with_data(indices, [&](const auto* data) { expect_indices(op, what, data, indices.size(0), size); });
}

Pattern readable(const char* op, const Pattern& p, int64_t columns) {
  const Pattern whole = contiguous(p);
  if (!p.crow.is_cpu()) return whole;
  look_at_offsets(op, whole.crow, whole.nonzeros());
  look_at_indices(op, "columns", whole.col, columns);
  if (whole.order.defined()) look_at_indices(op, "order", whole.order, whole.nonzeros());
  return whole;
}

}  // namespace matmuls
