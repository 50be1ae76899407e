// A sparse matrix laid out for products that keep part of the dense side in shared memory
// (sparse/spmm/smem_tiles/kernel.h).
//
// Its columns are cut into `tiles`, its rows into `panels`. In each tile the rows of a panel are sorted, those with the
// most nonzeros there first, and a warp takes a slice of them: 32 / lanes neighbours, `lanes` lanes a row. In a step
// each lane has two nonzeros of its row, which lie in memory as the warp reads them.
//   heads [tiles, panels, slices, 4]: a slice's first step, and how many of its steps need no more than the first
//   quarter of the tile, the first two, three, and all: as 16 bits each
//   slots [tiles, panels, slices * 32 / lanes, 3]: a row of the panel, or -1, and from where to where its nonzeros lie
//   places, values [(steps + 1) * kStepNonzeros]: a nonzero's column in its tile, in 16 bits, and its value; where a
//   row has no more of them the column behind the tile's last one, which holds zeros, and 0. One step more than there
//   are is read ahead.
// Of columns that increase in every row.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <tuple>

#include "sparse/csr.h"

namespace matmuls {

constexpr int kTileStages = 4;        // that a tile comes in
constexpr int kMostTileRows = 1024;   // of the dense side
constexpr int kMostPanelRows = 1024;  // of A
constexpr int kMostTiles = 8;         // blocks of a cluster
constexpr int kEach = 2;              // nonzeros of a lane
constexpr int kStepNonzeros = 32 * kEach;

struct TileLayout {
  int rows, columns, tiles, panels, lanes;
  int tile_rows, panel_rows, slices;  // of a tile, of a panel, and of a panel again

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

// ValueError where they are of another layout.
void check_tiles(const TileLayout& m, const at::Tensor& heads, const at::Tensor& slots);
void lay_out_on_gpu(const Pattern& p, const TileLayout& m, const at::Tensor& heads, const at::Tensor& slots);
void fill_tiles_on_gpu(const Pattern& p, const at::Tensor& values, const TileLayout& m, const at::Tensor& heads,
                       const at::Tensor& slots, const at::Tensor& places, const at::Tensor& packed);

}  // namespace matmuls
