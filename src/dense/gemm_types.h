// cuBLAS data type, compute type and scalars (1 and 0 in the scale type) for each dtype.
#pragma once

#include <library_types.h>

#include "glue/checks.h"

namespace matmuls {

bool allows_tf32();  // torch's switch; defined in gemm.cpp

struct GemmTypes {
  cudaDataType_t data, scale;
  cublasComputeType_t compute;

  // float16 and bfloat16 accumulate in float32; float32 uses TF32 only if torch's switch allows it.
  explicit GemmTypes(at::ScalarType dtype) {
    const auto single = allows_tf32() ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    switch (dtype) {
      case at::kDouble: *this = {CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F}; break;
      case at::kFloat: *this = {CUDA_R_32F, CUDA_R_32F, single}; break;
      case at::kHalf: *this = {CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F}; break;
      case at::kBFloat16: *this = {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F}; break;
      case at::kComplexFloat: *this = {CUDA_C_32F, CUDA_C_32F, single}; break;
      case at::kComplexDouble: *this = {CUDA_C_64F, CUDA_C_64F, CUBLAS_COMPUTE_64F}; break;
      default:
        TORCH_CHECK(false, "matmul: expected dtype float64, float32, float16, bfloat16, complex64 or complex128 on ",
                    "CUDA, got ", dtype);
    }
  }

  const void* one() const { return scalars(1); }
  const void* zero() const { return scalars(0); }

 private:
  GemmTypes(cudaDataType_t data, cudaDataType_t scale, cublasComputeType_t compute)
      : data(data), scale(scale), compute(compute) {}

  // {value, 0}: valid as a real or a complex number.
  const void* scalars(int value) const {
    static constexpr double as_double[2][2] = {{0, 0}, {1, 0}};
    static constexpr float as_float[2][2] = {{0, 0}, {1, 0}};
    const bool wide = scale == CUDA_R_64F || scale == CUDA_C_64F;
    return wide ? static_cast<const void*>(as_double[value]) : static_cast<const void*>(as_float[value]);
  }
};

}  // namespace matmuls
