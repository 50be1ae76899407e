// Products of a packed matrix (packed.h): tensor cores take its numbers out of registers, into which each warp unpacks
// them. For matrices of which a twentieth or more is stored, times dense sides of few columns, where the product with
// all zeros waits for them.
#pragma once

#include <ATen/core/Tensor.h>

#include "packed.h"
#include "spmm.h"

namespace matmuls::spmm {

struct PackedCall {
  PackedLayout layout;
  at::Tensor packed;  // packed.h
  at::Tensor dense;
};

// Whether the GPU can, one dense matrix in 16 bits, rows of whole vectors of 16 bytes; ValueError where what was packed
// is not this matrix's.
bool can_go_packed(const PackedCall& c);
// 0 times what is not finite is NaN, as in a product with all zeros.
at::Tensor run_packed(const PackedCall& c);

}  // namespace matmuls::spmm
