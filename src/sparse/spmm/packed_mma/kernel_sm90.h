// Products of a packed matrix (sparse/spmm/packed_mma/layout.h): tensor cores take its numbers out of registers, into
// which each warp unpacks them. For matrices of which a twentieth or more is stored, times dense sides of few columns,
// where the product with all zeros waits for them.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/spmm/packed_mma/layout.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

// Where it was packed in order, dense is x of a linear layer, [n, columns], and the result x W^T + bias, [n, rows].
struct PackedCall {
  PackedLayout layout;
  at::Tensor packed;  // sparse/spmm/packed_mma/layout.h
  at::Tensor dense;
  at::Tensor bias;  // [rows], or undefined

  int64_t n() const { return dense.size(layout.in_order ? 0 : 1); }
};

// Whether the GPU can, one dense matrix in 16 bits, rows of whole vectors of 16 bytes, of a result too; ValueError
// where what was packed is not this matrix's.
bool can_go_packed(const PackedCall& c);
// 0 times what is not finite is NaN, as in a product with all zeros.
at::Tensor run_packed(const PackedCall& c);

}  // namespace matmuls::spmm
