// one_pass: one row per block, warp or part of a warp, read once and held in registers. Many small blocks hide the
// latency of memory.
#pragma once

#include "rows/device/operation.cuh"

namespace matmuls {

// Threads per block at most. Each team has one row: with few threads per row, many rows wait for memory at once.
template <Scope scope>
constexpr int kOnePassThreads = scope == Scope::warp ? 64 : 512;

// One row per team. Edge elements of an unaligned row go one each to the first threads of a block. If lanes of a warp
// share a row, its vectors reach past both ends instead.
template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kOnePassThreads<scope>, (scope == Scope::block && sizeof(typename Op::Storage) > 2
                                                               ? 1024
                                                               : Op::kTraits.threads_per_sm) /
                                                              kOnePassThreads<scope>)
    one_pass_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  constexpr bool kInside = ragged && scope == Scope::block;
  Team<scope> team;
  const int row_in_block = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t first = team.index * (scope == Scope::warp ? blockDim.y : 1);
  // Several teams of a warp run together; those past the last row recompute another row.
  const bool own = first + row_in_block < shape.rows;
  const typename Op::Row row = op.row(own ? first + row_in_block : first);
  const Inside in = kInside ? inside_of<V>(row.input(0), shape.columns) : Inside{0, shape.columns};
  const auto span = [&] {
    if constexpr (kInside)
      return Span<V, false>{in.first + team.rank * V, team.size * V, in.end};
    else
      return span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  }();
  const auto constants = [&](int c, int i, typename Op::F(&numbers)[V]) {
    unpack(load_columns<T, V>(op.constant(c), span, i, op.absent(c)), numbers);
  };
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  Inputs<T, V, NV, Op::kInputs> inputs;
  inputs.load(row, span, ptx::l2_policy(ragged || shape.large));
  RowEnds<Op> ends;
  if constexpr (kInside) ends.load(row, in, team.rank, shape.columns);
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  op.fold(state, held, row, span, inputs, constants);
  if constexpr (kInside) ends.fold(op, state, row);
  const auto result = op.finish(team.merge(op, state));
  if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
  ColumnSums<typename Op::F, V, 0> none;
  if (!own) return;
  if constexpr (V > 1 && !ragged && Op::kConstants > 0) {
    const auto loaded = [&](int c, int i, typename Op::F(&numbers)[V]) {
      Words<T, V> words{};
      if (span.begins(i)) load_words<16>(op.constant(c) + span.column(i), words.at);
      unpack(words, numbers);
    };
    if (has_plain_constants(op)) return op.write(row, result, held, span, inputs, loaded, none);
  }
  op.write(row, result, held, span, inputs, constants, none);
  if constexpr (kInside) ends.write(op, row, result);
}

}  // namespace matmuls
