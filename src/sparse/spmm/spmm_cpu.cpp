// csr_spmm on the CPU: merge-path shares of rows and nonzeros over torch's threads.
#include "sparse/spmm/spmm.h"

#include <ATen/Dispatch.h>

#include "cpu/threads.h"
#include "sparse/cpu.h"
#include "sparse/ops.h"

namespace matmuls::spmm {
namespace {

constexpr int64_t kShare = 8192;            // rows + nonzeros that a thread takes at a time
constexpr int64_t kCacheBytes = 256 << 10;  // a B this small is soon in the L2 cache
constexpr int64_t kLongestWhole = 4096;     // nonzeros of the longest row that is not cut

// Sums by shares of equal work. Long rows are cut at the ends of shares, which do not depend on the number of threads;
// their pieces are added in order once all are computed.
template <class T, class I>
void sum_cpu(const Spmm<T, I>& m, int64_t rows) {
  using A = arithmetic_t<T>;
  const int64_t shares = shares_of(rows, m.nonzeros, kShare);
  const auto place = [&](int64_t k) { return place_of(m.crow, rows, k, kShare, kLongestWhole); };
  if (shares == 1) return spmm_rows(m, 0, rows);
  // For share k: the piece of a row that began before it, and the piece of a row that begins in it and goes on after
  // it.
  std::vector<A> sums;
  bool cut = false;
  for (int64_t k = 1; k < shares && !cut; ++k) {
    const Place at = place(k);
    cut = at.row < rows && at.at > m.crow[at.row];
  }
  if (cut) sums.resize(2 * shares * m.n);
  parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Place from = place(k), to = place(k + 1);
      A* const pieces = sums.data() + 2 * k * m.n;
      int64_t row = from.row;
      if (row < rows && from.at > m.crow[row]) {
        const int64_t end = to.row > row ? static_cast<int64_t>(m.crow[row + 1]) : to.at;
        spmm_piece(m, from.at, end, pieces);
        if (to.row == row) continue;
        ++row;
      }
      spmm_rows(m, row, to.row);
      if (to.row < rows && to.at > m.crow[to.row]) spmm_piece(m, m.crow[to.row], to.at, pieces + m.n);
    }
  });
  if (!cut) return;
  for (int64_t k = 0; k < shares; ++k) {
    const Place from = place(k), to = place(k + 1);
    const bool begins = to.row < rows && to.at > m.crow[to.row] && (from.row < to.row || from.at == m.crow[to.row]);
    if (!begins) continue;
    A* const total = sums.data() + (2 * k + 1) * m.n;
    for (int64_t next = k + 1; next < shares; ++next) {
      const A* const piece = sums.data() + 2 * next * m.n;
      for (int64_t c = 0; c < m.n; ++c) total[c] += piece[c];
      if (place(next + 1).row > to.row) break;
    }
    spmm_finish(m, to.row, total);
  }
}

// Calls f(row begin, row end) over torch's threads, in shares of equal work.
template <class I, class F>
void for_rows_of_equal_work(const I* crow, int64_t rows, const F& f) {
  const int64_t shares = shares_of(rows, crow[rows], kShare);
  parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    f(place_of(crow, rows, first, kShare, INT64_MAX).row, place_of(crow, rows, last, kShare, INT64_MAX).row);
  });
}

template <class T, class I>
void selected_cpu(const Spmm<T, I>& m, const I* selected, bool by_column, int64_t begin, int64_t end) {
  using A = arithmetic_t<T>;
  std::vector<A> sums(m.n);
  for (int64_t r = begin; r < end; ++r) {
    std::fill(sums.begin(), sums.end(), A(0));
    for (int64_t p = m.crow[r]; p < m.crow[r + 1]; ++p) {
      const I at = static_cast<I>(m.value_at(p));
      const A value = static_cast<A>(m.values[at]);
      const int64_t column = m.col[p];
      const I* const chosen = selected + (by_column ? column : r) * m.n;
      const T* const row = m.dense + column * m.dense_stride;
      for (int64_t c = 0; c < m.n; ++c)
        if (chosen[c] == at) sums[c] += value * static_cast<A>(row[c]);
    }
    T* const out = m.out + r * m.out_stride;
    for (int64_t c = 0; c < m.n; ++c) out[c] = static_cast<T>(m.alpha * sums[c]);
  }
}

// Product b of the batch.
template <class T, class I>
Spmm<T, I> product_of(const Call& c, int64_t b) {
  const int64_t n = c.out.size(2);
  return {c.pattern.crow.const_data_ptr<I>(),
          c.pattern.col.const_data_ptr<I>(),
          indices_or_null<I>(c.pattern.order),
          c.values.const_data_ptr<T>() + b * c.values.stride(0),
          c.dense.const_data_ptr<T>() + b * c.dense.stride(0),
          c.out.mutable_data_ptr<T>() + b * c.out.stride(0),
          c.pattern.nonzeros(),
          n,
          c.dense.stride(1),
          c.out.stride(1),
          static_cast<arithmetic_t<T>>(c.alpha),
          static_cast<arithmetic_t<T>>(c.beta),
          c.reduce == Reduce::mean,
          c.dense.size(1) * n * c.dense.element_size() > kCacheBytes};
}

// Complex sums. A long row is the work of one thread.
void run_complex(Call c) {
  c.values = at::view_as_real(c.values), c.dense = as_real_columns(c.dense), c.out = as_real_columns(c.out);
  AT_DISPATCH_FLOATING_TYPES(c.out.scalar_type(), kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      for (int64_t b = 0; b < c.out.size(0); ++b) {
        const auto m = product_of<scalar_t, index_t>(c, b);
        for_rows_of_equal_work(m.crow, c.pattern.rows(),
                               [&](int64_t begin, int64_t end) { complex_rows(m, begin, end); });
      }
    });
  });
}

}  // namespace

void run_cpu(const Call& c) {
  if (c.out.is_complex()) return run_complex(c);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.dense.scalar_type(), kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      const int64_t rows = c.pattern.rows(), n = c.out.size(2);
      for (int64_t b = 0; b < c.out.size(0); ++b) {
        const auto m = product_of<scalar_t, index_t>(c, b);
        if (c.selected.defined()) {
          const index_t* const selected = c.selected.const_data_ptr<index_t>() + b * c.selected.stride(0);
          for_rows_of_equal_work(
              m.crow, rows, [&](int64_t begin, int64_t end) { selected_cpu(m, selected, c.by_column, begin, end); });
        } else if (c.reduce == Reduce::max || c.reduce == Reduce::min) {
          index_t* const arg = c.arg.defined() ? c.arg.mutable_data_ptr<index_t>() + b * rows * n : nullptr;
          for_rows_of_equal_work(m.crow, rows, [&](int64_t begin, int64_t end) {
            extremum_rows(m, c.reduce == Reduce::max, begin, end, arg);
          });
        } else {
          sum_cpu(m, rows);
        }
      }
    });
  });
}

}  // namespace matmuls::spmm
