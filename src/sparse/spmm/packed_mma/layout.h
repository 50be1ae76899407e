// A sparse matrix in 16 bits without most of its zeros, packed as tensor cores take it
// (sparse/spmm/packed_mma/kernel_sm90.h).
//
// It is cut into tiles of 64 rows and 64 columns. A product takes a tile's columns in four steps of 16: in order, for a
// dense side whose columns lie in memory; or of column 8 j + i step i % 4, and there the place 8 (i / 4) + j. So each
// step finds its rows of the dense side 8 apart, and those of a narrow one can lie side by side
// (sparse/spmm/packed_mma/kernel_sm90.cu). Of a tile each of four warps has 16 rows, and of these, for every step, four
// squares of 8 x 8: the upper left, the lower left, the upper right, the lower right. Lane l of the warp has of a
// square the places 2 (l % 4) and one more of row l / 4: a pair, 16 of them in a tile. Pairs without a nonzero are not
// stored.
//   packed [tiles, units * 8]: tiles of so many units of 16 bytes, as the largest needs. Of 64 rows all tiles, from
//   left to right and empty ones to a multiple of four, then those of the next 64 rows, to a multiple of 256. In a tile
//   each lane's head, warp after warp: which pairs it has, in 16 bits, and from where on they lie, in bytes; then all
//   pairs, a lane's side by side.
// Of columns that differ in every row.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr int kPackedRows = 64, kPackedColumns = 64;  // of a tile
constexpr int kPackedTiles = 4;                       // their number in a row and in a column is a multiple of it
constexpr int kPackedLanes = 128, kPackedPairs = 16;  // of a tile; of a lane
constexpr int kPackedHeads = 4 * kPackedLanes, kPackedUnit = 16;  // bytes
constexpr int kLeastPackedUnits = kPackedHeads / kPackedUnit;     // of a tile
constexpr int kMostPackedUnits = (kPackedHeads + 4 * kPackedLanes * kPackedPairs) / kPackedUnit;
constexpr int kMostPackedColumns = 32768;

constexpr const char* kPackedOp = "csr_packed";

struct PackedLayout {
  int64_t rows, columns;
  int64_t down;  // tiles of a column
  int steps;     // tiles of a row
  bool in_order;

  PackedLayout(int64_t rows_of, int64_t columns_of, bool in_order_of)
      : rows(rows_of),
        columns(columns_of),
        down(ceil_of(rows, kPackedTiles * kPackedRows) * kPackedTiles),
        steps(up(columns, kPackedTiles * kPackedColumns) * kPackedTiles),
        in_order(in_order_of) {}
  int64_t tiles() const { return down * steps; }
};

// Where in a tile a number lies: which lane has it, in which of its pairs, and on which side.
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

// least <- the units that the largest tile needs.
void measure_packed_on_gpu(const Pattern& p, const PackedLayout& m, const at::Tensor& least);
void pack_on_gpu(const Pattern& p, const at::Tensor& values, const PackedLayout& m, const at::Tensor& packed);

}  // namespace matmuls
