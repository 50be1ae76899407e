// Chunk layout for csr_spmm_chunks (kernel.h): A's nonzeros in row order, cut into chunks of about `size` nonzeros.
// Rows of more than `piece` nonzeros are cut into pieces. A chunk holds the rows and pieces that begin within its
// `size` nonzeros. All tensors are int32.
//
//   begins [ceil(nonzeros / size) + 1]: first nonzero of each chunk; a row or piece begins there
//   ends [nonzeros]: the row that ends with this nonzero, rows + slot for the end of a piece, or -1
//   cut [nonzeros / (piece + 1), 3]: each row that was cut: row, first slot, number of pieces; then zeros
//   empty [rows]: rows without nonzeros; then zeros
//   counts [3]: entries of empty, entries of cut, slots in all
//   names [rows], optional: row ids; row r appears as names[r], e.g. the row before a reordering
//
// Example: rows = 3, size = 4, piece = 4, row lengths 3, 1, 8:
//
//   nonzero  0  1  2 | 3 | 4  5  6  7 : 8  9 10 11
//   row      0  0  0 | 1 | 2  2  2  2 : 2  2  2  2
//   ends    -1 -1  0 | 1 |-1 -1 -1  3 :-1 -1 -1  4      cut: (2, 0, 2)
//   begins   0            4            8            12
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr const char* kChunksOp = "csr_chunks";
constexpr int64_t kMostChunk = 1 << 20;  // nonzeros

struct Chunks {
  at::Tensor begins, ends, cut, empty, counts;
};

// Where a chunk begins: the first row or piece that begins at `target` or later.
C10_HOST_DEVICE inline int begin_of_chunk(const int* crow, int rows, int64_t target, int piece) {
  const int row = first_from(crow, 0, rows, target);  // the first row that begins there or later
  const int next = crow[row], first = row > 0 ? crow[row - 1] : next;
  if (next - first <= piece) return next;
  const int64_t next_piece = first + (target - first + piece - 1) / piece * piece;
  return next_piece < next ? static_cast<int>(next_piece) : next;
}

void cut_on_gpu(const Pattern& p, int size, int piece, const at::Tensor& names, const Chunks& made);

}  // namespace matmuls
