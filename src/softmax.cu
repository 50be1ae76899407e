// softmax and its scaled, masked and causal form: y = exp(z - max z) / sum exp(z - max z) along one dimension, with
// z = scale * x + mask, in place or into another tensor.
//
// A masked column gets 0; a row with nothing but masked columns is 0 throughout; NaN propagates as in torch.softmax.
// Statistics are float32 (float64 for float64), the scale too. Each element is read once and written once.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>

#include "common.h"
#include "masks.h"
#include "rows.h"

namespace matmuls {

// One call, checked: what is read, what is written (x itself in place), and how.
struct SoftmaxCall {
  const char* op;
  at::Tensor x, out;
  int64_t dim = -1;
  at::Tensor mask = {};  // expanded to x's sizes: strides of 0 where it repeats
  MaskKind kind = MaskKind::none;
  double scale = 1;
  bool causal = false;

  bool masked() const { return kind != MaskKind::none || causal || scale != 1; }
};
void run_cuda(const SoftmaxCall& c);

namespace {

using at::Tensor;
using Call = SoftmaxCall;

// Rows of x and out, and beside them, where fewer dimensions merge, of the mask and the query's position: the index
// along the last but one dimension, as if it were an offset.
struct CallRows {
  Rows<2> data, beside;
};
CallRows rows_of_call(const Call& c) {
  const int64_t dims = c.x.dim();
  const auto position = position_strides(dims, c.causal);
  auto order = innermost_first(dims);
  if (c.kind != MaskKind::none && dims > 2 && c.x.stride(-2) != 0) {
    // Where more than 16 MB of x pass before a mask's row is needed again (by the next head), the dimensions that share
    // it go innermost: it is then still in the L2.
    const int64_t between = 2 * c.x.size(-1) * c.x.size(-2) * c.x.element_size();
    if (between > (int64_t{16} << 20))
      std::stable_partition(order.begin(), order.end(),
                            [&](int64_t d) { return c.mask.stride(d) == 0 && d < dims - 2; });
  }
  const at::IntArrayRef mask = c.mask.defined() ? c.mask.strides() : at::IntArrayRef{};
  return {rows_of<2>(c.op, c.x.sizes(), {c.x.strides(), c.out.strides()}, c.dim, order),
          rows_of<2>(c.op, c.x.sizes(), {mask, position}, c.dim, order)};
}

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "even_rows.cuh"
#include "handles.h"
#include "held_rows.cuh"
#include "packed_softmax.cuh"
#include "rows.cuh"
#include "short_rows.cuh"

namespace matmuls {
namespace {

// What a kernel knows of its mask: nothing is masked; or that it is of bytes (or not there), of T or of float32, side
// by side; or nothing.
struct NoMask {};
struct AnyMask {};

// `holds`: exponentials wait in registers for their sum; else they are taken again, and the row waits in shared memory.
// Unless a mask's rows may start `anywhere`, by_words says so of all of them.
template <class T, class Mask, bool holds = true, bool anywhere = false>
struct Softmax {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr bool masked = !std::is_same_v<Mask, NoMask>, any = std::is_same_v<Mask, AnyMask>;
  static constexpr bool kWholeRows = !holds || (masked && !any);
  static constexpr int kInputs = 1, kOutputs = 1, kConstants = 0;
  static constexpr int kVectors = 4, kLongVectors = 4;
  static constexpr int kHeldVectors = kLongVectors, kRowMost = holds ? 512 : 0;
  static constexpr int kThreadsPerSm = masked ? 768 : 1024, kMostThreads = masked ? 512 : 1024;
  static constexpr bool kNumber = false, kColumnSums = false, kEnds = masked, kHoldsZ = sizeof(T) == 8;

  struct Row {
    const T* x;
    T* y;
    const char* mask;
    int64_t x_step, y_step;
    int last;  // column that a causal row may see

    __device__ const T* input(int) const { return x; }
    __device__ int64_t column_stride(int) const { return x_step; }
    __device__ int visible(int columns) const { return masked ? min(columns, last + 1) : columns; }
    __device__ T* output(int) const { return y; }
    __device__ void place(T* const* tiles) { x = y = tiles[0]; }
  };
  struct State {
    F max, sum;
  };
  // Rows that follow each other, and so do their masks' and their queries.
  struct Run {
    int64_t first;
    int rows;
    Row row;
    int64_t mask_step;  // bytes
    int last_step;
  };
  template <int V, int NV, bool = holds>
  struct Held {
    F top;       // of the span's z
    F e[NV][V];  // exp(z - top); z itself in float64, where each rounding counts
  };
  template <int V, int NV>
  struct Held<V, NV, false> {};
  struct Result {
    F max, sum;
    bool undefined;  // the sum is 0 or NaN
  };

  RowIndex<2, masked ? 3 : 2> index;  // of x and y
  RowIndex<2, 3> mask_index;          // of the mask and the query's position
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
  __device__ Row row_beside(int64_t r, int64_t offset) const { return row_at(r, offset, offset); }
  __device__ Row row_at(int64_t r, int64_t x_offset, int64_t y_offset) const {
    Row row{x + x_offset, y + y_offset, nullptr, x_step, y_step, INT32_MAX - 1};
    if constexpr (masked) {
      const auto other = mask_index(r);
      row.mask = mask + other.at[0] * mask_element;
      if (causal) row.last = static_cast<int>(other.at[1]);
    }
    return row;
  }
  __device__ Run run_from(int64_t r) const
    requires masked
  {
    return {r, mask_index.following(r), row_beside(r, 0), mask_index.strides[0][0] * mask_element,
            causal ? static_cast<int>(mask_index.strides[1][0]) : 0};
  }
  __device__ Row row_in(const Run& run, int64_t r) const {
    const int n = static_cast<int>(r - run.first);
    if (n >= run.rows) return row_beside(r, 0);
    Row row = run.row;
    row.mask += n * run.mask_step;
    row.last += n * run.last_step;
    return row;
  }
  __device__ static const T* constant(int) { return nullptr; }
  __device__ static F absent(int) { return F(0); }

  __device__ static F fill() { return -std::numeric_limits<F>::infinity(); }
  __device__ static State identity() { return {fill(), F(0)}; }
  // Where |base| * log2(e) * 2^-24 is an error that 16 bits do not show.
  __device__ static bool near_zero(F base) { return fabs(base) < F(512); }
  __device__ static F or_zero(F max) { return max == fill() ? F(0) : max; }
  // z of x behind a number of the mask; without one it is scale * x.
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
  // body(own, unmasked, z_of) of a mask of any kind: its numbers, what one is where there is none, and z_of(x, number).
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
    auto& e = held.e;  // z at first
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
    F tops[4] = {fill(), fill(), fill(), fill()}, sums[4] = {};  // four chains: a warp would wait for a single one
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
    // exp(z - base) by one multiply-add; its rounding, 6e-8 |base|, is far below that of 16 bits.
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

  // body(i) for the vectors of a whole row. In float32 most threads have all, and no branch is made for each: in
  // bfloat16 that was slower.
  template <int NV, class Columns, class Body>
  __device__ static void for_each(const Columns& span, const Body& body) {
    for_vectors<NV, (sizeof(T) > 2)>(span, [&](int i, auto whole) {
      if (whole || span.begins(i)) body(i);
    });
  }

  // Of x alone, in whole vectors or single numbers; nothing is held.
  template <int V, int NV, class Columns, class Inputs>
  __device__ void take_once(State& state, const Columns& span, const Inputs& inputs) const {
    Words<T, V> words[NV];  // read once from shared memory for the largest and for the sum
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

  // z of all vectors.
  template <int V, int NV, class Columns, class Inputs>
  __device__ void look_behind_mask(const Row& row, const Columns& span, int visible, const Inputs& inputs,
                                   F (&z)[NV][V]) const {
    if constexpr (!any) {
      Words<Mask, V> words[NV];  // all on their way at once
#pragma unroll
      for (int i = 0; i < NV; ++i)
        if (span.column(i) < visible) {
          const auto* const own = reinterpret_cast<const Mask*>(row.mask);
          if constexpr (anywhere && V > 1 && V * sizeof(Mask) == 16)
            words[i] = load_unaligned<Mask, V>(own, span.column(i), span.columns);
          else
            words[i] = load_mask<Mask, V, anywhere>(own + span.column(i));
        }
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        auto x = inputs.words(i, 0);
        F m[V];
        if constexpr (sizeof(Mask) > 1) unpack(words[i], m);
        // x is 0 where the mask is -inf, and the sum -inf.
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
  // A row of -inf alone: 0 / 0 makes NaN of it, as torch does.
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
    // The sum as one more term of the exponent: of 16 bits no digit is lost to that.
    const float shift = -(float(result.max) * kLog2e + __log2f(float(result.sum)));
    if constexpr (kHoldsZ)  // in float64 each rounding counts
      put([&](F x) { return exp_of(x - result.max) / result.sum; });
    else if (sizeof(T) == 2 && near_zero(result.max))
      put([&](F x) { return F(ptx::exp2_approx(fmaf(float(x), kLog2e, shift))); });
    else
      put([&](F x) { return exp_of(x - result.max) * factor; });
  }

  // The same of a row in short_rows.cuh's hands.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs, const Constants&,
                            Sums&, const Group& lanes, F) const {
    const int visible = row.visible(span.columns);
    F e[N][1], tops[4];
    static_assert(N >= 4);
    // What a number is behind its mask is asked in a loop of its own for each kind of mask.
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
        Z m[N];  // all on their way at once
        const auto load = [&](const auto* first, auto step) {
          __builtin_assume(__isGlobal(first));
#pragma unroll
          for (int i = 0; i < N; ++i)
            m[i] = span.begins(i) ? static_cast<Z>(first[i * Columns::kStep * step]) : unmasked;
        };
        if (mask_step == 1)  // at distances that are known when this is compiled
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

// Whether vectors of V columns of x lie beside V of the mask, on as many bytes.
bool by_words(const Call& c, const Rows<2>& beside, int V) {
  if (!c.mask.defined()) return true;
  const int64_t element = c.mask.element_size(), bytes = std::min<int64_t>(V * element, 16);
  bool aligned = beside.column_strides[0] == 1 && reinterpret_cast<uintptr_t>(c.mask.const_data_ptr()) % bytes == 0;
  for (int d = 0; d < beside.dims; ++d) aligned &= beside.strides[0][d] * element % bytes == 0;
  return aligned;
}

template <class T, class Mask, bool holds = true, bool anywhere = false>
Softmax<T, Mask, holds, anywhere> operation(const Call& c, const CallRows& rows) {
  using Op = Softmax<T, Mask, holds, anywhere>;
  return {decltype(Op::index)(rows.data),
          RowIndex<2, 3>(rows.beside),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr,
          rows.data.column_strides[0],
          rows.data.column_strides[1],
          rows.beside.column_strides[0],
          c.mask.defined() ? static_cast<int>(c.mask.element_size()) : 0,
          c.kind,
          c.causal,
          static_cast<arithmetic_t<T>>(c.scale)};
}

template <class T, class Mask, bool holds = true>
void launch(const Call& c, const CallRows& rows) {
  const auto op = operation<T, Mask, holds>(c, rows);
  launch_rows(op, rows.data, std::array<const void*, 2>{op.x, op.y});
}

// 16-bit rows of which the threads of row_kernel have four vectors each: 1 to 2 % faster there.
bool shared_by_fours(int64_t columns) { return columns == 2048 || columns == 4096; }

float packed_factor(const Call& c) { return static_cast<float>(std::abs(c.scale)) * kLog2e; }

template <class T, bool bytes, bool ends, bool anywhere = false>
PackedSoftmax<T, bytes, ends, anywhere> packed(const Call& c, const CallRows& rows) {
  return {RowIndex<2, 3>(rows.data),
          RowIndex<2, 3>(rows.beside),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          bytes ? static_cast<const unsigned char*>(c.mask.const_data_ptr()) : nullptr,
          c.causal,
          c.scale < 0,
          packed_factor(c)};
}

// Rows that do not start or end on 16 bytes may not go so; a mask's may start anywhere.
template <class T, bool bytes, bool ends, bool ragged>
bool launch_packed(const Call& c, const CallRows& rows) {
  constexpr bool anywhere = ragged && bytes;
  const auto op = packed<T, bytes, ends, anywhere>(c, rows);
  const Rows<2>& data = rows.data;
  if constexpr (ragged) {
    return launch_ragged_warps(op, data) || launch_nearly_even<true, 5, 6, 7, 8>(op, data);
  } else {
    if (data.count <= INT32_MAX) {
      if (data.columns == 128) return launch_even_rows<ends ? 4 : 2, ends ? 4 : 8, true>(op, data), true;
      if constexpr (ends) {  // 512 and 1024 columns, 0.90 and 0.93 of a copy where causal, 0.87 and 0.92 by row_kernel
        if (launch_even_fours<16, 32>(op, data)) return true;
        // 1032 and 1280 causal ones at 0.93 and 0.94 for 0.56 and 0.69.
        if (!shared_by_fours(data.columns) && launch_warps<5, 6, 7, 8>(op, data)) return true;
      }
    }
    if (data.columns > 1024 && !shared_by_fours(data.columns))
      if (launch_nearly_even<false, 5, 6, 7, 8>(op, data)) return true;
    launch_rows(op, data, std::array<const void*, 2>{op.x, op.y});
    return true;
  }
}
// The same of any other mask.
template <class T, class Mask, bool ragged>
bool launch_behind(const Call& c, const CallRows& rows) {
  const auto op = operation<T, Mask, true, ragged>(c, rows);
  const Rows<2>& data = rows.data;
  constexpr int kMost = sizeof(T) == 4 ? 8 : 6;  // vectors of 16-bit numbers take twice the registers
  if constexpr (ragged) {
    if constexpr (sizeof(T) == 2)
      if (launch_ragged_warps(op, data)) return true;
    return launch_nearly_even<true, 3, 4, 5, kMost>(op, data);
  } else {
    if (data.columns > 1024 && !shared_by_fours(data.columns))
      if (launch_nearly_even<false, 3, 4, 5, kMost>(op, data)) return true;
    launch_rows(op, data, std::array<const void*, 2>{op.x, op.y});
    return true;
  }
}

// By what there is for this kind of mask, of 16-byte vectors. Whether there is.
template <class T, bool ragged>
bool launch_by_kind(const Call& c, const CallRows& rows) {
  if (c.kind == MaskKind::same) {
    if (sizeof(T) == 2 && !std::isfinite(static_cast<float>(c.scale))) return false;  // times 0 it would be NaN
    return launch_behind<T, T, ragged>(c, rows);
  }
  if constexpr (sizeof(T) == 2) {
    if (c.kind == MaskKind::float32) return launch_behind<T, float, ragged>(c, rows);
    if (!std::isfinite(packed_factor(c)) || packed_factor(c) <= 1e-30f) return false;
    if (c.kind == MaskKind::none) return launch_packed<T, false, true, ragged>(c, rows);
    return c.causal ? launch_packed<T, true, true, ragged>(c, rows) : launch_packed<T, true, false, ragged>(c, rows);
  } else {
    return launch_behind<T, uint8_t, ragged>(c, rows);
  }
}

constexpr int kTiledMost = 800;
// Up to how many columns 16-bit rows that start anywhere go by tiles. On an H100, shares of a copy and what vectors
// have: behind an added mask [B,1,1,K], as much to read as x, 131 columns .88 for .57, 785 .95 for .81, 1025 .85 for
// .88; without one 197 .98 for .95, 257 .98 for 1.01; causal ones, of which vectors read half, 150 .65 for .61, 197 .65
// for .72; behind one of bytes, [B,1,Q,K], 150 .74 for .81.
int short_columns(const Call& c) {
  if (c.kind == MaskKind::bytes) return 127;
  if (c.kind == MaskKind::none) return c.causal ? 160 : 208;
  return kTiledMost;
}

template <class T>
void launch_masked(const Call& c, const CallRows& rows) {
  constexpr int V = 16 / sizeof(T);
  if constexpr (V > 2) {
    const auto a = alignment_of<T>(rows.data, std::array{c.x.const_data_ptr(), c.out.const_data_ptr()});
    if (a.whole && by_words(c, rows.beside, V) && launch_by_kind<T, false>(c, rows)) return;
    // Rows that start anywhere: short ones number by number, in tiles, others and their masks by vectors; of float32
    // only the longest, its whole rows number by number (2048 columns: 0.82 of a copy for 0.69).
    constexpr bool narrow = sizeof(T) == 2;
    if (a.vectors && (narrow || !a.whole)) {
      const bool is_short = !a.whole && (!narrow || rows.data.columns <= short_columns(c));
      if (is_short && launch_short_rows<2, narrow ? kTiledMost : INT_MAX>(operation<T, AnyMask>(c, rows), rows.data))
        return;
      const bool by_vectors = !c.mask.defined() || rows.beside.column_strides[0] == 1;
      if (rows.data.columns > 127 && by_vectors && launch_by_kind<T, true>(c, rows)) return;
    }
  }
  launch<T, AnyMask>(c, rows);
}

// Rows of middle length keep their exponentials in registers; of longer ones few threads have much, and take them
// again. The longest wait in shared memory, several at a time.
template <class T>
void launch_plain(const Call& c, const CallRows& rows) {
  const auto a = alignment_of<T>(rows.data, std::array{c.x.const_data_ptr(), c.out.const_data_ptr()});
  const int64_t columns = rows.data.columns, bytes = columns * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) <= 4) {
    // 513 to 672 float32 columns are five to six vectors for each of a warp.
    const bool fives = sizeof(T) == 4 && columns > 512 && columns <= 672;
    const bool few_threads = fives || bytes > (sizeof(T) == 2 ? 2 : 16) * 1024;
    if (a.vectors && !a.whole && launch_short_rows<2>(operation<T, NoMask>(c, rows), rows.data)) return;
    if (a.vectors && few_threads && !shared_by_fours(columns)) {
      const auto again = operation<T, NoMask, false>(c, rows);
      if (a.whole ? launch_nearly_even<false, 5, 6, 7, 8>(again, rows.data)
                  : launch_nearly_even<true, 5, 6, 7, 8>(again, rows.data))
        return;
      if (bytes > 32768 && launch_held_rows(again, rows.data)) return;
    }
  }
  if (a.whole && bytes > 16384) return launch<T, NoMask, false>(c, rows);
  launch<T, NoMask>(c, rows);
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.out.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  const auto rows = rows_of_call(c);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    if (c.masked())
      launch_masked<scalar_t>(c, rows);
    else
      launch_plain<scalar_t>(c, rows);
  });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "autograd.h"
#include "huge_pages.h"
#include "inplace_gradient.h"
#include "row_operators.h"
#include "rows_cpu.h"

namespace matmuls {
namespace {

int64_t check_x(const char* op, const Tensor& x, int64_t dim) {
  check_floating(op, "x", x);
  return check_dim(op, x, dim);
}

MaskKind check_mask(const char* op, const Tensor& x, const OptionalTensor& mask) {
  if (!mask || !mask->defined()) return MaskKind::none;
  TORCH_CHECK(mask->device() == x.device(), op, ": expected mask on ", x.device(), " as x is, got ", mask->device());
  TORCH_CHECK(mask->layout() == at::kStrided, op, ": expected mask to be a strided tensor, got layout ",
              mask->layout());
  bool broadcasts = mask->dim() <= x.dim();
  for (int64_t d = 1; broadcasts && d <= mask->dim(); ++d)
    broadcasts = mask->sym_size(-d) == 1 || mask->sym_size(-d) == x.sym_size(-d);
  TORCH_CHECK(broadcasts, op, ": expected a mask whose shape broadcasts to x's ", x.sym_sizes(), ", got ",
              mask->sym_sizes());
  const auto type = mask->scalar_type();
  if (type == at::kBool || type == at::kByte) return MaskKind::bytes;
  if (type == x.scalar_type()) return MaskKind::same;
  TORCH_CHECK(type == at::kFloat && x.scalar_type() != at::kDouble, op, ": expected a mask in Bool, Byte, ",
              x.scalar_type(), " as x is", x.scalar_type() == at::kDouble ? "" : " or Float", ", got ", type);
  return MaskKind::float32;
}

void check_out(const char* op, const Tensor& x, const Tensor& out) {
  check_like(op, "out", out, "x", x);
  TORCH_CHECK(out.sym_sizes() == x.sym_sizes(), op, ": expected out of shape ", x.sym_sizes(), ", got ",
              out.sym_sizes());
}

void run_cpu(const Call& c) {
  if (c.out.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const char* mask = c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr;
  const int64_t element = c.mask.defined() ? c.mask.element_size() : 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    const scalar_t* x = c.x.const_data_ptr<scalar_t>();
    scalar_t* y = c.out.mutable_data_ptr<scalar_t>();
    for_rows<scalar_t, 2>(rows.data.count, rows.data.columns, [&](int64_t row, RowBuffers<scalar_t, 2>& buffers) {
      const scalar_t* from = buffers.gather(0, x + rows.data.offset(0, row), rows.data.column_strides[0]);
      scalar_t* to = buffers.target(1, y + rows.data.offset(1, row), rows.data.column_strides[1]);
      const int64_t visible =
          c.causal ? std::min(rows.data.columns, rows.beside.offset(1, row) + 1) : rows.data.columns;
      softmax_row(from, to, rows.data.columns, visible, c.scale,
                  MaskRow{c.kind, mask + rows.beside.offset(0, row) * element, rows.beside.column_strides[0]});
      buffers.scatter(to, y + rows.data.offset(1, row), rows.data.column_strides[1]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(SoftmaxOp, "custom_mm::softmax", "", Tensor(const Tensor&, int64_t));
MATMULS_OPERATOR(SoftmaxOutOp, "custom_mm::softmax", "out", void(const Tensor&, int64_t, Tensor));
MATMULS_OPERATOR(SoftmaxInplaceOp, "custom_mm::softmax_", "", void(Tensor, int64_t));
MATMULS_OPERATOR(MaskedOp, "custom_mm::scaled_masked_softmax", "",
                 Tensor(const Tensor&, const OptionalTensor&, double, bool));
MATMULS_OPERATOR(MaskedInplaceOp, "custom_mm::scaled_masked_softmax_", "",
                 void(Tensor, const OptionalTensor&, double, bool));
using Runner = void(const Call&);

constexpr const char* kMasked = "scaled_masked_softmax";

void softmax_into(Runner run, const char* op, const Tensor& x, int64_t dim, const Tensor& out) {
  dim = check_x(op, x, dim);
  const bool in_place = out.is_same(x);
  if (!in_place) check_out(op, x, out);
  check_no_overlap(op, out, {{"x", in_place ? Tensor() : x}});
  run({.op = op, .x = at_least_1d(x), .out = at_least_1d(out), .dim = dim});
}

MaskKind check_masked(const Tensor& x, const OptionalTensor& mask, bool causal) {
  check_x(kMasked, x, -1);
  TORCH_CHECK(!causal || x.dim() >= 2, kMasked, ": expected x of at least two dimensions where causal, got ", x.dim());
  return check_mask(kMasked, x, mask);
}
void masked_into(Runner run, const Tensor& x, const OptionalTensor& mask, double scale, bool causal,
                 const Tensor& out) {
  const MaskKind kind = check_masked(x, mask, causal);
  check_no_overlap(kMasked, out, {{"mask", kind == MaskKind::none ? Tensor() : *mask}});
  const Tensor wide = at_least_1d(x);
  run({.op = kMasked,
       .x = wide,
       .out = at_least_1d(out),
       .dim = wide.dim() - 1,
       .mask = kind == MaskKind::none ? Tensor() : mask->expand_as(wide),
       .kind = kind,
       .scale = scale,
       .causal = causal});
}

template <Runner run>
Tensor softmax(const Tensor& x, int64_t dim) {
  check_x("softmax", x, dim);
  Tensor out = in_huge_pages(at::empty_like(x));
  softmax_into(run, "softmax", x, dim, out);
  return out;
}
template <Runner run>
void softmax_out(const Tensor& x, int64_t dim, Tensor out) {
  softmax_into(run, "softmax", x, dim, out);
}
template <Runner run>
void softmax_(Tensor x, int64_t dim) {
  softmax_into(run, "softmax_", x, dim, x);
}
template <Runner run>
Tensor masked_softmax(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  check_masked(x, mask, causal);
  Tensor out = in_huge_pages(at::empty_like(x));
  masked_into(run, x, mask, scale, causal, out);
  return out;
}
template <Runner run>
void masked_softmax_(Tensor x, const OptionalTensor& mask, double scale, bool causal) {
  masked_into(run, x, mask, scale, causal, x);
}

// Tracing: the checks, and the shape.
Tensor softmax_meta(const Tensor& x, int64_t dim) {
  check_x("softmax", x, dim);
  return at::empty_like(x);
}
void softmax_out_meta(const Tensor& x, int64_t dim, Tensor out) {
  check_x("softmax", x, dim);
  check_out("softmax", x, out);
}
void softmax_inplace_meta(Tensor x, int64_t dim) { check_x("softmax_", x, dim); }
Tensor masked_meta(const Tensor& x, const OptionalTensor& mask, double, bool causal) {
  check_masked(x, mask, causal);
  return at::empty_like(x);
}
void masked_inplace_meta(Tensor x, const OptionalTensor& mask, double, bool causal) { check_masked(x, mask, causal); }

// ---------------------------------------------------------------------------------------------------------- gradient

// dx = scale * y * (dy - sum(y * dy)) needs the result alone: y is kept, which in place is x itself. Beyond that only
// the sizes of a mask that wants a gradient.
struct SoftmaxGradient : torch::autograd::Function<SoftmaxGradient> {
  struct Arguments {
    int64_t dim;
    double scale;
    bool masked, causal;
  };

  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const OptionalTensor& mask,
                        Arguments a) {
    const Tensor y =
        a.masked ? MaskedOp::below_autograd(x, mask, a.scale, a.causal) : SoftmaxOp::below_autograd(x, a.dim);
    ctx->save_for_backward({y});
    ctx->saved_data["dim"] = a.dim;
    ctx->saved_data["scale"] = a.scale;
    ctx->saved_data["causal"] = a.causal;
    if (mask && mask->requires_grad()) ctx->saved_data["mask_sizes"] = mask->sym_sizes();
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto& data = ctx->saved_data;
    const Tensor y = ctx->get_saved_variables()[0];
    const auto dim = data["dim"].toInt();
    const auto scale = data["scale"].toDouble();
    const auto causal = data["causal"].toBool();
    if (!data.count("mask_sizes")) return {SoftmaxBackwardOp::call(y, grads[0], dim, scale, causal), {}, {}};
    const Tensor dz = SoftmaxBackwardOp::call(y, grads[0], dim, 1, causal);
    return {dz * scale, at::sum_to(dz, data["mask_sizes"].toSymIntVector()), {}};
  }
};

// The same in place, as a Node of its own: a Function that writes over a view keeps it by a cycle, which frees the
// memory only if backward runs, or without its history, which a second derivative needs.
struct SoftmaxInplaceGradient : torch::autograd::Node {
  torch::autograd::SavedVariable y;
  int64_t dim = -1;
  double scale = 1;
  bool causal = false, of_view = false;
  std::optional<std::vector<c10::SymInt>> mask_sizes;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor(), Tensor()};
    const Tensor result = y.unpack(held(this));
    if (mask_sizes) {
      const Tensor dz = SoftmaxBackwardOp::call(result, grad, dim, 1, causal);
      return {dz * scale, at::sum_to(dz, *mask_sizes)};
    }
    // Who asked for work in place does not want a second tensor of this size here either.
    if (!nobody_else_holds(grad)) return {SoftmaxBackwardOp::call(result, grad, dim, scale, causal), Tensor()};
    SoftmaxBackwardOutOp::call(result, grad, dim, scale, causal, grad);
    return {grad, Tensor()};
  }

  // Of a view autograd lets go of this node as a whole. Until then a second derivative may come by it twice: as what
  // the base is made by and, once the view is gone, as what y is.
  void release_variables() override {
    if (of_view) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    y.reset_data();
  }

  std::string name() const override { return "SoftmaxInplaceGradient"; }
};

// write() over x, recorded.
template <class Write>
void record_in_place(const char* op, const Tensor& x, const Tensor& mask, int64_t dim, double scale, bool causal,
                     const Write& write) {
  check_recorded(op, x);
  const auto node = new_node<SoftmaxInplaceGradient>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, mask));
  node->dim = dim, node->scale = scale, node->causal = causal, node->of_view = x.is_view();
  if (mask.defined() && mask.requires_grad()) node->mask_sizes = mask.sym_sizes().vec();
  write();
  torch::autograd::rebase_history(x, NodePtr(node));
  node->y = torch::autograd::SavedVariable(x, /*is_output=*/true, /*is_inplace_on_view=*/x.is_view());
}

Tensor softmax_autograd(const Tensor& x, int64_t dim) {
  if (!needs_gradient("softmax", {x})) return SoftmaxOp::below_autograd(x, dim);
  return SoftmaxGradient::apply(x, std::nullopt, SoftmaxGradient::Arguments{dim, 1, false, false});
}
void softmax_out_autograd(const Tensor& x, int64_t dim, Tensor out) {
  check_no_gradient_into("softmax", "out", {x, out});
  SoftmaxOutOp::below_autograd(x, dim, out);
}
void softmax_inplace_autograd(Tensor x, int64_t dim) {
  const auto write = [&] { SoftmaxInplaceOp::below_autograd(x, dim); };
  needs_gradient("softmax_", {x}) ? record_in_place("softmax_", x, {}, dim, 1, false, write) : write();
}
Tensor masked_autograd(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  const Tensor m = tensor_or_none(mask);
  if (!needs_gradient(kMasked, {x, m})) return MaskedOp::below_autograd(x, mask, scale, causal);
  return SoftmaxGradient::apply(x, mask, SoftmaxGradient::Arguments{-1, scale, true, causal});
}
void masked_inplace_autograd(Tensor x, const OptionalTensor& mask, double scale, bool causal) {
  const Tensor m = tensor_or_none(mask);
  const auto write = [&] { MaskedInplaceOp::below_autograd(x, mask, scale, causal); };
  needs_gradient(kMasked, {x, m}) ? record_in_place(kMasked, x, m, -1, scale, causal, write) : write();
}

// Autocast as torch.softmax: float32 comes out. In place the dtype stays.
template <c10::DeviceType device>
Tensor softmax_autocast(const Tensor& x, int64_t dim) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return SoftmaxOp::call(autocast_to(at::kFloat, x, device), dim);
}
template <c10::DeviceType device>
Tensor masked_autocast(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  OptionalTensor m = mask;
  if (m && m->defined() && m->is_floating_point()) m = autocast_to(at::kFloat, *m, device);
  return MaskedOp::call(autocast_to(at::kFloat, x, device), m, scale, causal);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("softmax(Tensor x, int dim=-1) -> Tensor", tags);
  m.def("softmax.out(Tensor x, int dim=-1, *, Tensor(a!) out) -> ()", tags);
  m.def("softmax_(Tensor(a!) x, int dim=-1) -> ()", tags);
  m.def("scaled_masked_softmax(Tensor x, Tensor? mask=None, float scale=1.0, bool causal=False) -> Tensor", tags);
  m.def("scaled_masked_softmax_(Tensor(a!) x, Tensor? mask=None, float scale=1.0, bool causal=False) -> ()", tags);
}

#define MATMULS_SOFTMAX_KERNELS(run)                    \
  m.impl("softmax", softmax<run>);                      \
  m.impl("softmax.out", softmax_out<run>);              \
  m.impl("softmax_", softmax_<run>);                    \
  m.impl("scaled_masked_softmax", masked_softmax<run>); \
  m.impl("scaled_masked_softmax_", masked_softmax_<run>);

TORCH_LIBRARY_IMPL(custom_mm, CPU, m){MATMULS_SOFTMAX_KERNELS(run_cpu)}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m){MATMULS_SOFTMAX_KERNELS(run_cuda)}
#endif

TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("softmax", softmax_meta);
  m.impl("softmax.out", softmax_out_meta);
  m.impl("softmax_", softmax_inplace_meta);
  m.impl("scaled_masked_softmax", masked_meta);
  m.impl("scaled_masked_softmax_", masked_inplace_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("softmax", softmax_autograd);
  m.impl("softmax.out", softmax_out_autograd);
  m.impl("softmax_", softmax_inplace_autograd);
  m.impl("scaled_masked_softmax", masked_autograd);
  m.impl("scaled_masked_softmax_", masked_inplace_autograd);
}
MATMULS_WRITES("softmax.out", SoftmaxOutOp, 2)
MATMULS_WRITES("softmax_", SoftmaxInplaceOp, 0)
MATMULS_WRITES("scaled_masked_softmax_", MaskedInplaceOp, 0)

TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) {
  m.impl("softmax", softmax_autocast<at::kCPU>);
  m.impl("scaled_masked_softmax", masked_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) {
  m.impl("softmax", softmax_autocast<at::kCUDA>);
  m.impl("scaled_masked_softmax", masked_autocast<at::kCUDA>);
}

}  // namespace matmuls
#endif
