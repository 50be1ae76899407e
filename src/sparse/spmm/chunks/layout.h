// The nonzeros of a sparse matrix, in the order of its rows, cut into chunks for the products of
// sparse/spmm/chunks/kernel.h: a chunk is what begins within `size` nonzeros, rows of more than `piece` are cut into
// pieces.
//   begins [ceil(nonzeros / size) + 1]: where each chunk begins, at the first nonzero of a row or piece
//   ends [nonzeros]: the row whose last nonzero this is, rows + slot for a piece's, or -1
//   cut [nonzeros / (piece + 1), 3]: the rows that were cut: a row, its first slot and how many pieces it has
//   empty [rows]: the rows without nonzeros
//   counts [3]: how many of `empty` and `cut` there are, zeros follow them, and slots in all
// All int32. names: row r is told as names[r], where given: those of a matrix before its rows were reordered.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr const char* kChunksOp = "csr_chunks";
constexpr int64_t kMostChunk = 1 << 20;  // nonzeros

struct Chunks {
  at::Tensor begins, ends, cut, empty, counts;
};

// Where the chunk begins that takes what begins at `target` or later.
C10_HOST_DEVICE inline int begin_of_chunk(const int* crow, int rows, int64_t target, int piece) {
  const int row = first_from(crow, 0, rows, target);  // the first that begins there or later
  const int next = crow[row], first = row > 0 ? crow[row - 1] : next;
  if (next - first <= piece) return next;
  const int64_t next_piece = first + (target - first + piece - 1) / piece * piece;
  return next_piece < next ? static_cast<int>(next_piece) : next;
}

void cut_on_gpu(const Pattern& p, int size, int piece, const at::Tensor& names, const Chunks& made);

}  // namespace matmuls
