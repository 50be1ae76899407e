// A call of layer_norm_ or rms_norm_: its rows, and the facts that choose its kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "rows/facts.h"

namespace matmuls {

struct NormCall {
  const char* op;
  at::Tensor x, weight, bias, residual;  // weight, bias and residual may be undefined
  double eps;
  bool rms;
  at::Tensor xhat, rstd;  // written if defined
};
void run_cuda(const NormCall& c);

// Rows of x, residual and xhat.
inline Rows<3> rows_of_call(const NormCall& c) { return rows_of<3>(c.op, {c.x, c.residual, c.xhat}, c.x.dim() - 1); }

inline RowFacts facts_of_call(const NormCall& c, Rows<3> rows) {
  const auto data = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
  std::array<const void*, 3> pointers{data(c.x), data(c.residual), data(c.xhat)};
  for (int t = 1; t < 3; ++t) {  // absent tensors get the address and strides of x
    if (pointers[t] && pointers[t] != pointers[0]) continue;
    pointers[t] = pointers[0];
    rows.strides[t] = rows.strides[0];
    rows.column_strides[t] = rows.column_strides[0];
  }
  RowFacts f = facts_of(c.rms ? RowOperation::rms_norm : RowOperation::layer_norm, c.x.element_size(), rows, pointers);
  const auto plain = [&](const at::Tensor& t) {
    return t.defined() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  f.residual = c.residual.defined();
  f.keeps = c.xhat.defined();
  f.plain_constants = plain(c.weight) && (c.rms || plain(c.bias));
  return f;
}

}  // namespace matmuls
