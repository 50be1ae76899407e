// Whether a product by tensor cores over a matrix with its zeros is exact enough: what was seen of A and of B on the
// GPU. Columns of the result for which it is not are summed again in float32 by the kernels of by_rows/.
#pragma once

#include <climits>

namespace matmuls {

// What was seen of A, or of columns of the dense side. Zeros say that nothing was.
struct FillFacts {
  int unfit;  // never to be multiplied so
  int tiny;   // some number is
  // Of A: INT_MAX less the large numbers of the row that has fewest. Of the dense side: the numbers that are not large,
  // zeros too, of the column that has most.
  int missing;
  int beyond;  // of A's nonzeros, two of four
};
__device__ inline bool fit(const FillFacts& a, const FillFacts& dense) {
  return !a.unfit && !dense.unfit && ((!a.tiny && !dense.tiny) || INT_MAX - a.missing > dense.missing);
}

}  // namespace matmuls
