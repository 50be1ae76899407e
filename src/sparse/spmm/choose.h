// What a csr_spmm without a plan runs on a GPU, chosen on the host from sizes alone: the row kernels and how they split
// the work, or the densified product.
//
//   by_rows      teams of lanes take whole rows of A                    spmm_rows_kernel, no slots
//   split_rows   long rows are cut at slots                             spmm_rows_kernel and spmm_long_rows_kernel
//   shares       A is divided into merge-path shares of equal rows +    spmm_shares_kernel and spmm_long_rows_kernel
//                nonzeros
//   fp16x2       float32: A is densified for this product               densified/fp16x2_sm90.cu
//   dense        16 bits: the same                                      cuBLAS
//
// Kernels that are switched off (glue/kernel_switch.h) are passed over.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

namespace matmuls::spmm {

enum class SpmmKernel { by_rows, split_rows, shares, fp16x2, dense };  // named as in matmuls/sparse/names.py
constexpr int kSpmmKernels = 5;
const char* name_of(SpmmKernel kernel);

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

  SpmmKernel kernel() const {
    return shares ? SpmmKernel::shares : slots > 0 ? SpmmKernel::split_rows : SpmmKernel::by_rows;
  }
  const char* name() const { return name_of(kernel()); }
};

// An instance of spmm_rows_kernel or spmm_shares_kernel: `ahead` nonzeros are prefetched; blocks of a multiprocessor,
// of shares.
struct RowsKernel {
  int lanes, parts, vectors, ahead;
  bool lean = false;
  int share_blocks = 0;  // 0: of spmm_rows_kernel

  constexpr bool is(const RowsChoice& c) const {
    return lanes == c.lanes && parts == c.parts && vectors == c.vectors &&
           (c.shares ? share_blocks > 0 : share_blocks == 0 && lean == c.lean);
  }
};
constexpr RowsKernel kRowsByElements[] = {{4, 1, 1, 4}, {8, 1, 1, 8}, {32, 1, 1, 8}};
// By vectors; 64-bit types have the first four alone, to compile fewer kernels.
constexpr std::array<RowsKernel, 15> kRowsByVectors = {{{4, 1, 1, 4},
                                                        {8, 1, 1, 8},
                                                        {16, 1, 1, 8},
                                                        {32, 1, 1, 8},
                                                        {4, 8, 1, 4},
                                                        {8, 4, 1, 4},
                                                        {8, 1, 2, 4},
                                                        {16, 2, 1, 8},
                                                        {16, 2, 2, 4},
                                                        {16, 1, 2, 4},
                                                        {32, 1, 2, 4},
                                                        {4, 1, 1, 4, false, 4},
                                                        {8, 1, 1, 8, false, 3},
                                                        {16, 1, 1, 4, false, 4},
                                                        {32, 1, 1, 4, false, 4}}};
// kRowsByVectors and those of one element size.
template <size_t n>
constexpr auto with_rows_by_vectors(const RowsKernel (&own)[n]) {
  std::array<RowsKernel, kRowsByVectors.size() + n> all{};
  std::ranges::copy(own, std::ranges::copy(kRowsByVectors, all.begin()).out);
  return all;
}
constexpr auto kRows2 = with_rows_by_vectors({{4, 4, 1, 4}, {16, 2, 1, 4, true}, {32, 1, 2, 4, false, 3}});
constexpr auto kRows4 = with_rows_by_vectors({{32, 1, 2, 2, false, 4}});
// Those that are compiled for a dtype.
constexpr std::span<const RowsKernel> rows_kernels(int element_bytes, bool vectors) {
  if (!vectors) return kRowsByElements;
  if (element_bytes == 2) return kRows2;
  if (element_bytes == 4) return kRows4;
  return std::span(kRowsByVectors).first(4);
}
inline bool is_compiled(const ProductFacts& f, const RowsChoice& c) {
  for (const RowsKernel& k : rows_kernels(f.element_bytes, f.vectors))
    if (k.is(c)) return true;
  return false;
}

// Raises ValueError if the product needs more blocks than a grid has, or if every row kernel that takes it is switched
// off. all_kernels: none counts as switched off, for a part of a product that another kernel leaves over.
RowsChoice choose_rows(const ProductFacts& facts, bool all_kernels = false);

// True if the densified product is estimated to be faster: A is densified for this product alone, in float32 as fp16x2,
// in 16 bits for cuBLAS. copies: B and the result are not aligned for it and go through copies.
bool is_worth_densifying(const ProductFacts& facts, bool copies);

// True if densified products read B and write the result in place. Other operands go through copies of padded width.
inline bool is_aligned(const ProductFacts& f) { return f.vectors && f.n % 8 == 0; }

// What the sizes leave open about densifying A for one product.
struct DensifyFacts {
  bool plain;      // a sum over all nonzeros onto nothing: no `selected`, beta 0
  bool alpha_one;  // alpha is 1
  bool fp16x2;     // float32: the GPU has the kernels
  bool cublas;     // 16 bits: cuBLAS may be called, and torch asks for no deterministic algorithms, as which it counts
                   // none of cuBLAS's
};
// The kernel that A may be densified for, fp16x2 or dense, worth it or not; or none.
std::optional<SpmmKernel> densified_kernel(const ProductFacts& facts, const DensifyFacts& more);
// The kernel that A is densified for, because that is estimated to be faster or because all row kernels are switched
// off; none: csr_spmm runs what choose_rows says.
std::optional<SpmmKernel> choose_densified(const ProductFacts& facts, const DensifyFacts& more);

}  // namespace matmuls::spmm
