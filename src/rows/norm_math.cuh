// The operation `layer norm or RMS norm of a row, with a residual or without` for the row kernels (interface: see
// rows/device/operation.cuh). Used by rows/norm.cu only.
#pragma once

#include "rows/device/operation.cuh"
#include "rows/device/row_index.cuh"

namespace matmuls {
namespace {

template <class T, bool rms, bool with_residual>
struct Norm {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr RowTraits kTraits = norm_traits(sizeof(T), rms, with_residual);
  static constexpr int kInputs = kTraits.inputs, kOutputs = 2, kConstants = kTraits.constants;
  static constexpr bool kNumber = false, kColumnSums = false, kEnds = false;

  struct Row {
    T *x, *xhat;
    const T* residual;
    F* rstd;
    const int64_t* steps;

    __device__ const T* input(int k) const { return k == 0 ? x : residual; }
    __device__ T* output(int n) const { return n == 0 ? x : xhat; }
    __device__ void place(T* const* tiles) {
      x = tiles[0];
      if (xhat) xhat = tiles[1];
    }
    __device__ int64_t column_stride(int k) const { return steps[k]; }
    __device__ int visible(int columns) const { return columns; }
  };
  struct State {
    F count, mean, squares;  // squares: sum of squared distances from the mean
  };
  template <int V, int NV>
  struct Held {};
  struct Result {
    F mean, rstd;
  };

  RowIndex<3> index;
  T *x, *xhat;
  const T *residual, *weight, *bias;
  F* rstd;
  int64_t steps[3];
  F columns, eps;

  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    return {x + offsets.at[0], xhat ? xhat + offsets.at[2] : nullptr, residual + offsets.at[1],
            rstd ? rstd + r : nullptr, steps};
  }
  __device__ Row row_for_copies(int64_t r, int64_t offset) const {
    return {x + offset, xhat ? xhat + offset : nullptr, residual + offset, rstd ? rstd + r : nullptr, steps};
  }
  __host__ __device__ const T* constant(int c) const { return c == 0 ? weight : bias; }
  __device__ static F absent(int c) { return c == 0 ? F(1) : F(0); }
  __device__ static State identity() { return {F(0), F(0), F(0)}; }

  // h = x + residual of one vector.
  template <int V, class Inputs>
  __device__ static void sum_of(const Inputs& inputs, int i, F (&h)[V]) {
    unpack(inputs.words(i, 0), h);
    if constexpr (with_residual) {
      F r[V];
      unpack(inputs.words(i, 1), r);
#pragma unroll
      for (int j = 0; j < V; ++j) h[j] += r[j];
    }
  }

  // Several spans of a row merge by Chan's formula.
  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>&, const Row&, const Columns& span, const Inputs& inputs,
                       const Constants&) const {
    constexpr bool ragged = Columns::kRagged;
    // With many elements one pass computes both sums, from distances to the first element. That element is at most
    // sqrt(held) standard deviations from the mean.
    constexpr bool once = !rms && !ragged && (NV > 4 || Columns::kOnce);
    F sums[4] = {}, squares[4] = {}, from = 0;
    int held = 0;
    if constexpr (once) {
      F h[V];
      sum_of(inputs, 0, h);
      from = h[0];
    }
    for_vectors<NV>(span, [&](int i, auto) {
      held += span.count(i);
      F h[V];
      sum_of(inputs, i, h);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if constexpr (once) h[j] -= from;
        if constexpr (Columns::kEven) h[j] = span.begins(i) ? h[j] : F(0);
        if constexpr (!rms) sums[j % 4] += h[j];
        if constexpr (rms || once) squares[j % 4] += h[j] * h[j];
      }
    });
    const F count = held;
    F mean = 0;
    if constexpr (!rms) mean = quotient((sums[0] + sums[1]) + (sums[2] + sums[3]), larger(count, F(1)));
    if constexpr (!rms && !once) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        F h[V];
        sum_of(inputs, i, h);
        if constexpr (ragged) span.clear_outside(i, span.columns, mean, h);
        const F own = ragged || span.begins(i) ? mean : F(0);  // vectors outside the row are 0
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const F distance = h[j] - own;
          squares[j % 4] += distance * distance;
        }
      }
    }
    F all_squares = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    if constexpr (once) {
      all_squares -= mean * mean * count;
      if (all_squares < F(0)) all_squares = 0;
      mean += from;
    }
    if constexpr (Columns::kEven) {
      if constexpr (Columns::kAlone) {
        state = {count, mean, all_squares};
        return;
      }
    }
    const F all = state.count + count, apart = mean - state.mean;
    state.squares += all_squares;
    if constexpr (!rms) {
      const F share = state.count == F(0) ? F(1) : quotient(count, all);
      state.squares += (apart * state.count) * (apart * share);  // 0 if there were no columns before, at any distance
      state.mean += apart * share;
    }
    state.count = all;
  }

  __device__ State merge(const State& state, Lanes lanes) const {
    if constexpr (rms) return {F(0), F(0), lanes.sum(state.squares)};
    F sums[2] = {state.count, state.mean * state.count};
    lanes.sums(sums);
    // Lanes that hold no column at all, as in a block that is wider than its row, have no mean.
    const F mean = quotient(sums[1], larger(sums[0], F(1))), apart = state.mean - mean;
    return {sums[0], mean, lanes.sum(state.squares + apart * (apart * state.count))};
  }
  // Merges `lanes` states of `each` columns.
  template <int lanes>
  __device__ static State merge_even(const State& state, int each) {
    if constexpr (rms) return {F(0), F(0), sum_of_group<lanes>(state.squares)};
    const F mean = sum_of_group<lanes>(state.mean) * (F(1) / lanes), apart = state.mean - mean;
    return {F(0), mean, sum_of_group<lanes>(state.squares + apart * apart * each)};
  }
  __device__ Result finish(const State& state) const { return {state.mean, rsqrt(state.squares / columns + eps)}; }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, const Result& result, const Held<V, NV>&, const Columns& span,
                        const Inputs& inputs, const Constants& constants, Sums&) const {
    if (row.rstd && span.first <= 0 && span.first + V > 0) *row.rstd = result.rstd;
    for_vectors<NV>(span, [&](int i, auto whole) {
      const auto store = [&](T* to, int64_t step, const F(&values)[V]) {
        if constexpr (decltype(whole)::value)
          store_vector(to + span.column(i), pack<T, V>(values));
        else
          span.store(to, step, i, values);
      };
      F y[V], w[V];
      sum_of(inputs, i, y);
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = (y[j] - result.mean) * result.rstd;
      if (row.xhat) store(row.xhat, steps[2], y);
      constants(0, i, w);
      if constexpr (rms) {
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] *= w[j];
      } else {
        F b[V];
        constants(1, i, b);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = y[j] * w[j] + b[j];
      }
      store(row.x, steps[0], y);
    });
  }

  // fold, merge and write in one, for rows/kernels/staged.cuh.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs,
                            const Constants& constants, Sums&, const Group& lanes, F) const {
    F h[N][1], sums[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum_of(inputs, i, h[i]);
      sums[i % 4] += h[i][0];
    }
    if constexpr (!rms) {
      const F mean = quotient(lanes.sum((sums[0] + sums[1]) + (sums[2] + sums[3])), columns);
#pragma unroll
      for (int i = 0; i < N; ++i) h[i][0] = span.begins(i) ? h[i][0] - mean : F(0);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) squares[i % 4] += h[i][0] * h[i][0];
    const F all_squares = lanes.sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const F scale = rsqrt(all_squares / columns + eps);  // may be inf, of which quotient() would make NaN
    if (!own) return;
    if (row.rstd && span.first == 0) *row.rstd = scale;
    const auto put = [&](auto keeps) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        h[i][0] *= scale;
        if constexpr (decltype(keeps)::value) span.store(row.xhat, 1, i, h[i]);
        h[i][0] *= constants(0, i);
        if constexpr (!rms) h[i][0] += constants(1, i);
        span.store(row.x, 1, i, h[i]);
      }
    };
    row.xhat ? put(std::true_type{}) : put(std::false_type{});
  }
};

}  // namespace
}  // namespace matmuls
