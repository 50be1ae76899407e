// Activations and their gradients on the CPU. Included by row_loops.h, whose exponential they use, and compiled with
// it.

// below: the standard normal CDF at z; density: its derivative. With tanh: the approximation of both.
template <class A>
struct Normal {
  Vec<A> below, density;
};

template <class A>
C10_ALWAYS_INLINE Vec<A> at_most(Vec<A> v, A most) {
  return v > most ? splat(most) : v;  // NaN propagates
}
C10_ALWAYS_INLINE Vec<float> absolute(Vec<float> v) { return (Vec<float>)((Vec<uint32_t>)v & 0x7fffffffu); }
C10_ALWAYS_INLINE Vec<double> absolute(Vec<double> v) { return (Vec<double>)((Vec<uint64_t>)v & 0x7fffffffffffffffu); }

// gelu is subnormal in float32 below this, outside the range of exp_normal; the result is 0 here.
constexpr double kGeluStart = -13.2;

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
  for_each_vector<A>(0, columns, [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
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
  for_each_vector<A>(0, columns, [&](int64_t c, int count) C10_ALWAYS_INLINE_ATTRIBUTE {
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
