// Runs a row operation (softmax, the norms, their gradients) on the GPU: selects the general row kernel and its
// configuration, and launches it.
//
// The threads that share a row (rows/team.cuh) each load their part of it as 16-byte vectors, fold it into a small
// state, merge their states and write their part of the result: one read and one write of memory. The kernels are in
// rows/kernels/row_kernels.cuh:
//
//   one row per block or warp (row_kernel)      many small blocks hide the latency of memory
//   persistent (walking_kernel)                 the grid loops over the rows, two to four of them in flight in shared
//                                               memory: for sums over the rows, constants that are best kept, and rows
//                                               that fill an SM
//   reread (long_rows_kernel)                   a row too long for registers and shared memory is read twice
//
// An operation is a struct that says what to fold, how states merge and what to write; rows/softmax_backward.cu has the
// simplest. Specialized kernels: rows/kernels/even_rows.cuh, rows/kernels/two_pass.cuh, rows/kernels/cluster.cuh,
// rows/kernels/persistent_unaligned.cuh and rows/kernels/staged.cuh.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <bit>

#include "glue/rows.h"
#include "gpu/launch.cuh"
#include "rows/kernels/cluster.cuh"
#include "rows/kernels/row_kernels.cuh"
#include "rows/row_index.cuh"

namespace matmuls {

enum class Way { row, walk, passes };
struct RowConfig {
  Way way;
  Scope scope;
  int vectors;  // per thread
  int threads;  // of a block, per row
  int beside;   // rows that a block processes at the same time
  int ranks;    // blocks of a cluster
};

// The number of vectors per thread of the compiled warp kernels: 1, 2, 3 or `most`.
constexpr int compiled_vectors(int vectors, int most) {
  for (const int held : {1, 2, 3})
    if (vectors <= held && held < most) return held;
  return most;
}

template <class Op>
constexpr bool kFewThreads =
    Op::kConstants == 1 && !Op::kColumnSums && sizeof(typename Op::Storage) == 2 && Op::kLongVectors > Op::kVectors;

// True if the threads of a cluster always hold kLongVectors. With two constants, a row of 8 vectors per thread fills
// shared memory and needs half the blocks.
template <class Op>
constexpr bool kLongClusters = Op::kConstants == 2 || kFewThreads<Op>;

// True if a block's threads may hold three vectors instead of four, where a third of the four would be idle. Gradient
// of 1032, 1152 and 1280 bfloat16 columns: 0.79, 0.91 and 0.93 of the speed of a copy; 0.69, 0.77 and 0.85 with four.
template <class Op, int V, bool ragged>
constexpr bool kThrees = V > 1 && !ragged && Op::kColumnSums && Op::kVectors == 4;

// How a row is divided among threads. Few threads with many vectors each need the fewest instructions per column.
template <class Op, int V, bool ragged>
RowConfig configure(int64_t columns) {
  const auto power = [](int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); };
  constexpr int most = V == 1 ? 4 : Op::kVectors;
  constexpr bool walks = kWalks<Op, ragged>;
  const int64_t vectors = ceil_of(columns, V) + (ragged ? 1 : 0);
  int64_t threads = ceil_of(ceil_of(vectors, most), 32) * 32;
  if (threads == 32) {
    // At least 4 lanes share a row of at least 4 vectors, so that they access 64 contiguous bytes.
    const int lanes = std::max(power(ceil_of(vectors, most)), std::min(4, power(vectors)));
    const int held = compiled_vectors(static_cast<int>(ceil_of(vectors, lanes)), most);
    return {walks ? Way::walk : Way::row, Scope::warp, held, lanes, (walks ? 256 : 64) / lanes, 1};
  }
  if (ragged && !walks) threads = ceil_of(ceil_of(columns / V, most), 32) * 32;  // for the whole vectors only
  const bool keeps = walks || (V > 1 && threads > Op::kRowMost + (ragged ? 32 : 0));
  if (threads <= (keeps ? kMostWalkers<Op, Scope::block, ragged> : kRowThreads<Scope::block>)) {
    if (kThrees<Op, V, ragged> && 100 * vectors < 68 * most * threads)
      return {Way::walk, Scope::block, 3, static_cast<int>(ceil_of(ceil_of(vectors, 3), 32) * 32), 1, 1};
    return {keeps ? Way::walk : Way::row, Scope::block, most, static_cast<int>(threads), 1, 1};
  }
  if (V > 1 && has_sm90_code()) {
    // 16-bit rows with one constant: few threads with many vectors each reach 0.90 to 0.92 of a copy at 262144 columns.
    if (kFewThreads<Op> && ceil_of(vectors, Op::kLongVectors) <= kMaxRanks * 256) {
      const int64_t all = ceil_of(vectors, Op::kLongVectors);
      const int ranks = std::clamp(power(ceil_of(all, 256)), 2, kMaxRanks);
      return {Way::walk, Scope::cluster, Op::kLongVectors, static_cast<int>(ceil_of(ceil_of(all, ranks), 32) * 32),
              1,         ranks};
    }
    // With kFewThreads, a row that was rejected above has too many vectors for fewer vectors per thread.
    static_assert(!kFewThreads<Op> || 256 * Op::kLongVectors >= Op::kMostThreads * Op::kVectors);
    for (const int held : {kLongClusters<Op> ? Op::kLongVectors : most, Op::kLongVectors}) {
      const int64_t all = ceil_of(vectors, held);
      if (all > kMaxRanks * Op::kMostThreads) continue;
      const int ranks = std::clamp(power(ceil_of(all, Op::kMostThreads)), 2, kMaxRanks);
      return {Way::walk, Scope::cluster, held, static_cast<int>(ceil_of(ceil_of(all, ranks), 32) * 32), 1, ranks};
    }
  }
  return {Way::passes, Scope::block, most, 256, 1, 1};
}

// Shared memory of a persistent block: constants, one row of each of its teams, merging.
template <class Op, int V, int NV, Scope scope, bool ragged>
struct WalkBytes {
  int64_t constants, row;
  int threads;
  static constexpr int64_t kMerging = (4 * kMaxRanks + 64) * (sizeof(typename Op::State) + 8) + 256;

  explicit WalkBytes(const RowConfig& c) {
    constexpr int64_t word = sizeof(Words<typename Op::Storage, V>);
    constants = word * NV * Op::kConstants * c.threads * (kOwnConstants<scope, ragged> ? c.beside : 1);
    row = V > 1 ? (word * NV * Op::kInputs + (Op::kNumber ? sizeof(typename Op::F) : 0)) * c.threads * c.beside : 0;
    threads = c.threads * c.beside;
  }
  // Rows in flight: as many as leave room for the blocks that an SM should run, at least two, at most four.
  int stages() const {
    if (row == 0) return 1;
    const DeviceLimits& limits = device_limits();
    const bool few = scope == Scope::cluster && kFewThreads<Op> && NV == Op::kLongVectors;
    for (int blocks = few ? 1 : std::max(1, (Op::kThreadsPerSm + threads / 2) / threads);; --blocks) {
      const int64_t mine =
          std::min(limits.shared_per_multiprocessor / blocks - 1024, limits.shared_per_block) - kMerging - constants;
      const auto fit = static_cast<int>(std::max<int64_t>(mine, 0) / row);
      if (fit >= 2 || blocks == 1) return std::min(fit, 4);
    }
  }
};

template <class Op>
RowShape shape_of(int64_t rows, int64_t columns) {
  const int64_t bytes = rows * columns * Op::kInputs * static_cast<int64_t>(sizeof(typename Op::Storage));
  return {rows, static_cast<int>(columns), bytes > device_limits().l2};
}

// Returns false, launching nothing, if the GPU has no room for a block or cluster. prepare(op, teams) is called before
// the launch of an operation with column sums.
template <class Op, int V, int NV, Scope scope, bool ragged, class Prepare>
bool launch_walking(Op op, const RowConfig& c, int stages, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr auto kernel = walking_kernel<Op, V, NV, scope, ragged>;
  const WalkBytes<Op, V, NV, scope, ragged> bytes(c);
  Launch launch(c.ranks, dim3(c.threads, c.beside), bytes.constants + bytes.row * stages);
  if constexpr (scope == Scope::cluster) launch.in_clusters(c.ranks);
  const int64_t needed = (rows + c.beside - 1) / c.beside;  // blocks or clusters that give each team one row
  int64_t blocks = resident<kernel>(launch.config, c.ranks);
  if (blocks == 0) return false;
  // All rows of a team then have the same misalignment, so each thread keeps the same columns.
  if (ragged && c.beside < V && blocks > V) blocks -= blocks % V;
  blocks = std::min(blocks, needed);
  launch.config.gridDim = dim3(static_cast<unsigned>(blocks * c.ranks));
  prepare(op, kAddsTeams<V, scope, ragged> ? blocks : blocks * c.beside);
  // With at least 128 rows per team, teams with four rows more than others cost at most 3 %.
  const bool fours = rows >= 128 * blocks;
  launch(kernel, op, WalkShape{shape_of<Op>(rows, columns), stages, fours});
  return true;
}

// Launches a cluster per row, for rows of more than 2048 vectors. Uses the fewest blocks per row that have room for it:
// each thread then holds five to eight vectors, or three to four of each of two inputs.
template <class Op, int V, bool ragged>
bool launch_wide(const Op& op, int64_t rows, int64_t columns) {
  constexpr int kMost = kWideVectors / Op::kInputs;
  const int64_t vectors = columns / V;
  int ranks = 1;
  while (ranks * kWideThreads * kMost < vectors) ranks *= 2;
  if (ranks > kMaxRanks) return false;
  const auto go = [&]<int NV>() {
    constexpr auto kernel = wide_row_kernel<Op, V, NV, ragged>;
    constexpr int vectors_of_row = NV * Op::kInputs;
    Launch launch(ranks, kWideThreads, wide_stages(vectors_of_row) * wide_row_bytes(vectors_of_row));
    launch.in_clusters(ranks);
    const int64_t clusters = std::min<int64_t>(resident<kernel>(launch.config, ranks), rows);
    if (clusters == 0) return false;
    launch.config.gridDim = dim3(static_cast<unsigned>(clusters * ranks));
    launch(kernel, op, shape_of<Op>(rows, columns));
    return true;
  };
  const auto held = (vectors + ranks * kWideThreads - 1) / (ranks * kWideThreads);
  if constexpr (kMost == 4) {
    return held == 3 ? go.template operator()<3>() : go.template operator()<4>();
  } else {
    switch (held) {
      case 5: return go.template operator()<5>();
      case 6: return go.template operator()<6>();
      case 7: return go.template operator()<7>();
      default: return go.template operator()<8>();
    }
  }
}

// Launches a cluster per unaligned row of more than 2048 vectors, for operations without constants. Returns false,
// launching nothing, for shorter rows or if the GPU cannot run the clusters.
template <class Op>
bool launch_wide_ragged(const Op& op, int64_t rows, int64_t columns) {
  constexpr int V = 16 / sizeof(typename Op::Storage);
  return columns / V > 2048 && has_sm90_code() && launch_wide<Op, V, true>(op, rows, columns);
}

template <auto kernel, class Op>
void launch_rows_kernel(const Op& op, dim3 threads, int64_t blocks, int64_t rows, int64_t columns) {
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX)));
  launch_early(kernel, grid, threads, op, shape_of<Op>(rows, columns));
}

template <int V, bool ragged, class Op, class Prepare>
void launch_vectors(const Op& op, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr int kMost = V == 1 ? 4 : Op::kVectors;
  const RowConfig c = configure<Op, V, ragged>(columns);
  const auto go = [&]<int NV, Scope scope>() {
    if constexpr (scope != Scope::cluster && !kWalks<Op, ragged> && !kLong<Op>) {
      if (c.way == Way::row)
        return launch_rows_kernel<row_kernel<Op, V, NV, scope, ragged>>(
            op, dim3(c.threads, c.beside), (rows + c.beside - 1) / c.beside, rows, columns);
    }
    if constexpr (scope == Scope::cluster && !ragged && kWide<Op, V>) {
      if (launch_wide<Op, V, false>(op, rows, columns)) return;
    }
    if constexpr (scope == Scope::cluster || kWalks<Op, ragged> ||
                  (scope == Scope::block && (Op::kConstants > 0 || kLong<Op>))) {
      const int stages = c.way == Way::walk ? WalkBytes<Op, V, NV, scope, ragged>(c).stages() : 0;
      if (stages > 0 && launch_walking<Op, V, NV, scope, ragged>(op, c, stages, rows, columns, prepare)) return;
    }
    launch_rows_kernel<long_rows_kernel<Op, V, kMost, ragged>>(op, dim3(256), rows, rows, columns);
  };
  if constexpr (kThrees<Op, V, ragged>)
    if (c.scope == Scope::block && c.vectors == 3) return go.template operator()<3, Scope::block>();
  if (c.scope == Scope::block) return go.template operator()<kMost, Scope::block>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster) {
      if constexpr (!kLongClusters<Op>)
        if (c.vectors <= kMost) return go.template operator()<kMost, Scope::cluster>();
      return go.template operator()<Op::kLongVectors, Scope::cluster>();
    }
    if constexpr (!ragged) {
      const auto warps = [&]<int NV>() { go.template operator()<compiled_vectors(NV, kMost), Scope::warp>(); };
      switch (c.vectors) {
        case 1: return warps.template operator()<1>();
        case 2: return warps.template operator()<2>();
        case 3: return warps.template operator()<3>();
      }
    }
  }
  go.template operator()<kMost, Scope::warp>();  // ragged: one kernel for all short rows
}

// Which vector accesses the first P tensors of a row allow.
//
//   vectors: columns are contiguous and each row has the same misalignment (address modulo 16) in all tensors
//   aligned: that misalignment is 0
//   whole:   aligned, and the row's length is a multiple of 16 bytes
struct Alignment {
  bool vectors, aligned, whole;
};
template <class T, int N, size_t P>
Alignment alignment_of(const Rows<N>& rows, const std::array<const void*, P>& pointers) {
  const auto off = [&](int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)) % 16 != 0; };
  const auto address = [&](int t) { return reinterpret_cast<intptr_t>(pointers[t]); };
  bool vectors = true, aligned = address(0) % 16 == 0;
  for (size_t t = 0; t < P; ++t) {
    vectors &= rows.column_strides[t] == 1 && (address(t) - address(0)) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) {
      vectors &= !off(rows.strides[t][d] - rows.strides[0][d]);
      aligned &= !off(rows.strides[0][d]);
    }
  }
  return {vectors, vectors && aligned, vectors && aligned && !off(rows.columns)};
}

// A thread's next column, up to 8192 ahead, must fit an int.
inline void check_columns(int64_t columns) {
  TORCH_CHECK(columns < INT32_MAX - (1 << 14), "expected rows of fewer than 2^31 columns, got ", columns);
}

// Runs an operation over its rows. pointers: the tensors accessed as vectors. prepare(op, teams) is called before the
// launch of an operation with column sums if each thread keeps its columns from row to row.
constexpr auto kNothingToPrepare = [](auto&&...) {};
template <class Op, int N, size_t P, class Prepare = decltype(kNothingToPrepare)>
void launch_rows(const Op& op, const Rows<N>& rows, const std::array<const void*, P>& pointers,
                 const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  constexpr int V = 16 / sizeof(T);
  check_columns(rows.columns);
  const auto a = alignment_of<T>(rows, pointers);
  if (a.whole || Op::kWholeRows) return launch_vectors<V, false>(op, rows.count, rows.columns, prepare);
  if constexpr (!Op::kWholeRows) {
    if (!a.vectors) return launch_vectors<1, false>(op, rows.count, rows.columns, prepare);
    launch_vectors<V, true>(op, rows.count, rows.columns, [&](Op& o, int64_t teams) {
      if (a.aligned || (rows.dims <= 1 && (teams % V == 0 || teams >= rows.count))) prepare(o, teams);
    });
  }
}

}  // namespace matmuls
