// direct: short unaligned float32 rows that are contiguous, of more than 160 columns, read and written in place: each
// element is as wide as a lane's share of a memory transaction.
#pragma once

#include <algorithm>

#include "rows/device/operation.cuh"
#include "rows/kernel_sizes.h"

namespace matmuls {

// A lane's columns of a row, at most N, in shared memory or in global memory.
template <int lanes, int N>
struct ShortShare {
  static constexpr int kStep = lanes;
  static constexpr int kSure = N > 4 ? N - std::max(4, N / 4) : 0;  // elements that every lane has
  int first, columns;
  bool in_tile;

  __device__ int column(int i) const { return first + i * lanes; }
  __device__ bool begins(int i) const { return i < kSure || column(i) < columns; }
  __device__ bool holds(int i, int, int end) const { return column(i) < end; }
  template <class T, class F>
  __device__ void store(T* row, int64_t, int i, const F (&number)[1]) const {
    if (!begins(i)) return;
    if (!in_tile) {
      row[column(i)] = T(number[0]);
      return;
    }
    const uint32_t word = pack<T, 1>(number).at[0], to = ptx::shared_address(row + first) + i * lanes * sizeof(T);
    if constexpr (sizeof(T) == 2)
      ptx::store_shared_half(to, word);
    else
      ptx::store_shared(to, word);
  }
};

// One float32 row per warp, read and written in place.
template <class Op, int N>
__global__ void __launch_bounds__(32 * kTileWarps, N <= 22            ? 8
                                                   : Op::kInputs == 1 ? 6
                                                                      : 4)
    direct_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int K = Op::kInputs;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTileWarps + threadIdx.y;
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  if (r >= shape.rows) return;
  const ShortShare<32, N> span{static_cast<int>(threadIdx.x), shape.columns, false};
  const auto row = op.row_for_copies(r, r * shape.columns);
  const ptx::L2Policy policy = ptx::l2_policy(shape.large);
  Inputs<T, 1, N, K> inputs;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k)
      inputs.at[i][k].at[0] =
          ptx::load_if(span.begins(i), reinterpret_cast<const uint32_t*>(row.input(k) + span.column(i)), policy);
  const auto constants = [&](int c, int i) {
    return span.begins(i) && op.constant(c) ? __ldg(op.constant(c) + span.column(i)) : op.absent(c);
  };
  ColumnSums<F, 1, 0> none;
  op.template whole_row<N>(row, true, span, inputs, constants, none, FixedLanes<32>{}, F(0));
}

// Hands the kernel of a choice to `use`.
template <class Op, class Use>
void with_direct(const RowChoice& c, const Use& use) {
  with_instance<kDirect>(c, [&]<int held>() { use.template operator()<RowKernel::direct, direct_kernel<Op, held>>(); });
}

}  // namespace matmuls
