// norm_backward for rows that stream through shared memory; see rows/kernels/norm_backward_stream.cu.
#pragma once

#include <cstddef>
#include <cstdint>

namespace matmuls {

// Arguments. Rows are `strides` elements apart, and each row has the same misalignment in all three tensors.
template <class T>
struct StreamNormBackward {
  const T *grad, *xhat, *weight;  // weight may be null
  const float* rstd;
  T* dx;
  int64_t strides[3];  // of grad, xhat and dx, in elements
  int64_t rows;
  int columns;
  bool rms;
  float* partial;      // [teams][2][columns], or null
  uint64_t* messages;  // [teams][kMessages] for `whole` rows, otherwise unused

  static constexpr int kMessages = 514;  // 512, and the start of the team
};

// teams: of `blocks` blocks, which share a row. whole: rows are aligned and their length is a multiple of 16 bytes.
template <class T>
void launch_stream_norm_backward(const StreamNormBackward<T>& call, int teams, int blocks, bool whole);

}  // namespace matmuls
