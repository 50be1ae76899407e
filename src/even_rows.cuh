// Rows that threads share evenly: each has NV whole vectors, known when this is compiled. No branch asks whether a
// vector is there, and addresses are a register and a number: half the instructions of rows.cuh's kernels, for which
// 16-bit layer norm waits (8192 columns: 15 a column against 34, 0.94 of a copy against 0.85).
#pragma once

#include "rows.cuh"

namespace matmuls {

// Span's questions with their answers. Unless `exact`, some threads lack the last of their vectors.
template <int V, int NV, int step, bool exact>
struct EvenSpan {
  static constexpr bool kRagged = false, kEven = true;
  int first, columns;
  bool last;

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return exact || i < NV - 1 || last; }
  __device__ static constexpr int count(int) { return V; }
  template <class T, class F>
  __device__ void store(T* row, int64_t, int i, const F (&values)[V]) const {
    store_once(row + column(i), pack<T, V>(values));
  }
};
template <int NV, int V, int step, bool exact, class Body>
__device__ void for_vectors(const EvenSpan<V, NV, step, exact>& span, const Body& body) {
#pragma unroll
  for (int i = 0; i < NV - 1; ++i) body(i, std::true_type{});
  if (span.begins(NV - 1)) body(NV - 1, std::true_type{});
}

// A row for each team of `threads`: a warp of several, or a block. Op::merge_even<lanes>(state, each): the merge of
// states of `each` columns.
template <class Op, int V, int NV, int threads, bool exact>
__global__ void __launch_bounds__(std::max(threads, 256), 1024 / std::max(threads, 256))
    even_row_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int kWarps = threads / 32;
  static_assert(exact || kWarps == 1);
  const int64_t own = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const typename Op::Row row = op.row(min(own, shape.rows - 1));
  const int first = static_cast<int>(threadIdx.x) * V;
  const EvenSpan<V, NV, V * threads, exact> span{first, shape.columns, first + (NV - 1) * V * threads < shape.columns};
  ptx::let_next_start();  // and wait here
  ptx::wait_for_earlier();
  if (own >= shape.rows) return;
  Inputs<T, V, NV, Op::kInputs> inputs;
#pragma unroll
  for (int i = 0; i < NV; ++i)
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      inputs.at[i][k] = {};
      if (span.begins(i)) inputs.at[i][k] = load_once<T, V>(row.input(k) + span.column(i));
    }
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  const auto constants = [&](int c, int i, F(&numbers)[V]) {
    Words<T, V> words;
    load_constant<16>(op.constant(c) + span.column(i), words.at);
    unpack(words, numbers);
  };
  op.fold(state, held, row, span, inputs, constants);
  if constexpr (exact)
    state = op.template merge_even<32>(state, V * NV);
  else
    state = op.merge(state, Lanes{32});
  if constexpr (kWarps > 1) {
    __shared__ typename Op::State warps[kWarps];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = state;
    __syncthreads();
    state = op.template merge_even<kWarps>(warps[threadIdx.x % kWarps], V * NV * 32);
  }
  const auto result = op.finish(state);
  inputs.forget_numbers();
  ColumnSums<F, V, 0> none;
  op.write(row, result, held, span, inputs, constants, none);
}

template <int NV, int threads, bool exact, class Op>
void launch_even_rows(const Op& op, int64_t rows, int64_t columns) {
  constexpr int kBeside = threads == 32 ? 8 : 1;
  launch_rows_kernel<even_row_kernel<Op, 16 / sizeof(typename Op::Storage), NV, threads, exact>>(
      op, dim3(threads, kBeside), (rows + kBeside - 1) / kBeside, rows, columns);
}

}  // namespace matmuls
