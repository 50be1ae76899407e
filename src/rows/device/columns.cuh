// The columns of a row that one thread holds, as 16-byte vectors where alignment allows.
#pragma once

#include <type_traits>

#include "gpu/vector_io.cuh"

namespace matmuls {

// One thread's share of a row: vectors of V adjacent columns, `step` columns apart.
//
// `ragged` rows do not start or do not end on a 16-byte boundary. Their vectors are aligned all the same: the first and
// the last vector may reach past an end of the row, and only the columns inside the row are read and written.
//
//   16-byte blocks  |........|........|........|........|
//   row                  ####################
//   vectors         0        1        2        (0 and 2 reach past the row: column(0) < 0)
template <int V, bool ragged>
struct Span {
  static constexpr bool kRagged = ragged, kEven = false, kOnce = false;
  int first, step;  // first column of vector 0; columns from one vector to the next
  int columns;      // of the row

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return column(i) < columns; }
  __device__ bool sees(int i, int end) const { return column(i) < end; }
  __device__ bool whole(int i, int end) const { return (!ragged || column(i) >= 0) && column(i) + V <= end; }
  __device__ bool holds(int i, int j, int end) const {
    return static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(end);
  }
  // Number of the row's columns in vector i.
  __device__ int count(int i) const {
    if constexpr (ragged) return max(0, min(column(i) + V, columns) - max(column(i), 0));
    return begins(i) ? V : 0;
  }

  // Sets the elements of vector i outside columns [0, end) to `fill`.
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

// Columns [first, end) of an unaligned row that fill whole aligned vectors. Up to V - 1 edge elements lie before
// `first` and after `end`.
struct Inside {
  int first, end;
};
template <int V, class T>
__device__ Inside inside_of(const T* row, int columns) {
  const int first = min(static_cast<int>(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)), columns);
  return {first, first + (columns - first) / V * V};
}

// Calls body(i, whole) for each of a thread's vectors. `whole` is std::true_type if all of the vector's columns are
// known to exist. With more than four vectors, or if `together` is set, threads that hold all their vectors take one
// branch for all instead of one for each.
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

// Interface of Span with compile-time answers, for rows whose vectors divide evenly among the threads. If `exact`,
// every thread has NV vectors; else some threads lack the last one. If `ends`, a row may see only its first columns
// (causal).
template <int V, int NV, bool exact, bool ends>
struct EvenSpan {
  static constexpr bool kRagged = false, kEven = true, kOnce = true;
  static constexpr bool kAlone = true;  // the thread has no other span of this row
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
// One of several spans of a row that the same thread holds.
template <int V, int NV, bool ends>
struct EvenPart : EvenSpan<V, NV, true, ends> {
  static constexpr bool kAlone = false;
};
// Visits the last vector even if it may be missing: behind a branch its load would wait for the other loads.
template <int NV, bool = true, int V, bool exact, bool ends, class Body>
__device__ void for_vectors(const EvenSpan<V, NV, exact, ends>&, const Body& body) {
#pragma unroll
  for (int i = 0; i < NV - 1; ++i) body(i, std::true_type{});
  body(NV - 1, std::bool_constant<exact>{});
}

// Loads an aligned vector that reaches past an end of the row; columns outside the row are 0. Uses predicated loads
// instead of branches, so that several are in flight.
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

// Loads the same vector from any address, one element at a time.
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

// Loads 16 bytes from any address by loading the two aligned 16-byte blocks around them. `constant`: see load_words.
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

// Loads V columns of a row that all rows share (a weight) from an address that is not a multiple of 16 bytes or from
// across an end of that row.
template <class T, int V, bool constant = true>
__device__ Words<T, V> load_unaligned(const T* row, int column, int columns) {
  const auto from = reinterpret_cast<uintptr_t>(row + column), low = from & ~uintptr_t{15};
  const auto begin = reinterpret_cast<uintptr_t>(row), end = reinterpret_cast<uintptr_t>(row + columns);
  if (low < begin || low + 32 > end) return load_edge_anywhere<T, V>(row, column, columns);
  const uint4 w = across_aligned<constant>(from);
  return {w.x, w.y, w.z, w.w};
}
// Out of line, to keep the kernel short where unaligned weights are rare.
template <class T, int V>
__device__ __noinline__ Words<T, V> load_unaligned_rarely(const T* row, int column, int columns) {
  return load_unaligned<T, V>(row, column, columns);
}

// Loads the columns of vector i of a row that all rows share. A null `row` stands for `absent` in every column. Columns
// outside the row are 0.
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
