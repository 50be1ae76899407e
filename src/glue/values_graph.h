// Sparse tensors of values with a graph, and the values of such tensors, differentiable any number of times.
//
// torch's own functions are not: the gradient of `values()` is a sparse tensor of detached values, and the gradient of
// sparse_csr_tensor is first made dense.
#pragma once

#include <ATen/core/Tensor.h>

namespace matmuls {

// A sparse tensor of these indices and values, in CSR, CSC, BSR or BSC. The indices are not checked.
at::Tensor sparse_of_values(const at::Tensor& compressed, const at::Tensor& plain, const at::Tensor& values,
                            at::IntArrayRef sizes, at::Layout layout);
// The values of a sparse tensor in one of these layouts, not a view for autograd.
at::Tensor values_of_sparse(const at::Tensor& a);

}  // namespace matmuls
