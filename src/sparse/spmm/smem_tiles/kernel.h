// Products by tiles: rows of the dense side, 32 of its columns, lie in shared memory while rows of A read them again
// and again. For float32 matrices of even rows whose nonzeros read each row of the dense side many times. Sums in an
// order that depends on the layout alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/spmm/smem_tiles/layout.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

struct TiledCall {
  TileLayout layout;
  at::Tensor heads, slots, places, packed;  // sparse/spmm/smem_tiles/layout.h
  at::Tensor dense;
};

// Whether the GPU can, one dense matrix in float32, rows of whole vectors of 16 bytes; ValueError where the tiles are
// not this matrix's.
bool can_go_by_tiles(const TiledCall& c);
at::Tensor run_tiles(const TiledCall& c);

}  // namespace matmuls::spmm
