// Products for csr_spmm with A densified, i.e. stored with explicit zeros or in 2:4 sparse form, on tensor cores. Where
// a tenth of A or more is stored, these beat the kernels that read a row of B for each nonzero.
//
// float32 (fp16x2): each number becomes two float16, high + low / 2^12, after every row of A and every column of B was
// scaled by a power of two so that its largest magnitude lies in [2^14, 2^15).
//
//   A @ B ~ high @ high + (high @ low + low @ high) / 2^12      three fp16 products
//
// Numbers of at least 2^-28 of the largest of their row or column keep 22 bits or more; smaller ones are off by up to
// 2^-51 of that largest. The omitted low @ low is less than 2^-22 of the product. Tensor cores add up 64 products at a
// time, float32 registers the rest. Sums of few products would be less exact than in float32: matrices of fewer than
// kFewestInFp16x2 (sparse/spmm/choose.h) nonzeros per row take the row kernel.
//
// Inputs that this cannot represent are detected on the GPU, and those columns of the result are recomputed in float32
// from A's nonzeros (fallback.cuh):
//   - non-finite numbers
//   - a column that occurs twice in a row of A
//   - numbers below 2^-28 of their largest, unless every row of A has more numbers of at least 2^-8 of its largest than
//     any column of B has smaller ones. Then every sum holds a product of two such numbers, next to which the tiny ones
//     are negligible.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr float kLowScale = 4096;
constexpr int kFitFlags = 4;  // ints of FitFlags, sparse/spmm/fit_flags.cuh
constexpr int kTileRows = 128, kStepColumns = 64,
              kStepElements = 8704;        // 2-byte elements of StepOfTile, densified.cuh
constexpr int kNarrowStepElements = 4608;  // 2-byte elements of NarrowStepOfTile
constexpr int kMostPaired = 32768;         // columns of A at most, in 2:4 form

// A densified:
//
//   float32:  parts [2, rows, columns to a multiple of 8] float16: all high halves, then all low halves
//             exponents [rows] int32: row r was scaled by 2^exponents[r];  rest [0, 2]
//   16 bits:  parts [rows, columns to a multiple of 8]: the numbers as they are
//   2:4:      parts [tiles of 128 rows, steps of 64 columns, kStepElements], each a StepOfTile, in 16 bits
//             [.., .., kNarrowStepElements], each a NarrowStepOfTile (densified.cuh); float32 also has exponents
//             rest [rows + nonzeros beyond 2:4, 2] int32: what does not fit into 2:4, multiplied by CUDA cores
//
//               rest[0 .. rows - 1]    begin, end of row r's entries, as indices into rest
//               rest[rows ..]          column, bits of the number as float32
//   facts [kFitFlags] int32: FitFlags
//
// 2:4 form suits a matrix most of whose aligned groups of four columns hold at most two nonzeros: it takes half the
// bytes and half the tensor core time.
struct DensifiedMatrix {
  at::Tensor parts, exponents, facts, rest;
};
// values [nonzeros]. beyond: how many of them do not fit into 2:4; -1: unknown.
DensifiedMatrix densify(const Pattern& p, const at::Tensor& values, int64_t columns, bool sparse24 = false,
                        int64_t beyond = -1);

// FitFlags, [kFitFlags] int32, of dense [columns, n] in 16 bits with 16-byte aligned rows: unfit if not finite.
at::Tensor find_nonfinite(const at::Tensor& dense);

// out <- alpha * A @ dense in float32. p and values: A's CSR, contiguous. n is a multiple of 8, rows of dense and out
// are 16-byte aligned. Splits up to 128 MiB of dense at a time, or 128 columns if these are more.
void multiply_fp16x2(const DensifiedMatrix& a, const Pattern& p, const at::Tensor& values, const at::Tensor& dense,
                     const at::Tensor& out, double alpha);
bool can_multiply_fp16x2(const at::Tensor& operand);  // on operand's GPU, the current one

// out <- A @ dense in 16 bits from A in 2:4 form; the columns of a row of A differ. n is a multiple of 8; rows of dense
// (at least one) and of out are 16-byte aligned and do not overlap. In groups of four with fewer than two nonzeros 2:4
// keeps zeros: such a 0 times a non-finite number is NaN, as in a dense product.
void multiply_sparse24(const DensifiedMatrix& a, const at::Tensor& dense, const at::Tensor& out);

}  // namespace matmuls
