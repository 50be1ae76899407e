// Tensor maps of the operands of linear_rows and linear_tiles.
#pragma once

#include "dense/gemm.h"
#include "gpu/tensor_map.h"

namespace matmuls::dense_rows {

constexpr int kRowBytes = 128;        // of a tile's row in shared memory: the swizzle width
constexpr int kWide = kRowBytes / 2;  // K of a stage
constexpr int kGroup = 128;           // threads of a warpgroup

// The matrix's [rows, inner] 16-bit elements in boxes of `box_rows` rows and kWide columns.
template <class T>
CUtensorMap map_of(const Gemm::Operand& matrix, int64_t rows, int64_t inner, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.ld) * sizeof(T)};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(box_rows)};
  return tensor_map<T>("cublaslt_matmul", matrix.data, sizes, strides, box);
}

}  // namespace matmuls::dense_rows
