// two_pass: a block or cluster per row, held in registers and shared memory of small blocks, so that two or
// three blocks run per SM and one reads while another writes. Float32 softmax of 30522 columns reaches 0.98 of a copy,
// 0.88 with one block per SM (rows/kernels/cluster.cuh).
//
// What registers and shared memory do not hold of a row is read twice, the second time from the L2. The edge elements
// of unaligned rows go one each to the first threads.
#pragma once

#include "rows/device/operation.cuh"
#include "rows/kernel_sizes.h"

namespace matmuls {

// A row's whole vectors are divided into parts of kTwoPassPartBytes per block:
//
//   parts    0 .. kept-1 | kept .. held-1 | held .. parts-1 | remainder (less than a part)
//   held in  registers   | shared memory  | read twice      | shared memory
template <class Op, int V, int kept, int blocks, Scope scope>
__global__ void __launch_bounds__(kTwoPassThreads, blocks)
    two_pass_kernel(const __grid_constant__ Op op, const HeldShape shape) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::Storage;
  constexpr int K = Op::kInputs, each = 2 / K;
  using Part = Inputs<T, V, each, K>;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<scope> team;
  const int step = V * (scope == Scope::block ? kTwoPassThreads : team.size);
  const typename Op::Row row = op.row(team.index);
  const Inside in = inside_of<V>(row.input(0), shape.columns);
  const int first_column = in.first + team.rank * V, parts = (in.end - in.first) / (each * step);
  const int held = min(kept + shape.waiting, parts);  // in registers and shared memory
  const auto span = [&](int part) {
    return EvenPart<V, each, Op::kEnds>{{first_column + part * each * step, step, in.end}};
  };
  const Span<V, false> rest{first_column + parts * each * step, step, in.end};
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared) + threadIdx.x;
  const auto place = [&](int part) {
    return Ahead<T, V, each, K>{{slots + (part - kept) * each * K * kTwoPassThreads, kTwoPassThreads}};
  };
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  const ptx::L2Policy policy = ptx::l2_policy(true);
  Part first[kept];
#pragma unroll
  for (int part = 0; part < kept; ++part) first[part].load(row, span(part), policy);
#pragma unroll 1
  for (int part = kept; part < held; ++part) place(part).fetch_all(row, span(part), policy);
  Odd<K> no_odd;
  place(held).fetch(row, rest, no_odd);
  ptx::cp_async_commit_group();
  RowEnds<Op> ends;
  ends.load(row, in, team.rank, shape.columns);

  typename Op::State state = Op::identity();
  typename Op::template Held<V, each> none;
  const auto constants = [](auto&&...) {};
  const auto fold = [&](const auto& span, const auto& inputs) { op.fold(state, none, row, span, inputs, constants); };
#pragma unroll
  for (int part = 0; part < kept; ++part) fold(span(part), first[part]);
  ends.fold(op, state, row);
#pragma unroll 1
  for (int part = held; part < parts; ++part) {
    Part inputs;
    inputs.load(row, span(part), policy);
    fold(span(part), inputs);
  }
  ptx::cp_async_wait_group<0>();
#pragma unroll 1
  for (int part = kept; part < held; ++part) fold(span(part), place(part));
  fold(rest, place(held));
  const auto result = op.finish(team.merge(op, state));

  ColumnSums<typename Op::F, V, 0> no_sums;
  const auto write = [&](const auto& span, const auto& inputs) {
    op.write(row, result, none, span, inputs, constants, no_sums);
  };
#pragma unroll
  for (int part = 0; part < kept; ++part) {
    first[part].forget_numbers();
    write(span(part), first[part]);
  }
#pragma unroll 1
  for (int part = kept; part < held; ++part) write(span(part), place(part));
#pragma unroll 1
  for (int part = held; part < parts; ++part) {
    Part inputs;
    inputs.load(row, span(part), ptx::l2_policy(false));  // last use: no need to stay in the L2
    write(span(part), inputs);
  }
  write(rest, place(held));
  ends.write(op, row, result);
#endif
}

// Hands the kernel of a choice, of an operation without constants, to `use`.
template <class Op, class Use>
void with_two_pass(const RowChoice& c, const Use& use) {
  static_assert(Op::kConstants == 0 && !Op::kColumnSums && Op::kTraits.keeps_nothing);
  static constexpr auto kCompiled = two_pass_kernels(Op::kTraits);
  with_instance<kCompiled>(c, [&]<TwoPass k>() {
    use.template
    operator()<RowKernel::two_pass,
               two_pass_kernel<Op, Op::kTraits.elements_of_vector(), k.kept_parts, k.blocks_per_sm, k.scope>>();
  });
}

}  // namespace matmuls
