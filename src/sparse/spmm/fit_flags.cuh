// Decides on the GPU whether a densified product (tensor cores over A with explicit zeros) is exact enough. Columns of
// the result for which it is not are recomputed in float32 by the kernels of sparse/spmm/by_rows/by_rows.cuh.
#pragma once

#include <climits>

namespace matmuls {

// Flags collected from A, or from a range of columns of B. All zeros: nothing found.
struct FitFlags {
  int unfit;  // holds something that the densified product cannot represent, e.g. a non-finite number
  int tiny;   // some number is tiny
  // A: INT_MAX - (large numbers of the row with the fewest). B: numbers that are not large, zeros included, of the
  // column with the most. If the first count exceeds the second, every row of A has a large number opposite a large one
  // in every column.
  int missing;
  int beyond;  // A only: nonzeros that do not fit into 2:4 sparsity
};
__device__ inline bool fit(const FitFlags& a, const FitFlags& dense) {
  return !a.unfit && !dense.unfit && ((!a.tiny && !dense.tiny) || INT_MAX - a.missing > dense.missing);
}

}  // namespace matmuls
