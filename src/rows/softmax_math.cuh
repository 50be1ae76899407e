// The operation `softmax of a row, with a mask of any kind` for the row kernels (interface: see
// rows/device/operation.cuh). Used by rows/softmax.cu only.
#pragma once

#include <limits>
#include <type_traits>

#include "glue/masks.h"
#include "rows/device/operation.cuh"
#include "rows/device/row_index.cuh"
#include "rows/softmax_half2.cuh"

namespace matmuls {
namespace {

// What a kernel knows of its mask at compile time. NoMask: no mask, scale 1, not causal. AnyMask: nothing. Otherwise
// the type of contiguous elements, which may still be absent: uint8_t, T or float.
struct NoMask {};
struct AnyMask {};

// `holds`: exponentials stay in registers until their sum is known. Otherwise they are computed twice, and the row may
// stay in shared memory. Unless `anywhere` is set, by_words holds for all rows of the mask.
template <class T, class Mask, bool holds = true, bool anywhere = false>
struct Softmax {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr bool masked = !std::is_same_v<Mask, NoMask>, any = std::is_same_v<Mask, AnyMask>;
  static constexpr RowTraits kTraits = softmax_traits(sizeof(T), masked, any, holds);
  static constexpr int kInputs = kTraits.inputs, kOutputs = 1, kConstants = kTraits.constants;
  static constexpr bool kNumber = false, kColumnSums = false, kEnds = masked, kHoldsZ = sizeof(T) == 8;

  struct Row {
    const T* x;
    T* y;
    const char* mask;
    int64_t x_step, y_step;
    int last;  // last column that a causal row sees

    __device__ const T* input(int) const { return x; }
    __device__ int64_t column_stride(int) const { return x_step; }
    __device__ int visible(int columns) const { return masked ? min(columns, last + 1) : columns; }
    __device__ T* output(int) const { return y; }
    __device__ void place(T* const* tiles) { x = y = tiles[0]; }
  };
  struct State {
    F max, sum;
  };
  // Consecutive rows whose mask rows and query positions have constant strides.
  struct Run {
    int64_t first;
    int rows;
    Row row;
    int64_t mask_step;  // bytes
    int last_step;
  };
  template <int V, int NV, bool = holds>
  struct Held {
    F top;       // maximum of the span's z
    F e[NV][V];  // exp(z - top); z itself in float64, where each rounding counts
  };
  template <int V, int NV>
  struct Held<V, NV, false> {};
  struct Result {
    F max, sum;
    bool undefined;  // the sum is 0 or NaN
  };

  RowIndex<2, masked ? 3 : 2> index;  // x and y
  RowIndex<2, 3> mask_index;          // mask, and position of the query
  const T* x;
  T* y;
  const char* mask;
  int64_t x_step, y_step, mask_step;
  int mask_element;
  MaskKind kind;
  bool causal;
  F scale;

  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    return row_at(r, offsets.at[0], offsets.at[1]);
  }
  __device__ Row row_for_copies(int64_t r, int64_t offset) const { return row_at(r, offset, offset); }
  __device__ Row row_at(int64_t r, int64_t x_offset, int64_t y_offset) const {
    Row row{x + x_offset, y + y_offset, nullptr, x_step, y_step, kLastColumn};
    if constexpr (masked) {
      const auto other = mask_index(r);
      row.mask = mask + other.at[0] * mask_element;
      if (causal) row.last = last_column(other.at[1]);
    }
    return row;
  }
  __device__ Run run_from(int64_t r) const
    requires masked
  {
    return {r, mask_index.following(r), row_for_copies(r, 0), mask_index.strides[0][0] * mask_element,
            causal ? static_cast<int>(mask_index.strides[1][0]) : 0};
  }
  __device__ Row row_in(const Run& run, int64_t r) const {
    const int n = static_cast<int>(r - run.first);
    if (n >= run.rows) return row_for_copies(r, 0);
    Row row = run.row;
    row.mask += n * run.mask_step;
    row.last += n * run.last_step;
    return row;
  }
  __device__ static const T* constant(int) { return nullptr; }
  __device__ static F absent(int) { return F(0); }

  __device__ static F fill() { return -std::numeric_limits<F>::infinity(); }
  __device__ static State identity() { return {fill(), F(0)}; }
  // True if |base| * log2(e) * 2^-24, the rounding error, is invisible in 16 bits.
  __device__ static bool near_zero(F base) { return fabs(base) < F(512); }
  __device__ static F or_zero(F max) { return max == fill() ? F(0) : max; }
  // z of x and the mask's element; without a mask z is scale * x.
  __device__ F behind_byte(F x, bool hides) const { return hides ? fill() : scale * x; }
  __device__ F behind(F x, F m) const {
    const F z = fma(scale, x, m);
    return m == fill() ? fill() : z;
  }
  __device__ bool is_masked(const char* row_mask, int64_t column) const {
    bool masked_out = false;
    if (kind != MaskKind::none)
      by_kind(row_mask, [&]<class Z>(const auto* own, Z, const auto& z_of) {
        masked_out = z_of(F(0), static_cast<Z>(own[column * mask_step])) == fill();
      });
    return masked_out;
  }
  // Calls body(own, unmasked, z_of) for the kind of mask at run time: the mask row as its type, the element that masks
  // nothing, and z_of(x, element).
  template <class Body>
  __device__ void by_kind(const char* row_mask, const Body& body) const {
    const auto added = [&](F x, F m) { return behind(x, m); };
    if (kind == MaskKind::bytes)
      body(reinterpret_cast<const uint8_t*>(row_mask), 0u, [&](F x, unsigned m) { return behind_byte(x, m); });
    else if (kind == MaskKind::same)
      body(reinterpret_cast<const T*>(row_mask), F(0), added);
    else
      body(reinterpret_cast<const float*>(row_mask), F(0), added);
  }

  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>& held, const Row& row, const Columns& span, const Inputs& inputs,
                       const Constants&) const {
    if constexpr (holds)
      take(state, held, row, span, inputs);
    else
      take_once<V, NV>(state, span, inputs);
  }
  template <int V, int NV, class Columns, class Inputs>
  __device__ void take(State& state, Held<V, NV>& held, const Row& row, const Columns& span,
                       const Inputs& inputs) const {
    const int visible = row.visible(span.columns);
    auto& e = held.e;  // holds z first, then exp(z - base)
    bool started = false;
    if constexpr (masked) {
      if (kind != MaskKind::none) {
        look_behind_mask(row, span, visible, inputs, e);
        started = true;
      }
    }
    if (!started) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        unpack(inputs.words(i, 0), e[i]);
        if constexpr (masked) {
#pragma unroll
          for (int j = 0; j < V; ++j) e[i][j] *= scale;
        }
      }
    }
    F tops[4] = {fill(), fill(), fill(), fill()}, sums[4] = {};  // four chains: a single one would stall the warp
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      span.clear_outside(i, visible, fill(), e[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) tops[(i * V + j) % 4] = larger(tops[(i * V + j) % 4], e[i][j]);
    }
    held.top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    const F base = or_zero(held.top);
    const auto raise = [&](const auto& exponential) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const F each = exponential(e[i][j]);
          sums[(i * V + j) % 4] += each;
          if constexpr (!kHoldsZ) e[i][j] = each;
        }
      }
    };
    // exp(z - base) as one multiply-add and ex2. The rounding, 6e-8 |base|, is far below that of 16 bits.
    const float shift = -float(base) * kLog2e;
    if (sizeof(T) == 2 && near_zero(base))
      raise([&](F z) { return F(ptx::exp2_approx(fmaf(float(z), kLog2e, shift))); });
    else
      raise([&](F z) { return exp_of(z - base); });
    const F sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const F top = larger(state.max, held.top), both = or_zero(top);
    state.sum = state.sum * exp_of(state.max - both) + sum * exp_of(held.top - both);
    state.max = top;
  }

  // Calls body(i) for the vectors of a whole row. In float32 one branch covers all vectors, which most threads have; in
  // bfloat16 that was slower.
  template <int NV, class Columns, class Body>
  __device__ static void for_each(const Columns& span, const Body& body) {
    for_vectors<NV, (sizeof(T) > 2)>(span, [&](int i, auto whole) {
      if (whole || span.begins(i)) body(i);
    });
  }

  // Folds x alone, as whole vectors or single elements, and keeps nothing.
  template <int V, int NV, class Columns, class Inputs>
  __device__ void take_once(State& state, const Columns& span, const Inputs& inputs) const {
    Words<T, V> words[NV];  // one read from shared memory serves the maximum and the sum
    F top = state.max;
    if constexpr (sizeof(T) == 2 && V > 1) {
      uint32_t tops = Pair<T>::kMinusInfinity;
      for_each<NV>(span, [&](int i) {
        words[i] = inputs.words(i, 0);
#pragma unroll
        for (const uint32_t two : words[i].at) tops = Pair<T>::max(tops, two);
      });
      F two[2];
      unpack(Words<T, 2>{tops}, two);
      top = larger(top, larger(two[0], two[1]));
    } else {
      for_each<NV>(span, [&](int i) {
        words[i] = inputs.words(i, 0);
        F x[V];
        unpack(words[i], x);
#pragma unroll
        for (int j = 0; j < V; ++j) top = larger(top, x[j]);
      });
    }
    const F base = or_zero(top);
    F sums[4] = {state.sum * exp_of(state.max - base)};
    const auto add = [&](const auto& each) {
      for_each<NV>(span, [&](int i) {
        F x[V];
        unpack(words[i], x);
#pragma unroll
        for (int j = 0; j < V; ++j) sums[j % 4] += each(x[j]);
      });
    };
    const float shift = -float(base) * kLog2e;
    if (sizeof(T) == 2 && near_zero(base))
      add([&](F x) { return F(ptx::exp2_approx(fmaf(float(x), kLog2e, shift))); });
    else
      add([&](F x) { return exp_of(x - base); });
    state = {top, (sums[0] + sums[1]) + (sums[2] + sums[3])};
  }

  // Computes z of all vectors, masked.
  template <int V, int NV, class Columns, class Inputs>
  __device__ void look_behind_mask(const Row& row, const Columns& span, int visible, const Inputs& inputs,
                                   F (&z)[NV][V]) const {
    if constexpr (!any) {
      Words<Mask, V> words[NV];  // all loads in flight at once
#pragma unroll
      for (int i = 0; i < NV; ++i)
        if (span.column(i) < visible) {
          const auto* const own = reinterpret_cast<const Mask*>(row.mask);
          if constexpr (anywhere && V > 1 && V * sizeof(Mask) == 16)
            words[i] = load_unaligned<Mask, V, false>(own, span.column(i), span.columns);
          else
            words[i] = load_mask<Mask, V, anywhere>(own + span.column(i));
        }
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        auto x = inputs.words(i, 0);
        F m[V];
        if constexpr (sizeof(Mask) > 1) unpack(words[i], m);
        // Clears x where the mask is -inf, so that z is -inf and not NaN.
        constexpr bool by_pairs = sizeof(T) == 2 && sizeof(Mask) == 2 && V > 1;
        if constexpr (by_pairs) {
#pragma unroll
          for (int w = 0; w < V / 2; ++w) x.at[w] &= ~Pair<T>::minus_infinities(words[i].at[w]);
        }
        unpack(x, z[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if constexpr (by_pairs)
            z[i][j] = fma(scale, z[i][j], m[j]);
          else if constexpr (sizeof(Mask) > 1)
            z[i][j] = behind(z[i][j], m[j]);
          else
            z[i][j] = behind_byte(z[i][j], words[i].at[j / 4] & (0xffu << (8 * (j % 4))));
        }
      }
    } else {
      by_kind(row.mask, [&]<class Z>(const auto* own, Z unmasked, const auto& z_of) {
#pragma unroll
        for (int i = 0; i < NV; ++i) {
          const auto* const first = own + span.column(i) * mask_step;
          Z m[V];
#pragma unroll
          for (int j = 0; j < V; ++j)
            m[j] = span.holds(i, j, visible) ? static_cast<Z>(first[j * mask_step]) : unmasked;
          unpack(inputs.words(i, 0), z[i]);
#pragma unroll
          for (int j = 0; j < V; ++j) z[i][j] = z_of(z[i][j], m[j]);
        }
      });
    }
  }
  template <class Team>
  __device__ State merge(const State& state, Team lanes) const {
    const F top = lanes.max(state.max);
    const F sum = lanes.sum(state.sum * exp_of(state.max - or_zero(top)));
    return {top, sum};
  }
  template <int lanes>
  __device__ State merge_even(const State& state, int) const {
    return merge(state, FixedLanes<lanes>{});
  }
  // A row of nothing but -inf gives 0 / 0 = NaN, as in torch.
  __device__ Result finish(const State& state) const {
    return {or_zero(state.max), state.sum, masked && !(state.sum > F(0))};
  }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, const Result& result, Held<V, NV>& held, const Columns& span,
                        const Inputs& inputs, const Constants&, Sums&) const {
    if constexpr (!holds)
      write_again<V, NV>(row, result, span, inputs);
    else
      write_held(row, result, held, span);
  }
  template <int V, int NV, class Columns>
  __device__ void write_held(const Row& row, const Result& result, Held<V, NV>& held, const Columns& span) const {
    if (masked && result.undefined)
      return write_undefined<NV, V>(row.y, row.y_step, span, row.visible(span.columns),
                                    [&](int column) { return !is_masked(row.mask, column); });
    const F factor = exp_of(held.top - result.max) / result.sum;
#pragma unroll
    for (int i = 0; i < NV; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        held.e[i][j] = kHoldsZ ? exp_of(held.e[i][j] - result.max) / result.sum : held.e[i][j] * factor;
      span.store(row.y, row.y_step, i, held.e[i]);
    }
  }
  template <int V, int NV, class Columns, class Inputs>
  __device__ void write_again(const Row& row, const Result& result, const Columns& span, const Inputs& inputs) const {
    static_assert(!masked);
    const auto put = [&](const auto& each) {
      for_each<NV>(span, [&](int i) {
        F x[V];
        unpack(inputs.words(i, 0), x);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = each(x[j]);
        if constexpr (V > 1)
          store_vector(row.y + span.column(i), pack<T, V>(x));
        else
          span.store(row.y, row.y_step, i, x);
      });
    };
    const F factor = F(1) / result.sum;
    // The sum's logarithm joins the exponent: in 16 bits no digit is lost.
    const float shift = -(float(result.max) * kLog2e + __log2f(float(result.sum)));
    if constexpr (kHoldsZ)  // in float64 each rounding counts
      put([&](F x) { return exp_of(x - result.max) / result.sum; });
    else if (sizeof(T) == 2 && near_zero(result.max))
      put([&](F x) { return F(ptx::exp2_approx(fmaf(float(x), kLog2e, shift))); });
    else
      put([&](F x) { return exp_of(x - result.max) * factor; });
  }

  // fold, merge and write in one, for rows/kernels/staged.cuh.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs, const Constants&,
                            Sums&, const Group& lanes, F) const {
    const int visible = row.visible(span.columns);
    F e[N][1], tops[4];
    static_assert(N >= 4);
    // One loop for each kind of mask: the kind is tested outside of it.
    const auto take = [&](auto ends, const auto& z_of) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        unpack(inputs.words(i, 0), e[i]);
        const bool there = decltype(ends)::value ? span.column(i) < visible : span.begins(i);
        if constexpr (masked) e[i][0] = z_of(i, e[i][0]);
        e[i][0] = there ? e[i][0] : fill();
        tops[i % 4] = i < 4 ? e[i][0] : larger(tops[i % 4], e[i][0]);
      }
    };
    const auto seen = [&](const auto& z_of) { causal ? take(std::true_type{}, z_of) : take(std::false_type{}, z_of); };
    const auto scaled = [&](int, F x) { return scale * x; };
    if constexpr (!masked) {
      take(std::false_type{}, scaled);
    } else if (kind == MaskKind::none) {
      seen(scaled);
    } else {
      by_kind(row.mask, [&]<class Z>(const auto* own, Z unmasked, const auto& z_of) {
        Z m[N];  // all loads in flight at once
        const auto load = [&](const auto* first, auto step) {
          __builtin_assume(__isGlobal(first));
#pragma unroll
          for (int i = 0; i < N; ++i)
            m[i] = span.begins(i) ? static_cast<Z>(first[i * Columns::kStep * step]) : unmasked;
        };
        if (mask_step == 1)  // offsets known at compile time
          load(own + span.first, std::integral_constant<int, 1>{});
        else
          load(own + span.first * mask_step, mask_step);
        seen([&](int i, F x) { return z_of(x, m[i]); });
      });
    }
    const F top = or_zero(lanes.max(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]))));
    F sums[4];
    const auto raise = [&](const auto& each) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        e[i][0] = each(e[i][0]);
        sums[i % 4] = i < 4 ? e[i][0] : sums[i % 4] + e[i][0];
      }
    };
    const float shift = -float(top) * kLog2e;
    if (sizeof(T) == 2 && near_zero(top))
      raise([&](F z) { return F(ptx::exp2_approx(fmaf(float(z), kLog2e, shift))); });
    else
      raise([&](F z) { return exp_of(z - top); });
    const F sum = lanes.sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (!own) return;
    if (masked && !(sum > F(0)))
      return write_undefined<N, 1>(row.y, row.y_step, span, visible,
                                   [&](int column) { return !is_masked(row.mask, column); });
    const F factor = quotient(F(1), sum);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      e[i][0] *= factor;
      span.store(row.y, row.y_step, i, e[i]);
    }
  }
};

}  // namespace
}  // namespace matmuls
