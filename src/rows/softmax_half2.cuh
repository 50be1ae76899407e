// softmax of 16-bit rows with a byte mask, a causal mask, or both, in packed half2 or bfloat162 arithmetic.
//
// Elements stay packed until their exponentials, and vectors that a row cannot see are neither read nor computed. That
// is a third of the instructions of softmax with any mask, which is bound by instructions. Unaligned rows are
// supported: their edge elements come one at a time, in the lower half of a word.
#pragma once

#include <limits>

#include "rows/device/operation.cuh"
#include "rows/device/row_index.cuh"

namespace matmuls {

// Two 16-bit elements in a word.
template <class T>
struct Pair {
  static constexpr bool kHalf = std::is_same_v<T, c10::Half>;
  static constexpr uint32_t kMinusInfinity = kHalf ? 0xfc00fc00u : 0xff80ff80u;
  static constexpr uint32_t kSigns = 0x80008000u;

  // Elementwise maximum; NaN only if both are NaN.
  __device__ static uint32_t max(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    uint32_t c;
    if constexpr (kHalf)
      asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
      asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    float x[2], y[2];
    unpack(Words<T, 2>{a}, x);
    unpack(Words<T, 2>{b}, y);
    const float larger[2] = {fmaxf(x[0], y[0]), fmaxf(x[1], y[1])};
    return pack<T, 2>(larger).at[0];
#endif
  }
  // Expands bytes 2 * half and 2 * half + 1 of `bytes`: each 16-bit half is 0xffff if its byte is not 0.
  __device__ static uint32_t spread(uint32_t bytes, int half) {
    const uint32_t tops = bytes | ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu);  // highest bit of each nonzero byte
    // Replicates that bit over both bytes of each half (prmt's sign mode, which __byte_perm does not have).
    uint32_t two;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(two) : "r"(tops), "r"(half ? 0xbbaau : 0x9988u));
    return two;
  }
  // Each half 0xffff if it is -inf.
  __device__ static uint32_t minus_infinities(uint32_t two) {
    using Two = std::conditional_t<kHalf, __half2, __nv_bfloat162>;
    const uint32_t infinities = kMinusInfinity;
    return __heq2_mask(reinterpret_cast<const Two&>(two), reinterpret_cast<const Two&>(infinities));
  }
  // Sets the elements with bits in `hidden` to -inf.
  __device__ static uint32_t hide(uint32_t two, uint32_t hidden) { return (two & ~hidden) | (kMinusInfinity & hidden); }
};

// Writes a row whose sum is 0 or NaN. Masked columns are 0 even here; columns that are `seen` are NaN.
template <int NV, int V, class T, class Columns, class Seen>
__device__ void write_undefined(T* y, int64_t step, const Columns& span, int visible, const Seen& seen) {
#pragma unroll 1
  for (int n = 0; n < NV * V; ++n) {
    const int column = span.column(n / V) + n % V;
    if (!span.holds(n / V, n % V, span.columns)) continue;
    y[column * step] = T(column < visible && seen(column) ? std::numeric_limits<arithmetic_t<T>>::quiet_NaN() : 0);
  }
}

// Loads V columns of a mask row, which may start anywhere. Not through the constant cache: the previous kernel may have
// written them.
template <class Mask, int V, bool anywhere>
__device__ Words<Mask, V> load_mask(const Mask* from) {
  Words<Mask, V> words;
  if constexpr (V == 1 && sizeof(Mask) == 1)
    words.at[0] = *from;
  else if constexpr (V == 1)
    words = load_one(from);
  else if constexpr (anywhere)
    load_anywhere(from, words.at);
  else
    load_words<V * sizeof(Mask), false>(from, words.at);
  return words;
}

// The operation. Requires a finite, nonzero scale. bytes: there is a mask; ends: the row may be causal; anywhere: mask
// rows may be unaligned.
template <class T, bool bytes, bool ends, bool anywhere = false>
struct PackedSoftmax {
  using Storage = T;
  using F = float;
  static constexpr RowTraits kTraits = softmax_half2_traits(ends);
  static constexpr int kInputs = kTraits.inputs, kConstants = kTraits.constants;
  static constexpr bool kNumber = false, kColumnSums = false, kEnds = ends;

  struct Row {
    const T* x;
    T* y;
    const unsigned char* mask;
    int last;  // last visible column

    __device__ const T* input(int) const { return x; }
    __device__ int64_t column_stride(int) const { return 1; }
    __device__ int visible(int columns) const { return ends ? min(columns, last + 1) : columns; }
  };
  // Base-2 exponents, relative to 4 * `shift`. `shift` is an integer near the maximum over 4, so that differences of
  // shifts are exact. The factor 4 avoids overflow: log2(e) times the lowest bfloat16 is -inf.
  struct State {
    F shift, sum;
  };
  template <int V, int NV>
  struct Held {
    F shift;
    F e[NV][V];  // 2^(z - 4 * shift)
  };

  RowIndex<2, 3> index;       // x and y
  RowIndex<2, 3> mask_index;  // mask, and position of the query
  const T* x;
  T* y;
  const unsigned char* mask;
  bool causal, negative;  // negative: scale < 0
  F factor;               // |scale| * log2(e)

  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    const auto other = mask_index(r);
    Row row{x + offsets.at[0], y + offsets.at[1], mask + other.at[0],
            ends && causal ? last_column(other.at[1]) : kLastColumn};
    ptx::opaque(row.x);
    if (bytes) ptx::opaque(row.mask);
    return row;
  }
  __device__ static const T* constant(int) { return nullptr; }
  __device__ static F absent(int) { return F(0); }
  __device__ static F lowest() { return -std::numeric_limits<F>::infinity(); }
  __device__ static State identity() { return {lowest(), F(0)}; }
  __device__ static F or_zero(F shift) { return shift == lowest() ? F(0) : shift; }

  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>& held, const Row& row, const Columns& span, const Inputs& inputs,
                       const Constants&) const {
    constexpr int kPairs = Words<T, V>::kCount;
    const int visible = row.visible(span.columns);
    Words<T, V> words[NV];
    Words<uint8_t, V> hidden[NV];
    if constexpr (bytes) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        hidden[i] = {};
        if (span.sees(i, visible)) hidden[i] = load_mask<uint8_t, V, anywhere>(row.mask + span.column(i));
      }
    }
#pragma unroll
    for (int i = 0; i < NV; ++i) words[i] = inputs.words(i, 0);
    if (negative) {
#pragma unroll
      for (int i = 0; i < NV; ++i)
#pragma unroll
        for (auto& two : words[i].at) two ^= Pair<T>::kSigns;
    }
    if constexpr (V == 1) {
#pragma unroll
      for (int i = 0; i < NV; ++i) words[i].at[0] = Pair<T>::hide(words[i].at[0], 0xffff0000u);
    }
    uint32_t tops = Pair<T>::kMinusInfinity;
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      if (!span.sees(i, visible)) continue;
      const int seen = visible - span.column(i);
      auto& at = words[i].at;
#pragma unroll
      for (int w = 0; w < kPairs; ++w)
        if constexpr (bytes) at[w] = Pair<T>::hide(at[w], Pair<T>::spread(hidden[i].at[w / 2], w % 2));
      if (ends && seen < V)
#pragma unroll
        for (int w = 0; w < kPairs; ++w) at[w] = Pair<T>::hide(at[w], ptx::ones_from(16 * (seen - 2 * w)));
#pragma unroll
      for (int w = 0; w < kPairs; ++w) tops = Pair<T>::max(tops, at[w]);
    }
    F top[2];
    unpack(Words<T, 2>{tops}, top);
    const F base = larger(top[0], top[1]);
    const F shift = rintf(base * (F(0.25) * factor));
    held.shift = shift;
    const F from = 4 * or_zero(shift);
    F sums[4] = {};  // four chains: a single one would stall the warp
    const auto take = [&](const auto& exponent) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        if (!span.sees(i, visible)) continue;
        F z[V];
        unpack(words[i], z);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          held.e[i][j] = ptx::exp2_approx(exponent(z[j]));
          sums[j % 4] += held.e[i][j];
        }
      }
    };
    if (fabsf(from) < F(1 << 20))
      take([&](F z) { return fmaf(z, factor, -from); });
    else  // not exact at this magnitude, where exponents are equal or far apart
      take([&](F z) { return (z - base) * factor; });
    const F sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const F most = larger(state.shift, shift), all = or_zero(most);
    state.sum = state.sum * ptx::exp2_approx(4 * (state.shift - all)) + sum * ptx::exp2_approx(4 * (shift - all));
    state.shift = most;
  }
  template <class Team>
  __device__ State merge(const State& state, Team lanes) const {
    const F most = lanes.max(state.shift);
    return {most, lanes.sum(state.sum * ptx::exp2_approx(4 * (state.shift - or_zero(most))))};
  }
  template <int lanes>
  __device__ State merge_even(const State& state, int) const {
    return merge(state, FixedLanes<lanes>{});
  }
  __device__ State finish(const State& state) const { return {or_zero(state.shift), state.sum}; }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, const State& result, Held<V, NV>& held, const Columns& span, const Inputs&,
                        const Constants&, Sums&) const {
    const int visible = row.visible(span.columns);
    if (!(result.sum > F(0)))
      return write_undefined<NV, V>(row.y, 1, span, visible,
                                    [&](int column) { return !bytes || row.mask[column] == 0; });
    T* y_row = row.y;
    ptx::opaque(y_row);
    const F share = ptx::exp2_approx(4 * (held.shift - result.shift)) * ptx::reciprocal_approx(result.sum);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      Words<T, V> words{};
      if (span.sees(i, visible)) {
#pragma unroll
        for (int j = 0; j < V; ++j) held.e[i][j] *= share;
        words = pack<T, V>(held.e[i]);
      }
      if (!span.begins(i)) continue;
      if constexpr (V == 1)
        y_row[span.column(i)] = span.sees(i, visible) ? T(held.e[i][0]) : T(0);
      else
        store_vector(y_row + span.column(i), words);
    }
  }
};

}  // namespace matmuls
