// layer_norm_ of middle rows of 16-bit numbers that do not start on 16 bytes: see stream_norm.cu.
#pragma once

#include <cstdint>

namespace matmuls {

// Rows `strides` elements apart, which x and xhat hold equally far from a multiple of 16 bytes.
template <class T>
struct StreamNorm {
  T *x, *xhat;             // xhat may be null
  const T *weight, *bias;  // either may be null
  float* rstd;             // may be null
  int64_t strides[2];      // of x and xhat
  int64_t rows;
  int columns;
  float eps;
};

// Whether it did: not where rows.cuh's kernels serve such rows better.
template <class T>
bool launch_stream_norm(const StreamNorm<T>& call);

}  // namespace matmuls
