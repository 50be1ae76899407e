// What both kernels of a product in halves (sparse/spmm/densified/densified.h) share: the dense side's halves, and how
// they are launched.
#pragma once

#include <ATen/core/Tensor.h>

#include "gpu/launch.cuh"
#include "sparse/spmm/densified/densified.cuh"

namespace matmuls {

constexpr int64_t kHalvesBytes = 128 << 20;          // of the dense side at once
constexpr int kSplitColumns = 16, kSplitBlocks = 8;  // a cluster takes 16 columns of the dense side

// The dense side, [inner, n], in halves. On 16 bytes each, in one piece of memory.
struct DenseHalves {
  __half* halves;    // [2, inner, n]
  int* powers;       // [n], of the columns' scales
  FillFacts* facts;  // [parts of kSplitColumns, kSplitBlocks]: of a block's rows of them

  static int64_t parts(int64_t n) { return up(n, kSplitColumns); }
  static int64_t nbytes(int64_t inner, int64_t n) {
    return 4 * inner * n + 4 * n + parts(n) * kSplitBlocks * static_cast<int64_t>(sizeof(FillFacts));
  }
  DenseHalves(void* memory, int64_t inner, int64_t n)
      : halves(static_cast<__half*>(memory)),
        powers(reinterpret_cast<int*>(halves + 2 * inner * n)),
        facts(reinterpret_cast<FillFacts*>(powers + n)) {}
};

// rest: what two of four leave of A (sparse/spmm/densified/densified.h); out <- rest @ dense, in the rows of A that
// have any.
bool can_split_dense();  // on the current device
void split_dense(const at::Tensor& dense, const DenseHalves& to, const at::Tensor& rest, const at::Tensor& out);

}  // namespace matmuls
