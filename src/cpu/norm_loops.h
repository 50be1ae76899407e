// Norms and their gradients on the CPU. Included by row_loops.h, whose sums they use, and compiled with it.

// Their last loops are unrolled too: GCC makes a loop of its own for each of a shorter body's conditions, and rounds
// once less where that lets it fuse the product by weight with the sum.
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
  A moments[2];  // the first corrects the rounding of the mean; for a constant row it is the whole deviation
  sum_columns(columns, moments, [&](int64_t c, int count, Vec<A>* sums) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> centred = pad<A>(h(c, count) - about, count, 0);
    sums[0] += centred;
    sums[kChains] += centred * centred;
  });
  const A off = rms ? 0 : moments[0] / columns, mean = about + off;
  const A corrected = moments[1] / columns - off * off, variance = corrected < 0 ? 0 : corrected;
  const A rstd = static_cast<A>(1 / std::sqrt(static_cast<double>(variance) + eps));

  for_each_in_chains<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    Vec<A> v = (h(c, count) - mean) * rstd;
    if (xhat != nullptr) store<A>(xhat + c, v, count);
    if (weight != nullptr) v *= load<A>(weight + c, count);
    if (bias != nullptr) v += load<A>(bias + c, count);
    store<A>(y + c, v, count);
  });
  return rstd;
}

// Rows of at most N vectors, kept in registers. The results of kRows rows are written after all of these rows are read:
// a load waits for an earlier store that overlaps it in part.
template <int N, class T>
void norm_short_rows_of(const NormRows<T>& m, int64_t rows) {
  using A = arithmetic_t<T>;
  constexpr int n = kLanes<A>, kRows = N > 2 ? 16 : 32;  // a multiple of the lanes of double
  const int columns = static_cast<int>(m.columns), last = columns - (N - 1) * n;
  const auto lanes = [&](int i) C10_ALWAYS_INLINE_ATTRIBUTE { return i + 1 < N ? n : last; };
  const A share = A(1) / columns;
  Vec<A> weight[N], bias[N], held[kRows * N];
  for (int i = 0; i < N; ++i) {
    weight[i] = m.weight != nullptr ? load<A>(m.weight + i * n, lanes(i)) : splat<A>(1);
    bias[i] = m.bias != nullptr ? load<A>(m.bias + i * n, lanes(i)) : Vec<A>{};
  }
  double scale[kRows] = {};  // the variance, then 1 / sqrt of it
  for (int64_t begin = 0; begin < rows; begin += kRows) {
    const int some = rows - begin < kRows ? static_cast<int>(rows - begin) : kRows;
    for (int r = 0; r < some; ++r) {
      const T* const x = m.x + (begin + r) * m.x_step;
      Vec<A> h[N], sum = {}, off = {}, squares = {};
      for (int i = 0; i < N; ++i) {
        h[i] = load<A>(x + i * n, lanes(i));
        if (m.residual != nullptr) h[i] += load<A>(m.residual + (begin + r) * m.residual_step + i * n, lanes(i));
        sum += h[i];
      }
      if (m.rms) {
        for (int i = 0; i < N; ++i) squares += h[i] * h[i];
        for (int i = 0; i < N; ++i) held[r * N + i] = h[i];
        scale[r] = sum_of_lanes<A>(squares) * share;
        continue;
      }
      const Vec<A> about = splat<A>(sum_of_lanes<A>(sum) * share);
      for (int i = 0; i < N; ++i) off += h[i] = pad<A>(h[i] - about, lanes(i), 0);
      const Vec<A> mean = splat<A>(sum_of_lanes<A>(off) * share);  // corrects the rounding of `about`
      for (int i = 0; i < N; ++i) {
        const Vec<A> centred = held[r * N + i] = pad<A>(h[i] - mean, lanes(i), 0);
        squares += centred * centred;
      }
      scale[r] = sum_of_lanes<A>(squares) * share;
    }
    for (int r = 0; r < kRows; r += kLanes<double>)
      store<double>(scale + r, 1 / square_root(load<double>(scale + r, kLanes<double>) + m.eps), kLanes<double>);
    for (int r = 0; r < some; ++r) {
      const A rstd = static_cast<A>(scale[r]);
      if (m.rstd != nullptr) m.rstd[begin + r] = rstd;
      for (int i = 0; i < N; ++i) {
        const Vec<A> v = held[r * N + i] * rstd;
        if (m.xhat != nullptr) store<A>(m.xhat + (begin + r) * m.xhat_step + i * n, v, lanes(i));
        store<A>(m.x + (begin + r) * m.x_step + i * n, v * weight[i] + bias[i], lanes(i));
      }
    }
  }
}

template <class T>
bool norm_short_rows(const NormRows<T>& m, int64_t rows) {
  const int64_t vectors = (m.columns + kLanes<arithmetic_t<T>> - 1) / kLanes<arithmetic_t<T>>;
  switch (vectors) {
    case 1: return norm_short_rows_of<1>(m, rows), true;
    case 2: return norm_short_rows_of<2>(m, rows), true;
    case 3: return norm_short_rows_of<3>(m, rows), true;
    case 4: return norm_short_rows_of<4>(m, rows), true;
  }
  return false;
}

template <class T>
void norm_backward_row(const T* grad, const T* xhat, const T* weight, arithmetic_t<T> rstd, T* dx,
                       arithmetic_t<T>* dweight, arithmetic_t<T>* dbias, int64_t columns, bool rms) {
  using A = arithmetic_t<T>;
  const auto d = [&](Vec<A> g, int64_t c, int count)
                     C10_ALWAYS_INLINE_ATTRIBUTE { return weight != nullptr ? g * load<A>(weight + c, count) : g; };
  A sums[2];  // sums of d and of d * xhat
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
  for_each_in_chains<A>(0, columns, [&](int64_t c, int count, int) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Vec<A> xh = load<A>(xhat + c, count), dc = d(load<A>(grad + c, count), c, count);
    store<A>(dx + c, (dc - mean_d - xh * mean_dxhat) * rstd, count);
  });
}
