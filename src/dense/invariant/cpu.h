// Products on a CPU that are independent of the number of rows, for handles(batch_invariant=True).
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// out = op(a) @ op(b) + bias for checked operands, as matmul takes them; bias [N] may be undefined. MKL's and oneDNN's
// sums depend on the number of rows and on alignment. Here each element is one chain of multiply-adds in the order of
// K, in float32 or float64, whatever the number of rows, of threads, and the place in memory.
void batch_invariant_product_cpu(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                                 const at::Tensor& out, bool transa, bool transb);

}  // namespace matmuls
