// A sparse matrix with its zeros, for csr_spmm: where a tenth of it or more is stored, tensor cores are faster than
// what reads a row of the dense side for each nonzero.
//
// float32 goes through them as two float16 numbers for each, high + low / 2^12, after every row of A and every column
// of the dense side was scaled by a power of two to a largest number in [2^14, 2^15): they keep 22 bits or more of what
// is not below 2^-28 of its row's or column's largest, and 2^-51 of that of what is. high @ high + (high @ low + low @
// high) / 2^12 leaves out less than one in 2^22, and tensor cores add up 64 products at a time, float32 the rest. Sums
// of few products would be less exact than float32's: matrices of less than kFewestInHalves a row go by rows.
//
// What that would not do is looked at on the GPU, and those columns then summed by the rows' nonzeros in float32:
// numbers that are not finite; a column twice in a row of A; numbers below 2^-28, unless every row of A meets in every
// column a product of two that are 2^-8 of their largest, beside which they vanish: more such numbers in each row than
// others in any column.
#pragma once

#include <ATen/core/Tensor.h>

#include "sparse/csr.h"

namespace matmuls {

constexpr float kLowScale = 4096;
constexpr int kFewestInHalves = 16;  // choice.py's FEWEST_IN_HALVES
constexpr int kFillFacts = 4;        // ints of FillFacts, sparse/spmm/densified/densified.cuh
constexpr int kTileRows = 128, kStepColumns = 64,
              kStepHalves = 8704;        // of StepOfTile, sparse/spmm/densified/densified.cuh
constexpr int kNarrowStepHalves = 4608;  // of NarrowStepOfTile
constexpr int kMostPaired = 32768;       // columns of two of four

// float32: parts [2, rows, columns to a multiple of 8] in float16, exponents [rows] of the rows' scales. 16 bits:
// [rows, columns to a multiple of 8] as they are. facts: [kFillFacts].
//
// Of a matrix most of whose columns, taken by four, hold two nonzeros or fewer, two of four suffice: half the bytes,
// and tensor cores take half the time. parts: [tiles of rows, steps of columns, kStepHalves], StepOfTile's, or in 16
// bits kNarrowStepHalves, NarrowStepOfTile's. rest, [rows + those beyond two, 2]: of each row from where to where below
// its other nonzeros lie, as columns and bits of float32, which are multiplied as such. It is [0, 2] where parts hold
// all.
struct Filled {
  at::Tensor parts, exponents, facts, rest;
};
// values: [nonzeros]. beyond: how many of them are beyond two of four; -1: not known.
Filled fill(const Pattern& p, const at::Tensor& values, int64_t columns, bool two_of_four = false, int64_t beyond = -1);

// Facts of dense, [columns, n] with rows on 16 bytes, in 16 bits: whether it is finite. [kFillFacts]
at::Tensor look_for_infinite(const at::Tensor& dense);

// out <- alpha * A @ dense in float32, A of this pattern and these values, side by side in memory; n a multiple of 8,
// rows of dense and out on 16 bytes. dense takes up to 128 MiB in halves, or those of 128 columns, at a time.
void multiply_halves(const Filled& a, const Pattern& p, const at::Tensor& values, const at::Tensor& dense,
                     const at::Tensor& out, double alpha);
bool can_multiply_halves(const at::Tensor& operand);  // on its GPU, the current one

// out <- A @ dense in 16 bits, of what two of four keep of A, of columns that differ in every row; n a multiple of 8,
// rows of dense, at least one, and out on 16 bytes and no nearer than they are long. 0 times what is not
// finite is NaN, as in a product with all zeros, in the columns that are kept beside fewer than two.
void multiply_two_of_four(const Filled& a, const at::Tensor& dense, const at::Tensor& out);

}  // namespace matmuls
