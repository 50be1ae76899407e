// One-pass kernels for rows whose vectors divide evenly, or nearly so, among the threads: each thread holds NV whole
// vectors, a compile-time constant.
//
// No branch tests whether a vector exists, and addresses are a register plus an immediate. That halves the instructions
// of row_kernel, which limit 16-bit layer norm (8192 columns: 15 instructions per column against 34, 0.94 of a copy
// against 0.85).
#pragma once

#include "rows/launch_rows.cuh"

namespace matmuls {

// Rows per block: two warps retire sooner than eight. With 8 threads per row (128 columns) a block has four warps: an
// H200 starts a block every 1.3 ns, and blocks of two warps would take as long to start as the memory transfer.
template <int threads>
constexpr int kEvenBeside = threads == 8   ? 16
                            : threads < 64 ? 64 / threads
                                           : 1;

// Reads the constants in a span's columns.
template <class T, int V, class Op, class Columns>
__device__ auto even_constants(const Op& op, const Columns& span) {
  return [&op, span](int c, int i, typename Op::F(&numbers)[V]) {
    Words<T, V> words{};
    if (span.begins(i)) load_words<16>(op.constant(c) + span.column(i), words.at);
    unpack(words, numbers);
  };
}
// Merges the states of a block's warps, each of `each` columns.
template <int threads, class Op, class State>
__device__ State merge_even_warps(const Op& op, const State& state, int each) {
  constexpr int kWarps = threads / 32;
  __shared__ State warps[kWarps];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = state;
  __syncthreads();
  return op.template merge_even<kWarps>(warps[threadIdx.x % kWarps], each);
}

// One row for each `threads` threads: some lanes of a warp, a warp, or a block. The edge elements of an unaligned row
// go one each to the threads, at least 16. Beyond the interface in row_kernels.cuh the operation provides
//
//   kEnds                           whether a row may see fewer than its columns
//   merge_even<lanes>(state, each)  the merge of `lanes` states of `each` columns
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

template <int NV, int threads, bool exact, int beside = kEvenBeside<threads>, bool ragged = false, class Op, int N>
void launch_even_rows(const Op& op, const Rows<N>& rows) {
  launch_rows_kernel<even_row_kernel<Op, 16 / sizeof(typename Op::Storage), NV, threads, beside, exact, ragged>>(
      op, dim3(threads, beside), (rows.count + beside - 1) / beside, rows.count, rows.columns);
}

// Launches even_row_kernel for unaligned rows of up to five whole vectors per lane of a warp, or four per lane of half
// a warp. A block has four or eight rows, since one starts every 1.3 ns. Returns false, launching nothing, for other
// rows.
template <class Op, int N>
bool launch_ragged_warps(const Op& op, const Rows<N>& rows) {
  constexpr int V = 16 / sizeof(typename Op::Storage);
  const int64_t least = (rows.columns - V + 1) / V,
                most = rows.columns / V;  // whole vectors of a row, depending on its alignment
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

// Launches one warp per row if a row has one of NVs vectors per lane. A block has two rows: blocks of one warp would
// start too slowly where rows do not see all of their columns. Returns false, launching nothing, for other rows.
template <int... NVs, class Op, int N>
bool launch_warps(const Op& op, const Rows<N>& rows) {
  const int64_t held = ceil_of(rows.columns * static_cast<int64_t>(sizeof(typename Op::Storage)), 16 * 32);
  return ((held == NVs && (launch_even_rows<NVs, 32, false>(op, rows), true)) || ...);
}

// Launches even_row_kernel if a row has exactly four vectors for each of `most` threads, or of most / 2, and so on down
// to `least`. Returns false, launching nothing, for other rows.
template <int least, int most, class Op, int N>
bool launch_even_fours(const Op& op, const Rows<N>& rows) {
  if (rows.columns * sizeof(typename Op::Storage) == 64 * most) return launch_even_rows<4, most, true>(op, rows), true;
  if constexpr (most > least) return launch_even_fours<least, most / 2>(op, rows);
  return false;
}

// Launches even_row_kernel for rows of two to three vectors per thread, for 4, 8, 16 or 32 threads. With two vectors
// per thread, or with a power of two of threads for all vectors, half of the threads would be idle: 16-bit layer norm
// with a residual, of 136 and 384 columns, reaches 0.94 and 1.05 of a copy, otherwise 0.64 and 0.89. Returns false,
// launching nothing, for other rows.
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

// Selects the number of vectors per thread, of NVs, that leaves the fewest idle slots, and launches. Returns false,
// launching nothing, if none fits.
template <bool ragged, int... NVs, class Op, int N>
bool launch_nearly_even(const Op& op, const Rows<N>& rows) {
  static_assert(!ragged || Op::kConstants == 0);
  constexpr int V = 16 / sizeof(typename Op::Storage);
  const int64_t vectors = rows.columns / V;  // some unaligned rows have one fewer
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
