// Operands and results of linear_rows and linear_tiles: tensor maps, and sums in registers that are activated and
// written.
#pragma once

#include "dense/gemm.h"
#include "gpu/activations.cuh"
#include "gpu/hopper.cuh"
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warp's sums of a tile, 16 rows, are cut into units of 8 for each thread: unit u has those of half h = u % 2 of the
// rows in the 32 columns from 32 (u / 2) on. Sum i of a unit is of column 8 (i / 2) + 2 (lane % 4) + i % 2 and row
// lane / 4 + 8 h; this is where the thread keeps it.
__device__ constexpr int sum_of(int unit, int i) { return unit / 2 * 16 + i / 2 * 4 + unit % 2 * 2 + i % 2; }

// Adds the bias to a unit's sums, activates and writes them: 16 bytes per lane and row, 64 bytes per four lanes.
// row, column0: of the warp's first row and the tile's first column in y [rows, columns]. rounded: the sum is rounded
// before the activation too.
template <Activation activation, bool rounded, class T, int N>
__device__ inline void write_unit(const float (&acc)[N], int unit, const float* biases, T* y, int64_t stride, int row,
                                  int column0, int rows, int columns) {
  const int lane = threadIdx.x % 32;
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto [left, right] = *reinterpret_cast<const float2*>(biases + unit / 2 * 32 + 8 * j + 2 * (lane % 4));
    float one = acc[sum_of(unit, 2 * j)] + left, other = acc[sum_of(unit, 2 * j + 1)] + right;
    if constexpr (rounded)
      one = static_cast<float>(static_cast<T>(one)), other = static_cast<float>(static_cast<T>(other));
    words[j] = hopper::pack2<T>(activated_16bit<activation>(one), activated_16bit<activation>(other));
  }
  hopper::transpose_4x4(words, lane);
  const int to_row = row + lane / 4 + unit % 2 * 8, column = column0 + unit / 2 * 32 + lane % 4 * 8;
  if (to_row < rows && column < columns)
    *reinterpret_cast<uint4*>(y + to_row * stride + column) = {words[0], words[1], words[2], words[3]};
}

#endif

}  // namespace matmuls::dense_rows
