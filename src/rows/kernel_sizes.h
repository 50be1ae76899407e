// Sizes that the row kernels are compiled for, in plain C++: the kernels and the host code that configures them
// (rows/candidates.cpp) share them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "rows/traits.h"

namespace matmuls {

// even_rows: rows per block. Two warps retire sooner than eight. With 8 threads per row (128 columns) a block has four
// warps: an H200 starts a block every 1.3 ns, and blocks of two warps would take as long to start as the memory
// transfer. Unaligned rows, for the same reason: four or eight rows.
constexpr int even_rows_per_block(int threads, bool unaligned) {
  return unaligned ? 128 / threads : threads == 8 ? 16 : threads < 64 ? 64 / threads : 1;
}

// cluster: threads per block; vectors per thread at most, of all inputs together; bytes per block for rows in flight.
constexpr int kClusterThreads = 512, kClusterVectors = 8;
constexpr size_t kClusterShared = 220 << 10;
// Rows in shared memory: one is being written, one folded, the others are in flight. vectors: of all inputs together.
constexpr size_t cluster_row_bytes(int vectors) { return size_t{16} * vectors * kClusterThreads; }
constexpr int cluster_stages(int vectors) {
  return std::min(4, static_cast<int>(kClusterShared / cluster_row_bytes(vectors)));
}

// two_pass: threads per block; bytes of a part, two vectors per thread.
constexpr int kTwoPassThreads = 512;
constexpr int64_t kTwoPassPartBytes = int64_t{32} * kTwoPassThreads;

// persistent_unaligned: warps per block, if a warp or half a warp shares a row; threads per block, if it shares a row.
constexpr int kUnalignedWarps = 8;
constexpr int persistent_unaligned_threads(bool column_sums) { return column_sums ? 256 : 512; }

// staged, direct: warps per block, each of which has its own rows and waits for no other; tiles per warp: one being
// processed, the next in flight.
constexpr int kTileWarps = 4;
constexpr int kTileStages = 2;
// staged, direct: the most columns. Float32 tiles have few elements per lane; longer rows are as fast with other
// kernels, and gradients faster. limit: of the operation.
constexpr int staged_columns(const RowTraits& t, int limit) {
  if (t.column_sums) return t.element == 4 ? 416 : 608;
  if (t.element == 4) return std::min(limit, t.inputs == 1 || t.constants > 0 ? 1024 : 80);
  // Layer norm of 257 to 577 columns: 1.06 times as fast by persistent_unaligned.
  if (t.constants == 2 && t.inputs == 1) return std::min(limit, 208);
  return std::min(limit, t.constants > 0 ? 608 : t.inputs == 1 ? 1056 : 800);
}
// Rows with any mask.
constexpr int kStagedMaskedColumns = 800;

// norm_backward_stream, by bytes of an element. float32 rows hold half as many elements: one block of twice the
// threads, as measured on an H200.
template <int element>
struct StreamPlan {
  static constexpr int kVectors = 16 / element;  // elements of a vector
  static constexpr int kThreads = element == 4 ? 512 : 256, kWarps = kThreads / 32;
  static constexpr int kBlocks = 512 / kThreads;  // per multiprocessor
  static constexpr int kHeld = 4;                 // vectors of each input per thread
  static constexpr int kStages = 3;               // rows in shared memory
  static constexpr int kPhases = 4;               // rows whose sums other blocks may still have to read
  static constexpr int kPart = kThreads * kHeld;  // vectors of a row per block
  static constexpr int kBytes = 16 * kPart * (1 + 2 * kStages);
};
constexpr int kMostStreamBlocks = 64;  // that share a row: a lane reads two messages

}  // namespace matmuls
