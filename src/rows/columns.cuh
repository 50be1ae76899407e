// A thread's columns of a row, by 16-byte vectors where it has them.
#pragma once

#include <type_traits>

#include "gpu/vector_io.cuh"

namespace matmuls {

// The part of a row in one thread's hands: vectors of V neighbouring columns. In `ragged` rows, which do not start or
// do not end on 16 bytes, the vectors still do, and the first and the last of a row reach over its ends: of those the
// row's own columns alone are read and written.
template <int V, bool ragged>
struct Span {
  static constexpr bool kRagged = ragged, kEven = false, kOnce = false;
  int first, step;  // column of the first vector's first element, and the way to the next vector
  int columns;      // that the row has

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return column(i) < columns; }
  __device__ bool sees(int i, int end) const { return column(i) < end; }
  __device__ bool whole(int i, int end) const { return (!ragged || column(i) >= 0) && column(i) + V <= end; }
  __device__ bool holds(int i, int j, int end) const {
    return static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(end);
  }
  // How many of the row's columns vector i has.
  __device__ int count(int i) const {
    if constexpr (ragged) return max(0, min(column(i) + V, columns) - max(column(i), 0));
    return begins(i) ? V : 0;
  }

  // `fill` instead of what vector i has beside columns 0 to end.
  template <class F>
  __device__ void clear_outside(int i, int end, F fill, F (&values)[V]) const {
    if (whole(i, end)) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!holds(i, j, end)) values[j] = fill;
  }

  template <class T, class F>
  __device__ void store(T* row, int64_t column_stride, int i, const F (&values)[V]) const {
    if constexpr (V == 1) {
      if (begins(i)) row[column(i) * column_stride] = T(values[0]);
    } else if (whole(i, columns)) {
      store_vector(row + column(i), pack<T, V>(values));
    } else if constexpr (ragged) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (holds(i, j, columns)) row[column(i) + j] = T(values[j]);
    }
  }
};

// Of a row that does not start or end on 16 bytes: the columns of its whole vectors. Beside them it has up to V - 1
// numbers at each end.
struct Inside {
  int first, end;
};
template <int V, class T>
__device__ Inside inside_of(const T* row, int columns) {
  const int first = min(static_cast<int>(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)), columns);
  return {first, first + (columns - first) / V * V};
}

// body(i, whole) for each of a thread's vectors; `whole` is a type that says so of the vector. Where they are all
// there, as in most threads, no branch is made for each, if they are more than four or `together` says so.
template <int NV, bool together = (NV > 4), int V, bool ragged, class Body>
__device__ void for_vectors(const Span<V, ragged>& span, const Body& body) {
  if constexpr (together && V > 1 && !ragged) {
    if (span.whole(NV - 1, span.columns)) {
#pragma unroll
      for (int i = 0; i < NV; ++i) body(i, std::true_type{});
    } else {
#pragma unroll
      for (int i = 0; i < NV; ++i)
        if (span.begins(i)) body(i, std::false_type{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < NV; ++i) body(i, std::false_type{});
  }
}

// Span's questions with their answers, where threads share a row evenly. Unless `exact`, some threads lack the last of
// their vectors; a row `ends` early where it does not see all its columns.
template <int V, int NV, bool exact, bool ends>
struct EvenSpan {
  static constexpr bool kRagged = false, kEven = true, kOnce = true;
  static constexpr bool kAlone = true;  // no other span of the row is this thread's
  int first, step, columns;
  bool last;

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return exact || i < NV - 1 || last; }
  __device__ bool sees(int i, int end) const { return ends ? column(i) < end : begins(i); }
  __device__ static constexpr bool whole(int, int) { return true; }
  __device__ bool holds(int i, int j, int end) const { return column(i) + j < end; }
  __device__ int count(int i) const { return begins(i) ? V : 0; }
  template <class F>
  __device__ void clear_outside(int i, int end, F fill, F (&values)[V]) const {
    if (!ends || column(i) + V <= end) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!holds(i, j, end)) values[j] = fill;
  }
  template <class T, class F>
  __device__ void store(T* row, int64_t, int i, const F (&values)[V]) const {
    if (begins(i)) store_vector(row + column(i), pack<T, V>(values));
  }
};
// One of a thread's several spans of a row.
template <int V, int NV, bool ends>
struct EvenPart : EvenSpan<V, NV, true, ends> {
  static constexpr bool kAlone = false;
};
// The last one too where it may not be there: behind a branch it would not be loaded before the others have come.
template <int NV, bool = true, int V, bool exact, bool ends, class Body>
__device__ void for_vectors(const EvenSpan<V, NV, exact, ends>&, const Body& body) {
#pragma unroll
  for (int i = 0; i < NV - 1; ++i) body(i, std::true_type{});
  body(NV - 1, std::bool_constant<exact>{});
}

// A vector that starts on 16 bytes and reaches over an end of the row: 0 in columns that the row does not have. Without
// a branch, so that several are on their way at once.
template <class T, int V>
__device__ Words<T, V> load_edge(const T* row, int column, int columns) {
  Words<T, V> words;
  const auto there = [&](int j) { return static_cast<unsigned>(column + j) < static_cast<unsigned>(columns); };
  const T* const from = row + column;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      const bool low = there(2 * w), high = there(2 * w + 1);
      const auto* const half = reinterpret_cast<const uint16_t*>(from) + 2 * w + (high ? 1 : 0);
      words.at[w] = ptx::load_if(low && high, reinterpret_cast<const uint32_t*>(from) + w) |
                    ptx::load_if(low != high, half) << (high ? 16 : 0);
    }
  } else {
    constexpr int kEach = sizeof(T) / 4;
#pragma unroll
    for (int w = 0; w < V * kEach; ++w)
      words.at[w] = ptx::load_if(there(w / kEach), reinterpret_cast<const uint32_t*>(from) + w);
  }
  return words;
}

// The same at any address, number by number.
template <class T, int V>
__device__ Words<T, V> load_edge_anywhere(const T* row, int column, int columns) {
  Words<T, V> words{};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (static_cast<unsigned>(column + j) >= static_cast<unsigned>(columns)) continue;
    const T* const from = row + column + j;
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from)) << 16 * (j % 2);
    } else {
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(T) / 4); ++w)
        words.at[j * sizeof(T) / 4 + w] = reinterpret_cast<const uint32_t*>(from)[w];
    }
  }
  return words;
}

// The 16 bytes at any address, of the two aligned 16 bytes around it; constant as load_words has it.
template <bool constant>
__device__ uint4 across_aligned(uintptr_t from) {
  const uint4* const low = reinterpret_cast<const uint4*>(from & ~uintptr_t{15});
  const uint4 w[2] = {load_word<constant>(low), load_word<constant>(low + 1)};
  const unsigned bytes = from % 16;
  uint32_t at[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
#pragma unroll
  for (int n = 0; n < 6; ++n) at[n] = bytes & 8 ? at[n + 2] : at[n];
#pragma unroll
  for (int n = 0; n < 5; ++n) at[n] = bytes & 4 ? at[n + 1] : at[n];
  const unsigned bits = 8 * (bytes % 4);
  return {__funnelshift_r(at[0], at[1], bits), __funnelshift_r(at[1], at[2], bits), __funnelshift_r(at[2], at[3], bits),
          __funnelshift_r(at[3], at[4], bits)};
}

// Columns of a row that is the same for all rows, a weight say, where the vector does not start on 16 bytes or reaches
// over an end.
template <class T, int V, bool constant = true>
__device__ Words<T, V> load_unaligned(const T* row, int column, int columns) {
  const auto from = reinterpret_cast<uintptr_t>(row + column), low = from & ~uintptr_t{15};
  const auto begin = reinterpret_cast<uintptr_t>(row), end = reinterpret_cast<uintptr_t>(row + columns);
  if (low < begin || low + 32 > end) return load_edge_anywhere<T, V>(row, column, columns);
  const uint4 w = across_aligned<constant>(from);
  return {w.x, w.y, w.z, w.w};
}
// Out of line for rows where a weight that starts elsewhere is rare: their code stays short.
template <class T, int V>
__device__ __noinline__ Words<T, V> load_unaligned_rarely(const T* row, int column, int columns) {
  return load_unaligned<T, V>(row, column, columns);
}

// Columns of a row that is the same for all rows, or `absent` throughout where it is null; 0 beside them.
template <class T, int V, bool ragged, class F>
__device__ Words<T, V> load_columns(const T* row, const Span<V, ragged>& span, int i, F absent) {
  if (!span.begins(i)) return {};
  if (!row) {
    F numbers[V];
#pragma unroll
    for (int j = 0; j < V; ++j) numbers[j] = span.holds(i, j, span.columns) ? absent : F(0);
    return pack<T, V>(numbers);
  }
  const T* const from = row + span.column(i);
  if constexpr (V == 1) {
    return load_one(from);
  } else if constexpr (ragged) {
    return load_unaligned<T, V>(row, span.column(i), span.columns);
  } else {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
      return load_unaligned_rarely<T, V>(row, span.column(i), span.columns);
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
    return {w.x, w.y, w.z, w.w};
  }
}

}  // namespace matmuls
