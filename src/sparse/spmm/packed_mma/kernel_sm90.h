// Products with a packed matrix (layout.h): each warp unpacks A's fragments into registers for wgmma. For a matrix A
// with a twentieth or more of its elements stored, times a B of few columns, where the dense product is bound by
// loading A's zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/spmm/packed_mma/layout.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {

// If A was packed in_order, dense is x of a linear layer, [n, columns], and the result x A^T + bias, [n, rows].
struct PackedCall {
  PackedLayout layout;
  at::Tensor packed;  // from csr_packed (layout.h)
  at::Tensor dense;
  at::Tensor bias;  // [rows], or undefined

  int64_t n() const { return dense.size(layout.in_order ? 0 : 1); }
};

// Whether the kernel can run: Hopper with TMA, one 16-bit dense matrix, rows of dense and of the result 16-byte
// aligned. Raises ValueError if `packed` was not made from this matrix.
bool can_go_packed(const PackedCall& c);
// A stored or implicit 0 times a non-finite number is NaN, as in a dense product.
at::Tensor run_packed(const PackedCall& c);

}  // namespace matmuls::spmm
