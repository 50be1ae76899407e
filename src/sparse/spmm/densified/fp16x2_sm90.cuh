// The split form of B, shared by both kernels of the fp16x2 product (split_rhs_sm90.cu, fp16x2_sm90.cu; densified.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "gpu/launch.cuh"
#include "sparse/spmm/densified/densified.cuh"

namespace matmuls {

constexpr int64_t kHalvesBytes = 128 << 20;          // of B's halves at once
constexpr int kSplitColumns = 16, kSplitBlocks = 8;  // a cluster of kSplitBlocks blocks takes 16 columns of B

// B [inner, n] split into halves; all members in one piece of memory, 16-byte aligned each.
struct SplitDense {
  __half* halves;   // [2, inner, n]: high halves, then low halves
  int* powers;      // [n]: column c was scaled by 2^powers[c]
  FitFlags* facts;  // [groups of kSplitColumns, kSplitBlocks]: of one block's rows of the group's columns

  static int64_t parts(int64_t n) { return up(n, kSplitColumns); }
  static int64_t nbytes(int64_t inner, int64_t n) {
    return 4 * inner * n + 4 * n + parts(n) * kSplitBlocks * static_cast<int64_t>(sizeof(FitFlags));
  }
  SplitDense(void* memory, int64_t inner, int64_t n)
      : halves(static_cast<__half*>(memory)),
        powers(reinterpret_cast<int*>(halves + 2 * inner * n)),
        facts(reinterpret_cast<FitFlags*>(powers + n)) {}
};

// Also out <- rest @ dense in the rows of A that have entries in `rest`, A's nonzeros beyond 2:4 (densified.h).
bool can_split_dense();  // on the current device
void split_dense(const at::Tensor& dense, const SplitDense& to, const at::Tensor& rest, const at::Tensor& out);

}  // namespace matmuls
