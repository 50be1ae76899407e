// Sparse matrices as cuSPARSE's generic API takes them, in CSR, CSC, COO or BSR, and RAII types for the descriptors.
//
//   csr   offsets [rows + 1]            indices [nonzeros]: columns   values [nonzeros]
//   csc   offsets [columns + 1]         indices [nonzeros]: rows      values [nonzeros]
//   coo   offsets [nonzeros]: rows,     indices [nonzeros]: columns   values [nonzeros]
//         which do not decrease
//   bsr   offsets [rows / height + 1]   indices [blocks]: columns     values [blocks, height, width]
//         of blocks                     of blocks
//
// Validated as those of sparse/csr.h are: on the CPU by every operator (validate_parts), on a GPU only by csr_check.
#pragma once

#include "glue/checks.h"
#include "sparse/csr.h"

namespace matmuls {

enum class Layout { csr, csc, coo, bsr };

struct SparseParts {
  Layout layout;
  at::Tensor offsets, indices, values;
  c10::SymInt rows, columns;
};

Layout layout_of_name(const char* op, std::string_view name);

// Checks what can be checked without reading indices: layout, dtype, shape, device.
void check_parts(const char* op, const SparseParts& a, const at::Tensor& like);
// On the CPU, raises ValueError if indices are out of range or out of order.
void validate_parts(const char* op, const SparseParts& a);

// The matrix, or its transpose, in CSR over the flattened a.values.
Pattern by_rows(const SparseParts& a, bool transposed);

}  // namespace matmuls

#ifdef MATMULS_CUDA
#include <memory>
#include <optional>

#include "glue/handles.h"

namespace matmuls {

template <auto destroy>
struct DestroyedBy {
  template <class T>
  void operator()(T* descriptor) const {
    destroy(descriptor);
  }
};
using SparseDescriptor = std::unique_ptr<cusparseSpMatDescr, DestroyedBy<cusparseDestroySpMat>>;
using DenseDescriptor = std::unique_ptr<cusparseDnMatDescr, DestroyedBy<cusparseDestroyDnMat>>;

// 16-bit operands are multiplied and summed in float32.
cudaDataType_t cuda_type(at::ScalarType dtype);
inline cudaDataType_t compute_type(at::ScalarType dtype) { return dtype == at::kDouble ? CUDA_R_64F : CUDA_R_32F; }

struct Scalar {
  double wide;
  float narrow;
  bool is_wide;

  Scalar(double value, at::ScalarType dtype)
      : wide(value), narrow(static_cast<float>(value)), is_wide(dtype == at::kDouble) {}
  const void* at() const { return is_wide ? static_cast<const void*>(&wide) : &narrow; }
};

// Raises an error with the name of the failed call, its status, and what it was called for.
[[noreturn]] void fail(const char* call, cusparseStatus_t status, const std::string& what_for);

// Row-major or column-major, with lines `ld` elements apart. nullopt: the matrix must be copied, because cuSPARSE is
// given only contiguous matrices at 16-byte aligned addresses.
struct Order {
  bool by_rows;
  int64_t ld;

  bool operator==(const Order&) const = default;
};
std::optional<Order> order_of(const at::Tensor& matrix);
inline at::Tensor in_order(const at::Tensor& matrix) {
  return order_of(matrix) ? matrix : matrix.clone(at::MemoryFormat::Contiguous);
}
inline bool is_aligned(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }
inline at::Tensor whole(const at::Tensor& t) {
  return t.is_contiguous() && is_aligned(t) ? t : t.clone(at::MemoryFormat::Contiguous);
}

SparseDescriptor describe(const SparseParts& a);
DenseDescriptor describe(const at::Tensor& matrix);  // of a matrix for which order_of has a value

}  // namespace matmuls
#endif
