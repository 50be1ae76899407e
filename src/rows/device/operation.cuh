// The interface of a row operation, as the kernels of rows/kernels/ use it. See rows/device/columns.cuh for a thread's
// columns, rows/device/inputs.cuh for what it holds of them, and rows/device/team.cuh for the threads that share a row
// and their merge.
#pragma once

#include "rows/device/inputs.cuh"
#include "rows/device/shapes.h"
#include "rows/device/team.cuh"
#include "rows/dispatch.h"

namespace matmuls {

// The interface of an operation Op, with storage type T and arithmetic type F:
//
//   kTraits                             what it is compiled for (rows/traits.h)
//   kInputs, kNumber, kColumnSums       of kTraits: tensors that a row is read from; whether each row has its own
//                                       number, row.number, the last argument of write; whether write adds to `sums`,
//                                       two for each of a thread's columns
//   State, identity()                   what a row is folded into, and its initial value
//   Row row(r)                          row r: `input(k)`, and the number of visible columns
//   kConstants, constant(c), absent(c)  rows of T that all rows share (weight, bias); their value where null
//   Held<V, NV>                         what fold leaves in registers for write
//   fold(state, held, row, span, inputs, constants)           adds a span to the state
//   merge(state, lanes)                                       merges the states of all lanes
//   finish(state)                                             converts the merged state for write
//   write(row, result, held, span, inputs, constants, sums)   writes a span of the result
//   write_sums(team, span, sums)        stores the sums over all rows; only if each thread keeps its columns
//
// inputs.words(i, k) is vector i of input k; constants(c, i, values) reads vector i of constant c.

// True if all constants exist and are aligned. The loads of several vectors then have no branches between them.
template <class Op>
__host__ __device__ bool has_plain_constants(const Op& op) {
  bool plain = true;
  for (int c = 0; c < Op::kConstants; ++c)
    plain &= op.constant(c) && reinterpret_cast<uintptr_t>(op.constant(c)) % 16 == 0;
  return plain;
}

}  // namespace matmuls
