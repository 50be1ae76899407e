// The look at the indices of a sparse matrix on the CPU, before anything is read or written through them.
//
// Every operator that reads through indices takes it at every call: whatever was written to them since an earlier look,
// no index leads out of bounds. On a GPU operators take none, as it would wait for the device: there csr_check says
// what is wrong. The functions return at once for tensors of another device, and for those that trust_indices() was
// given and that nobody has written to since.
#pragma once

#include <cstdint>

#include "sparse/csr.h"

namespace matmuls {

// False for tensors that are traced or transformed: they have no data to look at, and those inside them meet an
// operator that looks.
bool has_data(const at::Tensor& indices);

// ValueError unless offsets begin with 0, end with `nonzeros`, which count `what`, and never decrease.
void look_at_offsets(const char* op, const at::Tensor& offsets, int64_t nonzeros, const char* what = "columns");
// ValueError unless every index lies in [0, size).
void look_at_indices(const char* op, const char* what, const at::Tensor& indices, int64_t size);

// The pattern with contiguous indices, which kernels read, without the transposed one. ValueError on the CPU where they
// do not fit: offsets, columns and order.
Pattern readable(const char* op, const Pattern& p, int64_t columns);

// Looks at the indices and keeps the result with the tensors, so that operators need not look again: a product with one
// column would take a tenth longer. For copies that a plan alone holds. A write through the tensor or a view of it
// moves its version, and then operators look again; a write that moves no version (through numpy, or through .data) is
// not seen. Tensors without a version, or of another device, are left as they are.
void trust_indices(const at::Tensor& crow, const at::Tensor& col, const OptionalTensor& order, int64_t columns);

}  // namespace matmuls
