// The loops of sparse_cpu.h, included by sparse_cpu.cpp once per instruction set, each time in another namespace and
// with another ROWS_VECTOR_BYTES: no include guard, no other #include and no call of a template of the standard library
// (vectors_cpu.h says why).

#include "vectors_cpu.h"

constexpr int kTile = 8;    // vectors of sums: 128 float32 columns with AVX-512, half of its registers
constexpr int kAhead = 16;  // nonzeros that the prefetch runs ahead

// sums += value * row of the dense side, over nonzeros begin to end, in NV vectors from column c on, `tail` columns in
// the last one.
template <int NV, class T, class I, class A = arithmetic_t<T>>
C10_ALWAYS_INLINE void add_nonzeros(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail,
                                    Vec<A> (&sums)[NV]) {
  constexpr int n = kLanes<A>;
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t ahead = p + kAhead < m.nonzeros ? p + kAhead : p;
    const T* next = m.dense + static_cast<int64_t>(m.col[ahead]) * m.dense_stride + c;
    for (int line = 0; line < NV * n; line += kLine) __builtin_prefetch(next + line);
    const T* row = m.dense + static_cast<int64_t>(m.col[p]) * m.dense_stride + c;
    const Vec<A> value = splat(static_cast<A>(m.values[m.value_at(p)]));
    for (int i = 0; i + 1 < NV; ++i) sums[i] += value * load<A>(row + i * n, n);
    sums[NV - 1] += value * load<A>(row + (NV - 1) * n, tail);
  }
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

// Rows begin to end in NV vectors of columns from c on.
template <int NV, class T, class I, class A = arithmetic_t<T>>
void tile_of_rows(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail) {
  constexpr int n = kLanes<A>;
  for (int64_t r = begin; r < end; ++r) {
    Vec<A> sums[NV] = {};
    if (tail == n)
      add_nonzeros<NV>(m, m.crow[r], m.crow[r + 1], c, n, sums);
    else
      add_nonzeros<NV>(m, m.crow[r], m.crow[r + 1], c, tail, sums);
    T* out = m.out + r * m.out_stride + c;
    const A scale = row_scale(m, r);
    for (int i = 0; i + 1 < NV; ++i) finish<A>(out + i * n, sums[i], scale, m.beta, n);
    finish<A>(out + (NV - 1) * n, sums[NV - 1], scale, m.beta, tail);
  }
}

template <int NV, class T, class I, class A = arithmetic_t<T>>
void tile_of_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, int64_t c, int tail, A* out) {
  constexpr int n = kLanes<A>;
  Vec<A> sums[NV] = {};
  add_nonzeros<NV>(m, begin, end, c, tail, sums);
  for (int i = 0; i + 1 < NV; ++i) store<A>(out + c + i * n, sums[i], n);
  store<A>(out + c + (NV - 1) * n, sums[NV - 1], tail);
}

// f(vectors, c, tail) for tiles of up to kTile vectors over n columns, the number of vectors as a constant.
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

template <class T, class I>
void spmm_rows(const Spmm<T, I>& m, int64_t begin, int64_t end) {
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

// A tile of columns at a time, so that the best of them and where they came from stay in the L1 cache.
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

template <class T, class I>
constexpr Kernels<T, I> kKernels = {spmm_rows<T, I>, spmm_piece<T, I>, spmm_finish<T, I>, extremum_rows<T, I>,
                                    dot_rows<T>};
