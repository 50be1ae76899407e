// Makes tensor maps on the host, by which TMA copies (hopper.cuh) address tiles of a tensor.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <cuda.h>

#include <algorithm>
#include <type_traits>

namespace matmuls {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's cuTensorMapEncodeTiled, or null if the driver lacks it.
inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    C10_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(entry) : nullptr;
  }();
  return encode;
}

// Tensor map of T elements, innermost dimension first. Rows of 128 bytes are swizzled by default; elements outside the
// tensor read as 0. strides: in bytes, of all dimensions but the innermost.
template <class T, int rank>
CUtensorMap tensor_map(const char* name, const void* data, const cuuint64_t (&sizes)[rank],
                       const cuuint64_t (&strides)[rank - 1], const cuuint32_t (&box)[rank],
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  constexpr auto type = std::is_same_v<T, float>           ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                        : std::is_same_v<T, c10::BFloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint32_t steps[rank];
  std::fill_n(steps, rank, 1);
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, name, ": cuTensorMapEncodeTiled failed with ", static_cast<int>(result),
              " for sizes ", c10::ArrayRef<cuuint64_t>(sizes, rank), ", strides in bytes ",
              c10::ArrayRef<cuuint64_t>(strides, rank - 1));
  return map;
}

}  // namespace matmuls
