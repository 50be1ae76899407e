// Layout of a sparse float32 matrix A for products that keep a part of B in shared memory (kernel.h).
//
// A's columns are cut into `tiles`, its rows into `panels`. Within a tile the rows of a panel are sorted by the number
// of steps they take there, most first, and cut into slices of 32 / lanes rows. A warp takes a slice, `lanes` lanes a
// row; in a step each lane has kEach = 2 nonzeros of its row.
//
//               tile 0    tile 1             a slice of one panel in one tile, rows a, b, ... with lanes = 8:
//   panel 0   | slices  | slices  |                  | lane 0   lane 1  ...  lane 7  | lane 8   ...
//   panel 1   | slices  | slices  |           step 0 | a0  a1   a2  a3       a14 a15 | b0  b1
//                                             step 1 | a16 a17  a18 0        0   0   | b16 b17
//
//   heads [tiles, panels, slices, 4] int32: the slice's first step in places and values; then 16 bits each: how many of
//     its steps need only the first quarter of the tile, the first half, three quarters, all; then 0
//   slots [tiles, panels, slices * 32 / lanes, 3] int32: row of the panel or -1; its nonzeros in the tile, [begin, end)
//     as indices of A's nonzeros
//   places int16, values float32, [(steps + 1) * kStepNonzeros]: each nonzero's column in its tile, and its value.
//     Padding has value 0 and column tile_rows, a row of zeros in shared memory. One step more than there are is
//     allocated, because the kernel prefetches it.
//
// Precondition: columns increase in every row.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>

#include "sparse/csr.h"

namespace matmuls {

constexpr int kTileStages = 4;        // in which a tile of B is loaded
constexpr int kMostTileRows = 1024;   // of B
constexpr int kMostPanelRows = 1024;  // of A
constexpr int kMostTiles = 8;         // blocks of a cluster
constexpr int kEach = 2;              // nonzeros per lane and step
constexpr int kStepNonzeros = 32 * kEach;

struct TileLayout {
  int rows, columns, tiles, panels, lanes;
  int tile_rows, panel_rows, slices;  // rows of B per tile; rows of A per panel; slices per panel

  TileLayout(int64_t all_rows, int64_t all_columns, int64_t tiles_of, int64_t panels_of, int64_t lanes_of)
      : rows(static_cast<int>(all_rows)),
        columns(static_cast<int>(all_columns)),
        tiles(static_cast<int>(tiles_of)),
        panels(static_cast<int>(panels_of)),
        lanes(static_cast<int>(lanes_of)),
        tile_rows((columns + tiles * kTileStages - 1) / (tiles * kTileStages) * kTileStages),
        panel_rows((rows + panels - 1) / panels),
        slices((panel_rows + 32 / lanes - 1) / (32 / lanes)) {}
};

constexpr const char* kTilesOp = "csr_tiles";

struct TileSlot {
  int row, begin, end;
};

using Tiles = std::tuple<at::Tensor, at::Tensor>;

// Raises ValueError if heads and slots are not of this layout.
void check_tiles(const TileLayout& m, const at::Tensor& heads, const at::Tensor& slots);
void lay_out_on_gpu(const Pattern& p, const TileLayout& m, const at::Tensor& heads, const at::Tensor& slots);
void fill_tiles_on_gpu(const Pattern& p, const at::Tensor& values, const TileLayout& m, const at::Tensor& heads,
                       const at::Tensor& slots, const at::Tensor& places, const at::Tensor& packed);

}  // namespace matmuls
