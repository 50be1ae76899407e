// Products by cublasLtMatmul: algorithms and descriptors are found in the first call of a shape and kept with the
// handle.
#pragma once

#ifdef MATMULS_CUDA
#include <ATen/core/Tensor.h>
#include <cublasLt.h>

#include "dense/gemm.h"

namespace matmuls {

// One product, batch included. Returns false if cuBLASLt has no algorithm for it with this epilogue.
bool product_by_lt(const char* op, const Gemm& g, const at::Tensor& bias, cublasLtEpilogue_t epilogue);

// out = epilogue(op(a) @ op(b) + bias), K > 0, for handles(batch_invariant=True): by the same algorithm for any number
// of rows of a, for any layout of a and out, and without a sum that several blocks share (split-K). A row of the result
// then has the same bits whatever the other rows. Raises if cuBLASLt has no such algorithm.
void batch_invariant_product(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                             cublasLtEpilogue_t epilogue, const at::Tensor& out, const ProductShape<int64_t>& shape,
                             bool transa, bool transb);

}  // namespace matmuls
#endif
