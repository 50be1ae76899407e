// persistent_unaligned: for unaligned rows of an operation with constants (weight, bias).
//
// All rows of a team (the threads that share a row) have the same misalignment, so a thread keeps its columns, and
// loads the constants of these columns once. Edge elements (before the first whole vector and after the last) go one to
// a thread, so vectors need no bounds test. The next row is prefetched to registers.
#pragma once

#include <algorithm>

#include "rows/device/operation.cuh"
#include "rows/kernel_sizes.h"

namespace matmuls {

// Blocks per SM, from the vectors that a thread holds; column sums count like inputs.
template <class Op, int NV, Scope scope>
constexpr int kUnalignedBlocks = [] {
  constexpr int held = NV * Op::kInputs * (Op::kColumnSums ? 2 : 1);
  return scope == Scope::block || held > 8 ? 1 : held > 4 ? 2 : held > 2 ? 3 : 4;
}();

// float32 rows compute mean and squares in two passes over registers: the mean is then as accurate as the elements.
template <class T, int V, int NV>
struct UnalignedSpan : EvenSpan<V, NV, false, false> {
  static constexpr bool kOnce = sizeof(T) == 2;
};

template <class Op, int V, int NV, Scope scope>
__global__ void __launch_bounds__(scope == Scope::block ? persistent_unaligned_threads(Op::kColumnSums)
                                                        : 32 * kUnalignedWarps,
                                  kUnalignedBlocks<Op, NV, scope>)
    persistent_unaligned_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Row = typename Op::Row;
  constexpr int C = Op::kConstants;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<scope> team;
  const int row_in_block = scope == Scope::warp ? threadIdx.y : 0, teams = scope == Scope::warp ? blockDim.y : 1;
  const int64_t step = team.count() * teams;
  int64_t first = team.index * teams;  // the first of the rows that this block processes together
  // Teams past the last row keep their last inputs and take part in warp operations.
  const auto own = [&](int64_t r) { return r + row_in_block < shape.rows; };
  const auto row_at = [&](int64_t r) { return op.row(own(r) ? r + row_in_block : r); };
  const Inside in = inside_of<V>(row_at(first).input(0), shape.columns);
  const int column = in.first + team.rank * V, apart = team.size * V;
  const UnalignedSpan<T, V, NV> span{{column, apart, in.end, column + (NV - 1) * apart < in.end}};
  const Span<1, false> end{team.rank < in.first ? team.rank : in.end + team.rank - in.first, 0, shape.columns};

  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const Slots<T, V> kept{reinterpret_cast<Words<T, V>*>(shared) + thread, threads};
  F kept_end[C];
  struct Held {
    Inputs<T, V, NV, Op::kInputs> vectors;
    Inputs<T, 1, 1, Op::kInputs> end;
    F number;  // Op::kNumber: the row's own number
  };
  const ptx::L2Policy policy = ptx::l2_policy(true);
  const auto load = [&](Held& to, int64_t r) {
    if (!own(r)) return;
    const Row row = row_at(r);
    to.vectors.load(row, span, policy);
    to.end.load(row, end, policy);
    if constexpr (Op::kNumber) to.number = *row.number;
  };
  const auto constants = [&](int c, int i, F(&numbers)[V]) { unpack(kept[i * C + c], numbers); };
  const auto end_constants = [&](int c, int, F(&number)[1]) { number[0] = kept_end[c]; };
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;
  ColumnSums<F, 1, Op::kColumnSums ? 1 : 0> end_sums;
  const auto work = [&](Held& now, int64_t r) {
    const Row row = row_at(r);
    typename Op::State state = Op::identity();
    typename Op::template Held<V, NV> held;
    typename Op::template Held<1, 1> held_end;
    op.fold(state, held, row, span, now.vectors, constants);
    op.fold(state, held_end, row, end, now.end, end_constants);
    const auto result = op.finish(team.merge(op, state));
    now.vectors.forget_numbers();
    if (!own(r)) return;
    const auto put = [&](auto& held, const auto& span, const auto& inputs, const auto& constants, auto& sums) {
      if constexpr (Op::kNumber)
        op.write(row, result, held, span, inputs, constants, sums, now.number);
      else
        op.write(row, result, held, span, inputs, constants, sums);
    };
    put(held, span, now.vectors, constants, sums);
    put(held_end, end, now.end, end_constants, end_sums);
  };
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  Held even, odd;
  load(even, first);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const Span<V, true> all{column, apart, in.end};
#pragma unroll
    for (int i = 0; i < NV; ++i) kept[i * C + c] = load_columns<T, V>(op.constant(c), all, i, op.absent(c));
    kept_end[c] = end.begins(0) && op.constant(c) ? F(op.constant(c)[end.first]) : F(op.absent(c));
  }
#pragma unroll 1
  for (; first < shape.rows; first += 2 * step) {
    load(odd, first + step);
    work(even, first);
    if (first + step >= shape.rows) break;
    load(even, first + 2 * step);
    work(odd, first + step);
  }
  if constexpr (Op::kColumnSums) {
    if (!op.partial) return;
    // The teams of a block have different columns; they add up in order.
    float* const all = scope == Scope::warp ? reinterpret_cast<float*>(shared) : op.partial_of(team.index);
    const auto give = [&](int s, int column, F sum) {
      float* const to = all + s * shape.columns + column;
      *to = row_in_block == 0 ? sum : *to + sum;
    };
    for (int t = 0; t < teams; ++t) {
      __syncthreads();  // in the first iteration, also for the constants, which occupied this memory
      if (t != row_in_block) continue;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < NV; ++i)
#pragma unroll
          for (int j = 0; j < V; ++j)
            if (span.begins(i)) give(s, span.column(i) + j, sums.at[s][i][j]);
        if (end.begins(0)) give(s, end.first, end_sums.at[s][0][0]);
      }
    }
    if constexpr (scope == Scope::warp) {
      __syncthreads();
      for (int n = thread; n < 2 * shape.columns; n += threads) op.partial_of(team.index)[n] = all[n];
    }
  }
}

// Hands the kernel of a choice to `use`.
template <class Op, class Use>
void with_persistent_unaligned(const RowChoice& c, const Use& use) {
  const auto with = [&]<Scope scope>() {
    static constexpr auto kCompiled = persistent_unaligned_vectors(Op::kTraits, scope);
    with_instance<kCompiled>(c, [&]<int NV>() {
      use.template operator()<RowKernel::persistent_unaligned,
                              persistent_unaligned_kernel<Op, Op::kTraits.elements_of_vector(), NV, scope>>();
    });
  };
  c.scope == Scope::warp ? with.template operator()<Scope::warp>() : with.template operator()<Scope::block>();
}

}  // namespace matmuls
