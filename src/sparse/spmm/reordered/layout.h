// Reorders the rows of a square sparse matrix A, so that rows that are multiplied at about the same time read the same
// rows of B (matmuls/reorder.py). All tensors are int32.
//
//   csr_regions   region of each row, by growing regions over the matrix's graph
//   csr_reads     estimate of how many rows of B an order reads
//   csr_reorder   the matrix in the new order:
//
//      old rows   | r0: a b | r1: c | r2: d e f |       order = 2, 0, 1
//      new col    | d e f | a b | c |                   place = 3 4 5 0 1 2   index of each nonzero in the old matrix
//      new crow   0       3     5   6
//
// Regions grow from every size-th row: row r is the seed of region r / size. In each of `rounds` rounds, a row without
// a region joins the highest-numbered region that a row named by its columns had before the round. A row that none
// reaches joins region row / size. So rows of one region are near each other in the graph, whatever their numbers.
// in the matrix's graph, whatever their numbers are.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr const char* kRegionsOp = "csr_regions";
constexpr const char* kReadsOp = "csr_reads";
constexpr const char* kReorderOp = "csr_reorder";

C10_HOST_DEVICE inline int seed(int row, int size) { return row % size == 0 ? row / size : -1; }
// A row's region after another round; -1: none yet.
C10_HOST_DEVICE inline int grown(const int* crow, const int* col, int row, const int* regions) {
  int region = regions[row];
  if (region >= 0) return region;
  for (int p = crow[row]; p < crow[row + 1]; ++p) region = region < regions[col[p]] ? regions[col[p]] : region;
  return region;
}

// Windows of `at_once` consecutive rows of A, which are in flight together, for counting reads of B: a window reads
// each row of B once. Only every `every`-th window is counted.
struct Windows {
  int at_once, every;

  // The number of windows that are counted.
  int64_t of(int64_t rows) const { return ceil_of(ceil_of(rows, at_once), every); }
  // Row of A at position i of the counted windows; all but the last have all of their rows.
  C10_HOST_DEVICE int64_t row(int64_t i) const { return i / at_once * every * at_once + i % at_once; }
};

//   before [rows]: scratch
//   order [rows]: row i of the new matrix is row order[i] of the old one; undefined: unchanged
//   seen [windows, ceil(columns / 32)]: a bit per window and column, zero-initialized
//   count [1] int64: zero-initialized
void grow_on_gpu(const Pattern& p, int size, int rounds, const at::Tensor& regions, const at::Tensor& before);
void count_reads_on_gpu(const Pattern& p, const at::Tensor& order, const Windows& windows, const at::Tensor& seen,
                        const at::Tensor& count);
// col, place [nonzeros] <- columns of the nonzeros in the new row order, and their indices in p. crow: the new offsets.
// order must name every row once; this is not checked.
void move_rows_on_gpu(const Pattern& p, const at::Tensor& order, const at::Tensor& crow, const at::Tensor& col,
                      const at::Tensor& place);

}  // namespace matmuls
