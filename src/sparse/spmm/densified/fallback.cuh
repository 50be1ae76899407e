// Detects columns that the fp16x2 product cannot represent (densified.h) and recomputes them in float32 from A's
// nonzeros, within the kernel of the product.
#pragma once

#include "gpu/hopper.cuh"
#include "sparse/spmm/densified/densified.cuh"
#include "sparse/spmm/densified/fp16x2_sm90.cuh"

namespace matmuls {

// A nonzero of A: its column, which is a row of B, and its value.
struct Nonzero {
  int row;
  float number;
};

// A and B in their original form, and the flags found in them.
struct OriginalOperands {
  const void *crow, *col, *order;  // int64 if `wide`, else int32; order may be null
  const float *values, *dense;
  int64_t stride;
  bool wide;
  const FitFlags *facts, *dense_facts;

  __device__ int64_t index(const void* from, int64_t at) const {
    return wide ? static_cast<const int64_t*>(from)[at] : static_cast<const int*>(from)[at];
  }
  __device__ Nonzero nonzero(int64_t p) const {
    return {static_cast<int>(index(col, p)), values[order ? index(order, p) : p]};
  }

  // Whether columns [first, last) of the result fit; called by a whole warp.
  __device__ bool fit_in(int first, int last) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    bool unfit = false;
    for (int from = first; from < last; from += 32 / kSplitBlocks * kSplitColumns) {
      const int part = from / kSplitColumns + lane / kSplitBlocks;
      FitFlags all{};
      if (part * kSplitColumns < last) all = dense_facts[part * kSplitBlocks + lane % kSplitBlocks];
      for (int step = 1; step < kSplitBlocks; step *= 2) {
        all.unfit |= __shfl_xor_sync(0xffffffffu, all.unfit, step);
        all.tiny |= __shfl_xor_sync(0xffffffffu, all.tiny, step);
        all.missing += __shfl_xor_sync(0xffffffffu, all.missing, step);
      }
      unfit |= !fit(*facts, all);
    }
    return !__any_sync(0xffffffffu, unfit);
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // out <- alpha * A @ dense in rows [first, last), at most 32 per warp, and `columns` columns from column0 on. Slices
  // of B pass through shared memory, `bytes` at `kept`: reading B from the L2 took up to half as long again. A row with
  // increasing columns finds its rows of B there; nonzeros out of order read B from global memory.
  template <int threads, int columns, int bytes>
  __device__ void sum_rows(float4* kept, int first, int last, int column0, int n, int inner, float* out,
                           int64_t out_stride, float alpha) const {
    constexpr int lanes = columns / 4, parts = 32 / lanes, at_once = 8, warps = threads / 32;
    constexpr int kept_rows = bytes / (columns * 4);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int part = lane / lanes, c = column0 + lane % lanes * 4;
    const int own = first + warp + lane * warps;  // each lane keeps the position of one row
    int64_t next = own < last ? index(crow, own) : 0;
    const int64_t own_end = own < last ? index(crow, own + 1) : 0;
    for (int k = 0; k < inner; k += kept_rows) {
      const int many_rows = min(kept_rows, inner - k);
      hopper::named_barrier_sync(1, threads);
      for (int i = static_cast<int>(threadIdx.x); i < many_rows * lanes; i += threads)
        if (const int column = column0 + i % lanes * 4; column < n)
          kept[i] = *reinterpret_cast<const float4*>(dense + (k + i / lanes) * stride + column);
      hopper::named_barrier_sync(1, threads);
      for (int r = first + warp, i = 0; r < last; r += warps, ++i) {
        int64_t p = __shfl_sync(0xffffffffu, next, i);
        const int64_t end = __shfl_sync(0xffffffffu, own_end, i);
        const auto entry_of_lane = [&](int64_t from) {
          return from + lane < end ? nonzero(from + lane) : Nonzero{INT_MAX, 0};
        };
        float sum[4] = {};
        Nonzero ahead = entry_of_lane(p);
        for (int many = 32; many == 32 && p < end; p += many) {
          Nonzero entry = ahead;
          ahead = entry_of_lane(p + 32);
          const unsigned beyond = __ballot_sync(0xffffffffu, entry.row >= k + many_rows);
          many = beyond ? __ffs(beyond) - 1 : 32;
          if (lane >= many) entry = {k, 0};
          const bool passed = __any_sync(0xffffffffu, entry.row < k);
          for (int from = part; from - part < many; from += at_once * parts) {
            float4 x[at_once];
            float number[at_once];
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
              const int row = __shfl_sync(0xffffffffu, entry.row, from + j * parts);
              number[j] = __shfl_sync(0xffffffffu, entry.number, from + j * parts);
              x[j] = {};
              if (from + j * parts >= many) continue;
              if (!passed)
                x[j] = kept[(row - k) * lanes + lane % lanes];
              else if (c < n)
                x[j] = *reinterpret_cast<const float4*>(dense + row * stride + c);
            }
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
              sum[0] = fmaf(number[j], x[j].x, sum[0]), sum[1] = fmaf(number[j], x[j].y, sum[1]);
              sum[2] = fmaf(number[j], x[j].z, sum[2]), sum[3] = fmaf(number[j], x[j].w, sum[3]);
            }
          }
        }
        if (lane == i) next = p;
        for (int step = lanes; step < 32; step *= 2)
#pragma unroll
          for (float& x : sum) x += __shfl_xor_sync(0xffffffffu, x, step);
        if (part > 0 || c >= n) continue;
        auto* const to = reinterpret_cast<float4*>(out + r * out_stride + c);
        const float4 before = k > 0 ? *to : float4{};
        *to = {before.x + alpha * sum[0], before.y + alpha * sum[1], before.z + alpha * sum[2],
               before.w + alpha * sum[3]};
      }
    }
  }
#endif
};

}  // namespace matmuls
