// Sizes that the row kernels are compiled for, in plain C++: the kernels and the host code that configures them
// (rows/candidates.cpp) share them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "rows/traits.h"

namespace matmuls {

// even_rows: rows per block. Two warps retire sooner than eight. With 8 threads per row (128 columns) a block has four
// warps: an H200 starts a block every 1.3 ns, and blocks of two warps would take as long to start as the memory
// transfer. Unaligned rows, for the same reason: four or eight rows.
constexpr int even_rows_per_block(int threads, bool unaligned) {
  return unaligned ? 128 / threads : threads == 8 ? 16 : threads < 64 ? 64 / threads : 1;
}

// even_rows of unaligned rows: whole vectors for a warp or half a warp.
constexpr EvenRows kUnalignedEven[] = {{1, 16, false}, {2, 16, false}, {3, 16, false}, {4, 16, false},
                                       {3, 32, false}, {4, 32, false}, {5, 32, false}};

// one_pass, persistent: all numbers of vectors, of which RowTraits::has_vectors says which are compiled.
constexpr int kGeneralVectors[] = {1, 2, 3, 4, 8};

// cluster: threads per block; vectors per thread at most, of all inputs together; bytes per block for rows in flight.
constexpr int kClusterThreads = 512, kClusterVectors = 8;
constexpr size_t kClusterShared = 220 << 10;
// Rows in shared memory: one is being written, one folded, the others are in flight. vectors: of all inputs together.
constexpr size_t cluster_row_bytes(int vectors) { return size_t{16} * vectors * kClusterThreads; }
constexpr int cluster_stages(int vectors) {
  return std::min(4, static_cast<int>(kClusterShared / cluster_row_bytes(vectors)));
}

constexpr int kClusterOfOne[] = {5, 6, 7, 8}, kClusterOfTwo[] = {3, 4};
// cluster: vectors.
constexpr std::span<const int> cluster_vectors(const RowTraits& t) {
  return t.inputs == 2 ? std::span<const int>(kClusterOfTwo) : std::span<const int>(kClusterOfOne);
}

// two_pass: parts in registers, blocks per multiprocessor.
struct TwoPass {
  int kept_parts, blocks_per_sm;
  Scope scope;
};
constexpr TwoPass kTwoPassOfTwo[] = {{3, 2, Scope::cluster}, {3, 2, Scope::block}};
constexpr TwoPass kTwoPass2[] = {{3, 2, Scope::cluster}, {1, 3, Scope::block}, {4, 2, Scope::block}};
constexpr TwoPass kTwoPass4[] = {{4, 2, Scope::cluster}, {1, 3, Scope::block}, {4, 2, Scope::block}};
constexpr std::span<const TwoPass> two_pass_kernels(const RowTraits& t) {
  if (t.inputs == 2) return kTwoPassOfTwo;
  return t.element == 4 ? std::span<const TwoPass>(kTwoPass4) : std::span<const TwoPass>(kTwoPass2);
}
// two_pass: threads per block; bytes of a part, two vectors per thread.
constexpr int kTwoPassThreads = 512;
constexpr int64_t kTwoPassPartBytes = int64_t{32} * kTwoPassThreads;

// persistent_unaligned: warps per block, if a warp or half a warp shares a row; threads per block, if it shares a row.
constexpr int kUnalignedWarps = 8;
constexpr int persistent_unaligned_threads(bool column_sums) { return column_sums ? 256 : 512; }
constexpr int kOneToFour[] = {1, 2, 3, 4}, kOneToEight[] = {1, 2, 3, 4, 5, 6, 7, 8};
constexpr int kUnalignedBlock2[] = {5, 6, 8}, kUnalignedBlock4[] = {4, 5, 6};
// persistent_unaligned: vectors.
constexpr std::span<const int> persistent_unaligned_vectors(const RowTraits& t, Scope scope) {
  const bool warp = scope == Scope::warp;
  if (t.column_sums || t.inputs == 2)
    return warp ? std::span<const int>(kOneToFour) : std::span<const int>(kThreeToFour);
  if (warp) return kOneToEight;
  return t.element == 2 ? std::span<const int>(kUnalignedBlock2) : std::span<const int>(kUnalignedBlock4);
}

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
// staged: lanes per row, elements per lane.
struct StagedRow {
  int lanes, held;
};
constexpr StagedRow kStaged[] = {{2, 4},   {2, 8},  {4, 8},   {8, 7},   {8, 10},  {8, 13},  {16, 8},  {16, 10},
                                 {16, 13}, {32, 8}, {32, 10}, {32, 13}, {32, 16}, {32, 19}, {32, 25}, {32, 33}};
// True if it is compiled for rows of at most `most` columns.
constexpr bool has_staged(const RowTraits& t, int most, const StagedRow& row) {
  const int columns = row.lanes * row.held;
  const bool wide = t.element == 4;
  if (columns <= 160) return columns <= 80 || most > 80;
  if (columns <= 416) return most > 160 && (t.column_sums || !wide);
  return !wide && most > (columns <= 608 ? 416 : columns <= 800 ? 608 : 800);
}
// direct: elements per lane, where it is compiled.
constexpr int kDirect[] = {7, 10, 13, 16, 19, 22, 25, 28, 32};
constexpr bool has_direct(const RowTraits& t) {
  return t.element == 4 && !t.column_sums && staged_columns(t, t.staged) > 160;
}

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
