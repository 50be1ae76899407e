// norm_backward of rows that stream through shared memory: see rows/kernels/norm_backward_stream.cu.
#pragma once

#include <cstddef>
#include <cstdint>

namespace matmuls {

// Rows `strides` elements apart, which all three tensors hold equally far from a multiple of 16 bytes.
template <class T>
struct StreamNormBackward {
  const T *grad, *xhat, *weight;  // weight may be null
  const float* rstd;
  T* dx;
  int64_t strides[3];  // of grad, xhat and dx
  int64_t rows;
  int columns;
  bool rms;
  float* partial;     // [teams][2][columns], or null
  uint64_t* letters;  // kLetters of them a team where rows are `whole`, else none

  static constexpr int kLetters = 512;
};

// How many teams of blocks share such rows on the current device, 0 where rows/launch_rows.cuh's kernels serve them
// better. `whole`: rows are whole 16-byte vectors, aligned.
template <class T>
int stream_norm_backward_teams(int64_t columns, int64_t rows, bool whole);
// False, and nothing is written, where the teams' blocks, which wait for each other, do not all fit.
template <class T>
bool launch_stream_norm_backward(const StreamNormBackward<T>& call, int teams, bool whole);

}  // namespace matmuls
