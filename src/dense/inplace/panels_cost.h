// Estimated cycles of a product in place on Hopper: by the kernel of panels_kernel_sm90.cuh in tiles of a given size,
// or through a workspace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "glue/checks.h"

namespace matmuls::in_place {

constexpr int kRowBytes = 128;  // bytes of a tile's row in shared memory: the swizzle width
constexpr int kPair = 2;        // blocks of a cluster, one above the other
constexpr int kTeams = 64;      // teams of panels_kernel_sm90.cuh that have counters

struct TileSize {
  int rows, columns;  // of the result, per block

  // Cycles of a tile: 2000 for the last step and the stores of 128 x 256 results, plus those of each K stage of 128
  // bytes. A stage takes as long as its products at the full rate of the tensor cores, or as its loads, a's tile and
  // half of b's, at 35.5 bytes per cycle (H200: 700 cycles for 24 KB, 450 for 16 KB). With 192 columns it takes 1.08 of
  // that (H200, 12000 x 3000: 1.07 of the time of 256 columns, 0.74 of it at 58208 x 4224).
  double cycles(int64_t steps) const {
    const double products = rows * columns / 32.0, loads = (rows + columns / kPair) * kRowBytes / 35.5;
    const double stage = (columns == 192 ? 1.08 : 1.0) * std::max(products, loads);
    return rows * columns / 16.4 + static_cast<double>(steps) * stage;
  }
};

// How the clusters that can be resident walk over a product in tiles of one size.
struct Walk {
  int pairs, across, waves;  // pairs of panels, tiles across the result, pairs per team; 0 waves: no team fits

  // turned: both blocks of a cluster read the same rows, so that a team of one cluster has a counter too.
  Walk(int64_t rows, int64_t columns, TileSize tile, int clusters, bool turned)
      : pairs(up(rows, kPair * tile.rows)), across(up(columns, tile.columns)) {
    const int most = clusters / across, teams = turned || across > 1 ? std::min(most, kTeams) : most;
    waves = teams > 0 ? up(pairs, teams) : 0;
  }
  int teams() const { return up(pairs, waves); }
};

// The workspace's panels take `slower` times the cycles of large tiles that leave no multiprocessor idle, and 10000
// more, 6 us, until the first product starts: an estimate, for a copy of 8 MiB at 4 TB/s and two more launches.
inline double workspace_cycles(int64_t rows, int64_t columns, int64_t steps, TileSize large, int clusters,
                               double slower) {
  const int64_t tiles = ceil_of(rows, kPair * large.rows) * ceil_of(columns, large.columns);
  return 10000 + slower * static_cast<double>(ceil_of(tiles, clusters)) * large.cycles(steps);
}

}  // namespace matmuls::in_place
