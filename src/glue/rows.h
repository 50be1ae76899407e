// Views tensors as rows: one dimension runs along the row, all others index the rows, with any strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <numeric>
#include <vector>

#include "cpu/threads.h"
#include "glue/batch_invariance.h"
#include "glue/checks.h"

namespace matmuls {

// The rows of N tensors of one shape. Adjacent leading dimensions that have a common stride in every tensor are merged,
// so contiguous tensors have one. Dimensions count from the innermost.
template <int N>
struct Rows {
  static constexpr int kMaxDims = 8;

  int64_t count = 1, columns = 1;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<std::array<int64_t, kMaxDims>, N> strides{};  // in elements
  std::array<int64_t, N> column_strides{};

  // Offset in elements of a row's first element in tensor t.
  int64_t offset(int t, int64_t row) const {
    int64_t sum = 0;
    for (int d = 0; d + 1 < dims; ++d) {
      sum += row % sizes[d] * strides[t][d];
      row /= sizes[d];
    }
    return dims > 0 ? sum + row * strides[t][dims - 1] : 0;
  }
};

inline std::vector<int64_t> innermost_first(int64_t dims) {
  std::vector<int64_t> order(dims);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

// Builds Rows from the strides of each tensor; an absent tensor has no strides. `order`: dimensions from the
// innermost.
template <int N>
Rows<N> rows_of(const char* op, at::IntArrayRef sizes, const std::array<at::IntArrayRef, N>& strides, int64_t dim,
                at::IntArrayRef order) {
  Rows<N> rows;
  const auto stride = [&](int t, int64_t d) { return strides[t].empty() ? 0 : strides[t][d]; };
  rows.columns = sizes[dim];
  for (int t = 0; t < N; ++t) rows.column_strides[t] = rows.columns == 1 ? 1 : stride(t, dim);
  for (const int64_t d : order) {
    if (d == dim) continue;
    rows.count *= sizes[d];
    if (sizes[d] == 1) continue;
    bool merges = rows.dims > 0;
    for (int t = 0; merges && t < N; ++t)
      merges = stride(t, d) == rows.strides[t][rows.dims - 1] * rows.sizes[rows.dims - 1];
    if (merges) {
      rows.sizes[rows.dims - 1] *= sizes[d];
      continue;
    }
    TORCH_CHECK(rows.dims < Rows<N>::kMaxDims, op, ": expected at most ", Rows<N>::kMaxDims,
                " leading dimensions that do not merge, got a tensor of sizes ", sizes);
    rows.sizes[rows.dims] = sizes[d];
    for (int t = 0; t < N; ++t) rows.strides[t][rows.dims] = stride(t, d);
    ++rows.dims;
  }
  return rows;
}

template <int N>
Rows<N> rows_of(const char* op, const std::array<at::Tensor, N>& tensors, int64_t dim) {
  std::array<at::IntArrayRef, N> strides;
  for (int t = 0; t < N; ++t)
    if (tensors[t].defined()) strides[t] = tensors[t].strides();
  return rows_of<N>(op, tensors[0].sizes(), strides, dim, innermost_first(tensors[0].dim()));
}

// Strides that make the query position an offset: 1 along the second-to-last dimension if rows are causal, else 0.
inline std::vector<int64_t> position_strides(int64_t dims, bool causal) {
  std::vector<int64_t> strides(dims, 0);
  if (causal && dims > 1) strides[dims - 2] = 1;
  return strides;
}

// Copies of rows whose columns are not adjacent: N buffers of one row each, per thread.
template <class T, int N>
class RowBuffers {
 public:
  explicit RowBuffers(int64_t columns) : columns_(columns) {}

  const T* gather(int n, const T* row, int64_t step) {
    if (step == 1) return row;
    T* buffer = target(n, nullptr, step);
    for (int64_t i = 0; i < columns_; ++i) buffer[i] = row[i * step];
    return buffer;
  }
  T* target(int n, T* row, int64_t step) {
    if (step == 1) return row;
    buffers_[n].resize(columns_);
    return buffers_[n].data();
  }
  void scatter(const T* from, T* row, int64_t step) const {
    if (step == 1) return;
    for (int64_t i = 0; i < columns_; ++i) row[i * step] = from[i];
  }

 private:
  int64_t columns_;
  std::array<std::vector<T>, N> buffers_;
};

// Calls body(row, buffers) for every row, on torch's threads.
template <class T, int N, class Body>
void for_rows(int64_t count, int64_t columns, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(columns, 1));
  parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    RowBuffers<T, N> buffers(columns);
    for (int64_t row = begin; row < end; ++row) body(row, buffers);
  });
}

// Calls body(first row, count) for runs of rows with a common stride, on torch's threads.
template <int N, class Body>
void for_runs_of_rows(const Rows<N>& rows, const Body& body) {
  const int64_t longest = rows.dims > 0 ? rows.sizes[0] : 1;
  parallel_for(0, rows.count, std::max<int64_t>(1, kGrain / rows.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end;) {
      const int64_t count = std::min(end - row, longest - row % longest);
      body(row, count);
      row += count;
    }
  });
}

// True if rows are adjacent in the first `tensors` tensors, and enough of them to vectorize across. Not under batch
// invariance: few rows would be summed up in another order.
template <class T, int N>
bool lie_side_by_side(const Rows<N>& rows, int tensors) {
  constexpr int64_t kFew = 32 / sizeof(T);
  if (rows.dims == 0 || rows.sizes[0] < kFew || is_batch_invariant()) return false;
  for (int t = 0; t < tensors; ++t)
    if (rows.strides[t][0] != 1 || (rows.columns > 1 && rows.column_strides[t] == 1)) return false;
  return true;
}

// Calls body(first row, width) for strips of rows that lie side by side, on torch's threads. Strips are up to `most`
// rows wide and some MB in size.
template <class T, int N, class Body>
void for_rows_side_by_side(const Rows<N>& rows, int64_t most, const Body& body) {
  constexpr int64_t kBytes = 1 << 20;
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t fits = kBytes / static_cast<int64_t>(sizeof(T)) / rows.columns / kLine * kLine;
  const int64_t width = std::clamp<int64_t>(fits, 8 * kLine, most);
  const int64_t strips = ceil_of(rows.sizes[0], width);
  const int64_t grain = std::max<int64_t>(1, kGrain / (std::min(width, rows.sizes[0]) * rows.columns));
  parallel_for(0, rows.count / rows.sizes[0] * strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % strips * width;
      body(i / strips * rows.sizes[0] + first, std::min(width, rows.sizes[0] - first));
    }
  });
}

}  // namespace matmuls
