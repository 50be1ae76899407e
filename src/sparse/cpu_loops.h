// Loops of cpu.h. cpu.cpp includes this file once per instruction set, each time in another namespace and with another
// ROWS_VECTOR_BYTES: no include guard, no other #include, and no calls of standard library templates (cpu/vectors.h
// says why).

#include "cpu/vectors.h"

constexpr int kTile = 8;    // vectors of sums: 128 float32 columns with AVX-512, half of its registers
constexpr int kAhead = 16;  // nonzeros that the prefetch runs ahead

// Operands of the innermost loop, in registers: NV vectors of B's columns from c on, with `tail` columns in the last.
template <int NV, bool prefetched, class T>
struct Tile {
  using A = arithmetic_t<T>;
  const char* col;
  const T *values, *dense;
  int64_t index_bytes, stride, last;
  int tail;

  C10_ALWAYS_INLINE Tile(const SpmmSums<T>& m, int64_t c, int tail)
      : col(m.col),
        values(m.values),
        dense(m.dense + c),
        index_bytes(m.index_bytes),
        stride(m.dense_stride),
        last(m.last),
        tail(tail) {}

  // The row of B of nonzero p: the low half of a 64-bit index, which comes first (little endian).
  C10_ALWAYS_INLINE const T* row_of(int64_t p) const {
    uint32_t row;
    __builtin_memcpy(&row, col + p * index_bytes, sizeof(row));
    return dense + static_cast<int64_t>(row) * stride;
  }

  // sums += value * row of B, for one nonzero.
  C10_ALWAYS_INLINE void add(int64_t p, Vec<A> (&sums)[NV]) const {
    constexpr int n = kLanes<A>;
    if constexpr (prefetched) {
      const T* next = row_of(p + kAhead < last ? p + kAhead : last);
      for (int line = 0; line < NV * n; line += 64 / sizeof(T)) __builtin_prefetch(next + line);
    }
    const T* row = row_of(p);
    const Vec<A> value = splat(static_cast<A>(values[p]));
    for (int i = 0; i + 1 < NV; ++i) sums[i] += value * load<A>(row + i * n, n);
    sums[NV - 1] += value * load<A>(row + (NV - 1) * n, tail);
  }
};

template <class T, class A = arithmetic_t<T>>
C10_ALWAYS_INLINE A row_scale(const SpmmSums<T>& m, int64_t row) {
  const int64_t length = m.row_begin(row + 1) - m.row_begin(row);
  return m.mean && length > 0 ? m.alpha / static_cast<A>(length) : m.alpha;
}

template <class A, class T>
C10_ALWAYS_INLINE void finish(T* out, Vec<A> sum, A scale, A beta, int count) {
  Vec<A> v = sum * scale;
  if (beta != 0) v += load<A>(out, count) * beta;
  store<A>(out, v, count);
}

// Rows [begin, end), NV vectors of columns from c on; `whole`: the last vector is full.
template <int NV, bool prefetched, bool whole, class T, class A = arithmetic_t<T>>
void rows_of_tile(const SpmmSums<T>& m, int64_t begin, int64_t end, int64_t c, int tail) {
  constexpr int n = kLanes<A>;
  const Tile<NV, prefetched, T> tile(m, c, whole ? n : tail);
  const A beta = m.beta;
  int64_t p = m.row_begin(begin);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t stop = m.row_begin(r + 1);
    Vec<A> sums[NV] = {};
    for (; p < stop; ++p) tile.add(p, sums);
    T* out = m.out + r * m.out_stride + c;
    const A scale = row_scale(m, r);
    for (int i = 0; i + 1 < NV; ++i) finish<A>(out + i * n, sums[i], scale, beta, n);
    finish<A>(out + (NV - 1) * n, sums[NV - 1], scale, beta, tile.tail);
  }
}

template <int NV, class T>
void tile_of_rows(const SpmmSums<T>& m, int64_t begin, int64_t end, int64_t c, int tail) {
  const bool whole = tail == kLanes<arithmetic_t<T>>;
  if (m.prefetch)
    whole ? rows_of_tile<NV, true, true>(m, begin, end, c, tail)
          : rows_of_tile<NV, true, false>(m, begin, end, c, tail);
  else
    whole ? rows_of_tile<NV, false, true>(m, begin, end, c, tail)
          : rows_of_tile<NV, false, false>(m, begin, end, c, tail);
}

template <int NV, class T, class A = arithmetic_t<T>>
void tile_of_piece(const SpmmSums<T>& m, int64_t begin, int64_t end, int64_t c, int tail, A* out) {
  constexpr int n = kLanes<A>;
  Vec<A> sums[NV] = {};
  const Tile<NV, true, T> tile(m, c, tail);
  for (int64_t p = begin; p < end; ++p) tile.add(p, sums);
  for (int i = 0; i + 1 < NV; ++i) store<A>(out + c + i * n, sums[i], n);
  store<A>(out + c + (NV - 1) * n, sums[NV - 1], tail);
}

// Calls f(vectors, c, tail) for tiles of up to kTile vectors over all columns, with the number of vectors as a
// constant.
template <class A, class F>
C10_ALWAYS_INLINE void for_each_tile(int64_t columns, F f) {
  constexpr int n = kLanes<A>;
  for (int64_t c = 0; c < columns; c += kTile * n) {
    const int64_t left = columns - c < kTile * n ? columns - c : kTile * n;
    const int vectors = static_cast<int>((left + n - 1) / n), tail = static_cast<int>(left - (vectors - 1) * n);
    switch (vectors) {
      case 1: f(std::integral_constant<int, 1>{}, c, tail); break;
      case 2: f(std::integral_constant<int, 2>{}, c, tail); break;
      case 3: f(std::integral_constant<int, 3>{}, c, tail); break;
      case 4: f(std::integral_constant<int, 4>{}, c, tail); break;
      case 5: f(std::integral_constant<int, 5>{}, c, tail); break;
      case 6: f(std::integral_constant<int, 6>{}, c, tail); break;
      case 7: f(std::integral_constant<int, 7>{}, c, tail); break;
      default: f(std::integral_constant<int, 8>{}, c, tail); break;
    }
  }
}

template <class T>
void spmm_rows(const SpmmSums<T>& m, int64_t begin, int64_t end) {
  for_each_tile<arithmetic_t<T>>(
      m.n, [&](auto vectors, int64_t c, int tail) { tile_of_rows<decltype(vectors)::value>(m, begin, end, c, tail); });
}

template <class T>
void spmm_piece(const SpmmSums<T>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums) {
  for_each_tile<arithmetic_t<T>>(m.n, [&](auto vectors, int64_t c, int tail) {
    tile_of_piece<decltype(vectors)::value>(m, begin, end, c, tail, sums);
  });
}

template <class T>
void spmm_finish(const SpmmSums<T>& m, int64_t row, const arithmetic_t<T>* sums) {
  using A = arithmetic_t<T>;
  const A scale = row_scale(m, row);
  T* out = m.out + row * m.out_stride;
  constexpr int n = kLanes<A>;
  for (int64_t c = 0; c < m.n; c += n) {
    const int count = m.n - c < n ? static_cast<int>(m.n - c) : n;
    finish<A>(out + c, load<A>(sums + c, count), scale, m.beta, count);
  }
}

// A tile of columns at a time, so that the best values and their origins stay in the L1 cache.
template <class T, class I>
void extremum_rows(const Spmm<T, I>& m, bool largest, int64_t begin, int64_t end, I* arg) {
  using A = arithmetic_t<T>;
  constexpr int64_t kColumns = 256;
  A best[kColumns];
  I from[kColumns];
  const A sign = largest ? 1 : -1;
  for (int64_t c = 0; c < m.n; c += kColumns) {
    const int64_t count = m.n - c < kColumns ? m.n - c : kColumns;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < count; ++i) best[i] = -kInfinity<A>, from[i] = -1;
      for (int64_t p = m.crow[r]; p < m.crow[r + 1]; ++p) {
        const I at = static_cast<I>(m.value_at(p));
        const A value = sign * static_cast<A>(m.values[at]);
        const T* row = m.dense + static_cast<int64_t>(m.col[p]) * m.dense_stride + c;
        for (int64_t i = 0; i < count; ++i) {
          const A x = value * static_cast<A>(row[i]);
          const bool better = (x > best[i]) | (from[i] < 0) | ((x != x) & (best[i] == best[i]));
          best[i] = better ? x : best[i];
          from[i] = better ? at : from[i];
        }
      }
      T* out = m.out + r * m.out_stride + c;
      for (int64_t i = 0; i < count; ++i) {
        const A x = from[i] < 0 ? A(0) : sign * best[i] * m.alpha;
        out[i] = static_cast<T>(m.beta != 0 ? x + m.beta * static_cast<A>(out[i]) : x);
      }
      if (arg != nullptr)
        for (int64_t i = 0; i < count; ++i) arg[r * m.n + c + i] = from[i];
    }
  }
}

template <class T>
arithmetic_t<T> dot_rows(const T* a, const T* b, int64_t columns, int64_t batches, int64_t a_step, int64_t b_step) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>;
  Vec<A> sums[4] = {};
  for (int64_t batch = 0; batch < batches; ++batch, a += a_step, b += b_step) {
    int64_t c = 0;
    for (; c + 4 * n <= columns; c += 4 * n)
      for (int i = 0; i < 4; ++i) sums[i] += load<A>(a + c + i * n, n) * load<A>(b + c + i * n, n);
    for (; c + n <= columns; c += n) sums[0] += load<A>(a + c, n) * load<A>(b + c, n);
    if (c < columns) {
      const int count = static_cast<int>(columns - c);
      sums[1] += load<A>(a + c, count) * load<A>(b + c, count);
    }
  }
  return sum_of_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The sign bit of x | (last - x) is set if x < 0 or x > last. ORing all of them needs no comparison, which most
// instruction sets lack for 64-bit integers.
template <class I>
bool lie_within(const I* indices, int64_t count, I last) {
  using U = std::conditional_t<sizeof(I) == 4, uint32_t, uint64_t>;
  U seen = 0;
  for (int64_t i = 0; i < count; ++i) {
    const U x = static_cast<U>(indices[i]);
    seen |= x | (static_cast<U>(last) - x);
  }
  return seen >> (8 * sizeof(I) - 1) == 0;
}

// As above with x | (y - x), y the number after x: the difference of two nonnegative numbers does not overflow.
template <class I>
bool never_decrease(const I* offsets, int64_t count) {
  using U = std::conditional_t<sizeof(I) == 4, uint32_t, uint64_t>;
  U seen = 0;
  for (int64_t i = 0; i < count; ++i) {
    const U x = static_cast<U>(offsets[i]);
    seen |= x | (static_cast<U>(offsets[i + 1]) - x);
  }
  return seen >> (8 * sizeof(I) - 1) == 0;
}

template <class T, class I>
constexpr Kernels<T, I> kKernels = {spmm_rows<T>, spmm_piece<T>, spmm_finish<T>,   extremum_rows<T, I>,
                                    dot_rows<T>,  lie_within<I>, never_decrease<I>};
