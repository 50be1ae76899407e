// Rows on the GPU: the one kernel behind softmax, the norms and their gradients.
//
// A team of threads owns a row. Each thread loads its part of the row by 16-byte vectors, folds it into a small state,
// the states are merged, and the thread writes its part of the result: one read and one write of memory. Many small
// blocks hide the waits. Where sums go from row to row, a weight is best kept, or a row fills an SM, teams walk over
// the rows instead, two to four of each on their way in shared memory. A row too long to be held passes by twice.
//
// An operation is a struct: what to fold, how states merge, what to write (softmax_backward.cu is the plainest).
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/detail/IntegerDivider.cuh>

#include <algorithm>
#include <atomic>
#include <bit>

#include "launch.cuh"
#include "row_team.cuh"
#include "rows.h"

namespace matmuls {

// -------------------------------------------------------------------------------------------------- where rows start

template <int N>
struct RowIndex {
  explicit RowIndex(const Rows<N>& rows) : dims(rows.dims), wide(rows.count > INT32_MAX) {
    for (int d = 0; d < dims; ++d) {
      sizes[d] = rows.sizes[d];
      if (!wide) dividers[d] = at::cuda::detail::IntDivider<uint32_t>(static_cast<uint32_t>(rows.sizes[d]));
      for (int t = 0; t < N; ++t) strides[t][d] = rows.strides[t][d];
    }
  }

  // Offsets of a row's first element in every tensor.
  struct Offsets {
    int64_t at[N];
  };
  __device__ Offsets operator()(int64_t row) const {
    Offsets offsets;
    if (dims <= 1) {
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] = row * strides[t][0];
      return offsets;
    }
    if (wide) return divided(row);
    if (dims == 2) {  // a mask's, mostly: its loads need not wait for a loop
      const uint32_t outer = dividers[0].div(static_cast<uint32_t>(row));
      const uint32_t inner = static_cast<uint32_t>(row) - outer * static_cast<uint32_t>(sizes[0]);
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] = inner * strides[t][0] + outer * strides[t][1];
      return offsets;
    }
#pragma unroll
    for (int t = 0; t < N; ++t) offsets.at[t] = 0;
    uint32_t rest = static_cast<uint32_t>(row);
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const uint32_t next = d + 1 < dims ? dividers[d].div(rest) : 0;
      const uint32_t index = rest - next * static_cast<uint32_t>(sizes[d]);
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      rest = next;
    }
    return offsets;
  }

  int dims;
  bool wide;
  at::cuda::detail::IntDivider<uint32_t> dividers[Rows<N>::kMaxDims];
  int64_t sizes[Rows<N>::kMaxDims] = {};
  int64_t strides[N][Rows<N>::kMaxDims] = {};

 private:
  // More than 2^31 rows.
  __device__ __noinline__ Offsets divided(int64_t row) const {
    Offsets offsets{};
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const int64_t rest = d + 1 < dims ? row / sizes[d] : 0;
      const int64_t index = row - rest * sizes[d];
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      row = rest;
    }
    return offsets;
  }
};

// ------------------------------------------------------------------------------------------------- a thread's columns

// The part of a row in one thread's hands: vectors of V neighbouring columns. In `ragged` rows, which do not start or
// do not end on 16 bytes, the vectors still do, and the first and the last of a row reach over its ends: of those the
// row's own columns alone are read and written.
template <int V, bool ragged>
struct Span {
  static constexpr bool kRagged = ragged, kEven = false;
  int first, step;  // column of the first vector's first element, and the way to the next vector
  int columns;      // that the row has

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return column(i) < columns; }
  __device__ bool whole(int i, int end) const { return (!ragged || column(i) >= 0) && column(i) + V <= end; }
  __device__ bool holds(int i, int j, int end) const {
    return static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(end);
  }
  // How many of the row's columns vector i has.
  __device__ int count(int i) const {
    if constexpr (ragged) return max(0, min(column(i) + V, columns) - max(column(i), 0));
    return begins(i) ? V : 0;
  }

  // `fill` instead of what vector i has beside columns 0 to end.
  template <class F>
  __device__ void clear_outside(int i, int end, F fill, F (&values)[V]) const {
    if (whole(i, end)) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!holds(i, j, end)) values[j] = fill;
  }

  template <class T, class F>
  __device__ void store(T* row, int64_t column_stride, int i, const F (&values)[V]) const {
    if constexpr (V == 1) {
      if (begins(i)) row[column(i) * column_stride] = T(values[0]);
    } else if (whole(i, columns)) {
      store_once(row + column(i), pack<T, V>(values));
    } else if constexpr (ragged) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (holds(i, j, columns)) row[column(i) + j] = T(values[j]);
    }
  }
};

// body(i, whole) for each of a thread's vectors; `whole` is a type that says so of the vector. Where they are all
// there, as in most threads, no branch is made for each, if they are more than four or `together` says so.
template <int NV, bool together = (NV > 4), int V, bool ragged, class Body>
__device__ void for_vectors(const Span<V, ragged>& span, const Body& body) {
  if constexpr (together && V > 1 && !ragged) {
    if (span.whole(NV - 1, span.columns)) {
#pragma unroll
      for (int i = 0; i < NV; ++i) body(i, std::true_type{});
    } else {
#pragma unroll
      for (int i = 0; i < NV; ++i)
        if (span.begins(i)) body(i, std::false_type{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < NV; ++i) body(i, std::false_type{});
  }
}

// A vector that starts on 16 bytes and reaches over an end of the row: 0 in columns that the row does not have. Without
// a branch, so that several are on their way at once.
template <class T, int V>
__device__ Words<T, V> load_edge(const T* row, int column, int columns) {
  Words<T, V> words;
  const auto there = [&](int j) { return static_cast<unsigned>(column + j) < static_cast<unsigned>(columns); };
  const T* const from = row + column;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      const bool low = there(2 * w), high = there(2 * w + 1);
      const auto* const half = reinterpret_cast<const uint16_t*>(from) + 2 * w + (high ? 1 : 0);
      words.at[w] = ptx::load_if(low && high, reinterpret_cast<const uint32_t*>(from) + w) |
                    ptx::load_if(low != high, half) << (high ? 16 : 0);
    }
  } else {
    constexpr int kEach = sizeof(T) / 4;
#pragma unroll
    for (int w = 0; w < V * kEach; ++w)
      words.at[w] = ptx::load_if(there(w / kEach), reinterpret_cast<const uint32_t*>(from) + w);
  }
  return words;
}

// The same at any address, number by number.
template <class T, int V>
__device__ Words<T, V> load_edge_anywhere(const T* row, int column, int columns) {
  Words<T, V> words{};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (static_cast<unsigned>(column + j) >= static_cast<unsigned>(columns)) continue;
    const T* const from = row + column + j;
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from)) << 16 * (j % 2);
    } else {
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(T) / 4); ++w)
        words.at[j * sizeof(T) / 4 + w] = reinterpret_cast<const uint32_t*>(from)[w];
    }
  }
  return words;
}

// The 16 bytes at any address, of the two aligned 16 bytes around it.
__device__ inline uint4 across_aligned(uintptr_t from) {
  const uint4* const low = reinterpret_cast<const uint4*>(from & ~uintptr_t{15});
  const uint4 w[2] = {__ldg(low), __ldg(low + 1)};
  const unsigned bytes = from % 16;
  uint32_t at[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
#pragma unroll
  for (int n = 0; n < 6; ++n) at[n] = bytes & 8 ? at[n + 2] : at[n];
#pragma unroll
  for (int n = 0; n < 5; ++n) at[n] = bytes & 4 ? at[n + 1] : at[n];
  const unsigned bits = 8 * (bytes % 4);
  return {__funnelshift_r(at[0], at[1], bits), __funnelshift_r(at[1], at[2], bits), __funnelshift_r(at[2], at[3], bits),
          __funnelshift_r(at[3], at[4], bits)};
}

// Columns of a row that is the same for all rows, a weight say, where the vector does not start on 16 bytes or reaches
// over an end.
template <class T, int V>
__device__ Words<T, V> load_unaligned(const T* row, int column, int columns) {
  const auto from = reinterpret_cast<uintptr_t>(row + column), low = from & ~uintptr_t{15};
  const auto begin = reinterpret_cast<uintptr_t>(row), end = reinterpret_cast<uintptr_t>(row + columns);
  if (low < begin || low + 32 > end) return load_edge_anywhere<T, V>(row, column, columns);
  const uint4 w = across_aligned(from);
  return {w.x, w.y, w.z, w.w};
}
// Out of line for rows where a weight that starts elsewhere is rare: their code stays short.
template <class T, int V>
__device__ __noinline__ Words<T, V> load_unaligned_rarely(const T* row, int column, int columns) {
  return load_unaligned<T, V>(row, column, columns);
}

// Columns of a row that is the same for all rows, or `absent` throughout where it is null; 0 beside them.
template <class T, int V, bool ragged, class F>
__device__ Words<T, V> load_columns(const T* row, const Span<V, ragged>& span, int i, F absent) {
  if (!span.begins(i)) return {};
  if (!row) {
    F numbers[V];
#pragma unroll
    for (int j = 0; j < V; ++j) numbers[j] = span.holds(i, j, span.columns) ? absent : F(0);
    return pack<T, V>(numbers);
  }
  const T* const from = row + span.column(i);
  if constexpr (V == 1) {
    return load_once<T, 1>(from);
  } else if constexpr (ragged) {
    return load_unaligned<T, V>(row, span.column(i), span.columns);
  } else {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
      return load_unaligned_rarely<T, V>(row, span.column(i), span.columns);
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
    return {w.x, w.y, w.z, w.w};
  }
}

// ------------------------------------------------------------------------------------------------ what a thread holds

// Its vectors of a row: words(i, k) are those of vector i of input k, 0 in columns that the row does not have. In
// registers: 16-bit numbers stay packed.
template <class T, int V, int NV, int K>
struct Inputs {
  Words<T, V> at[NV][K];

  __device__ const Words<T, V>& words(int i, int k) const { return at[i][k]; }

  template <class Row, bool ragged>
  __device__ void load(const Row& row, const Span<V, ragged>& span) {
    constexpr bool passing = requires { Row::kPassing; };
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        at[i][k] = {};
        if (span.column(i) < end && (!ragged || span.whole(i, span.columns)))
          at[i][k] = load_once<T, V, passing>(row.input(k) + span.column(i) * (V == 1 ? row.column_stride(k) : 1));
      }
    }
    if constexpr (ragged) {  // last: the others need not wait for what it takes to put an edge together
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        if (span.column(i) >= end || span.whole(i, span.columns)) continue;
        Words<T, V> edges[K];
#pragma unroll
        for (int k = 0; k < K; ++k) edges[k] = load_edge<T, V>(row.input(k), span.column(i), span.columns);
#pragma unroll
        for (int k = 0; k < K; ++k) at[i][k] = edges[k];
      }
    }
  }
  // The same numbers are unpacked again rather than kept from fold to write: half the registers.
  __device__ void forget_numbers() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int n = 0; n < NV * K * Words<T, V>::kCount; ++n)
        ptx::forget(at[n / K / Words<T, V>::kCount][n / Words<T, V>::kCount % K].at[n % Words<T, V>::kCount]);
    }
  }
};

// Slots of shared memory, a vector each, that one thread alone uses: those of neighbours lie side by side.
template <class T, int V>
struct Slots {
  Words<T, V>* first;
  int step;
  __device__ Words<T, V>& operator[](int n) const { return first[n * step]; }
};

// A 16-bit number beside a row's first or last whole word, too small to be copied ahead: in registers until the next
// row.
template <int K>
struct Odd {
  uint32_t* to = nullptr;  // in shared memory, of input 0
  bool high;               // which half of its word
  uint16_t number[K];
};

// A row on its way to shared memory while those before are worked on.
template <class T, int V, int NV, int K>
struct Ahead {
  Slots<T, V> slots;

  __device__ const Words<T, V>& words(int i, int k) const { return slots[i * K + k]; }

  template <class Row, bool ragged>
  __device__ void fetch(const Row& row, const Span<V, ragged>& span, Odd<K>& odd) const {
    const int end = row.visible(span.columns);
    if (NV > 4 && !ragged && span.column(NV - 1) < end) {  // no branch for each
#pragma unroll
      for (int i = 0; i < NV; ++i)
#pragma unroll
        for (int k = 0; k < K; ++k) ptx::copy_ahead(&slots[i * K + k], row.input(k) + span.column(i));
      return;
    }
    int last = -1;
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      const bool seen = span.column(i) < end, whole = !ragged || span.whole(i, span.columns);
      if (seen && !whole && span.column(i) >= 0) last = i;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!seen)
          slots[i * K + k] = {};
        else if (whole)
          ptx::copy_ahead(&slots[i * K + k], row.input(k) + span.column(i));
      }
    }
    if constexpr (ragged) {
      if (span.first < 0) fetch_edge(row, span, 0, odd);
      if (last >= 0) fetch_edge(row, span, last, odd);
    }
  }
  // A vector that reaches over an end of the row: the row's own words, 0 beside them.
  template <class Row, bool ragged>
  __device__ void fetch_edge(const Row& row, const Span<V, ragged>& span, int i, Odd<K>& odd) const {
    constexpr int kSize = sizeof(T);
    const int begin = max(-span.column(i), 0) * kSize, end = min(span.columns - span.column(i), V) * kSize;  // bytes
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const bool low = 4 * w >= begin && 4 * w < end, high = 4 * w + 2 >= begin && 4 * w + 2 < end;
      if (kSize == 2 && low != high) {
        settle(odd);
        odd.to = &slots[i * K].at[w];
        odd.high = high;
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const auto* const from = reinterpret_cast<const uint32_t*>(row.input(k) + span.column(i)) + w;
        if (low && high)
          ptx::copy_word_ahead(&slots[i * K + k].at[w], from);
        else if (kSize == 2 && low != high)
          odd.number[k] = reinterpret_cast<const uint16_t*>(from)[high];
        else
          slots[i * K + k].at[w] = 0;
      }
    }
  }
  __device__ void settle(Odd<K>& odd) const {
    if (!odd.to) return;
#pragma unroll
    for (int k = 0; k < K; ++k)
      odd.to[4 * k * slots.step] = static_cast<uint32_t>(odd.number[k]) << (odd.high ? 16 : 0);
    odd.to = nullptr;
  }
  // What came, into registers; the slots are free again.
  __device__ void take(Inputs<T, V, NV, K>& inputs) const {
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) inputs.at[i][k] = slots[i * K + k];
  }
};

// Two sums for each of a thread's columns, from row to row.
template <class F, int V, int NV>
struct ColumnSums {
  F at[2][std::max(NV, 1)][V] = {};
  __device__ void add(int s, int i, const F (&values)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) at[s][i][j] += values[j];
  }
};

template <class Op, int V, bool ragged>
__device__ Span<V, ragged> span_of(const typename Op::Row& row, int first_vector, int step, int columns) {
  int shift = 0;
  if constexpr (ragged)
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.input(0)) % 16 / sizeof(typename Op::Storage));
  return {first_vector * V - shift, step * V, columns};
}

// ----------------------------------------------------------------------------------------------------------- kernels

struct RowShape {
  int64_t rows;
  int columns;
};

// Op, for a storage type T and arithmetic type F:
//   kInputs, State, identity()          what is read, what a row is folded into
//   kVectors, kLongVectors              vectors of each input that a thread has; in rows that leave no other choice
//   kHeldVectors                        vectors of each input that its registers hold
//   kThreadsPerSm                       how many threads an SM should have room for
//   Row row(r)                          row r: `input(k)`, and how many columns are worth reading
//   Row::kPassing                       it is there: what is read is not used again soon, the L2 keeps what is written
//   kNumber                             whether a row has a number of its own, at row.number, which write takes last
//   kRowMost                            threads of a row beyond which it walks; 0: it is long
//   kWholeRows                          whether it is for rows of whole, aligned vectors alone
//   kConstants, constant(c), absent(c)  rows of T that are the same for all rows: a weight, a bias; what one is where
//                                       it is null
//   Held<V, NV>                         what fold leaves for write, in registers
//   fold(state, held, row, span, inputs, constants)  the state with a span more
//   merge(state, lanes)                 the states of all lanes as one
//   finish(state)                       what write takes
//   write(row, result, held, span, inputs, constants, sums)
//   kColumnSums                         whether write adds to `sums`, two for each of a thread's columns
//   write_sums(team, span, sums)        those of all rows; only where a thread's columns stay the same
// inputs.words(i, k) are vector i of input k; constants(c, i, numbers) gives those of constant c.

// A row for each team, and no more: where a row is in few hands many of them wait for memory at once.
// A ragged row has a vector more: room for a warp.
template <Scope scope, bool ragged>
constexpr int kRowThreads = scope == Scope::warp ? 64
                            : ragged             ? 544
                                                 : 512;  // of a block at most

template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kRowThreads<scope, ragged>,
                                  (scope == Scope::block && sizeof(typename Op::Storage) > 2 ? 1024
                                                                                             : Op::kThreadsPerSm) /
                                      (kRowThreads<scope, false>))
    row_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t first = team.index * (scope == Scope::warp ? blockDim.y : 1);
  // Several teams of a warp go along; those past the last row with a row that is not theirs.
  const bool own = first + beside < shape.rows;
  const typename Op::Row row = op.row(own ? first + beside : first);
  const auto span = span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  const auto constants = [&](int c, int i, typename Op::F(&numbers)[V]) {
    unpack(load_columns<T, V>(op.constant(c), span, i, op.absent(c)), numbers);
  };
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // the next kernel's blocks may start, and wait here
  cudaGridDependencySynchronize();
#endif
  Inputs<T, V, NV, Op::kInputs> inputs;
  inputs.load(row, span);
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  op.fold(state, held, row, span, inputs, constants);
  const auto result = op.finish(team.merge(op, state));
  if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
  ColumnSums<typename Op::F, V, 0> none;
  if (!own) return;
  if constexpr (V > 1 && !ragged && Op::kConstants > 0) {
    bool plain = true;  // there and aligned: no branch then keeps the loads of several vectors apart
#pragma unroll
    for (int c = 0; c < Op::kConstants; ++c)
      plain &= op.constant(c) && reinterpret_cast<uintptr_t>(op.constant(c)) % 16 == 0;
    const auto loaded = [&](int c, int i, typename Op::F(&numbers)[V]) {
      Words<T, V> words{};
      if (span.begins(i)) load_constant<16>(op.constant(c) + span.column(i), words.at);
      unpack(words, numbers);
    };
    if (plain) return op.write(row, result, held, span, inputs, loaded, none);
  }
  op.write(row, result, held, span, inputs, constants, none);
}

// Whether as many teams as run at once walk over rows of any length: sums go from row to row; the constants of ragged
// rows are put in place once for all rows.
template <class Op, bool ragged>
constexpr bool kWalks = Op::kColumnSums || (ragged && Op::kConstants > 0);

// Whether it is for long rows alone.
template <class Op>
constexpr bool kLong = Op::kRowMost == 0 && !Op::kColumnSums;

// Where the rows of a block differ in where they start, so do a thread's columns.
template <Scope scope, bool ragged>
constexpr bool kOwnConstants = scope == Scope::warp && ragged;

// The registers do not hold so much beside the sums: it stays in shared memory.
template <class Op, int V, int NV>
constexpr bool kStaysShared = V > 1 && NV > Op::kHeldVectors;

template <Scope scope>
constexpr int kWalkThreads = scope == Scope::warp    ? 256
                             : scope == Scope::block ? 512
                                                     : 1024;
// A ragged row's 96 registers let blocks of 9 warps come in pairs.
template <class Op, Scope scope, bool ragged>
constexpr int kMostWalkers =
    std::min(kWalkThreads<scope>, Op::kMostThreads) + (scope == Scope::block && ragged ? 32 : 0);

// What the compiler is told of it: 16-bit rows without sums get 80 registers, ragged ones 72, so that three blocks of
// 256 and of 288 threads run at once.
template <class Op, Scope scope, bool ragged>
constexpr int kWalkBound = scope == Scope::block && !Op::kColumnSums && !kLong<Op> && sizeof(typename Op::Storage) == 2
                               ? (ragged ? 896 : 768)
                               : kMostWalkers<Op, scope, ragged>;

struct WalkShape {
  int64_t rows;
  int columns;
  int stages;  // rows in shared memory, 4 at most: one is worked on, the others are on their way
};

// Whether the teams of a block have the same columns, so that their sums become one.
template <int V, Scope scope, bool ragged>
constexpr bool kAddsTeams = scope == Scope::warp && V > 1 && !ragged;

// Adds up the sums of a block's teams, in order, for the first of them. `shared` has room for a vector a thread.
template <class F, int V, int NV>
__device__ void add_teams(ColumnSums<F, V, NV>& sums, F* shared) {
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < V; ++j) shared[j * threads + thread] = sums.at[s][i][j];
      __syncthreads();
      if (threadIdx.y > 0) continue;
#pragma unroll 1
      for (int n = thread + blockDim.x; n < threads; n += blockDim.x)
#pragma unroll
        for (int j = 0; j < V; ++j) sums.at[s][i][j] += shared[j * threads + n];
    }
}

// As many teams as run at once walk over the rows, each with the next rows on their way.
template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kWalkBound<Op, scope, ragged>, std::max(1, Op::kThreadsPerSm / kWalkThreads<scope>))
    walking_kernel(const __grid_constant__ Op op, const WalkShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int K = Op::kInputs;
  constexpr bool kAhead = V > 1, kShared = kStaysShared<Op, V, NV>, kOwn = kOwnConstants<scope, ragged>;
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t teams = scope == Scope::warp ? blockDim.y : 1;  // of a block
  const int64_t step = team.count() * teams;

  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared);
  const int keepers = kOwn ? threads : blockDim.x;
  const Slots<T, V> kept{slots + (kOwn ? thread : threadIdx.x), keepers};
  const auto constants = [&](int c, int i, F(&numbers)[V]) { unpack(kept[i * Op::kConstants + c], numbers); };
  const auto stage = [&](int s) {
    return Ahead<T, V, NV, K>{{slots + NV * Op::kConstants * keepers + s * NV * K * threads + thread, threads}};
  };
  // The row's own number, of each thread for itself.
  F* const numbers =
      reinterpret_cast<F*>(slots + NV * (Op::kConstants * keepers + shape.stages * K * threads)) + thread;

  const auto row_at = [&](int64_t first) { return op.row(first + beside < shape.rows ? first + beside : first); };
  const auto span_at = [&](const typename Op::Row& row) {
    return span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  };
  Odd<K> odd;
  const auto fetch = [&](int64_t first, int s) {
    if (first < shape.rows) {
      const typename Op::Row row = row_at(first);
      stage(s).fetch(row, span_at(row), odd);
      if constexpr (Op::kNumber) {
#pragma unroll
        for (int w = 0; w < int(sizeof(F) / 4); ++w)
          ptx::copy_word_ahead(reinterpret_cast<uint32_t*>(numbers + s * threads) + w,
                               reinterpret_cast<const uint32_t*>(row.number) + w);
      }
    }
    ptx::end_group_ahead();
  };
  const auto keep = [&](const auto& span) {
#pragma unroll
    for (int c = 0; c < Op::kConstants; ++c)
#pragma unroll
      for (int i = 0; i < NV; ++i)
        kept[i * Op::kConstants + c] = load_columns<T, V>(op.constant(c), span, i, op.absent(c));
  };

  int64_t base = team.index * teams;
  if constexpr (kAhead) {
    for (int s = 0; s < shape.stages; ++s) {
      fetch(base + s * step, s);
      if constexpr (ragged) stage(s).settle(odd);
    }
  }
  if constexpr (!ragged && Op::kConstants > 0) {
    if (threadIdx.y == 0) keep(span_at(op.row(0)));
    if constexpr (scope == Scope::warp) __syncthreads();
  }
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;
  int columns_kept = INT32_MIN;  // the first column of the constants in the slots
  const auto put = [&](const typename Op::Row& row, F number, const auto& result, auto& held, const auto& span,
                       const auto& inputs) {
    if constexpr (Op::kNumber)
      op.write(row, result, held, span, inputs, constants, sums, number);
    else
      op.write(row, result, held, span, inputs, constants, sums);
  };
  const auto keep_ragged = [&](const auto& span) {
    if (!ragged || Op::kConstants == 0 || columns_kept == span.first) return;
    columns_kept = span.first;
    keep(span);
  };
#if __CUDA_ARCH__ >= 900
  // Clusters write a row when they have folded the next: its merge came meanwhile.
  if constexpr (scope == Scope::cluster && V > 1 && std::is_empty_v<typename Op::template Held<V, NV>>) {
    typename Op::template Held<V, NV> none;
    int64_t base_before = base;
    int slot = 0, slot_before = 0;
    const auto write = [&] {
      const auto result = op.finish(team.collect(op));
      const typename Op::Row row = row_at(base_before);
      const auto span = span_at(row);
      keep_ragged(span);
      put(row, Op::kNumber ? numbers[slot_before * threads] : F(0), result, none, span, stage(slot_before));
      fetch(base + (shape.stages - 1) * step, slot_before);
    };
    const int64_t begin = base;
#pragma unroll 1
    for (; shape.stages > 2 && base < shape.rows; base += step) {
      const typename Op::Row row = row_at(base);
      const auto span = span_at(row);
      keep_ragged(span);
      ptx::wait_ahead(shape.stages - 2);
      if constexpr (ragged) stage(slot).settle(odd);
      typename Op::State state = Op::identity();
      op.fold(state, none, row, span, stage(slot), constants);
      team.post(team.merge_block(op, state));
      if (base > begin) write();
      base_before = base;
      slot_before = slot;
      slot = slot + 1 < shape.stages ? slot + 1 : 0;
    }
    if (base > begin) write();
  }
#endif
#pragma unroll 1
  for (int s = 0; base < shape.rows; base += step) {
    const typename Op::Row row = row_at(base);
    const auto span = span_at(row);
    keep_ragged(span);
    F number = 0;
    const auto work = [&](auto& inputs) {
      typename Op::State state = Op::identity();
      typename Op::template Held<V, NV> held;
      op.fold(state, held, row, span, inputs, constants);
      const auto result = op.finish(team.merge(op, state));
      if constexpr (std::is_empty_v<decltype(held)> && !kShared) inputs.forget_numbers();
      if (scope != Scope::warp || base + beside < shape.rows) put(row, number, result, held, span, inputs);
    };
    Ahead<T, V, NV, K> ahead = stage(s);
    if constexpr (kAhead) {
      ptx::wait_ahead(shape.stages - 1);
      if constexpr (ragged) ahead.settle(odd);
      if constexpr (Op::kNumber) number = numbers[s * threads];
    } else if constexpr (Op::kNumber) {
      number = *row.number;
    }
    if constexpr (kShared) {
      work(ahead);
      fetch(base + shape.stages * step, s);
    } else {
      Inputs<T, V, NV, K> inputs;
      if constexpr (kAhead) {
        ahead.take(inputs);
        fetch(base + shape.stages * step, s);
      } else {
        inputs.load(row, span);
      }
      work(inputs);
    }
    s = s + 1 < shape.stages ? s + 1 : 0;
  }
  team.leave();
  if constexpr (Op::kColumnSums) {
    if constexpr (kAddsTeams<V, scope, ragged>) {
      ptx::wait_ahead(0);
      add_teams(sums, reinterpret_cast<F*>(shared));
      if (threadIdx.y == 0) op.write_sums(team.index, span_at(op.row(0)), sums);
    } else {
      const int64_t mine = team.index * teams + beside;
      op.write_sums(mine, span_at(op.row(mine < shape.rows ? mine : 0)), sums);
    }
  }
}

// A block for each row, whatever its length: one pass to fold it, one to write it.
template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(512) long_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  Team<Scope::block> team;
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;  // taken by another kernel
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
#pragma unroll 1
  for (int64_t r = blockIdx.x; r < shape.rows; r += gridDim.x) {
    const typename Op::Row row = op.row(r);
    const auto pass = [&](typename Op::State& state, const auto& body) {
#pragma unroll 1
      for (int vector = team.rank; vector * V < shape.columns + (ragged ? V : 0); vector += NV * team.size) {
        const auto span = span_of<Op, V, ragged>(row, vector, team.size, shape.columns);
        const auto constants = [&](int c, int i, F(&numbers)[V]) {
          unpack(load_columns<T, V>(op.constant(c), span, i, op.absent(c)), numbers);
        };
        Inputs<T, V, NV, Op::kInputs> inputs;
        inputs.load(row, span);
        typename Op::template Held<V, NV> held;
        op.fold(state, held, row, span, inputs, constants);
        body(held, span, inputs, constants);
      }
    };
    typename Op::State state = Op::identity();
    pass(state, [](auto&&...) {});
    const auto result = op.finish(team.merge(op, state));
    typename Op::State again = Op::identity();
    pass(again, [&](auto& held, const auto& span, const auto& inputs, const auto& constants) {
      if constexpr (Op::kNumber)
        op.write(row, result, held, span, inputs, constants, sums, *row.number);
      else
        op.write(row, result, held, span, inputs, constants, sums);
      again = Op::identity();
    });
  }
}

// ----------------------------------------------------------------------------------------------------------- launch

enum class Way { row, walk, passes };
struct RowConfig {
  Way way;
  Scope scope;
  int vectors;  // that a thread holds
  int threads;  // of a block, for one row
  int beside;   // rows that a block works on side by side
  int ranks;    // blocks of a cluster
};

// The kernels for short rows hold 1, 2, 3 or `most` vectors a thread.
constexpr int compiled_vectors(int vectors, int most) {
  for (const int held : {1, 2, 3})
    if (vectors <= held && held < most) return held;
  return most;
}

template <class Op>
constexpr bool kFewThreads =
    Op::kConstants == 1 && !Op::kColumnSums && sizeof(typename Op::Storage) == 2 && Op::kLongVectors > Op::kVectors;

// How a row is shared out. Few threads that hold much each need the fewest instructions a column.
template <class Op, int V, bool ragged>
RowConfig configure(int64_t vectors) {
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  const auto power = [](int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); };
  constexpr int most = V == 1 ? 4 : Op::kVectors;
  constexpr bool walks = kWalks<Op, ragged>;
  const int64_t threads = up(up(vectors, most), 32) * 32;
  if (threads == 32) {
    // At least 4 lanes share a row, if it has 4 vectors: 64 bytes side by side.
    const int lanes = std::max(power(up(vectors, most)), std::min(4, power(vectors)));
    const int held = compiled_vectors(static_cast<int>(up(vectors, lanes)), most);
    return {walks ? Way::walk : Way::row, Scope::warp, held, lanes, (walks ? 256 : 64) / lanes, 1};
  }
  const bool keeps = walks || (V > 1 && threads > Op::kRowMost + (ragged ? 32 : 0));
  if (threads <= (keeps ? kMostWalkers<Op, Scope::block, ragged> : kRowThreads<Scope::block, ragged>))
    return {keeps ? Way::walk : Way::row, Scope::block, most, static_cast<int>(threads), 1, 1};
  if (V > 1 && at::cuda::getCurrentDeviceProperties()->major >= 9) {
    // 16-bit rows with one constant: few threads that hold much, 0.90 to 0.92 of a copy at 262144 columns.
    if (kFewThreads<Op> && up(vectors, Op::kLongVectors) <= kMaxRanks * 256) {
      const int64_t all = up(vectors, Op::kLongVectors);
      const int ranks = std::clamp(power(up(all, 256)), 2, kMaxRanks);
      return {Way::walk, Scope::cluster, Op::kLongVectors, static_cast<int>(up(up(all, ranks), 32) * 32), 1, ranks};
    }
    // 16-bit rows with two constants: three small blocks a multiprocessor, 0.87 of a copy at 65536 columns, not 0.85.
    if (const int64_t all = up(vectors, Op::kLongVectors); Op::kConstants == 2 && sizeof(typename Op::Storage) == 2 &&
                                                           Op::kLongVectors > Op::kVectors && !ragged &&
                                                           all > 4 * 128 && all <= 8 * 128)
      return {Way::walk, Scope::cluster, Op::kLongVectors, static_cast<int>(up(up(all, 8), 32) * 32), 1, 8};
    // Two constants and a row of 8 vectors fill shared memory, and need half the blocks.
    for (const int held : {Op::kConstants == 2 ? Op::kLongVectors : most, Op::kLongVectors}) {
      const int64_t all = up(vectors, held);
      if (all > kMaxRanks * Op::kMostThreads) continue;
      const int ranks = std::clamp(power(up(all, Op::kMostThreads)), 2, kMaxRanks);
      return {Way::walk, Scope::cluster, held, static_cast<int>(up(up(all, ranks), 32) * 32), 1, ranks};
    }
  }
  return {Way::passes, Scope::block, most, 256, 1, 1};
}

// How many blocks or clusters of a walking kernel run at once; asked once for a size, device and kernel.
template <auto kernel>
int resident(const cudaLaunchConfig_t& launch, int ranks) {
  const int device = c10::cuda::current_device();
  const auto key =
      (static_cast<uint64_t>(device + 1) << 32 | launch.blockDim.x << 8 | static_cast<unsigned>(ranks)) & 0xffffffffff;
  static std::atomic<uint64_t> known{0};  // the last key and its answer
  const uint64_t last = known.load(std::memory_order_relaxed);
  if (last >> 24 == key) return static_cast<int>(last & 0xffffff);
  int fit = 0;
  const auto* properties = at::cuda::getDeviceProperties(device);
  // Shared memory above 48 KiB and clusters of more than 8 blocks must be asked for.
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(properties->sharedMemPerBlockOptin - attributes.sharedSizeBytes)));
  if (ranks > 1) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch));
  } else {
    C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &fit, kernel, static_cast<int>(launch.blockDim.x * launch.blockDim.y), launch.dynamicSmemBytes));
    fit *= properties->multiProcessorCount;
  }
  fit = std::max(fit, 1);
  known.store(key << 24 | static_cast<unsigned>(fit), std::memory_order_relaxed);
  return fit;
}

// What walking takes of a block's shared memory: for the constants, for a row of each team, and for merging.
template <class Op, int V, int NV, Scope scope, bool ragged>
struct WalkBytes {
  size_t constants, row;
  int threads;
  static constexpr size_t kMerging = (4 * kMaxRanks + 64) * (sizeof(typename Op::State) + 8) + 256;

  explicit WalkBytes(const RowConfig& c) {
    constexpr size_t word = sizeof(Words<typename Op::Storage, V>);
    constants = word * NV * Op::kConstants * c.threads * (kOwnConstants<scope, ragged> ? c.beside : 1);
    row = V > 1 ? (word * NV * Op::kInputs + (Op::kNumber ? sizeof(typename Op::F) : 0)) * c.threads * c.beside : 0;
    threads = c.threads * c.beside;
  }
  // As many rows on their way as leave room for the blocks that an SM should have: two at least, four at most.
  int stages() const {
    if (row == 0) return 1;
    const auto* properties = at::cuda::getCurrentDeviceProperties();
    const size_t all = properties->sharedMemPerMultiprocessor;
    const bool few = scope == Scope::cluster && kFewThreads<Op> && NV == Op::kLongVectors;
    for (int blocks = few ? 1 : std::max(1, (Op::kThreadsPerSm + threads / 2) / threads);; --blocks) {
      const size_t mine = std::min(all / blocks - 1024, properties->sharedMemPerBlockOptin) - kMerging;
      const auto fit = mine > constants ? static_cast<int>((mine - constants) / row) : 0;
      if (fit >= 2 || blocks == 1) return std::min(fit, 4);
    }
  }
};

// prepare(op, teams) is called before the launch of an operation with column sums.
template <class Op, int V, int NV, Scope scope, bool ragged, class Prepare>
void launch_walking(Op op, const RowConfig& c, int stages, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr auto kernel = walking_kernel<Op, V, NV, scope, ragged>;
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(c.threads, c.beside);
  const WalkBytes<Op, V, NV, scope, ragged> bytes(c);
  launch.dynamicSmemBytes = bytes.constants + bytes.row * stages;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute cluster{};
  if constexpr (scope == Scope::cluster) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(c.ranks), 1, 1};
    launch.attrs = &cluster;
    launch.numAttrs = 1;
  }
  launch.gridDim = dim3(c.ranks);
  const int64_t needed = (rows + c.beside - 1) / c.beside;  // blocks or clusters, each for one row a team
  int64_t blocks = resident<kernel>(launch, c.ranks);
  // A team's rows are then all as far from a multiple of 16 bytes, and its columns stay the same.
  if (ragged && c.beside < V && blocks > V) blocks -= blocks % V;
  blocks = std::min(blocks, needed);
  launch.gridDim = dim3(static_cast<unsigned>(blocks * c.ranks));
  prepare(op, kAddsTeams<V, scope, ragged> ? blocks : blocks * c.beside);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, op, WalkShape{rows, static_cast<int>(columns), stages}));
}

template <auto kernel, class Op>
void launch_rows_kernel(const Op& op, dim3 threads, int64_t blocks, int64_t rows, int64_t columns) {
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX)));
  launch_early(kernel, grid, threads, op, RowShape{rows, static_cast<int>(columns)});
}

template <int V, bool ragged, class Op, class Prepare>
void launch_vectors(const Op& op, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr int kMost = V == 1 ? 4 : Op::kVectors;
  const int64_t vectors = (columns + V - 1) / V + (ragged ? 1 : 0);
  const RowConfig c = configure<Op, V, ragged>(vectors);
  const auto go = [&]<int NV, Scope scope>() {
    if constexpr (scope != Scope::cluster && !kWalks<Op, ragged> && !kLong<Op>) {
      if (c.way == Way::row)
        return launch_rows_kernel<row_kernel<Op, V, NV, scope, ragged>>(
            op, dim3(c.threads, c.beside), (rows + c.beside - 1) / c.beside, rows, columns);
    }
    if constexpr (scope == Scope::cluster || kWalks<Op, ragged> ||
                  (scope == Scope::block && (Op::kConstants > 0 || kLong<Op>))) {
      const int stages = c.way == Way::walk ? WalkBytes<Op, V, NV, scope, ragged>(c).stages() : 0;
      if (stages > 0) return launch_walking<Op, V, NV, scope, ragged>(op, c, stages, rows, columns, prepare);
    }
    launch_rows_kernel<long_rows_kernel<Op, V, kMost, ragged>>(op, dim3(256), rows, rows, columns);
  };
  if (c.scope == Scope::block) return go.template operator()<kMost, Scope::block>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster && c.vectors > kMost)
      return go.template operator()<Op::kLongVectors, Scope::cluster>();
    if (c.scope == Scope::cluster) return go.template operator()<kMost, Scope::cluster>();
    if constexpr (!ragged) {
      const auto warps = [&]<int NV>() { go.template operator()<compiled_vectors(NV, kMost), Scope::warp>(); };
      switch (c.vectors) {
        case 1: return warps.template operator()<1>();
        case 2: return warps.template operator()<2>();
        case 3: return warps.template operator()<3>();
      }
    }
  }
  go.template operator()<kMost, Scope::warp>();  // ragged: one kernel for all short rows
}

// Whether 16-byte vectors serve the first P tensors of a row: columns side by side, and every row at the same distance
// from a multiple of 16 in all of them. `aligned`: that distance is 0; `whole`: and vectors fill the row.
struct Alignment {
  bool vectors, aligned, whole;
};
template <class T, int N, size_t P>
Alignment alignment_of(const Rows<N>& rows, const std::array<const void*, P>& pointers) {
  const auto off = [&](int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)) % 16 != 0; };
  const auto address = [&](int t) { return reinterpret_cast<intptr_t>(pointers[t]); };
  bool vectors = true, aligned = address(0) % 16 == 0;
  for (size_t t = 0; t < P; ++t) {
    vectors &= rows.column_strides[t] == 1 && (address(t) - address(0)) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) {
      vectors &= !off(rows.strides[t][d] - rows.strides[0][d]);
      aligned &= !off(rows.strides[0][d]);
    }
  }
  return {vectors, vectors && aligned, vectors && aligned && !off(rows.columns)};
}

// Runs an operation over its rows. pointers: the tensors that are read or written by vectors; prepare(op, teams) is
// called before the launch of an operation with column sums, where a team's columns stay from row to row.
constexpr auto kNothingToPrepare = [](auto&&...) {};
template <class Op, int N, size_t P, class Prepare = decltype(kNothingToPrepare)>
void launch_rows(const Op& op, const Rows<N>& rows, const std::array<const void*, P>& pointers,
                 const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  constexpr int V = 16 / sizeof(T);
  TORCH_CHECK(rows.columns < INT32_MAX - 4096, "expected rows of fewer than 2^31 columns, got ", rows.columns);
  const auto a = alignment_of<T>(rows, pointers);
  if (a.whole || Op::kWholeRows) return launch_vectors<V, false>(op, rows.count, rows.columns, prepare);
  if constexpr (!Op::kWholeRows) {
    if (!a.vectors) return launch_vectors<1, false>(op, rows.count, rows.columns, prepare);
    launch_vectors<V, true>(op, rows.count, rows.columns, [&](Op& o, int64_t teams) {
      if (a.aligned || (rows.dims <= 1 && (teams % V == 0 || teams >= rows.count))) prepare(o, teams);
    });
  }
}

}  // namespace matmuls
