// Rows of a square sparse matrix in an order in which those that are multiplied at about the same time read the same
// rows of the dense side (matmuls/reorder.py). int32 throughout.
//
// Regions grow from every size-th row: in each of `rounds` a row without one joins the last of those that the rows of
// its columns were in before. What none reaches joins by its place, row / size. Rows of one region lie near each other
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

// Rows of the dense side that rows on their way at once, `at_once` in turn, read: each once for all of them. Of every
// every-th such window alone.
struct Windows {
  int at_once, every;

  int64_t of(int64_t rows) const { return ceil_of(ceil_of(rows, at_once), every); }
  // Row i of those looked at, where each window but the last has all of its rows.
  C10_HOST_DEVICE int64_t row(int64_t i) const { return i / at_once * every * at_once + i % at_once; }
};

// before: [rows] of scratch. seen: a bit for each window and column, zeros at first, [windows, ceil(columns / 32)];
// count: [1], zero at first. order: row i of the new matrix was row order[i]; undefined: as they are.
void grow_on_gpu(const Pattern& p, int size, int rounds, const at::Tensor& regions, const at::Tensor& before);
void count_reads_on_gpu(const Pattern& p, const at::Tensor& order, const Windows& windows, const at::Tensor& seen,
                        const at::Tensor& count);
// The nonzeros by rows in their new order: their columns, and the place that each has in p. crow: the new offsets.
// order names every row once: nobody looks.
void move_rows_on_gpu(const Pattern& p, const at::Tensor& order, const at::Tensor& crow, const at::Tensor& col,
                      const at::Tensor& place);

}  // namespace matmuls
