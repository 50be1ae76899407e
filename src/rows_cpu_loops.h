// The loops over a row, written once with vector extensions and included by rows_cpu.cpp once per instruction set, each
// time in another namespace and with another ROWS_VECTOR_BYTES: no include guard, no other #include and no call of a
// template of the standard library (vectors_cpu.h says why).

constexpr int64_t kBlock = 4096;  // columns summed apart; 16 KB of floats, so that a block stays in the L1 cache
constexpr int64_t kMaxBlocks = 64;
constexpr int kChains = 4;  // independent accumulators, which hide the latency of an addition

#include "vectors_cpu.h"

// exp(x) for -87.3 <= x <= 0 (-708.3 of doubles), to 1 ulp; NaN for NaN.
// x = n ln2 + r with |r| <= ln2 / 2, exp(x) = 2^n exp(r). Adding 1.5 * 2^23 rounds to an integer and leaves it in the
// low bits. The polynomial is the minimax one of degree 6 with 1 + r fixed: 3e-9 relative.
C10_ALWAYS_INLINE Vec<float> exp_normal(Vec<float> x) {
  const Vec<float> shifted = x * 0x1.715476p+0f + 0x1.8p23f;
  const Vec<float> n = shifted - 0x1.8p23f;
  const Vec<float> r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // the first product is exact
  Vec<float> p = r * 0x1.6a23cep-10f + 0x1.123a20p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = (p * r) * r + r + 1.0f;
  // By a product: a NaN's bits with the power added to them may be a number's.
  const Vec<float> power = (Vec<float>)(((Vec<uint32_t>)shifted << 23) + 0x3f800000u);
  return p * power;
}

// The same in twice the digits. The polynomial is Taylor's of degree 13: 4e-18.
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

// exp(x) for any x <= 0; 0 below -87.3, where the result would soon be subnormal.
C10_ALWAYS_INLINE Vec<float> exp_nonpositive(Vec<float> x) { return x < -87.3f ? Vec<float>{} : exp_normal(x); }

C10_ALWAYS_INLINE Vec<double> exp_nonpositive(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// --- Loops -----------------------------------------------------------------------------------------------------------

// f(column, count, chain) for the vectors of [begin, end): count is a whole vector but for the last, chain < kChains.
template <class A, class F>
C10_ALWAYS_INLINE void for_each_vector(int64_t begin, int64_t end, F f) {
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
// Each block has its own sums, so that the error does not grow with the length of a row of 262144.
template <int N, class A, class F>
C10_ALWAYS_INLINE void sum_columns(int64_t columns, A (&total)[N], F add) {
  Vec<A> totals[N] = {};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = begin + kBlock < columns ? begin + kBlock : columns;
    Vec<A> chains[N * kChains] = {};
    for_each_vector<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
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
    return added == -kInfinity<A> ? added : z + added;  // -inf whatever z is, NaN included
  }
};

// A mask with the elements of one row side by side, in this thread's scratch where they are not yet.
template <class M>
C10_ALWAYS_INLINE const M* contiguous(const MaskRow& mask, int64_t columns) {
  const M* data = static_cast<const M*>(mask.data);
  if (mask.stride == 1) return data;
  M* row = static_cast<M*>(scratch(Scratch::mask, columns * sizeof(M)));
  for (int64_t c = 0; c < columns; ++c) row[c] = data[c * mask.stride];
  return row;
}

// The row where the largest input is -inf or the sum NaN: 0 in the masked columns, NaN in the others.
template <class A, class T, class Mask>
void softmax_undefined(T* y, int64_t columns, Mask mask) {
  for_each_vector<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> masked = mask.apply(Vec<A>{}, c, count);
    store<A>(y + c, masked == -kInfinity<A> ? Vec<A>{} : splat<A>(__builtin_nan("")), count);
  });
}

// Block by block the maximum and the exponentials against the largest value so far, while the block is in the L1 cache;
// then, once the sum is known, the factor that each block lacks. The exponentials wait in y, for 16-bit types in
// scratch.
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

  // To the next block, of the next row perhaps: 4096 float32 rows of 1024 in 400 us for 520 on two cores.
  const int64_t ahead = columns < block ? columns : block;
  A block_max[kMaxBlocks];
  A max = -kInfinity<A>;
  Vec<A> total = {};
  for (int64_t begin = 0, b = 0; begin < columns; begin += block, ++b) {
    const int64_t end = begin + block < columns ? begin + block : columns;
    Vec<A> maxima[kChains];
    for (Vec<A>& m : maxima) m = splat(max);
    for_each_vector<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
      maxima[chain] = greater<A>(z(c, count), maxima[chain]);
    });
    const A previous = max;
    max = max_of_lanes<A>(greater<A>(greater<A>(maxima[0], maxima[1]), greater<A>(maxima[2], maxima[3])));
    if (b > 0 && max > previous) total *= static_cast<A>(std::exp(static_cast<double>(previous - max)));
    block_max[b] = max;

    const A base = max == -kInfinity<A> ? 0 : max;  // nothing to attend to so far: exp(-inf - 0) = 0
    Vec<A> sums[kChains] = {};
    for_each_vector<A>(begin, end, [&](int64_t c, int count, int chain) C10_ALWAYS_INLINE_ATTRIBUTE {
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
    for_each_vector<A>(begin, end, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
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

template <class T>
void softmax_backward_row(const T* y, const T* grad, T* dx, int64_t columns, int64_t visible, double scale) {
  using A = arithmetic_t<T>;
  A dot[1];
  sum_columns(visible, dot, [&](int64_t c, int count, Vec<A>* sums) C10_ALWAYS_INLINE_ATTRIBUTE {
    sums[0] += load<A>(y + c, count) * load<A>(grad + c, count);
  });
  const A s = static_cast<A>(scale);
  for_each_vector<A>(0, visible, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    store<A>(dx + c, load<A>(y + c, count) * s * (load<A>(grad + c, count) - dot[0]), count);
  });
  if (visible < columns) zero(dx, visible, columns);
}

// --- Norms -----------------------------------------------------------------------------------------------------------

template <class T>
arithmetic_t<T> norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* xhat, int64_t columns,
                         double eps, bool rms) {
  using A = arithmetic_t<T>;
  const auto h = [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
    Vec<A> v = load<A>(x + c, count);
    if (residual != nullptr) v += load<A>(residual + c, count);
    return v;
  };
  A sum[1] = {0};
  if (!rms) {
    sum_columns(columns, sum,
                [&](int64_t c, int count, Vec<A>* sums) C10_ALWAYS_INLINE_ATTRIBUTE { sums[0] += h(c, count); });
  }
  const A about = sum[0] / columns;
  A moments[2];  // the first is what rounding left out of the mean, and all that a row of one value would have
  sum_columns(columns, moments, [&](int64_t c, int count, Vec<A>* sums) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> centred = pad<A>(h(c, count) - about, count, 0);
    sums[0] += centred;
    sums[kChains] += centred * centred;
  });
  const A off = rms ? 0 : moments[0] / columns, mean = about + off;
  const A corrected = moments[1] / columns - off * off, variance = corrected < 0 ? 0 : corrected;
  const A rstd = static_cast<A>(1 / std::sqrt(static_cast<double>(variance) + eps));

  for_each_vector<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    Vec<A> v = (h(c, count) - mean) * rstd;
    if (xhat != nullptr) store<A>(xhat + c, v, count);
    if (weight != nullptr) v *= load<A>(weight + c, count);
    if (bias != nullptr) v += load<A>(bias + c, count);
    store<A>(y + c, v, count);
  });
  return rstd;
}

template <class T>
void norm_backward_row(const T* grad, const T* xhat, const T* weight, arithmetic_t<T> rstd, T* dx,
                       arithmetic_t<T>* dweight, arithmetic_t<T>* dbias, int64_t columns, bool rms) {
  using A = arithmetic_t<T>;
  const auto d = [&](Vec<A> g, int64_t c, int count)
                     C10_ALWAYS_INLINE_ATTRIBUTE { return weight != nullptr ? g * load<A>(weight + c, count) : g; };
  A sums[2];  // of d and of d * xhat
  sum_columns(columns, sums, [&](int64_t c, int count, Vec<A>* s) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> g = load<A>(grad + c, count), xh = load<A>(xhat + c, count), dc = d(g, c, count);
    s[0] += dc;
    s[kChains] += dc * xh;
    if (dweight != nullptr) store<A>(dweight + c, load<A>(dweight + c, count) + g * xh, count);
    if (dbias != nullptr) store<A>(dbias + c, load<A>(dbias + c, count) + g, count);
  });
  if (dx == nullptr) return;

  const A mean_d = rms ? 0 : sums[0] / columns;
  const A mean_dxhat = sums[1] / columns;
  for_each_vector<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> xh = load<A>(xhat + c, count), dc = d(load<A>(grad + c, count), c, count);
    store<A>(dx + c, (dc - mean_d - xh * mean_dxhat) * rstd, count);
  });
}

// --- Activations -----------------------------------------------------------------------------------------------------

// The share of the normal distribution that lies below z, and its density there; by tanh what approximates them.
template <class A>
struct Normal {
  Vec<A> below, density;
};

template <class A>
C10_ALWAYS_INLINE Vec<A> at_most(Vec<A> v, A most) {
  return v > most ? splat(most) : v;  // NaN stays
}
C10_ALWAYS_INLINE Vec<float> absolute(Vec<float> v) { return (Vec<float>)((Vec<uint32_t>)v & 0x7fffffffu); }
C10_ALWAYS_INLINE Vec<double> absolute(Vec<double> v) { return (Vec<double>)((Vec<uint64_t>)v & 0x7fffffffffffffffu); }

constexpr double kGeluStart = -13.2;  // below it gelu is subnormal in float32, where exp_normal ends; 0 here

// below(-a) = exp(-a^2 / 2) P(a) / Q(a), fitted to 5e-9.
C10_ALWAYS_INLINE Normal<float> normal(Vec<float> z) {
  const Vec<float> a = at_most<float>(absolute(z), -kGeluStart), e = exp_normal(a * a * -0.5f);
  Vec<float> p = a * 0.00403672969f + 0.0400963724f;
  p = p * a + 0.181641012f;
  p = p * a + 0.43614006f;
  p = p * a + 0.5f;
  Vec<float> q = a * 0.0101184417f + 0.100513905f;
  q = q * a + 0.465262443f;
  q = q * a + 1.19587672f;
  q = q * a + 1.67016506f;
  q = q * a + 1.0f;
  const Vec<float> tail = e * (p / q);
  return {z > 0 ? 1.0f - tail : tail, e * 0.398942280f};
}

C10_ALWAYS_INLINE Normal<double> normal(Vec<double> z) {
  Vec<double> below;
  for (int i = 0; i < kLanes<double>; ++i) below[i] = 0.5 * (1 + std::erf(z[i] * 0.70710678118654752440));
  const Vec<double> a = at_most<double>(absolute(z), 37);
  return {below, exp_normal(a * a * -0.5) * 0.39894228040143267794};
}

// (1 + tanh u) / 2 and its slope, u = sqrt(2 / pi) (z + 0.044715 z^3).
template <class A>
C10_ALWAYS_INLINE Normal<A> normal_by_tanh(Vec<A> z) {
  constexpr A twice = 1.59576912160573071176;
  const Vec<A> square = z * z, twice_u = z * (square * A(twice * 0.044715) + twice);
  const Vec<A> e = exp_normal(-at_most<A>(absolute(twice_u), std::is_same_v<A, float> ? 87 : 700));
  const Vec<A> part = splat<A>(1) / (e + A(1)), slope = square * A(3 * 0.044715 * twice) + twice;
  return {z > 0 ? part : e * part, e * part * part * slope};
}

template <class A, bool tanh>
C10_ALWAYS_INLINE Normal<A> normal_as(Vec<A> z) {
  if constexpr (tanh)
    return normal_by_tanh<A>(z);
  else
    return normal(z);
}

template <class A, Activation activation>
C10_ALWAYS_INLINE Vec<A> activated(Vec<A> z) {
  if constexpr (activation == Activation::none) return z;
  if constexpr (activation == Activation::relu) return z < 0 ? Vec<A>{} : z;
  const Vec<A> y = z * normal_as<A, activation == Activation::gelu_tanh>(z).below;
  return z < A(kGeluStart) ? Vec<A>{} : y;
}

template <Activation activation, class T>
void activation_row_of(const T* x, const T* bias, int64_t bias_step, T* y, int64_t columns) {
  using A = arithmetic_t<T>;
  const Vec<A> one = splat<A>(bias == nullptr ? A(0) : A(*bias));
  for_each_vector<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    Vec<A> z = load<A>(x + c, count);
    if (bias != nullptr) z += bias_step == 0 ? one : load<A>(bias + c, count);
    store<A>(y + c, activated<A, activation>(z), count);
  });
}

template <class T>
void activation_row(const T* x, const T* bias, int64_t bias_step, T* y, int64_t columns, Activation activation) {
  switch (activation) {
    case Activation::none: return activation_row_of<Activation::none>(x, bias, bias_step, y, columns);
    case Activation::relu: return activation_row_of<Activation::relu>(x, bias, bias_step, y, columns);
    case Activation::gelu: return activation_row_of<Activation::gelu>(x, bias, bias_step, y, columns);
    case Activation::gelu_tanh: return activation_row_of<Activation::gelu_tanh>(x, bias, bias_step, y, columns);
  }
}

template <bool tanh, class T>
void gelu_backward_row_of(const T* grad, const T* x, T* dx, int64_t columns) {
  using A = arithmetic_t<T>;
  for_each_vector<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> z = load<A>(x + c, count), from = z < A(-kGeluEnd) ? splat<A>(-kGeluEnd) : z;
    const Vec<A> near = at_most<A>(from, kGeluEnd);
    const Normal<A> n = normal_as<A, tanh>(near);
    store<A>(dx + c, load<A>(grad + c, count) * (n.below + near * n.density), count);
  });
}

template <class T>
void gelu_backward_row(const T* grad, const T* x, T* dx, int64_t columns, Activation activation) {
  activation == Activation::gelu_tanh ? gelu_backward_row_of<true>(grad, x, dx, columns)
                                      : gelu_backward_row_of<false>(grad, x, dx, columns);
}

template <class T>
constexpr Rows<T> kRows = {softmax_row<T>,       softmax_backward_row<T>, norm_row<T>,
                           norm_backward_row<T>, activation_row<T>,       gelu_backward_row<T>};
