// Persistent kernel for unaligned rows of an operation with constants (weight, bias).
//
// All rows of a team (the threads that share a row) have the same misalignment, so a thread keeps its columns, and
// loads the constants of these columns once. Edge elements (before the first whole vector and after the last) go one to
// a thread, so vectors need no bounds test. The next row is prefetched to registers.
#pragma once

#include <algorithm>

#include "rows/launch_rows.cuh"

namespace matmuls {

constexpr int kShiftedWarps = 8;  // per block, if a warp or half a warp shares a row
template <class Op>
constexpr int kShiftedThreads = Op::kColumnSums ? 256 : 512;  // per block, if the block shares a row
// Blocks per SM, from the vectors that a thread holds; column sums count like inputs.
template <class Op, int NV, Scope scope>
constexpr int kShiftedBlocks = [] {
  constexpr int held = NV * Op::kInputs * (Op::kColumnSums ? 2 : 1);
  return scope == Scope::block || held > 8 ? 1 : held > 4 ? 2 : held > 2 ? 3 : 4;
}();

// float32 rows compute mean and squares in two passes over registers: the mean is then as accurate as the elements.
template <class T, int V, int NV>
struct ShiftedSpan : EvenSpan<V, NV, false, false> {
  static constexpr bool kOnce = sizeof(T) == 2;
};

template <class Op, int V, int NV, Scope scope>
__global__ void __launch_bounds__(scope == Scope::block ? kShiftedThreads<Op> : 32 * kShiftedWarps,
                                  kShiftedBlocks<Op, NV, scope>)
    shifted_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Row = typename Op::Row;
  constexpr int C = Op::kConstants;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0, teams = scope == Scope::warp ? blockDim.y : 1;
  const int64_t step = team.count() * teams;
  int64_t first = team.index * teams;  // the first of the rows that this block processes together
  // Teams past the last row keep their last inputs and take part in warp operations.
  const auto own = [&](int64_t r) { return r + beside < shape.rows; };
  const auto row_at = [&](int64_t r) { return op.row(own(r) ? r + beside : r); };
  const Inside in = inside_of<V>(row_at(first).input(0), shape.columns);
  const int column = in.first + team.rank * V, apart = team.size * V;
  const ShiftedSpan<T, V, NV> span{{column, apart, in.end, column + (NV - 1) * apart < in.end}};
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
      *to = beside == 0 ? sum : *to + sum;
    };
    for (int t = 0; t < teams; ++t) {
      __syncthreads();  // in the first iteration, also for the constants, which occupied this memory
      if (t != beside) continue;
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

// Launches it. Returns false, launching nothing, if rows are not at a constant distance, if they are so short that most
// threads would be idle or too long for kShiftedThreads, or if the constants do not fit in shared memory. Half warps
// come first, each thread with as much as it can hold, since two rows then share an instruction (layer norm of 577
// bfloat16 columns at 0.82 of a copy, 0.73 with a warp per row). prepare(op, blocks) is called before the launch of an
// operation with column sums.
template <class Op, int N, class Prepare = decltype(kNothingToPrepare)>
bool launch_shifted(Op op, const Rows<N>& rows, const Prepare& prepare = kNothingToPrepare) {
  constexpr int V = 16 / sizeof(typename Op::Storage), K = Op::kInputs;
  constexpr int kFewest = V == 8 ? 8 : 24;  // whole vectors
  const int64_t least = (rows.columns - V + 1) / V,
                most = rows.columns / V;  // whole vectors of a row, depending on its alignment
  if (rows.dims > 1 || least < kFewest || most > kShiftedThreads<Op> * 8 / K) return false;
  const auto go = [&]<int NV, Scope scope>(int64_t threads) {
    constexpr auto kernel = shifted_rows_kernel<Op, V, NV, scope>;
    const int64_t beside = scope == Scope::warp ? kShiftedWarps * 32 / threads : 1;
    const int64_t bytes = std::max(16 * NV * Op::kConstants * threads * beside,
                                   Op::kColumnSums && scope == Scope::warp ? 8 * rows.columns : 0);
    Launch launch(1, dim3(static_cast<unsigned>(threads), static_cast<unsigned>(beside)), bytes);
    int64_t blocks = resident<kernel>(launch.config, 1);
    if (blocks == 0) return false;
    if (scope == Scope::block)
      blocks = std::max<int64_t>(blocks - blocks % V, V);  // all rows of a block have the same misalignment
    blocks = std::min(blocks, ceil_of(rows.count, beside));
    launch.config.gridDim = dim3(static_cast<unsigned>(blocks));
    prepare(op, blocks);
    launch.early();
    launch(kernel, op, shape_of<Op>(rows.count, rows.columns));
    return true;
  };
  const auto fits = [&](int64_t threads, int held) {
    // With float32 column sums warps leave more threads idle than the kernels of rows/launch_rows.cuh. They pay off if
    // at most an eighth is idle.
    const bool full = V == 8 || !Op::kColumnSums || threads > 32 || 8 * most >= 7 * held * threads;
    return full && (held - 1) * threads <= least && most <= held * threads;
  };
  const auto warps = [&]<int... NVs>(int lanes) {
    return ((fits(lanes, NVs) && go.template operator()<NVs, Scope::warp>(lanes)) || ...);
  };
  // The number of threads that leaves the fewest slots empty.
  const auto block = [&]<int... NVs>(int64_t most_threads) {
    int best = 0;
    int64_t threads = 0;
    for (const int held : {NVs...}) {
      const int64_t wanted = ceil_of(ceil_of(most, held), 32) * 32;
      if (wanted > most_threads || !fits(wanted, held) || (best > 0 && held * wanted >= best * threads)) continue;
      best = held, threads = wanted;
    }
    return ((best == NVs && go.template operator()<NVs, Scope::block>(threads)) || ...);
  };
  if constexpr (Op::kColumnSums) {  // for longer rows one small block would fill a multiprocessor's registers
    return most <= (V == 8 ? 512 : 768) &&
           (warps.template operator()<1, 2>(16) || warps.template operator()<2, 3, 4>(32) ||
            block.template operator()<3, 4>(kShiftedThreads<Op>));
  } else if constexpr (K == 2) {
    return warps.template operator()<1, 2, 3, 4>(16) || warps.template operator()<3, 4>(32) ||
           block.template operator()<4, 3>(kShiftedThreads<Op>);
  } else {
    if (warps.template operator()<1, 2, 3, 4, 5, 6, 7, 8>(16) || warps.template operator()<5, 6, 7, 8>(32)) return true;
    if constexpr (V == 8) return block.template operator()<6, 5, 8>(kShiftedThreads<Op>);
    // 352 threads per multiprocessor are too few: layer norm of 8191 columns at 0.75 of a copy, 0.87 with the kernels
    // of rows/launch_rows.cuh.
    return block.template operator()<6, 5>(256) || block.template operator()<4>(256);
  }
}

}  // namespace matmuls
