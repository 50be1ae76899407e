// Sets of columns and sums by column for one row of a sparse product at a time, on the CPU.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace matmuls::spgemm {

struct Freed {
  void operator()(void* data) const { std::free(data); }
};
template <class T>
using Zeroed = std::unique_ptr<T[], Freed>;

// Memory of zeros whose pages cost nothing until they are written.
template <class T>
Zeroed<T> zeroed(int64_t count) {
  auto* const data = static_cast<T*>(std::calloc(static_cast<size_t>(count) + 1, sizeof(T)));
  TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "spgemm: expected memory for a row of ", count,
                   " columns, got none");
  return Zeroed<T>(data);
}

struct NoSum {};

// The distinct columns of a row, as bits, with a sum for each unless F is NoSum. `take` puts them in order: it reads
// the words of 64 columns that are not empty, few of them ranked, many by a second level of bits. It clears what it
// reads.
template <class I, class F>
class Columns {
 public:
  explicit Columns(int64_t columns)
      : words_(zeroed<uint64_t>(columns / 64 + 1)),
        groups_(zeroed<uint64_t>(columns / 4096 + 1)),
        list_(zeroed<I>(columns / 64 + 2)),
        sums_(zeroed<F>(kSums ? columns : 0)) {}

  // A row of B, times x unless F is NoSum.
  void add(const I* columns, int64_t count, const F* values = nullptr, F x = {}) {
    uint64_t* const words = words_.get();
    I* const list = list_.get();
    F* const sums = sums_.get();
    int64_t listed = listed_;  // in a register, as words may alias members
    for (int64_t i = 0; i < count; ++i) {
      const I column = columns[i];
      uint64_t& word = words[column >> 6];
      const uint64_t old = word;
      list[listed] = column >> 6;
      listed += old == 0;
      word = old | uint64_t{1} << (column & 63);
      if constexpr (kSums) sums[column] += x * values[i];
    }
    listed_ = listed;
  }

  int64_t take_count() {
    int64_t count = 0;
    for (int64_t i = 0; i < listed_; ++i) count += std::popcount(std::exchange(words_[list_[i]], 0));
    listed_ = 0;
    return count;
  }
  // Writes the columns in order, and their sums unless F is NoSum, but at most `room`; returns how many there are.
  int64_t take(I* to, F* sums, int64_t room) {
    int64_t count = 0;
    for_each([&](I column) {
      F sum{};
      if constexpr (kSums) sum = std::exchange(sums_[column], F{});
      if (count < room) {
        to[count] = column;
        if constexpr (kSums) sums[count] = sum;
      }
      ++count;
    });
    listed_ = 0;
    return count;
  }

 private:
  static constexpr bool kSums = !std::is_same_v<F, NoSum>;
  static constexpr int64_t kRanked = 24;

  template <class Use>
  void for_each_of(I w, const Use& use) {
    for (uint64_t word = std::exchange(words_[w], 0); word != 0; word &= word - 1)
      use(static_cast<I>(w * 64 + std::countr_zero(word)));
  }

  template <class Use>
  void for_each(const Use& use) {
    if (listed_ <= kRanked) {
      I ranked[kRanked];  // the place of a word is the number of smaller ones: no branch depends on the words
      for (int64_t i = 0; i < listed_; ++i) {
        I smaller = 0;
        for (int64_t k = 0; k < listed_; ++k) smaller += list_[k] < list_[i];
        ranked[smaller] = list_[i];
      }
      for (int64_t i = 0; i < listed_; ++i) for_each_of(ranked[i], use);
      return;
    }
    I first = list_[0], last = list_[0];
    for (int64_t i = 0; i < listed_; ++i) {
      const I w = list_[i];
      groups_[w >> 6] |= uint64_t{1} << (w & 63);
      first = std::min(first, w), last = std::max(last, w);
    }
    for (I g = first >> 6; g <= last >> 6; ++g)
      for (uint64_t group = std::exchange(groups_[g], 0); group != 0; group &= group - 1)
        for_each_of(static_cast<I>(g * 64 + std::countr_zero(group)), use);
  }

  Zeroed<uint64_t> words_, groups_;
  Zeroed<I> list_;  // words that are not empty
  Zeroed<F> sums_;
  int64_t listed_ = 0;
};

// As Columns with sums, for a row of at most kMost products: sorts them, and reads no memory by column.
template <class I, class F>
class FewProducts {
 public:
  // With 32 a stencil of 5 points, whose rows have 25 products, took 1.2 to 1.9 times as long (2^12 and 2^18 rows).
  static constexpr int64_t kMost = 16;

  void add(const I* columns, int64_t count, const F* values, F x) {
    for (int64_t i = 0; i < count; ++i) columns_[count_ + i] = columns[i], products_[count_ + i] = x * values[i];
    count_ += static_cast<int>(count);
  }
  int64_t take(I* to, F* sums, int64_t room) {
    const int count = std::exchange(count_, 0);
    I columns[kMost];
    F products[kMost];
    for (int i = 0; i < count; ++i) {  // equal columns keep their order, and so the sums theirs
      int place = 0;
      for (int k = 0; k < i; ++k) place += columns_[k] <= columns_[i];
      for (int k = i + 1; k < count; ++k) place += columns_[k] < columns_[i];
      columns[place] = columns_[i], products[place] = products_[i];
    }
    int64_t distinct = 0;
    for (int i = 0; i < count; ++i) distinct += i == 0 || columns[i] != columns[i - 1];
    if (distinct > room) return distinct;
    for (int i = 0, n = -1; i < count; ++i) {
      const bool is_new = i == 0 || columns[i] != columns[i - 1];
      n += is_new;
      to[n] = columns[i];
      sums[n] = is_new ? products[i] : sums[n] + products[i];
    }
    return distinct;
  }

 private:
  I columns_[kMost];
  F products_[kMost];
  int count_ = 0;
};

// As Columns without sums, for few nonzeros in many columns.
template <class I>
class ColumnList {
 public:
  explicit ColumnList(int64_t) {}
  void add(const I* columns, int64_t count) { list_.insert(list_.end(), columns, columns + count); }
  int64_t take_count() {
    sort();
    const auto count = static_cast<int64_t>(list_.size());
    list_.clear();
    return count;
  }
  int64_t take(I* to, NoSum*, int64_t room) {
    sort();
    const auto count = static_cast<int64_t>(list_.size());
    if (count <= room) std::copy(list_.begin(), list_.end(), to);
    list_.clear();
    return count;
  }

 private:
  void sort() {
    std::sort(list_.begin(), list_.end());
    list_.erase(std::unique(list_.begin(), list_.end()), list_.end());
  }
  std::vector<I> list_;
};

// Numbers of one row by column: begin(row's columns) sets those to 0, others are anything.
template <class F, class I>
class DenseRow {
 public:
  explicit DenseRow(int64_t columns) : numbers_(zeroed<F>(columns)) {}
  void begin(const I* columns, int64_t count) {
    columns_ = columns, count_ = count;
    for (int64_t i = 0; i < count; ++i) numbers_[columns[i]] = 0;
  }
  void end() { begin(columns_, count_); }  // so that a column that no row has is 0
  void add(const I* columns, int64_t count, const F* values, F x) {
    F* const numbers = numbers_.get();
    for (int64_t i = 0; i < count; ++i) numbers[columns[i]] += x * values[i];
  }
  F at(I column) const { return numbers_[column]; }

 private:
  Zeroed<F> numbers_;
  const I* columns_ = nullptr;
  int64_t count_ = 0;
};

// As DenseRow, for few nonzeros in many columns: searches the row's columns, which rise.
template <class F, class I>
class SearchedRow {
 public:
  explicit SearchedRow(int64_t) {}
  void begin(const I* columns, int64_t count) {
    columns_ = columns, count_ = count;
    numbers_.assign(count, F(0));
  }
  void end() {}
  void add(const I* columns, int64_t count, const F* values, F x) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = place_of(columns[i]);
      if (place >= 0) numbers_[place] += x * values[i];
    }
  }
  F at(I column) const {
    const int64_t i = place_of(column);
    return i < 0 ? F(0) : numbers_[i];
  }

 private:
  int64_t place_of(I column) const {
    const int64_t i = std::lower_bound(columns_, columns_ + count_, column) - columns_;
    return i < count_ && columns_[i] == column ? i : -1;
  }
  std::vector<F> numbers_;
  const I* columns_ = nullptr;
  int64_t count_ = 0;
};

// Whether a dense row pays for its pages: with less work per column than this, a search does.
inline bool is_sparse_row(int64_t columns, int64_t work) { return columns > int64_t{1} << 20 && columns / 8 > work; }

}  // namespace matmuls::spgemm
