// even_passes: a two-pass kernel for rows of 32 and 64 KiB that divide evenly among the threads of a block. The second
// read comes from the L2. A block holds only part of its row, so two or three blocks run per SM, and one reads while
// another writes: float32 layer norm of 16384 columns at 0.98 of a copy, 0.91 where a block holds the whole row.
#pragma once

#include "rows/kernels/even.cuh"

namespace matmuls {

// A thread has `parts` parts of `each` vectors. The first `kept` parts stay in registers. `blocks`: blocks per SM.
template <class Op, int V, int parts, int each, int kept, int threads, int blocks>
__global__ void __launch_bounds__(threads, blocks)
    even_passes_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using Part = Inputs<T, V, each, Op::kInputs>;
  constexpr int kStep = V * threads;
  const typename Op::Row row = op.row(blockIdx.x);
  const auto span = [&](int part) {
    return EvenPart<V, each, Op::kEnds>{
        {static_cast<int>(threadIdx.x) * V + part * each * kStep, kStep, shape.columns}};
  };
  const auto constants = [&](int part) { return even_constants<T, V>(op, span(part)); };
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  typename Op::State state = Op::identity();
  typename Op::template Held<V, each> none;
  const auto fold = [&](int part, Part& inputs) {
    inputs.load(row, span(part), ptx::l2_policy(true));
    op.fold(state, none, row, span(part), inputs, constants(part));
  };
  Part first[kept];
#pragma unroll
  for (int part = parts - 1; part >= kept; --part) {
    Part inputs;
    fold(part, inputs);
  }
#pragma unroll
  for (int part = kept - 1; part >= 0; --part) fold(part, first[part]);

  state = op.template merge_even<32>(state, V * each * parts);
  state = merge_even_warps<threads>(op, state, V * each * parts * 32);
  const auto result = op.finish(state);

  ColumnSums<typename Op::F, V, 0> no_sums;
#pragma unroll
  for (int part = 0; part < kept; ++part) {
    first[part].forget_numbers();
    op.write(row, result, none, span(part), first[part], constants(part), no_sums);
  }
#pragma unroll
  for (int part = kept; part < parts; ++part) {
    Part inputs;
    inputs.load(row, span(part), ptx::l2_policy(false));  // last use: no need to stay in the L2
    op.write(row, result, none, span(part), inputs, constants(part), no_sums);
  }
}

// Hands the kernel of a choice to `use`, if it has this number of parts and so on.
template <class Op, int parts, int each, int kept, int threads, int blocks, class Use>
bool with_even_passes(const RowChoice& c, const Use& use) {
  static_assert(Op::kTraits.keeps_nothing, "what fold leaves for write is read again");
  if (c.parts != parts || c.vectors != each || c.kept_parts != kept || c.threads != threads ||
      c.blocks_per_sm != blocks)
    return false;
  use.template
  operator()<RowKernel::even_passes,
             even_passes_kernel<Op, Op::kTraits.elements_of_vector(), parts, each, kept, threads, blocks>>();
  return true;
}

}  // namespace matmuls
