// Product by chunks (layout.h): A's nonzeros in row order, in parts of about equal size that groups of lanes run
// through regardless of row ends. Long rows are cut into pieces, which a second kernel adds up. The order of additions
// depends only on the chunks.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

// begins, ends, cut and empty: as in layout.h, with cut and empty trimmed to the counts. slots: pieces in all.
struct ChunkedCall {
  Pattern pattern;
  at::Tensor values, dense, begins, ends, cut, empty;
  int64_t slots;
};

// Whether the kernel can run: int32 indices, one matrix, at most 32-bit numbers, 16-byte aligned rows of B. Raises
// ValueError if the chunks do not fit this matrix.
bool can_go_by_chunks(const ChunkedCall& c, int64_t columns);
at::Tensor run_chunks(const ChunkedCall& c);

}  // namespace matmuls::spmm
