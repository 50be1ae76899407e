// Packed layout of a sparse 16-bit matrix A for tensor cores: only the register pairs of mma fragments that hold a
// nonzero are stored. kernel_sm90.cu reads it.
//
// A is cut into tiles of 64 x 64. A tile is multiplied in four steps of 16 columns (K), each a 16 x 16 fragment of
// A per warp. Column c of a tile falls to
//
//   in_order (B's columns contiguous, a linear layer):  step c / 16,  place c % 16
//   otherwise, c = 8 j + i:                             step i % 4,   place 8 (i / 4) + j
//
// so that otherwise a step's rows of B lie 8 apart, and rows of a narrow B can share a row of shared memory
// (kernel_sm90.cu). A warp's fragment is that of A in PTX's mma.m16n8k16. Pair numbers of a step, s = 4 * step:
//
//              place 0..7   place 8..15
//   row 0..7     s + 0        s + 2       lane l of the warp holds of each 8 x 8 square the numbers at row l / 4,
//   row 8..15    s + 1        s + 3       places 2 (l % 4) and 2 (l % 4) + 1: one pair of 4 bytes
//
//   packed [tiles, units * 8] 16-bit: all tiles of 64 rows from left to right, then those of the next 64 rows. Empty
//     tiles pad both directions to a multiple of kPackedTiles. Each tile has `units` units of 16 bytes, as the largest
//     needs.
//
//   tile:  | head of lane 0 | ... | head of lane 127 | pairs of lane 0 | pairs of lane 1 | ... | zeros |
//   head:  uint32, low 16 bits: which of the lane's 16 pairs are stored; high 16: byte where they begin, past the heads
//
// Precondition: the columns of a row differ.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr int kPackedRows = 64, kPackedColumns = 64;  // of a tile
constexpr int kPackedTiles = 4;                       // tiles per row and per column of tiles are multiples of it
constexpr int kPackedLanes = 128, kPackedPairs = 16;  // lanes per tile, pairs per lane
constexpr int kPackedHeads = 4 * kPackedLanes, kPackedUnit = 16;  // bytes
constexpr int kLeastPackedUnits = kPackedHeads / kPackedUnit;     // of a tile
constexpr int kMostPackedUnits = (kPackedHeads + 4 * kPackedLanes * kPackedPairs) / kPackedUnit;
constexpr int kMostPackedColumns = 32768;

constexpr const char* kPackedOp = "csr_packed";

struct PackedLayout {
  int64_t rows, columns;
  int64_t down;  // rows of tiles
  int steps;     // tiles per row of tiles
  bool in_order;

  PackedLayout(int64_t rows_of, int64_t columns_of, bool in_order_of)
      : rows(rows_of),
        columns(columns_of),
        down(ceil_of(rows, kPackedTiles * kPackedRows) * kPackedTiles),
        steps(up(columns, kPackedTiles * kPackedColumns) * kPackedTiles),
        in_order(in_order_of) {}
  int64_t tiles() const { return down * steps; }
};

// The place of a number in its tile: the lane that holds it, the pair of that lane, and which half of the pair.
struct PackedPlace {
  int lane, pair, side;

  C10_HOST_DEVICE PackedPlace(int row, int column, bool in_order) {
    const int step = in_order ? column / 16 : column % 4;
    const int place = in_order ? column % 16 : column % 8 / 4 * 8 + column / 8;
    lane = row / 16 * 32 + row % 8 * 4 + place % 8 / 2;
    pair = step * 4 + place / 8 * 2 + row / 8 % 2;
    side = place % 2;
  }
};

// least <- units of 16 bytes that the largest tile needs.
void measure_packed_on_gpu(const Pattern& p, const PackedLayout& m, const at::Tensor& least);
void pack_on_gpu(const Pattern& p, const at::Tensor& values, const PackedLayout& m, const at::Tensor& packed);

}  // namespace matmuls
