// A pattern's indices as kernels take them.
#pragma once

#include "sparse/csr.h"
#include "sparse/spgemm/products.cuh"

namespace matmuls::spgemm {

template <class I>
Indices<I> indices_of(const Pattern& p) {
  return {p.crow.const_data_ptr<I>(), p.col.const_data_ptr<I>(), indices_or_null<I>(p.order)};
}

}  // namespace matmuls::spgemm
