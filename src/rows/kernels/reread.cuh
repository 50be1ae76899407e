// reread: one block per row of any length, one pass to fold the row and one to write it. For rows too long for
// registers and shared memory.
#pragma once

#include "rows/device/operation.cuh"

namespace matmuls {

template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(512) reread_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  Team<Scope::block> team;
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;  // not stored: another kernel computes them
  ptx::griddepcontrol_wait();
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
        inputs.load(row, span, ptx::l2_policy(true));  // keep it in the L2 for the second pass
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

}  // namespace matmuls
