// Checks shared by all operations: operands, memory overlap, and library errors turned into exceptions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace matmuls {

// An optional operator argument. Functions below the operators take an undefined tensor instead.
using OptionalTensor = std::optional<at::Tensor>;
inline at::Tensor tensor_or_none(const OptionalTensor& t) { return t ? *t : at::Tensor(); }

// x / y rounded up; `up` returns int, for results that a check has bounded.
inline int64_t ceil_of(int64_t x, int64_t y) { return x / y + (x % y > 0); }  // x + y - 1 may overflow
inline c10::SymInt ceil_of(const c10::SymInt& x, int64_t y) { return (x + (y - 1)) / y; }
inline int up(int64_t x, int64_t y) { return static_cast<int>(ceil_of(x, y)); }

// at::empty and at::zeros. Including their own headers costs every CUDA file 13 s of compile time for two
// architectures.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

// The dtypes that operations compute in. float8 and complex32, which ATen counts as such too, have no kernels.
inline bool is_real(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kHalf || t == at::kBFloat16;
}
inline bool is_real_or_complex(at::ScalarType t) {
  return is_real(t) || t == at::kComplexFloat || t == at::kComplexDouble;
}

// Raises unless t is strided and has the dtype and device of `a`.
void check_same(const char* op, const char* name, const at::Tensor& t, const at::Tensor& a);
// Raises unless a and b (and bias and out, if given) are strided tensors on one device, all of one dtype that
// is_real_or_complex.
void check_operands(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {},
                    const at::Tensor& out = {});

// Raises unless t is strided and has memory (meta and traced tensors have none), for functions that read by address.
void expect_memory(const char* op, const char* name, const at::Tensor& t);
// Raises unless t is on a GPU, for functions without CPU code.
void expect_gpu(const char* op, const char* name, const at::Tensor& t);

// True if writing x could change y: exact for strided layouts (a bounded search over both index spaces), and true if
// the search exceeds its bound.
bool overlap(const at::Tensor& x, const at::Tensor& y);

// Raises if `out` shares an element with itself or with a named input.
struct Named {
  const char* name;
  const at::Tensor& tensor;
};
void check_no_overlap(const char* op, const at::Tensor& out, std::initializer_list<Named> inputs);

}  // namespace matmuls

#ifdef MATMULS_CUDA
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cusparse.h>

// Reports the failing call, its status and its purpose; the trailing arguments are evaluated on failure only.
#define MATMULS_CUBLAS_CHECK(call, ...)                                                                       \
  do {                                                                                                        \
    const cublasStatus_t status_ = (call);                                                                    \
    TORCH_CHECK(status_ == CUBLAS_STATUS_SUCCESS, #call, " failed with ", cublasGetStatusName(status_), " (", \
                cublasGetStatusString(status_), ")" __VA_OPT__(, ) __VA_ARGS__);                              \
  } while (0)

#define MATMULS_CUSPARSE_CHECK(call, ...)                                                                        \
  do {                                                                                                           \
    const cusparseStatus_t status_ = (call);                                                                     \
    TORCH_CHECK(status_ == CUSPARSE_STATUS_SUCCESS, #call, " failed with ", cusparseGetErrorName(status_), " (", \
                cusparseGetErrorString(status_), ")" __VA_OPT__(, ) __VA_ARGS__);                                \
  } while (0)
#endif
