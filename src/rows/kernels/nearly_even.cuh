// nearly_even: a block per row whose threads hold NV whole vectors, a compile-time constant, or one fewer.
#pragma once

#include "rows/kernels/even.cuh"

namespace matmuls {

// One block per row whose vectors divide nearly evenly: NV whole vectors per thread, some threads one fewer. It uses
// few threads with many vectors each. 1280 16-bit columns are 5 vectors per lane of a warp; four per lane would leave a
// third of two warps idle (layer norm at 0.99 of a copy against 0.66, softmax at 1.00 against 0.76). The edge elements
// of an unaligned row go one each to the first threads.
template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(256, NV* Op::kInputs > 5 ? 3 : 4)
    nearly_even_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  Team<Scope::block> team;
  const typename Op::Row row = op.row(team.index);
  const Inside in = ragged ? inside_of<V>(row.input(0), shape.columns) : Inside{0, shape.columns};
  const int first = in.first + team.rank * V, step = team.size * V;
  const EvenSpan<V, NV, false, Op::kEnds> span{first, step, in.end, first + (NV - 1) * step < in.end};
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  Inputs<T, V, NV, Op::kInputs> inputs;
  inputs.load(row, span, ptx::l2_policy(ragged || shape.large));
  RowEnds<Op> ends;
  if constexpr (ragged) ends.load(row, in, team.rank, shape.columns);
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  const auto constants = even_constants<T, V>(op, span);
  op.fold(state, held, row, span, inputs, constants);
  if constexpr (ragged) ends.fold(op, state, row);
  const auto result = op.finish(team.merge(op, state));
  if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
  ColumnSums<typename Op::F, V, 0> none;
  if constexpr (Op::kConstants > 0) {
    const auto anywhere = [&](int c, int i, typename Op::F(&numbers)[V]) {
      unpack(load_columns<T, V>(op.constant(c), Span<V, false>{first, step, in.end}, i, op.absent(c)), numbers);
    };
    if (!has_plain_constants(op)) return op.write(row, result, held, span, inputs, anywhere, none);
  }
  op.write(row, result, held, span, inputs, constants, none);
  if constexpr (ragged) ends.write(op, row, result);
}

// Hands the kernel of a choice to `use`.
template <class Op, bool ragged, class Use>
void with_nearly_even(const RowChoice& c, const Use& use) {
  static_assert(!ragged || Op::kConstants == 0);
  with_instance<Op::kTraits.nearly_even>(c, [&]<int NV>() {
    use.template
    operator()<RowKernel::nearly_even, nearly_even_kernel<Op, Op::kTraits.elements_of_vector(), NV, ragged>>();
  });
}

}  // namespace matmuls
