// Sets of columns and sums by column for one row of a sparse product at a time, on the CPU.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <memory>
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

// Puts distinct columns in order. Many of them are set as bits and read in order, with a second level of bits for the
// words of 64 columns that are not empty.
template <class I>
class Sorter {
 public:
  explicit Sorter(int64_t columns)
      : words_(zeroed<uint64_t>(columns / 64 + 1)), groups_(zeroed<uint64_t>(columns / 4096 + 1)) {}

  void sort(const I* columns, int64_t count, I* to) {
    if (count <= kFew) return rank(columns, count, to);
    int64_t first = INT64_MAX, last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = columns[i];
      words_[column >> 6] |= uint64_t{1} << (column & 63);
      groups_[column >> 12] |= uint64_t{1} << (column >> 6 & 63);
      first = std::min(first, column >> 12), last = std::max(last, column >> 12);
    }
    for (int64_t g = first; g <= last; ++g) {
      for (uint64_t group = std::exchange(groups_[g], 0); group != 0; group &= group - 1) {
        const int64_t w = g * 64 + std::countr_zero(group);
        for (uint64_t word = std::exchange(words_[w], 0); word != 0; word &= word - 1)
          *to++ = static_cast<I>(w * 64 + std::countr_zero(word));
      }
    }
  }

 private:
  static constexpr int64_t kFew = 24;

  // The place of a column is the number of smaller ones: no branch depends on the columns.
  static void rank(const I* columns, int64_t count, I* to) {
    for (int64_t i = 0; i < count; ++i) {
      const I column = columns[i];
      I smaller = 0;
      for (int64_t k = 0; k < count; ++k) smaller += columns[k] < column;
      to[smaller] = column;
    }
  }

  Zeroed<uint64_t> words_, groups_;
};

struct NoSum {};

// The distinct columns of a row in the order in which they come, with a sum for each unless F is NoSum. A stamp tells
// which row wrote a column last, so that nothing is cleared.
template <class I, class F>
class Columns {
 public:
  explicit Columns(int64_t columns)
      : slots_(zeroed<Slot>(columns)), list_(zeroed<I>(columns)), sorter_(columns), columns_(columns) {}

  void add(I column) {
    Slot& slot = slots_[column];
    list_[count_] = column;
    count_ += slot.stamp != stamp_;
    slot.stamp = stamp_;
  }
  void add(I column, F x) {
    Slot& slot = slots_[column];
    const bool is_new = slot.stamp != stamp_;
    list_[count_] = column;
    count_ += is_new;
    slot.stamp = stamp_;
    slot.sum = is_new ? x : slot.sum + x;
  }
  F sum(I column) const { return slots_[column].sum; }

  int64_t take_count() {
    if (++stamp_ == 0) std::fill_n(slots_.get(), columns_, Slot{}), stamp_ = 1;
    return std::exchange(count_, 0);
  }
  // Writes the columns in order to [to, end) and begins the next row; false if they are more or fewer.
  bool take(I* to, const I* end) {
    const int64_t count = take_count();
    if (count != end - to) return false;
    sorter_.sort(list_.get(), count, to);
    return true;
  }

 private:
  struct Slot {
    [[no_unique_address]] F sum;
    uint32_t stamp;
  };
  Zeroed<Slot> slots_;
  Zeroed<I> list_;
  Sorter<I> sorter_;
  int64_t columns_, count_ = 0;
  uint32_t stamp_ = 1;
};

// As Columns without sums, for few products in many columns.
template <class I>
class ColumnList {
 public:
  explicit ColumnList(int64_t) {}
  void add(I column) { list_.push_back(column); }
  int64_t take_count() {
    sort();
    const auto count = static_cast<int64_t>(list_.size());
    list_.clear();
    return count;
  }
  bool take(I* to, const I* end) {
    sort();
    const bool fits = static_cast<int64_t>(list_.size()) == end - to;
    if (fits) std::copy(list_.begin(), list_.end(), to);
    list_.clear();
    return fits;
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
  void add(I column, F x) { numbers_[column] += x; }
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
  void add(I column, F x) {
    const int64_t i = place_of(column);
    if (i >= 0) numbers_[i] += x;
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
