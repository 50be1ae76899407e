// A call of softmax or scaled_masked_softmax: its rows, and the facts that choose its kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "glue/masks.h"
#include "rows/facts.h"

namespace matmuls {

// One checked call. In place, `out` is x.
struct SoftmaxCall {
  const char* op;
  at::Tensor x, out;
  int64_t dim = -1;
  at::Tensor mask = {};  // expanded to x's sizes: stride 0 in broadcast dimensions
  MaskKind kind = MaskKind::none;
  double scale = 1;
  bool causal = false;

  bool masked() const { return kind != MaskKind::none || causal || scale != 1; }
};
void run_cuda(const SoftmaxCall& c);

// data: rows of x and out. mask_rows: rows of the mask, and of the query's position, the index along the last but one
// dimension expressed as an offset. Fewer dimensions of these merge.
struct SoftmaxRows {
  Rows<2> data, mask_rows;
};
inline SoftmaxRows rows_of_call(const SoftmaxCall& c) {
  const int64_t dims = c.x.dim();
  const auto position = position_strides(dims, c.causal);
  auto order = innermost_first(dims);
  if (c.kind != MaskKind::none && dims > 2 && c.x.stride(-2) != 0) {
    // If more than 16 MB of x pass before a mask row is needed again (by the next head), the dimensions that share the
    // row become the innermost ones, so that it is still in the L2.
    const int64_t between = 2 * c.x.size(-1) * c.x.size(-2) * c.x.element_size();
    if (between > (int64_t{16} << 20))
      std::stable_partition(order.begin(), order.end(),
                            [&](int64_t d) { return c.mask.stride(d) == 0 && d < dims - 2; });
  }
  const at::IntArrayRef mask = c.mask.defined() ? c.mask.strides() : at::IntArrayRef{};
  return {rows_of<2>(c.op, c.x.sizes(), {c.x.strides(), c.out.strides()}, c.dim, order),
          rows_of<2>(c.op, c.x.sizes(), {mask, position}, c.dim, order)};
}

// True if the mask allows vector loads: V columns of x match V elements of the mask, aligned to their size or 16 bytes.
inline bool by_words(const SoftmaxCall& c, const Rows<2>& mask_rows, int64_t V) {
  if (!c.mask.defined()) return true;
  const int64_t element = c.mask.element_size(), bytes = std::min<int64_t>(V * element, 16);
  bool aligned = mask_rows.column_strides[0] == 1 && reinterpret_cast<uintptr_t>(c.mask.const_data_ptr()) % bytes == 0;
  for (int d = 0; d < mask_rows.dims; ++d) aligned &= mask_rows.strides[0][d] * element % bytes == 0;
  return aligned;
}

inline RowFacts facts_of_call(const SoftmaxCall& c, const SoftmaxRows& rows) {
  const int64_t element = c.x.element_size();
  RowFacts f = facts_of(c.masked() ? RowOperation::scaled_masked_softmax : RowOperation::softmax, element, rows.data,
                        std::array{c.x.const_data_ptr(), static_cast<const void*>(c.out.const_data_ptr())});
  read_alike(f, c.dim, c.x.dim());
  f.mask = c.kind;
  f.causal = c.causal;
  f.scale = c.scale;
  f.mask_vectors = by_words(c, rows.mask_rows, 16 / element);
  f.mask_steps = c.mask.defined() && rows.mask_rows.column_strides[0] != 1;
  return f;
}

}  // namespace matmuls
