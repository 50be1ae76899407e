// Kernel for long rows: a block or cluster per row, held in registers and shared memory of small blocks, so that two or
// three blocks run per SM and one reads while another writes. Float32 softmax of 30522 columns reaches 0.98 of a copy,
// 0.88 with one block per SM (rows/kernels/cluster.cuh).
//
// What registers and shared memory do not hold of a row is read twice, the second time from the L2. The edge elements
// of unaligned rows go one each to the first threads.
#pragma once

#include "rows/launch_rows.cuh"

namespace matmuls {

constexpr int kHeldThreads = 512;
constexpr int64_t kHeldPartBytes = int64_t{32} * kHeldThreads;  // two vectors per thread
// Bytes of a row that one block holds, at most: about its registers and its half of the shared memory.
template <class Op>
constexpr int64_t kHeldMostBytes = (Op::kInputs == 1 && sizeof(typename Op::Storage) == 4 ? 170 : 150) << 10;

struct HeldShape : RowShape {
  int waiting;  // parts of a row that fit in a block's shared memory, besides the remainder
};

// A row's whole vectors are divided into parts of kHeldPartBytes per block:
//
//   parts    0 .. kept-1 | kept .. held-1 | held .. parts-1 | remainder (less than a part)
//   held in  registers   | shared memory  | read twice      | shared memory
template <class Op, int V, int kept, int blocks, Scope scope>
__global__ void __launch_bounds__(kHeldThreads, blocks)
    held_rows_kernel(const __grid_constant__ Op op, const HeldShape shape) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::Storage;
  constexpr int K = Op::kInputs, each = 2 / K;
  using Part = Inputs<T, V, each, K>;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<scope> team;
  const int step = V * (scope == Scope::block ? kHeldThreads : team.size);
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
    return Ahead<T, V, each, K>{{slots + (part - kept) * each * K * kHeldThreads, kHeldThreads}};
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
  ptx::end_group_ahead();
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
  ptx::wait_ahead<0>();
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

// Number of blocks that hold a row, a power of two.
template <class Op>
int blocks_that_hold(int64_t columns) {
  const int64_t bytes = columns * Op::kInputs * static_cast<int64_t>(sizeof(typename Op::Storage));
  int ranks = 1;
  while (ranks * kHeldMostBytes<Op> < bytes) ranks *= 2;
  return ranks;
}

// Launches it for rows of at least 16 KiB per block, of an operation without constants. Returns false, launching
// nothing, if the GPU is not Hopper or newer, or if blocks do not fit.
template <class Op, int N>
bool launch_held_rows(const Op& op, const Rows<N>& rows) {
  using T = typename Op::Storage;
  static_assert(Op::kConstants == 0 && !Op::kColumnSums && std::is_empty_v<typename Op::template Held<1, 1>>);
  constexpr int K = Op::kInputs, V = 16 / sizeof(T);
  const int ranks = blocks_that_hold<Op>(rows.columns);
  const auto parts = [&](int64_t columns) {
    return columns * K * static_cast<int64_t>(sizeof(T)) / (ranks * kHeldPartBytes);
  };
  // Whole parts of a row per block, least and most: they depend on where the row starts.
  const int64_t least = parts(rows.columns - 2 * V), most = parts(rows.columns);
  if (ranks > kMaxRanks || rows.count > INT32_MAX / ranks || !has_sm90_code()) return false;
  const auto go = [&]<int kept, int blocks, Scope scope>() {
    constexpr auto kernel = held_rows_kernel<Op, V, kept, blocks, scope>;
    // Leaves room for the kernel's static shared memory. With 3 KiB gradients hold a part fewer: 43000 bfloat16 columns
    // at 0.95 of a copy, 0.93 otherwise.
    const int64_t room =
        device_limits().shared_per_multiprocessor / blocks - (K == 1 && scope == Scope::block ? 2048 : 3072);
    // No more than needed: the rest serves as L1, through which registers are filled (50257 bfloat16 columns at 0.99 of
    // a copy, 0.80 if all is taken).
    const int64_t slots = std::min(room / kHeldPartBytes, most + 1 - kept);
    if (least < kept || slots < 1) return false;
    Launch launch(static_cast<unsigned>(rows.count * ranks), kHeldThreads, slots * kHeldPartBytes);
    if (scope == Scope::cluster) launch.in_clusters(ranks);
    launch.early();
    if (resident<kernel>(launch.config, ranks) == 0) return false;
    launch(kernel, op, HeldShape{shape_of<Op>(rows.count, rows.columns), static_cast<int>(slots - 1)});
    return true;
  };
  // Clusters with three parts in registers, not four: the rest of the row then arrives at once. Gradients of 151643
  // bfloat16 columns at 0.91 of a copy against 0.65, softmax at 0.90 against 0.79. Float32 softmax is faster with four.
  constexpr int kept = K == 1 && sizeof(T) == 4 ? 4 : 3;
  if (ranks > 1) return go.template operator()<kept, 2, Scope::cluster>();
  if constexpr (K == 2) {
    return least >= 4 && go.template operator()<3, 2, Scope::block>();
  } else {
    return least < 4 ? go.template operator()<1, 3, Scope::block>() : go.template operator()<4, 2, Scope::block>();
  }
}

}  // namespace matmuls
