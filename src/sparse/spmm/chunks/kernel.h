// Products by chunks: the nonzeros of A, in the order of its rows, in parts of about equal size that lanes walk through
// whatever rows they belong to. Rows of more than a piece are cut; a second kernel adds their pieces up. Sums in an
// order that depends on the chunks alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

// The chunks as sparse/spmm/chunks/layout.h has them, cut and empty no longer than they need be. slots: pieces in all.
struct ChunkedCall {
  Pattern pattern;
  at::Tensor values, dense, begins, ends, cut, empty;
  int64_t slots;
};

// int32 indices, one matrix, up to 32 bits, rows of whole vectors of 16 bytes; ValueError where the chunks are not this
// matrix's.
bool can_go_by_chunks(const ChunkedCall& c, int64_t columns);
at::Tensor run_chunks(const ChunkedCall& c);

}  // namespace matmuls::spmm
