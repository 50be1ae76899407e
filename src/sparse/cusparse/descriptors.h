// A sparse matrix as cuSPARSE's generic API takes it: by rows, by columns, by entries or in blocks, with its
// descriptors owned by their type.
//
// csr: offsets [rows + 1], indices [nonzeros] are columns. csc: offsets [columns + 1], indices are rows. coo: offsets
// are rows, [nonzeros] that do not decrease, indices are columns. bsr: offsets [rows / height + 1] and indices [blocks]
// count blocks, values [blocks, height, width]. Like those of sparse/csr.h they were checked before an operator sees
// them.
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

// What can be seen without reading an index.
void check_parts(const char* op, const SparseParts& a, const at::Tensor& like);
// ValueError on the CPU where its indices do not fit.
void look_at_parts(const char* op, const SparseParts& a);

// The same matrix, or its transpose, by rows: the values it speaks of are a.values, flattened.
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

// A failed call by its name and status, and what it was called for.
[[noreturn]] void fail(const char* call, cusparseStatus_t status, const std::string& what_for);

// How a matrix lies in memory: rows or columns side by side, `ld` elements apart. None: it must be copied, as cuSPARSE
// is given nothing but whole matrices that start on 16 bytes.
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
DenseDescriptor describe(const at::Tensor& matrix);  // one that has an order

}  // namespace matmuls
#endif
