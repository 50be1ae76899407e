// Loops over one row, written with vector extensions. row_functions.cpp includes this file once per instruction set,
// each time in another namespace and with another ROWS_VECTOR_BYTES. Hence no include guard, no other #include and no
// templates of the standard library (vectors.h says why).

constexpr int64_t kBlock = 4096;  // columns per partial sum; 16 KB of float32, so a block stays in the L1 cache
constexpr int64_t kMaxBlocks = 64;
constexpr int kChains = 4;  // independent accumulators, which hide the latency of additions

#include "cpu/vectors.h"

// exp(x) for -87.3 <= x <= 0 (double: -708.3), to 1 ulp; NaN for NaN. x = n ln2 + r with |r| <= ln2 / 2, exp(x) = 2^n
// exp(r). Adding 1.5 * 2^23 rounds to an integer, left in the low bits. The polynomial is minimax of degree 6 with 1 +
// r fixed: relative error 3e-9.
C10_ALWAYS_INLINE Vec<float> exp_normal(Vec<float> x) {
  const Vec<float> shifted = x * 0x1.715476p+0f + 0x1.8p23f;
  const Vec<float> n = shifted - 0x1.8p23f;
  const Vec<float> r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // the first product is exact
  Vec<float> p = r * 0x1.6a23cep-10f + 0x1.123a20p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = (p * r) * r + r + 1.0f;
  // Multiply instead of adding to the exponent bits: adding them to a NaN's bits may give a number.
  const Vec<float> power = (Vec<float>)(((Vec<uint32_t>)shifted << 23) + 0x3f800000u);
  return p * power;
}

// Double precision. The polynomial is Taylor's of degree 13: relative error 4e-18.
C10_ALWAYS_INLINE Vec<double> exp_normal(Vec<double> x) {
  const Vec<double> shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52;
  const Vec<double> n = shifted - 0x1.8p52;
  const Vec<double> r = (x - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  Vec<double> p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = (p * r) * r + r + 1.0;
  const Vec<double> power = (Vec<double>)(((Vec<uint64_t>)shifted << 52) + 0x3ff0000000000000u);
  return p * power;
}

// exp(x) for any x <= 0; 0 if the result is close to subnormal.
C10_ALWAYS_INLINE Vec<float> exp_nonpositive(Vec<float> x) { return x < -87.3f ? Vec<float>{} : exp_normal(x); }
C10_ALWAYS_INLINE Vec<double> exp_nonpositive(Vec<double> x) { return x < -708.3 ? Vec<double>{} : exp_normal(x); }

// --- Loops -----------------------------------------------------------------------------------------------------------

// Calls f(column, count) for the vectors of [begin, end). count: the vector's lanes, fewer only in the last one.
template <class A, class F>
C10_ALWAYS_INLINE void for_each_vector(int64_t begin, int64_t end, F f) {
  constexpr int n = kLanes<A>;
  int64_t c = begin;
  for (; c + n <= end; c += n) f(c, n);
  if (c < end) f(c, static_cast<int>(end - c));
}

// for_each_vector, unrolled, for reductions and short bodies. f(column, count, chain): chain < kChains selects an
// accumulator.
template <class A, class F>
C10_ALWAYS_INLINE void for_each_in_chains(int64_t begin, int64_t end, F f) {
  constexpr int n = kLanes<A>;
  int64_t c = begin;
  for (; c + kChains * n <= end; c += kChains * n) {
    f(c, n, 0);
    f(c + n, n, 1);
    f(c + 2 * n, n, 2);
    f(c + 3 * n, n, 3);
  }
  for (; c + n <= end; c += n) f(c, n, 0);
  if (c < end) f(c, static_cast<int>(end - c), 1);
}

template <class A>
C10_ALWAYS_INLINE Vec<A> sum_of_chains(const Vec<A>* chains) {
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

// N sums over the columns at once: add(column, count, sums) adds its terms to the N vectors sums[0], sums[kChains], ...
// Each block has its own partial sums, so that the error does not grow with the length of a row of 262144.
template <int N, class A, class F>
C10_ALWAYS_INLINE void sum_columns(int64_t columns, A (&total)[N], F add) {
  Vec<A> totals[N] = {};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = begin + kBlock < columns ? begin + kBlock : columns;
    Vec<A> chains[N * kChains] = {};
    for_each_in_chains<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
      add(c, count, chains + chain);
    });
    for (int i = 0; i < N; ++i) totals[i] += sum_of_chains<A>(chains + i * kChains);
  }
  for (int i = 0; i < N; ++i) total[i] = sum_of_lanes<A>(totals[i]);
}

// --- Softmax ---------------------------------------------------------------------------------------------------------

struct NoMask {
  template <class V>
  C10_ALWAYS_INLINE V apply(V z, int64_t, int) const {
    return z;
  }
};

template <class A>
struct ByteMask {
  const uint8_t* row;
  C10_ALWAYS_INLINE Vec<A> apply(Vec<A> z, int64_t c, int count) const {
    return load<A>(row + c, count) != 0 ? splat(-kInfinity<A>) : z;
  }
};

template <class A, class M>
struct AddedMask {
  const M* row;
  C10_ALWAYS_INLINE Vec<A> apply(Vec<A> z, int64_t c, int count) const {
    const Vec<A> added = load<A>(row + c, count);
    return added == -kInfinity<A> ? added : z + added;  // -inf for any z, also NaN
  }
};

// A mask row with adjacent elements; copied to this thread's scratch if it is strided.
template <class M>
C10_ALWAYS_INLINE const M* contiguous(const MaskRow& mask, int64_t columns) {
  const M* data = static_cast<const M*>(mask.data);
  if (mask.stride == 1) return data;
  M* row = static_cast<M*>(scratch(Scratch::mask, columns * sizeof(M)));
  for (int64_t c = 0; c < columns; ++c) row[c] = data[c * mask.stride];
  return row;
}

// Result if the row's maximum is -inf or its sum NaN: 0 in the masked columns, NaN in the others.
template <class A, class T, class Mask>
void softmax_undefined(T* y, int64_t columns, Mask mask) {
  for_each_vector<A>(0, columns, [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> masked = mask.apply(Vec<A>{}, c, count);
    store<A>(y + c, masked == -kInfinity<A> ? Vec<A>{} : splat<A>(__builtin_nan("")), count);
  });
}

// One pass computes, block by block in the L1 cache, the maximum and the exponentials relative to the maximum so far. A
// second pass multiplies each block by the factor to the final maximum and sum. The exponentials are kept in y, for
// 16-bit types in scratch.
template <class T, class Mask>
void softmax(const T* x, T* y, int64_t columns, arithmetic_t<T> scale, Mask mask) {
  using A = arithmetic_t<T>;
  A* e;
  if constexpr (sizeof(T) == sizeof(A)) {
    e = y;
  } else {
    e = static_cast<A*>(scratch(Scratch::row, columns * sizeof(A)));
  }
  const auto z = [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
    return pad(mask.apply(load<A>(x + c, count) * scale, c, count), count, -kInfinity<A>);
  };
  const int64_t block = columns <= kBlock * kMaxBlocks ? kBlock : (columns / kMaxBlocks / kLanes<A> + 1) * kLanes<A>;

  // Prefetch distance: the next block, possibly of the next row. 4096 float32 rows of 1024 columns take 400 us instead
  // of 520 on two cores.
  const int64_t ahead = columns < block ? columns : block;
  A block_max[kMaxBlocks];
  A max = -kInfinity<A>;
  Vec<A> total = {};
  for (int64_t begin = 0, b = 0; begin < columns; begin += block, ++b) {
    const int64_t end = begin + block < columns ? begin + block : columns;
    Vec<A> maxima[kChains];
    for (Vec<A>& m : maxima) m = splat(max);
    for_each_in_chains<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
      maxima[chain] = greater<A>(z(c, count), maxima[chain]);
    });
    const A previous = max;
    max = max_of_lanes<A>(greater<A>(greater<A>(maxima[0], maxima[1]), greater<A>(maxima[2], maxima[3])));
    if (b > 0 && max > previous) total *= static_cast<A>(std::exp(static_cast<double>(previous - max)));
    block_max[b] = max;

    const A base = max == -kInfinity<A> ? 0 : max;  // all columns masked so far: exp(-inf - 0) = 0
    Vec<A> sums[kChains] = {};
    for_each_in_chains<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
      __builtin_prefetch(x + c + ahead);
      const Vec<A> v = exp_nonpositive(z(c, count) - base);
      store<A>(e + c, v, count);
      sums[chain] += v;
    });
    total += sum_of_chains<A>(sums);
  }

  const A sum = sum_of_lanes<A>(total);
  if (max == -kInfinity<A> || !(sum == sum)) return softmax_undefined<A>(y, columns, mask);
  for (int64_t begin = 0, b = 0; begin < columns; begin += block, ++b) {
    const int64_t end = begin + block < columns ? begin + block : columns;
    const double lag = block_max[b] - max;
    const A factor = (lag == 0 ? 1 : static_cast<A>(std::exp(lag))) / sum;
    for_each_in_chains<A>(begin, end, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
      store<A>(y + c, load<A>(e + c, count) * factor, count);
    });
  }
}

template <class T>
C10_ALWAYS_INLINE void zero(T* y, int64_t begin, int64_t end) {
  __builtin_memset(static_cast<void*>(y + begin), 0, (end - begin) * sizeof(T));
}

template <class T>
void softmax_row(const T* x, T* y, int64_t columns, int64_t visible, double scale, const MaskRow& mask) {
  using A = arithmetic_t<T>;
  const A s = static_cast<A>(scale);
  switch (mask.kind) {
    case MaskKind::none: softmax(x, y, visible, s, NoMask{}); break;
    case MaskKind::bytes: softmax(x, y, visible, s, ByteMask<A>{contiguous<uint8_t>(mask, visible)}); break;
    case MaskKind::same: softmax(x, y, visible, s, AddedMask<A, T>{contiguous<T>(mask, visible)}); break;
    case MaskKind::float32: softmax(x, y, visible, s, AddedMask<A, float>{contiguous<float>(mask, visible)}); break;
  }
  if (visible < columns) zero(y, visible, columns);
}

// Rows of at most N vectors, kept in registers. Results of kRows rows are written after all of these rows are read: a
// load waits for an earlier masked store that may overlap it, 16 ns a row in place.
template <int N, class T>
void softmax_short_rows_of(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t rows, int columns,
                           arithmetic_t<T> scale) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>, kRows = 256 / N;
  const int last = columns - (N - 1) * n;
  Vec<A> results[kRows * N];
  for (int64_t begin = 0; begin < rows; begin += kRows) {
    const int some = rows - begin < kRows ? static_cast<int>(rows - begin) : kRows;
    for (int r = 0; r < some; ++r) {
      const T* row = x + (begin + r) * x_step;
      Vec<A> z[N], max = splat(-kInfinity<A>), sum = {};
      for (int i = 0; i < N; ++i) {
        const int count = i + 1 < N ? n : last;
        z[i] = pad<A>(load<A>(row + i * n, count) * scale, count, -kInfinity<A>);
        max = greater<A>(z[i], max);
      }
      const Vec<A> base = splat(max_of_lanes<A>(max));
      for (int i = 0; i < N; ++i) sum += z[i] = pad<A>(exp_nonpositive(z[i] - base), i + 1 < N ? n : last, 0);
      const Vec<A> factor = splat<A>(1 / sum_of_lanes<A>(sum));
      for (int i = 0; i < N; ++i) results[r * N + i] = z[i] * factor;
    }
    for (int r = 0; r < some; ++r)
      for (int i = 0; i < N; ++i) store<A>(y + (begin + r) * y_step + i * n, results[r * N + i], i + 1 < N ? n : last);
  }
}

template <class T>
bool softmax_short_rows(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t rows, int64_t columns, double scale) {
  using A = arithmetic_t<T>;
  const A s = static_cast<A>(scale);
  const int c = columns <= 4 * kLanes<A> ? static_cast<int>(columns) : INT_MAX;
  switch ((c - 1) / kLanes<A>) {
    case 0: return softmax_short_rows_of<1>(x, x_step, y, y_step, rows, c, s), true;
    case 1: return softmax_short_rows_of<2>(x, x_step, y, y_step, rows, c, s), true;
    case 2: return softmax_short_rows_of<3>(x, x_step, y, y_step, rows, c, s), true;
    case 3: return softmax_short_rows_of<4>(x, x_step, y, y_step, rows, c, s), true;
  }
  return false;
}

template <class T>
void softmax_backward_row(const T* y, const T* grad, T* dx, int64_t columns, int64_t visible, double scale) {
  using A = arithmetic_t<T>;
  A dot[1];
  sum_columns(visible, dot, [&](int64_t c, int count, Vec<A>* sums) C10_ALWAYS_INLINE_ATTRIBUTE {
    sums[0] += load<A>(y + c, count) * load<A>(grad + c, count);
  });
  const A s = static_cast<A>(scale);
  for_each_vector<A>(0, visible, [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
    store<A>(dx + c, load<A>(y + c, count) * s * (load<A>(grad + c, count) - dot[0]), count);
  });
  if (visible < columns) zero(dx, visible, columns);
}

// --- Softmax of adjacent rows ----------------------------------------------------------------------------------------

constexpr int kTogether = 8;  // columns read before any of them is written
// Up to this many columns the exponentials are kept: for a strip of 4 vectors they take 256 KiB of the L2 cache with
// AVX-512. 1.2 to 1.6 times as fast as computing them twice, in 16 bits (benchmarks/scripts/softmax_dims_cpu.py).
constexpr int kKeptColumns = 1024;

// One value for each of up to kMostSideBySide rows, read and written by full vectors.
template <class A>
struct Lanes {
  A at[kMostSideBySide];

  C10_ALWAYS_INLINE Vec<A> operator[](int64_t r) const { return load<A>(at + r, kLanes<A>); }
  C10_ALWAYS_INLINE void set(int64_t r, Vec<A> v) { store<A>(at + r, v, kLanes<A>); }
};

// Compensated sums: `lost` is the accumulated rounding error.
template <class A>
struct Sums {
  Lanes<A> sum = {}, lost = {};

  // sum <- sum * factor + more.
  C10_ALWAYS_INLINE void add(int64_t r, Vec<A> factor, Vec<A> more) {
    const Vec<A> before = sum[r] * factor, added = more - lost[r] * factor, after = before + added;
    sum.set(r, after);
    lost.set(r, (after - before) - added);
  }
};

// Calls f(column, count) over all columns, kTogether at a time. f reads all of them before it writes: a load waits for
// an earlier masked store whose address range overlaps.
template <class F>
C10_ALWAYS_INLINE void together(int64_t columns, F f) {
  int64_t c = 0;
  for (; c + kTogether <= columns; c += kTogether) f(c, kTogether);
  if (c < columns) f(c, static_cast<int>(columns - c));
}

// Softmax of V vectors of adjacent rows, the last with `count` lanes. e [columns][V]: the exponentials, which stay in a
// cache and are computed once.
template <int V, class T>
C10_ALWAYS_INLINE void softmax_strip(const T* x, int64_t x_step, T* y, int64_t y_step, int columns, int count,
                                     arithmetic_t<T> scale, Vec<arithmetic_t<T>>* e) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>;
  const auto lanes = [&](int v) C10_ALWAYS_INLINE_ATTRIBUTE { return v + 1 < V ? n : count; };
  Vec<A> max[V], sum[V] = {};
  for (Vec<A>& m : max) m = splat(-kInfinity<A>);
  for (int c = 0; c < columns; ++c)
    for (int v = 0; v < V; ++v) {
      const Vec<A> z = e[c * V + v] = load<A>(x + c * x_step + v * n, lanes(v)) * scale;
      max[v] = greater<A>(z, max[v]);
    }
  for (int c = 0; c < columns; ++c)
    for (int v = 0; v < V; ++v) sum[v] += e[c * V + v] = exp_nonpositive(e[c * V + v] - max[v]);
  for (Vec<A>& s : sum) s = splat<A>(1) / s;
  for (int c = 0; c < columns; ++c)
    for (int v = 0; v < V; ++v) store<A>(y + c * y_step + v * n, e[c * V + v] * sum[v], lanes(v));
}

template <class T>
void softmax_kept_columns(const T* x, int64_t x_step, T* y, int64_t y_step, int columns, int64_t width,
                          arithmetic_t<T> scale) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>, kStrip = 4;
  auto* const e = static_cast<Vec<A>*>(scratch(Scratch::row, columns * kStrip * sizeof(Vec<A>)));
  int64_t r = 0;
  for (; r + kStrip * n <= width; r += kStrip * n)
    softmax_strip<kStrip>(x + r, x_step, y + r, y_step, columns, n, scale, e);
  for (; r < width; r += n)
    softmax_strip<1>(x + r, x_step, y + r, y_step, columns, width - r < n ? static_cast<int>(width - r) : n, scale, e);
}

// Each lane is a row; memory is accessed in address order. The first pass computes each row's maximum and its sum of
// exponentials relative to the maximum so far; the second computes the exponentials again with both known.
template <class T>
void softmax_side_by_side(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t columns, int64_t width,
                          double scale) {
  using A = arithmetic_t<T>;
  const A s = static_cast<A>(scale);
  if (columns <= kKeptColumns) return softmax_kept_columns(x, x_step, y, y_step, static_cast<int>(columns), width, s);
  Lanes<A> max;
  Sums<A> sums;
  for (A& m : max.at) m = -kInfinity<A>;
  together(columns, [&](int64_t c, int some) C10_ALWAYS_INLINE_ATTRIBUTE {
    for_each_vector<A>(0, width, [&](int64_t r, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
      const Vec<A> before = max[r];
      Vec<A> z[kTogether], most = before, sum = {};
      for (int i = 0; i < some; ++i) {
        z[i] = load<A>(x + (c + i) * x_step + r, count) * s;
        most = greater<A>(z[i], most);
      }
      const Vec<A> base = most == -kInfinity<A> ? Vec<A>{} : most;
      for (int i = 0; i < some; ++i) sum += exp_nonpositive(z[i] - base);
      max.set(r, most);
      sums.add(r, exp_nonpositive(before - base), sum);
    });
  });
  Lanes<A> factor;
  for (int64_t r = 0; r < width; r += kLanes<A>) factor.set(r, splat<A>(1) / sums.sum[r]);
  together(columns, [&](int64_t c, int some) C10_ALWAYS_INLINE_ATTRIBUTE {
    for_each_vector<A>(0, width, [&](int64_t r, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
      Vec<A> e[kTogether];
      for (int i = 0; i < some; ++i)
        e[i] = exp_nonpositive(load<A>(x + (c + i) * x_step + r, count) * s - max[r]) * factor[r];
      for (int i = 0; i < some; ++i) store<A>(y + (c + i) * y_step + r, e[i], count);
    });
  });
}

template <class T>
void softmax_backward_side_by_side(const T* y, const T* grad, T* dx, const int64_t (&steps)[3], int64_t columns,
                                   int64_t width, double scale) {
  using A = arithmetic_t<T>;
  const A s = static_cast<A>(scale);
  Sums<A> dots;
  together(columns, [&](int64_t c, int some) C10_ALWAYS_INLINE_ATTRIBUTE {
    for_each_vector<A>(0, width, [&](int64_t r, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
      Vec<A> dot = {};
      for (int i = 0; i < some; ++i)
        dot += load<A>(y + (c + i) * steps[0] + r, count) * load<A>(grad + (c + i) * steps[1] + r, count);
      dots.add(r, splat<A>(1), dot);
    });
  });
  together(columns, [&](int64_t c, int some) C10_ALWAYS_INLINE_ATTRIBUTE {
    for_each_vector<A>(0, width, [&](int64_t r, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
      Vec<A> d[kTogether];
      for (int i = 0; i < some; ++i) {
        const Vec<A> g = load<A>(grad + (c + i) * steps[1] + r, count) - dots.sum[r];
        d[i] = load<A>(y + (c + i) * steps[0] + r, count) * s * g;
      }
      for (int i = 0; i < some; ++i) store<A>(dx + (c + i) * steps[2] + r, d[i], count);
    });
  });
}

#include "cpu/activation_loops.h"
#include "cpu/norm_loops.h"

template <class T>
constexpr Rows<T> kRows = {
    softmax_row<T>,
    softmax_short_rows<T>,
    softmax_backward_row<T>,
    softmax_side_by_side<T>,
    softmax_backward_side_by_side<T>,
    norm_row<T>,
    norm_short_rows<T>,
    norm_backward_row<T>,
    activation_row<T>,
    gelu_backward_row<T>,
};
