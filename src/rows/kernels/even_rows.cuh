// even_rows: a row for some lanes of a warp, a warp or a block, whose threads hold a number of whole vectors that is a
// compile-time constant.
#pragma once

#include "rows/kernel_sizes.h"
#include "rows/kernels/even.cuh"

namespace matmuls {

// One row for each `threads` threads: some lanes of a warp, a warp, or a block. The edge elements of an unaligned row
// go one each to the threads, at least 16. Beyond the interface in rows/device/operation.cuh the operation provides
//
//   kEnds                           whether a row may see fewer than its columns
//   merge_even<lanes>(state, each)  the merge of `lanes` states of `each` columns
template <class Op, int V, int NV, int threads, int rows_per_block, bool exact, bool ragged>
__global__ void __launch_bounds__(threads* rows_per_block, (NV > 4             ? 512
                                                            : ragged && NV > 2 ? 768
                                                                               : 1024) /
                                                               (threads * rows_per_block))
    even_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int kWarps = threads / 32;
  static_assert(exact || kWarps <= 1);
  static_assert(!ragged || (!exact && threads >= 16));
  const unsigned rows = static_cast<unsigned>(shape.rows), own = blockIdx.x * rows_per_block + threadIdx.y;
  const typename Op::Row row = op.row(min(own, rows - 1));
  const int rank = static_cast<int>(threadIdx.x);
  const Inside in = ragged ? inside_of<V>(row.input(0), shape.columns) : Inside{0, shape.columns};
  const int first = in.first + rank * V;
  const EvenSpan<V, NV, exact, Op::kEnds> span{first, V * threads, in.end, first + (NV - 1) * V * threads < in.end};
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  Inputs<T, V, NV, Op::kInputs> inputs;
  inputs.load(row, span, ptx::l2_policy(ragged || shape.large));
  RowEnds<Op> ends;
  if constexpr (ragged) ends.load(row, in, rank, shape.columns);
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  const auto constants = even_constants<T, V>(op, span);
  op.fold(state, held, row, span, inputs, constants);
  if constexpr (ragged) ends.fold(op, state, row);
  if constexpr (exact)
    state = op.template merge_even<std::min(threads, 32)>(state, V * NV);
  else
    state = op.merge(state, Lanes{std::min(threads, 32)});
  if constexpr (kWarps > 1) state = merge_even_warps<threads>(op, state, V * NV * 32);
  if (own >= rows) return;
  const auto result = op.finish(state);
  if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
  ColumnSums<F, V, 0> none;
  op.write(row, result, held, span, inputs, constants, none);
  if constexpr (ragged) ends.write(op, row, result);
}

// Hands the kernel of a choice to `use`.
template <class Op, bool ragged, class Use>
void with_even_rows(const RowChoice& c, const Use& use) {
  static constexpr std::span<const EvenRows> kCompiled =
      ragged ? std::span<const EvenRows>(kUnalignedEven) : Op::kTraits.even;
  with_instance<kCompiled>(c, [&]<EvenRows k>() {
    use.template
    operator()<RowKernel::even_rows, even_rows_kernel<Op, Op::kTraits.elements_of_vector(), k.vectors, k.threads,
                                                      even_rows_per_block(k.threads, ragged), k.exact, ragged>>();
  });
}

}  // namespace matmuls
