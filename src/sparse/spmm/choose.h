// What a csr_spmm without a plan runs on a GPU, chosen on the host from sizes alone: the row kernels and how they split
// the work, or the densified product.
//
//   by_rows      teams of lanes take whole rows of A                    spmm_rows_kernel, no slots
//   split_rows   long rows are cut at slots, or A is divided into       spmm_rows_kernel and spmm_long_rows_kernel,
//                merge-path shares of equal rows + nonzeros             spmm_shares_kernel
#pragma once

#include <cstdint>

namespace matmuls::spmm {

constexpr int64_t kSkewed = 8;       // ratio of the longest row to the mean above which rows are cut
constexpr int kFewestInFp16x2 = 16;  // nonzeros per row: sums of fewer products would round worse than in float32

// A [rows, columns] sparse, B [batches, columns, n], result [batches, rows, n].
struct ProductFacts {
  int64_t rows, columns, nonzeros;
  int64_t longest;  // nonzeros of A's longest row, or an upper bound; -1: unknown
  int64_t n, batches;
  int element_bytes;  // of values, B and result; sums are in float32, or in float64 for 8 bytes
  bool vectors;       // rows of B and of the result begin at multiples of 16 bytes
  int64_t multiprocessors;
};

// A team has `lanes` lanes with `vectors` 16-byte vectors (without ProductFacts::vectors: elements) of B's columns
// each, times `parts` parts of a row's nonzeros.
struct RowsChoice {
  int lanes, parts, vectors;
  bool shares;  // merge-path shares; parts is 1
  bool lean;    // prefetches fewer nonzeros and so needs fewer registers
  // Grid: for each of `slices` slices of B's columns `blocks` blocks, of which the first piece_blocks take pieces of
  // long rows, the others rows.
  unsigned blocks, piece_blocks, slices;
  int rows_each;  // neighbouring rows of A per team
  bool slices_first;
  // Rows are cut at multiples of `slot`, of which there are `slots`: nonzeros, or rows + nonzeros of a share. 0: none.
  int64_t slot, slots;

  const char* name() const { return slots > 0 ? "split_rows" : "by_rows"; }
};

// Raises ValueError if the product needs more blocks than a grid has.
RowsChoice choose_rows(const ProductFacts& facts);

// True if the densified product is estimated to be faster: A is densified for this product alone, in float32 as fp16x2,
// in 16 bits for cuBLAS. copies: B and the result are not aligned for it and go through copies.
bool is_worth_densifying(const ProductFacts& facts, bool copies);

}  // namespace matmuls::spmm
