// Loops of cpu.h. cpu.cpp includes this file once per instruction set, each time in another namespace and with another
// ROWS_VECTOR_BYTES: no include guard, no other #include, and no calls of standard library templates (cpu/vectors.h
// says why).

#include "cpu/vectors.h"

// Vectors of sums: 128 float32 columns with AVX-512, half of its registers. Fewer for x86-64 before 2013: the compiler
// takes time for each number of them.
#if defined(MATMULS_X86_TARGETS) && ROWS_VECTOR_BYTES == 16
constexpr int kTile = 4;
#else
constexpr int kTile = 8;
#endif
constexpr int kAhead = 16;  // nonzeros that the prefetch runs ahead

// Operands of the innermost loop, in registers: NV vectors of B's columns from c on, with `tail` columns in the last.
template <int NV, bool ordered, bool prefetched, class T, class I>
struct Tile {
  using A = arithmetic_t<T>;
  const I *col, *order;
  const T *values, *dense;
  int64_t stride, last;
  int tail;

  C10_ALWAYS_INLINE Tile(const Spmm<T, I>& m, int64_t c, int tail)
      : col(m.col),
        order(m.order),
        values(m.values),
        dense(m.dense + c),
        stride(m.dense_stride),
        last(m.nonzeros - 1),
        tail(tail) {}

  // sums += value * row of B, for one nonzero.
  C10_ALWAYS_INLINE void add(int64_t p, Vec<A> (&sums)[NV]) const {
    constexpr int n = kLanes<A>;
    if constexpr (prefetched) {
      const T* next = dense + static_cast<int64_t>(col[p + kAhead < last ? p + kAhead : last]) * stride;
      for (int line = 0; line < NV * n; line += 64 / sizeof(T)) __builtin_prefetch(next + line);
    }
    const T* row = dense + static_cast<int64_t>(col[p]) * stride;
    const Vec<A> value = splat(static_cast<A>(values[ordered ? static_cast<int64_t>(order[p]) : p]));
    for (int i = 0; i + 1 < NV; ++i) sums[i] += value * load<A>(row + i * n, n);
    sums[NV - 1] += value * load<A>(row + (NV - 1) * n, tail);
  }
};

// Calls f(tile) with the variant of Tile as compile-time constants.
template <int NV, class T, class I, class F>
C10_ALWAYS_INLINE void with_tile(const Spmm<T, I>& m, int64_t c, int tail, F f) {
  if (m.order != nullptr)
    f(Tile<NV, true, true, T, I>(m, c, tail));
  else if (m.prefetch)
    f(Tile<NV, false, true, T, I>(m, c, tail));
  else
    f(Tile<NV, false, false, T, I>(m, c, tail));
}

template <class T, class I, class A = arithmetic_t<T>>
C10_ALWAYS_INLINE A row_scale(const Spmm<T, I>& m, int64_t row) {
  const int64_t length = m.crow[row + 1] - m.crow[row];
  return m.mean && length > 0 ? m.alpha / static_cast<A>(length) : m.alpha;
}

template <class A, class T>
C10_ALWAYS_INLINE void finish(T* out, Vec<A> sum, A scale, A beta, int count) {
  Vec<A> v = sum * scale;
  if (beta != 0) v += load<A>(out, count) * beta;
  store<A>(out, v, count);
}

// Rows [begin, end), NV vectors of columns from c on; `whole`: the last vector is full.
template <int NV, bool whole, class Tile, class T, class I, class A = arithmetic_t<T>>
void rows_of_tile(Tile tile, const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c) {
  constexpr int n = kLanes<A>;
  if constexpr (whole) tile.tail = n;
  const I* const crow = m.crow;
  const A beta = m.beta;
  int64_t p = crow[begin];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t stop = crow[r + 1];
    Vec<A> sums[NV] = {};
    for (; p < stop; ++p) tile.add(p, sums);
    T* out = m.out + r * m.out_stride + c;
    const A scale = row_scale(m, r);
    for (int i = 0; i + 1 < NV; ++i) finish<A>(out + i * n, sums[i], scale, beta, n);
    finish<A>(out + (NV - 1) * n, sums[NV - 1], scale, beta, tile.tail);
  }
}

// One column of B in float or double, without vectors.
template <bool ordered, bool prefetched, class T, class I>
void one_column(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  const I *const col = m.col, *const order = m.order;
  const T *const values = m.values, *const dense = m.dense;
  const int64_t stride = m.dense_stride, last = m.nonzeros - 1;
  int64_t p = m.crow[begin];
  for (int64_t r = begin; r < end; ++r) {
    T sum = 0;
    for (const int64_t stop = m.crow[r + 1]; p < stop; ++p) {
      if constexpr (prefetched)
        __builtin_prefetch(dense + static_cast<int64_t>(col[p + kAhead < last ? p + kAhead : last]) * stride);
      const T value = values[ordered ? static_cast<int64_t>(order[p]) : p];
      sum += value * dense[static_cast<int64_t>(col[p]) * stride];
    }
    T& out = m.out[r * m.out_stride];
    const T x = sum * row_scale(m, r);
    out = m.beta != 0 ? x + m.beta * out : x;
  }
}

template <int NV, class T, class I>
void tile_of_rows(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail) {
  with_tile<NV>(m, c, tail, [&](auto tile) {
    if (tail == kLanes<arithmetic_t<T>>)
      rows_of_tile<NV, true>(tile, m, begin, end, c);
    else
      rows_of_tile<NV, false>(tile, m, begin, end, c);
  });
}

template <int NV, class T, class I, class A = arithmetic_t<T>>
void tile_of_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail, A* out) {
  constexpr int n = kLanes<A>;
  Vec<A> sums[NV] = {};
  const auto add = [&](const auto& tile) C10_ALWAYS_INLINE_ATTRIBUTE {
    for (int64_t p = begin; p < end; ++p) tile.add(p, sums);
  };
  if (m.order != nullptr)
    add(Tile<NV, true, true, T, I>(m, c, tail));
  else
    add(Tile<NV, false, true, T, I>(m, c, tail));
  for (int i = 0; i + 1 < NV; ++i) store<A>(out + c + i * n, sums[i], n);
  store<A>(out + c + (NV - 1) * n, sums[NV - 1], tail);
}

// Calls f(vectors, c, tail) for tiles of up to `most` vectors over all columns, with the number of vectors as a
// constant.
template <class A, int most = kTile, class F>
C10_ALWAYS_INLINE void for_each_tile(int64_t columns, F f) {
  constexpr int n = kLanes<A>;
  for (int64_t c = 0; c < columns; c += most * n) {
    const int64_t left = columns - c < most * n ? columns - c : most * n;
    const int vectors = static_cast<int>((left + n - 1) / n), tail = static_cast<int>(left - (vectors - 1) * n);
    [&]<int... fewer>(std::integer_sequence<int, fewer...>) C10_ALWAYS_INLINE_ATTRIBUTE {
      ((vectors == fewer + 1 ? f(std::integral_constant<int, fewer + 1>{}, c, tail) : void()), ...);
    }(std::make_integer_sequence<int, most>{});
  }
}

template <class T, class I>
void spmm_rows(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    if (m.n == 1) {
      if (m.order != nullptr) return one_column<true, true>(m, begin, end);
      return m.prefetch ? one_column<false, true>(m, begin, end) : one_column<false, false>(m, begin, end);
    }
  }
  for_each_tile<arithmetic_t<T>>(
      m.n, [&](auto vectors, int64_t c, int tail) { tile_of_rows<decltype(vectors)::value>(m, begin, end, c, tail); });
}

template <class T, class I>
void spmm_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums) {
  for_each_tile<arithmetic_t<T>>(m.n, [&](auto vectors, int64_t c, int tail) {
    tile_of_piece<decltype(vectors)::value>(m, begin, end, c, tail, sums);
  });
}

template <class T, class I>
void spmm_finish(const Spmm<T, I>& m, int64_t row, const arithmetic_t<T>* sums) {
  using A = arithmetic_t<T>;
  const A scale = row_scale(m, row);
  T* out = m.out + row * m.out_stride;
  constexpr int n = kLanes<A>;
  for (int64_t c = 0; c < m.n; c += n) {
    const int count = m.n - c < n ? static_cast<int>(m.n - c) : n;
    finish<A>(out + c, load<A>(sums + c, count), scale, m.beta, count);
  }
}

// i * v, for pairs of a real and an imaginary part.
template <class T>
C10_ALWAYS_INLINE Vec<T> times_i(Vec<T> v) {
  Vec<T> turned = {};
  for (int lane = 0; lane < kLanes<T>; lane += 2) turned[lane] = -v[lane + 1], turned[lane + 1] = v[lane];
  return turned;
}

// As rows_of_tile, with sums for the real and the imaginary parts of the values.
template <int NV, bool whole, class T, class I>
void complex_tile(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail) {
  constexpr int n = kLanes<T>;
  if constexpr (whole) tail = n;
  for (int64_t r = begin; r < end; ++r) {
    Vec<T> by_real[NV] = {}, by_imaginary[NV] = {};
    for (int64_t p = m.crow[r], stop = m.crow[r + 1]; p < stop; ++p) {
      const int64_t ahead = p + kAhead < m.nonzeros ? p + kAhead : m.nonzeros - 1;
      const T* const next = m.dense + static_cast<int64_t>(m.col[ahead]) * m.dense_stride + c;
      for (int line = 0; line < NV * n; line += 64 / sizeof(T)) __builtin_prefetch(next + line);
      const T* const row = m.dense + static_cast<int64_t>(m.col[p]) * m.dense_stride + c;
      const T* const value = m.values + 2 * m.value_at(p);
      const Vec<T> real = splat(value[0]), imaginary = splat(value[1]);
      for (int i = 0; i < NV; ++i) {
        const Vec<T> b = load<T>(row + i * n, i + 1 < NV ? n : tail);
        by_real[i] += real * b, by_imaginary[i] += imaginary * b;
      }
    }
    T* const out = m.out + r * m.out_stride + c;
    const T scale = row_scale(m, r);
    for (int i = 0; i < NV; ++i)
      finish<T>(out + i * n, by_real[i] + times_i<T>(by_imaginary[i]), scale, m.beta, i + 1 < NV ? n : tail);
  }
}

// One complex column of B.
template <class T, class I>
void complex_column(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T sums[4] = {};
    for (int64_t p = m.crow[r], stop = m.crow[r + 1]; p < stop; ++p) {
      const T* const b = m.dense + static_cast<int64_t>(m.col[p]) * m.dense_stride;
      const T* const value = m.values + 2 * m.value_at(p);
      sums[0] += value[0] * b[0], sums[1] += value[1] * b[1];
      sums[2] += value[0] * b[1], sums[3] += value[1] * b[0];
    }
    T* const out = m.out + r * m.out_stride;
    const T scale = row_scale(m, r), real = scale * (sums[0] - sums[1]), imaginary = scale * (sums[2] + sums[3]);
    out[0] = m.beta != 0 ? real + m.beta * out[0] : real;
    out[1] = m.beta != 0 ? imaginary + m.beta * out[1] : imaginary;
  }
}

template <class T, class I>
void complex_rows(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  if (m.n == 2) return complex_column(m, begin, end);
  for_each_tile<T, kTile / 2>(m.n, [&](auto vectors, int64_t c, int tail) {
    constexpr int NV = decltype(vectors)::value;
    if (tail == kLanes<T>)
      complex_tile<NV, true>(m, begin, end, c, tail);
    else
      complex_tile<NV, false>(m, begin, end, c, tail);
  });
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

// The sum of `batches` dot products of a and b.
template <class T>
C10_ALWAYS_INLINE arithmetic_t<T> dot_of_batches(const T* a, const T* b, int64_t columns, int64_t batches,
                                                 int64_t a_step, int64_t b_step) {
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

// Calls f(p, row of p) for nonzeros [begin, end), the first of which lies in `row`, with row p + kAhead of b
// prefetched.
template <class T, class I, class F>
C10_ALWAYS_INLINE void for_each_nonzero(const Sddmm<T, I>& m, int64_t row, int64_t begin, int64_t end, F f) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t lines = m.n < 8 * kLine ? m.n : 8 * kLine;
  for (int64_t p = begin; p < end; ++row) {
    const int64_t stop = m.crow[row + 1] < end ? static_cast<int64_t>(m.crow[row + 1]) : end;
    for (; p < stop; ++p) {
      if (m.prefetch) {
        const int64_t ahead = p + kAhead / 2 < m.nonzeros ? p + kAhead / 2 : m.nonzeros - 1;
        const T* const next = m.b + static_cast<int64_t>(m.col[ahead]) * m.b_stride;
        for (int64_t i = 0; i < lines; i += kLine) __builtin_prefetch(next + i);
      }
      f(p, row);
    }
  }
}

template <class T, class I>
C10_ALWAYS_INLINE void sddmm_write(const Sddmm<T, I>& m, int64_t p, arithmetic_t<T> sum) {
  m.out[m.order != nullptr ? static_cast<int64_t>(m.order[p]) : p] = static_cast<T>(m.alpha * sum);
}

// Rows of NV vectors, the last with `tail` lanes: the row of a stays in registers.
template <int NV, bool whole, class T, class I>
void sddmm_short(const Sddmm<T, I>& m, int64_t row, int64_t begin, int64_t end, int tail) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>;
  if constexpr (whole) tail = n;
  Vec<A> x[NV] = {};
  int64_t held = -1;
  for_each_nonzero(m, row, begin, end, [&](int64_t p, int64_t r) C10_ALWAYS_INLINE_ATTRIBUTE {
    if (r != held) {
      const T* const a = m.a + r * m.a_stride;
      for (int i = 0; i < NV; ++i) x[i] = load<A>(a + i * n, i + 1 < NV ? n : tail);
      held = r;
    }
    const T* const b = m.b + static_cast<int64_t>(m.col[p]) * m.b_stride;
    Vec<A> sums[2] = {};
    for (int i = 0; i < NV; ++i) sums[i & 1] += x[i] * load<A>(b + i * n, i + 1 < NV ? n : tail);
    sddmm_write(m, p, sum_of_lanes<A>(sums[0] + sums[1]));
  });
}

template <class T, class I>
void sddmm_nonzeros(const Sddmm<T, I>& m, int64_t row, int64_t begin, int64_t end) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>;
  if (m.batches == 1 && m.n > 0 && m.n <= kTile * n)
    return for_each_tile<A>(m.n, [&](auto vectors, int64_t, int tail) {
      if (tail == n)
        sddmm_short<decltype(vectors)::value, true>(m, row, begin, end, tail);
      else
        sddmm_short<decltype(vectors)::value, false>(m, row, begin, end, tail);
    });
  for_each_nonzero(m, row, begin, end, [&](int64_t p, int64_t r) C10_ALWAYS_INLINE_ATTRIBUTE {
    const T *const a = m.a + r * m.a_stride, *const b = m.b + static_cast<int64_t>(m.col[p]) * m.b_stride;
    sddmm_write(m, p, dot_of_batches(a, b, m.n, m.batches, m.a_step, m.b_step));
  });
}

// x * 0 is NaN for inf and NaN, and so are sums with it.
template <class T>
bool are_finite(const T* numbers, int64_t count) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>;
  Vec<A> sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * n <= count; c += 4 * n)
    for (int i = 0; i < 4; ++i) sums[i] += load<A>(numbers + c + i * n, n) * A(0);
  A sum = sum_of_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; c < count; ++c) sum += static_cast<A>(numbers[c]) * A(0);
  return sum == 0;
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
constexpr Kernels<T, I> kKernels = {spmm_rows<T, I>,      spmm_piece<T, I>, spmm_finish<T, I>, extremum_rows<T, I>,
                                    sddmm_nonzeros<T, I>, are_finite<T>,    lie_within<I>,     never_decrease<I>};
