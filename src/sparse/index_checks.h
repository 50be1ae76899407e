// Validation of CSR indices on the CPU, before anything is read or written through them.
//
// Every operator that reads through indices calls this at every call, so that no index leads out of bounds, whatever
// was written to the index tensors since an earlier check. On a GPU operators do not validate, because it would
// synchronize with the device: csr_check does. The functions return at once for tensors on another device, and for
// tensors that trust_indices() validated and that have not been written to since.
#pragma once

#include <cstdint>

#include "sparse/csr.h"

namespace matmuls {

// True if the CPU can read the indices: false on a GPU, and for traced or transformed tensors (fake tensors,
// functorch), whose inner tensors are validated by the operator that receives them.
bool has_data(const at::Tensor& indices);

// Raises ValueError unless `offsets` begin with 0, never decrease and end with `nonzeros`, the number of `what`.
void validate_offsets(const char* op, const at::Tensor& offsets, int64_t nonzeros, const char* what = "columns");
// Raises ValueError unless every index lies in [0, size).
void validate_indices(const char* op, const char* what, const at::Tensor& indices, int64_t size);
// Raises ValueError unless `order` names each of the values [0, nonzeros) once: results are written through it.
void validate_order(const char* op, const at::Tensor& order, int64_t nonzeros);

// The pattern with contiguous indices, as kernels read them, without the transposed matrix. On the CPU, raises
// ValueError if offsets, columns or order are invalid.
Pattern readable(const char* op, const Pattern& p, int64_t columns);

// Validates the indices and stores the result with the tensors, so that operators need not validate again: that check
// would make a product with one column take a tenth longer. For copies that only a plan holds. A write through the
// tensor or a view of it changes its version counter, and operators validate again; a write that does not change the
// counter (through numpy or .data) goes unnoticed. Tensors without a version counter, or on another device, stay as
// they are.
void trust_indices(const at::Tensor& crow, const at::Tensor& col, const OptionalTensor& order, int64_t columns);

}  // namespace matmuls
