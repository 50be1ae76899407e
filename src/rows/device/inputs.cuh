// The elements of its rows that a thread holds, in registers (Inputs) or on their way to shared memory (Ahead).
#pragma once

#include <algorithm>

#include "rows/device/columns.cuh"

namespace matmuls {

// A thread's vectors of a row, in registers. words(i, k): vector i of input k, 0 in columns outside the row. 16-bit
// elements stay packed.
template <class T, int V, int NV, int K>
struct Inputs {
  Words<T, V> at[NV][K];

  __device__ const Words<T, V>& words(int i, int k) const { return at[i][k]; }

  template <class Row, class Columns>
  __device__ void load(const Row& row, const Columns& span, ptx::L2Policy policy) {
    constexpr bool ragged = Columns::kRagged;
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      const bool there = span.sees(i, end) && (!ragged || span.whole(i, span.columns));
#pragma unroll
      for (int k = 0; k < K; ++k)
        at[i][k] = load_if<T, V>(there, row.input(k) + span.column(i) * (V == 1 ? row.column_stride(k) : 1), policy);
    }
    if constexpr (ragged) {  // after the whole vectors, whose loads then do not wait for the assembly of an edge
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
  // Makes write unpack the words again instead of keeping the float32 values of fold: half the registers.
  __device__ void forget_numbers() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int n = 0; n < NV * K * Words<T, V>::kCount; ++n)
        ptx::opaque(at[n / K / Words<T, V>::kCount][n / Words<T, V>::kCount % K].at[n % Words<T, V>::kCount]);
    }
  }
};

// Slots of shared memory, one vector each, private to a thread. Neighbouring threads' slots are adjacent.
template <class T, int V>
struct Slots {
  Words<T, V>* first;
  int step;
  __device__ Words<T, V>& operator[](int n) const { return first[n * step]; }
};

// A 16-bit element next to the row's first or last whole 32-bit word, too small for cp.async. It stays in registers
// until the next row.
template <int K>
struct Odd {
  uint32_t* to = nullptr;  // its word in shared memory, of input 0
  bool high;               // the upper half of the word
  uint16_t number[K];
};

// cp.async prefetch of a row to shared memory while earlier rows are processed. around: see ptx::cp_async.
template <class T, int V, int NV, int K, int around = 128>
struct Ahead {
  Slots<T, V> slots;

  __device__ const Words<T, V>& words(int i, int k) const { return slots[i * K + k]; }

  template <class Row, bool ragged>
  __device__ void fetch(const Row& row, const Span<V, ragged>& span, Odd<K>& odd) const {
    const int end = row.visible(span.columns);
    if (NV > 4 && !ragged && span.column(NV - 1) < end) {  // all vectors are there: no branch for each
#pragma unroll
      for (int i = 0; i < NV; ++i)
#pragma unroll
        for (int k = 0; k < K; ++k) ptx::cp_async<around>(&slots[i * K + k], row.input(k) + span.column(i));
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
          ptx::cp_async<around>(&slots[i * K + k], row.input(k) + span.column(i));
      }
    }
    if constexpr (ragged) {
      if (span.first < 0) fetch_edge(row, span, 0, odd);
      if (last >= 0) fetch_edge(row, span, last, odd);
    }
  }
  template <class Row, bool ends>
  __device__ void fetch(const Row& row, const EvenSpan<V, NV, false, ends>& span) const {
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (span.sees(i, end)) ptx::cp_async<around>(&slots[i * K + k], row.input(k) + span.column(i));
  }
  // For spans whose vectors all exist. ptxas 13.0 generates illegal instructions for several such predicated copies.
  template <class Row, class Columns>
  __device__ void fetch_all(const Row& row, const Columns& span, ptx::L2Policy policy) const {
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) ptx::cp_async(&slots[i * K + k], row.input(k) + span.column(i), policy);
  }
  // Copies a vector that reaches past an end of the row: the row's own words, 0 outside it.
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
          ptx::cp_async_word(&slots[i * K + k].at[w], from);
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
  // Moves the words that arrived to registers. The slots are then free.
  __device__ void take(Inputs<T, V, NV, K>& inputs) const {
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) inputs.at[i][k] = slots[i * K + k];
  }
};

// Two running sums for each of a thread's columns, over the rows.
template <class F, int V, int NV>
struct ColumnSums {
  F at[2][std::max(NV, 1)][V] = {};
  __device__ void add(int s, int i, const F (&values)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) at[s][i][j] += values[j];
  }
};

// The elements of a row outside its whole aligned vectors (head and tail). Each lane of the first warp holds at most
// one of each input. They go through the same fold and write as the vectors.
template <class Op>
struct RowEnds {
  Span<1, false> span;
  Inputs<typename Op::Storage, 1, 1, Op::kInputs> inputs;
  typename Op::template Held<1, 1> held;
  bool any = false;  // this thread is in the first warp

  __device__ void load(const typename Op::Row& row, const Inside& in, int rank, int columns) {
    any = rank < 32;
    if (!any) return;
    span = {rank < in.first ? rank : in.end + rank - in.first, 0, columns};
    inputs.load(row, span, ptx::L2Policy{});
  }
  __device__ void fold(const Op& op, typename Op::State& state, const typename Op::Row& row) {
    if (any) op.fold(state, held, row, span, inputs, [](auto&&...) {});
  }
  template <class Result>
  __device__ void write(const Op& op, const typename Op::Row& row, const Result& result) {
    ColumnSums<typename Op::F, 1, 0> none;
    if (any) op.write(row, result, held, span, inputs, [](auto&&...) {}, none);
  }
};

template <class Op, int V, bool ragged>
__device__ Span<V, ragged> span_of(const typename Op::Row& row, int first_vector, int step, int columns) {
  int shift = 0;
  if constexpr (ragged)
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.input(0)) % 16 / sizeof(typename Op::Storage));
  return {first_vector * V - shift, step * V, columns};
}

}  // namespace matmuls
