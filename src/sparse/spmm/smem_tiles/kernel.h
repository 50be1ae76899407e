// Product by tiles: 32 columns of a tile of B stay in shared memory while rows of A read them again and again. For
// float32 matrices A with rows of similar length whose nonzeros read each row of B many times. The order of additions
// depends only on the layout.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/spmm/smem_tiles/layout.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

struct TiledCall {
  TileLayout layout;
  at::Tensor heads, slots, places, packed;  // as in layout.h; packed: its values
  at::Tensor dense;
};

// Whether the kernel can run: Hopper with TMA, one float32 dense matrix with 16-byte aligned rows. Raises ValueError if
// the tiles were not made from this matrix.
bool can_go_by_tiles(const TiledCall& c);
at::Tensor run_tiles(const TiledCall& c);

}  // namespace matmuls::spmm
