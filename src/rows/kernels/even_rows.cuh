// Rows that threads share evenly: each has NV whole vectors, known when this is compiled. No branch asks whether a
// vector is there, and addresses are a register and a number: half the instructions of rows/launch_rows.cuh's kernels,
// for which 16-bit layer norm waits (8192 columns: 15 a column against 34, 0.94 of a copy against 0.85).
#pragma once

#include "rows/launch_rows.cuh"

namespace matmuls {

// Rows that a block works on side by side: two warps retire sooner than eight. Of 8 threads, 128 columns, four warps:
// an H200 starts a block each 1.3 ns, and so many blocks of two would take as long as the memory.
template <int threads>
constexpr int kEvenBeside = threads == 8   ? 16
                            : threads < 64 ? 64 / threads
                                           : 1;

// The constants of an even row in a span's columns.
template <class T, int V, class Op, class Columns>
__device__ auto even_constants(const Op& op, const Columns& span) {
  return [&op, span](int c, int i, typename Op::F(&numbers)[V]) {
    Words<T, V> words{};
    if (span.begins(i)) load_words<16>(op.constant(c) + span.column(i), words.at);
    unpack(words, numbers);
  };
}
// The merge of a block's warps, each of `each` columns.
template <int threads, class Op, class State>
__device__ State merge_even_warps(const Op& op, const State& state, int each) {
  constexpr int kWarps = threads / 32;
  __shared__ State warps[kWarps];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = state;
  __syncthreads();
  return op.template merge_even<kWarps>(warps[threadIdx.x % kWarps], each);
}

// A row for each team of `threads`: some lanes of a warp, a warp, or a block. Of a ragged row the numbers beside its
// whole vectors are one more for each thread, of which there are 16 at least. Of an operation it wants two things more:
//   kEnds                         whether a row may see less than its columns
//   merge_even<lanes>(state, each)  the merge of as many states of `each` columns
template <class Op, int V, int NV, int threads, int beside, bool exact, bool ragged>
__global__ void __launch_bounds__(threads* beside, (NV > 4             ? 512
                                                    : ragged && NV > 2 ? 768
                                                                       : 1024) /
                                                       (threads * beside))
    even_row_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int kWarps = threads / 32;
  static_assert(exact || kWarps <= 1);
  static_assert(!ragged || (!exact && threads >= 16));
  const unsigned rows = static_cast<unsigned>(shape.rows), own = blockIdx.x * beside + threadIdx.y;
  const typename Op::Row row = op.row(min(own, rows - 1));
  const int rank = static_cast<int>(threadIdx.x);
  const Inside in = ragged ? inside_of<V>(row.input(0), shape.columns) : Inside{0, shape.columns};
  const int first = in.first + rank * V;
  const EvenSpan<V, NV, exact, Op::kEnds> span{first, V * threads, in.end, first + (NV - 1) * V * threads < in.end};
  ptx::griddepcontrol_launch_dependents();  // and wait here
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

template <int NV, int threads, bool exact, int beside = kEvenBeside<threads>, bool ragged = false, class Op, int N>
void launch_even_rows(const Op& op, const Rows<N>& rows) {
  launch_rows_kernel<even_row_kernel<Op, 16 / sizeof(typename Op::Storage), NV, threads, beside, exact, ragged>>(
      op, dim3(threads, beside), (rows.count + beside - 1) / beside, rows.count, rows.columns);
}

// Rows that do not start or end on 16 bytes, of up to five whole vectors for each of a warp's lanes or four of half
// of them; a block has eight rows or four, since one starts each 1.3 ns. Whether they are.
template <class Op, int N>
bool launch_ragged_warps(const Op& op, const Rows<N>& rows) {
  constexpr int V = 16 / sizeof(typename Op::Storage);
  const int64_t least = (rows.columns - V + 1) / V, most = rows.columns / V;  // vectors of a row
  if (rows.count > INT32_MAX) return false;
  const auto go = [&]<int threads, int NV>() {
    const bool fits = most <= NV * threads && least >= (NV - 1) * threads;
    if (fits) launch_even_rows<NV, threads, false, 128 / threads, true>(op, rows);
    return fits;
  };
  return go.template operator()<16, 1>() || go.template operator()<16, 2>() || go.template operator()<16, 3>() ||
         go.template operator()<16, 4>() || go.template operator()<32, 3>() || go.template operator()<32, 4>() ||
         go.template operator()<32, 5>();
}

// Rows of as many vectors for each of a warp's lanes. Blocks of one warp would start too slowly where rows do not see
// all of their columns. Whether they are.
template <int... NVs, class Op, int N>
bool launch_warps(const Op& op, const Rows<N>& rows) {
  const int64_t held = ceil_of(rows.columns * static_cast<int64_t>(sizeof(typename Op::Storage)), 16 * 32);
  return ((held == NVs && (launch_even_rows<NVs, 32, false>(op, rows), true)) || ...);
}

// Rows of four vectors for each of `most` threads, or of half as many, down to `least`. Whether they are.
template <int least, int most, class Op, int N>
bool launch_even_fours(const Op& op, const Rows<N>& rows) {
  if (rows.columns * sizeof(typename Op::Storage) == 64 * most) return launch_even_rows<4, most, true>(op, rows), true;
  if constexpr (most > least) return launch_even_fours<least, most / 2>(op, rows);
  return false;
}

// Rows of two to three vectors for each of 4, 8, 16 or 32 threads: by twos, or by threads a power of two for all of a
// row's vectors, half of them would have none. 16-bit layer norm with a residual, of 136 and 384 columns at 0.94 and
// 1.05 of a copy for 0.64 and 0.89. Whether they are.
template <class Op, int N>
bool launch_threes(const Op& op, const Rows<N>& rows) {
  const int64_t vectors = rows.columns * sizeof(typename Op::Storage) / 16;
  const auto go = [&]<int threads>() {
    const bool fits = vectors > 2 * threads && vectors <= 3 * threads;
    if (fits) launch_even_rows<3, threads, false>(op, rows);
    return fits;
  };
  return go.template operator()<4>() || go.template operator()<8>() || go.template operator()<16>() ||
         go.template operator()<32>();
}

// Rows that a block's threads share nearly evenly: NV whole vectors each, some of them one less. Few threads that have
// much: 1280 columns of 16 bits are 5 for each of a warp, where fours would leave a third of two warps without any
// (layer norm at 0.99 of a copy for 0.66, softmax at 1.00 for 0.76). The numbers of a ragged row beside its whole
// vectors are one more for each of the first threads.
template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(256, NV* Op::kInputs > 5 ? 3 : 4)
    nearly_even_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  Team<Scope::block> team;
  const typename Op::Row row = op.row(team.index);
  const Inside in = ragged ? inside_of<V>(row.input(0), shape.columns) : Inside{0, shape.columns};
  const int first = in.first + team.rank * V, step = team.size * V;
  const EvenSpan<V, NV, false, Op::kEnds> span{first, step, in.end, first + (NV - 1) * step < in.end};
  ptx::griddepcontrol_launch_dependents();  // and wait here
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

// Whether there are so many threads, of one of NVs vectors each: those that leave the fewest without one.
template <bool ragged, int... NVs, class Op, int N>
bool launch_nearly_even(const Op& op, const Rows<N>& rows) {
  static_assert(!ragged || Op::kConstants == 0);
  constexpr int V = 16 / sizeof(typename Op::Storage);
  const int64_t vectors = rows.columns / V;  // of some ragged rows one less
  int64_t fewest = INT64_MAX;
  int best = 0, best_threads = 0;
  for (const int held : {NVs...}) {
    const int64_t threads = ceil_of(ceil_of(vectors, held), 32) * 32;
    if (threads > 256 || (held - 1) * threads > vectors - ragged || held * threads >= fewest) continue;
    fewest = held * threads, best = held, best_threads = static_cast<int>(threads);
  }
  if (best == 0 || rows.count > INT32_MAX) return false;
  const auto go = [&]<int NV>() {
    if (best == NV)
      launch_rows_kernel<nearly_even_kernel<Op, V, NV, ragged>>(op, dim3(best_threads), rows.count, rows.count,
                                                                rows.columns);
  };
  (go.template operator()<NVs>(), ...);
  return true;
}

}  // namespace matmuls
