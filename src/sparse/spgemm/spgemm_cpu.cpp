// Sparse products on the CPU, row by row (Gustavson), in parts of about equal work over torch's threads.
//
// A row is the work of one thread and its sums are in the order of A's nonzeros, so that the bits do not depend on the
// number of threads.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <numeric>

#include "cpu/huge_pages.h"
#include "cpu/threads.h"
#include "sparse/index_checks.h"
#include "sparse/spgemm.h"
#include "sparse/spgemm/row_sums.h"

namespace matmuls::spgemm {
namespace {

using at::Tensor;

constexpr int64_t kMostAtOnce = int64_t{1} << 27;  // products and rows: address space for 1 GiB of float32 and int32

template <class I>
struct Csr {
  explicit Csr(const Pattern& p)
      : crow(p.crow.const_data_ptr<I>()),
        col(p.col.const_data_ptr<I>()),
        order(indices_or_null<I>(p.order)),
        rows(p.rows()),
        last(p.nonzeros() - 1) {}
  int64_t length(int64_t row) const { return static_cast<int64_t>(crow[row + 1]) - crow[row]; }
  int64_t place(int64_t p) const { return order == nullptr ? p : static_cast<int64_t>(order[p]); }

  const I *crow, *col, *order;
  int64_t rows, last;
};

// Fetches the row of B of a nonzero of A some places after p, and its offset before that: they lie anywhere in memory.
template <class I>
void fetch_ahead(const Csr<I>& a, const Csr<I>& b, int64_t p, const void* b_values, size_t value_size) {
  constexpr int64_t kAhead = 8;
  __builtin_prefetch(b.crow + a.col[std::min(p + 2 * kAhead, a.last)]);
  const int64_t q = b.crow[a.col[std::min(p + kAhead, a.last)]];
  __builtin_prefetch(b.col + q);
  if (b_values != nullptr) __builtin_prefetch(static_cast<const char*>(b_values) + q * value_size);
}

// Values in the order of the pattern's nonzeros.
template <class F, class I>
const F* in_order(const Csr<I>& m, int64_t nonzeros, const F* values, std::vector<F>& sorted) {
  if (m.order == nullptr) return values;
  sorted.resize(nonzeros);
  for (int64_t p = 0; p < nonzeros; ++p) sorted[p] = values[m.order[p]];
  return sorted.data();
}

// [rows + 1]: the products of the rows before each one, and one more for each row.
template <class I>
std::vector<int64_t> work_before(const Csr<I>& a, const Csr<I>& b) {
  std::vector<int64_t> before(a.rows + 1, 0);
  parallel_for(0, a.rows, kGrain / 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      before[r + 1] = 1;
      for (int64_t p = a.crow[r]; p < a.crow[r + 1]; ++p) {
        __builtin_prefetch(b.crow + a.col[std::min(p + 8, a.last)]);
        before[r + 1] += b.length(a.col[p]);
      }
    }
  });
  std::partial_sum(before.begin(), before.end(), before.begin());
  return before;
}

// Calls f(first row, last row) for parts of about equal work, one for each thread.
template <class F>
void for_equal_parts(const std::vector<int64_t>& before, const F& f) {
  const auto rows = static_cast<int64_t>(before.size()) - 1;
  const int64_t parts = std::clamp<int64_t>(before.back() / kGrain, 1, at::get_num_threads());
  const auto row_at = [&](int64_t part) {
    const auto target = static_cast<int64_t>(static_cast<double>(before.back()) / static_cast<double>(parts) * part);
    return part == parts ? rows : std::lower_bound(before.begin(), before.end(), target) - before.begin();
  };
  parallel_for(0, parts, 1, [&](int64_t first, int64_t last) { f(row_at(first), row_at(last)); });
}

template <class I, class F>
void for_equal_parts(const Csr<I>& a, const Csr<I>& b, const F& f) {
  if (at::get_num_threads() == 1 || a.last < kGrain / 32) return f(int64_t{0}, a.rows);
  for_equal_parts(work_before(a, b), f);
}

template <class I, class Set>
void add_row(const Csr<I>& a, const Csr<I>& b, int64_t row, Set& set) {
  for (int64_t p = a.crow[row]; p < a.crow[row + 1]; ++p) {
    fetch_ahead(a, b, p, nullptr, 0);
    const int64_t k = a.col[p];
    set.add(b.col + b.crow[k], b.length(k));
  }
}

// As add_row, with the products of the values.
template <class F, class I, class Sums>
void add_products(const Csr<I>& a, const F* a_values, const Csr<I>& b, const F* b_values, int64_t row, Sums& sums) {
  for (int64_t p = a.crow[row]; p < a.crow[row + 1]; ++p) {
    fetch_ahead(a, b, p, b_values, sizeof(F));
    const F x = a_values[p];
    const int64_t k = a.col[p];
    sums.add(b.col + b.crow[k], b.length(k), b_values + b.crow[k], x);
  }
}

template <class Set, class I>
void count(const Csr<I>& a, const Csr<I>& b, int64_t columns, int64_t* counts) {
  for_equal_parts(a, b, [&](int64_t begin, int64_t end) {
    Set set(columns);
    for (int64_t r = begin; r < end; ++r) {
      add_row(a, b, r, set);
      counts[r] = set.take_count();
    }
  });
}

// False if a row has another number of columns than the offsets say: then they are of other matrices.
template <class Set, class I>
bool fill(const Csr<I>& a, const Csr<I>& b, int64_t columns, const int64_t* offsets, I* to) {
  std::atomic<bool> fits{true};
  for_equal_parts(a, b, [&](int64_t begin, int64_t end) {
    Set set(columns);
    bool all = true;
    for (int64_t r = begin; r < end; ++r) {
      add_row(a, b, r, set);
      const int64_t room = offsets[r + 1] - offsets[r];
      all &= set.take(to + offsets[r], nullptr, room) == room;
    }
    if (!all) fits = false;
  });
  return fits;
}

// Rows of C with their values: those of a part one after the other, from offsets[first row] on. A row that would end
// behind the next one's offset is only counted. before: that of work_before.
template <class F, class I>
void fill_with_values(const Csr<I>& a, const F* a_values, const Csr<I>& b, const F* b_values, int64_t columns,
                      const std::vector<int64_t>& before, const int64_t* offsets, I* to, F* values,
                      std::vector<int64_t>& begins, std::vector<int64_t>& counts) {
  for_equal_parts(before, [&](int64_t begin, int64_t end) {
    Columns<I, F> sums(columns);
    FewProducts<I, F> few;
    int64_t at = offsets[begin];
    for (int64_t r = begin; r < end; ++r) {
      const auto row = [&](auto& set) {
        add_products(a, a_values, b, b_values, r, set);
        return set.take(to + at, values + at, offsets[r + 1] - at);
      };
      begins[r] = at;
      counts[r] = before[r + 1] - before[r] - 1 <= few.kMost ? row(few) : row(sums);
      at = std::min(at + counts[r], offsets[r + 1]);
    }
  });
}

// Moves the rows of all parts together; crow [rows + 1]: where they belong.
template <class T, class I>
void close_gaps(const I* crow, const std::vector<int64_t>& begins, T* data) {
  const auto rows = static_cast<int64_t>(begins.size());
  for (int64_t r = 0, end = 0; r < rows; r = end) {
    const auto is_next = [&](int64_t row) { return begins[row] - begins[row - 1] == crow[row] - crow[row - 1]; };
    for (end = r + 1; end < rows && is_next(end);) ++end;
    if (begins[r] != crow[r]) std::memmove(data + crow[r], data + begins[r], (crow[end] - crow[r]) * sizeof(T));
  }
}

// Leaves the first `count` elements of fresh memory. The others were never written: they have no pages.
void shorten(const Tensor& fresh, int64_t count) {
  fresh.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  fresh.storage().unsafeGetStorageImpl()->set_nbytes(fresh.nbytes());
}

// Rows of the product by Row, which is a DenseRow or a SearchedRow. write(nonzero of C, sum).
template <class Row, class F, class I>
void multiply(const Csr<I>& a, const F* a_values, const Csr<I>& b, const F* b_values, const Csr<I>& c, int64_t columns,
              F* out) {
  for_equal_parts(a, b, [&](int64_t begin, int64_t end) {
    Row row(columns);
    for (int64_t r = begin; r < end; ++r) {
      row.begin(c.col + c.crow[r], c.length(r));
      add_products(a, a_values, b, b_values, r, row);
      for (int64_t i = c.crow[r]; i < c.crow[r + 1]; ++i) out[c.place(i)] = row.at(c.col[i]);
    }
  });
}

template <class Row, class F, class I>
void sample(const Csr<I>& p, const Csr<I>& g, const F* g_values, const Csr<I>& m, const F* m_values, int64_t columns,
            F* out) {
  for_equal_parts(p, m, [&](int64_t begin, int64_t end) {
    Row row(columns);
    for (int64_t r = begin; r < end; ++r) {
      if (p.length(r) == 0) continue;
      row.begin(g.col + g.crow[r], g.length(r));
      row.add(g.col + g.crow[r], g.length(r), g_values + g.crow[r], F(1));
      for (int64_t i = p.crow[r]; i < p.crow[r + 1]; ++i) {
        fetch_ahead(p, m, i, m_values, sizeof(F));
        const int64_t k = p.col[i];
        F sum = 0;
        for (int64_t q = m.crow[k]; q < m.crow[k + 1]; ++q) sum += m_values[q] * row.at(m.col[q]);
        out[p.place(i)] = sum;
      }
      row.end();
    }
  });
}

template <class F>
void with_index(const Pattern& p, const F& f) {
  AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kProduct, [&] { f(index_t{}); });
}

}  // namespace

Tensor size_cpu(const Product& call) {
  const int64_t columns = call.columns.expect_int();
  const Pattern a_pattern = readable(kSize, call.a, call.b.rows()), b_pattern = readable(kSize, call.b, columns);
  const Tensor offsets = at::empty({a_pattern.rows() + 1}, a_pattern.crow.options().dtype(at::kLong));
  with_index(a_pattern, [&](auto index) {
    using I = decltype(index);
    const Csr<I> a(a_pattern), b(b_pattern);
    int64_t* const counts = offsets.mutable_data_ptr<int64_t>();
    counts[0] = 0;
    const bool sparse = is_sparse_row(columns, a_pattern.nonzeros() + b_pattern.nonzeros());
    (sparse ? count<ColumnList<I>, I> : count<Columns<I, NoSum>, I>)(a, b, columns, counts + 1);
    std::partial_sum(counts, counts + a.rows + 1, counts);
  });
  return offsets;
}

Tensor pattern_cpu(const Product& call, const Tensor& offsets, int64_t nonzeros) {
  const int64_t columns = call.columns.expect_int();
  const Pattern a_pattern = readable(kPattern, call.a, call.b.rows()), b_pattern = readable(kPattern, call.b, columns);
  const bool sparse = is_sparse_row(columns, a_pattern.nonzeros() + b_pattern.nonzeros());
  const Tensor col = in_huge_pages(at::empty({nonzeros}, a_pattern.col.options()));
  with_index(a_pattern, [&](auto index) {
    using I = decltype(index);
    const Csr<I> a(a_pattern), b(b_pattern);
    const bool fits =
        (sparse ? fill<ColumnList<I>, I> : fill<Columns<I, NoSum>, I>)(a, b, columns, offsets.const_data_ptr<int64_t>(),
                                                                       col.mutable_data_ptr<I>());
    TORCH_CHECK_VALUE(fits, kPattern, ": expected offsets that ", kSize, " returned for these matrices, got others");
  });
  return col;
}

std::optional<Made> at_once_cpu(const Product& call, const Tensor& offsets) {
  const int64_t columns = call.columns.expect_int();
  const Pattern a_pattern = readable(kPattern, call.a, call.b.rows()), b_pattern = readable(kPattern, call.b, columns);
  if (is_sparse_row(columns, a_pattern.nonzeros() + b_pattern.nonzeros())) return {};
  const Tensor a_wide = wide(call.a_values), b_wide = wide(call.b_values);
  Made made;
  auto& [crow_of_c, col, values] = made;
  with_index(a_pattern, [&](auto index) {
    using I = decltype(index);
    const Csr<I> a(a_pattern), b(b_pattern);
    const std::vector<int64_t> before = work_before(a, b);
    const int64_t most = offsets.defined() ? offsets[-1].item<int64_t>() : before.back();
    if (!offsets.defined() && most > kMostAtOnce) return;
    const int64_t* const rows = offsets.defined() ? offsets.const_data_ptr<int64_t>() : before.data();
    col = in_huge_pages(at::empty({most}, a_pattern.col.options()));
    values = in_huge_pages(at::empty({most}, a_wide.options()));
    crow_of_c = at::empty({a.rows + 1}, a_pattern.crow.options());
    I *const crow = crow_of_c.mutable_data_ptr<I>(), *const to = col.mutable_data_ptr<I>();
    std::vector<int64_t> begins(a.rows), counts(a.rows);
    AT_DISPATCH_FLOATING_TYPES(a_wide.scalar_type(), kPattern, [&] {
      std::vector<scalar_t> a_sorted, b_sorted;
      const auto* const x = in_order(a, a_pattern.nonzeros(), a_wide.const_data_ptr<scalar_t>(), a_sorted);
      const auto* const y = in_order(b, b_pattern.nonzeros(), b_wide.const_data_ptr<scalar_t>(), b_sorted);
      auto* const sums = values.mutable_data_ptr<scalar_t>();
      fill_with_values(a, x, b, y, columns, before, rows, to, sums, begins, counts);
      crow[0] = 0;
      for (int64_t r = 0; r < a.rows; ++r) crow[r + 1] = static_cast<I>(crow[r] + counts[r]);
      TORCH_CHECK_VALUE(!offsets.defined() || std::equal(crow, crow + a.rows + 1, rows), kPattern,
                        ": expected offsets that ", kSize, " returned for these matrices, got others");
      if (offsets.defined()) return;
      close_gaps(crow, begins, to);
      close_gaps(crow, begins, sums);
      shorten(col, crow[a.rows]);
      shorten(values, crow[a.rows]);
    });
  });
  if (!col.defined()) return {};
  values = values.to(call.a_values.scalar_type());
  return made;
}
Tensor values_cpu(const Product& call) {
  const int64_t columns = call.columns.expect_int();
  const Pattern a_pattern = readable(kProduct, call.a, call.b.rows()), b_pattern = readable(kProduct, call.b, columns);
  const Pattern c_pattern = readable(kProduct, call.c, columns);
  const Tensor a_wide = wide(call.a_values), b_wide = wide(call.b_values);
  const int64_t work = a_pattern.nonzeros() + c_pattern.nonzeros();
  Tensor out = in_huge_pages(at::empty({c_pattern.nonzeros()}, a_wide.options()));
  AT_DISPATCH_FLOATING_TYPES(a_wide.scalar_type(), kProduct, [&] {
    with_index(a_pattern, [&](auto index) {
      using I = decltype(index);
      const Csr<I> a(a_pattern), b(b_pattern), c(c_pattern);
      std::vector<scalar_t> a_sorted, b_sorted;
      const auto* const x = in_order(a, a_pattern.nonzeros(), a_wide.const_data_ptr<scalar_t>(), a_sorted);
      const auto* const y = in_order(b, b_pattern.nonzeros(), b_wide.const_data_ptr<scalar_t>(), b_sorted);
      const auto run = is_sparse_row(columns, work) ? multiply<SearchedRow<scalar_t, I>, scalar_t, I>
                                                    : multiply<DenseRow<scalar_t, I>, scalar_t, I>;
      run(a, x, b, y, c, columns, out.mutable_data_ptr<scalar_t>());
    });
  });
  return out.to(call.a_values.scalar_type());
}

Tensor sampled_cpu(const Sampled& call) {
  const int64_t columns = call.columns.expect_int();
  const Pattern p_pattern = readable(kSampled, call.p, call.m.rows()), m_pattern = readable(kSampled, call.m, columns);
  const Pattern g_pattern = readable(kSampled, call.g, columns);
  const Tensor g_wide = wide(call.g_values), m_wide = wide(call.m_values);
  const int64_t work = g_pattern.nonzeros() + m_pattern.nonzeros();
  Tensor out = at::empty({p_pattern.nonzeros()}, g_wide.options());
  AT_DISPATCH_FLOATING_TYPES(g_wide.scalar_type(), kSampled, [&] {
    with_index(p_pattern, [&](auto index) {
      using I = decltype(index);
      const Csr<I> p(p_pattern), g(g_pattern), m(m_pattern);
      std::vector<scalar_t> g_sorted, m_sorted;
      const auto* const x = in_order(g, g_pattern.nonzeros(), g_wide.const_data_ptr<scalar_t>(), g_sorted);
      const auto* const y = in_order(m, m_pattern.nonzeros(), m_wide.const_data_ptr<scalar_t>(), m_sorted);
      const auto run = is_sparse_row(columns, work) ? sample<SearchedRow<scalar_t, I>, scalar_t, I>
                                                    : sample<DenseRow<scalar_t, I>, scalar_t, I>;
      run(p, g, x, m, y, columns, out.mutable_data_ptr<scalar_t>());
    });
  });
  return out.to(call.g_values.scalar_type());
}

}  // namespace matmuls::spgemm
