// column_sums: the sums over the rows that norm_backward needs, where no kernel that computes dx adds them up; and the
// sum of partial sums, in a fixed order.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <bit>

#include "gpu/launch.cuh"
#include "rows/device/operation.cuh"

namespace matmuls {
namespace {

// Sums partial [rows][2][columns] over its rows into dweight and dbias, in a fixed order. `among` warps share 32
// columns of one of them: one warp (1024 columns per block) if there are few rows, up to all 32.
template <class T, class F>
__global__ void __launch_bounds__(1024)
    add_partials_kernel(const F* partial, int64_t rows, int columns, int among, T* dweight, T* dbias) {
  __shared__ F warps[32][32];
  const int group = threadIdx.y / among, first = threadIdx.y - group * among;
  const int column = (blockIdx.x * (32 / among) + group) * 32 + threadIdx.x;
  const int64_t stride = 2 * static_cast<int64_t>(columns);
  partial += blockIdx.y * static_cast<int64_t>(columns);
  ptx::griddepcontrol_wait();
  F sum = 0, lost = 0;  // Kahan summation: there may be thousands of rows
  if (column < columns) {
#pragma unroll 8
    for (int64_t r = first; r < rows; r += among) {
      const F value = partial[r * stride + column] - lost, next = sum + value;
      lost = isfinite(next) ? (next - sum) - value : F(0);
      sum = next;
    }
  }
  warps[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (first > 0 || column >= columns) return;
#pragma unroll 4
  for (int w = 1; w < among; ++w) sum += warps[threadIdx.y + w][threadIdx.x];
  (blockIdx.y == 0 ? dweight : dbias)[column] = T(sum);
}

// Computes only the column sums, partial [block][2][columns], for rows that the fused kernels cannot sum: differently
// aligned ones, or too long for registers.
template <class Op, class F>
__global__ void __launch_bounds__(256)
    column_sums_kernel(const __grid_constant__ Op op, int64_t rows, int columns, F* partial) {
  const int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= columns) return;
  F dweight = 0, dbias = 0;
  for (int64_t begin = blockIdx.y; begin < rows; begin += int64_t(16) * gridDim.y) {
    F some_dweight = 0, some_dbias = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int64_t r = begin + int64_t(i) * gridDim.y;
      if (r >= rows) break;
      const auto offsets = op.index(r);
      const F g = F(op.grad[offsets.at[0] + column * op.steps[0]]);
      some_dweight += g * F(op.xhat[offsets.at[1] + column * op.steps[1]]);
      some_dbias += g;
    }
    dweight += some_dweight;
    dbias += some_dbias;
  }
  partial[(int64_t(blockIdx.y) * 2) * columns + column] = dweight;
  partial[(int64_t(blockIdx.y) * 2 + 1) * columns + column] = dbias;
}

template <class F, class Op>
void launch_column_sums(const Op& op, int64_t rows, int columns, int64_t parts, F* partial) {
  const dim3 blocks(static_cast<unsigned>((columns + 255) / 256), static_cast<unsigned>(parts));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  column_sums_kernel<Op, F><<<blocks, 256, 0, stream>>>(op, rows, columns, partial);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class F>
void launch_add_partials(const F* partial, int64_t parts, int columns, T* dweight, T* dbias) {
  // About eight partial rows per warp. With all 32 warps on 32 columns, each block of 1024 threads had 8 rows to add at
  // 262144 columns.
  const int among = static_cast<int>(std::min<uint64_t>(std::bit_ceil(static_cast<uint64_t>((parts + 7) / 8)), 32));
  const dim3 blocks(static_cast<unsigned>((columns * int64_t{among} + 1023) / 1024), 2);
  launch_programmatic(add_partials_kernel<T, F>, blocks, dim3(32, 32), partial, parts, columns, among, dweight, dbias);
}

}  // namespace
}  // namespace matmuls
