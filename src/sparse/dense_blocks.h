// Products with a sparse matrix of many nonzeros on the CPU: blocks of its rows with their zeros, one block at a time
// in the cache, multiplied by torch's BLAS. The temporary memory is one block, up to kBlockBytes.
#pragma once

#include <cstdint>

#include "sparse/csr.h"

namespace matmuls {

// True if x A^T for x [n, columns], of A's dtype, is faster so than nonzero by nonzero, and as exact. A has zeros where
// the pattern has nothing, which NaN and inf in x would reach: x must be finite.
bool takes_dense_linear(const Pattern& p, const at::Tensor& x);
// out [n, rows] <- x A^T + bias, with bias [rows] or undefined.
void dense_linear(const Pattern& p, const at::Tensor& values, const at::Tensor& x, const at::Tensor& bias,
                  const at::Tensor& out);

// True if a b^T at the nonzeros, a [rows, n], b [columns, n], is faster so.
bool takes_dense_sddmm(const Pattern& p, const at::Tensor& a, const at::Tensor& b);
// out [nonzeros] <- alpha * a b^T at the nonzeros.
void dense_sddmm(const Pattern& p, const at::Tensor& a, const at::Tensor& b, double alpha, const at::Tensor& out);

}  // namespace matmuls
