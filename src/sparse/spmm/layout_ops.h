// SpmmByLayout: kernels of products by a layout of A that only GPU kernels read, which call csr_spmm instead.
#pragma once

#include "sparse/ops.h"

namespace matmuls {

// Kernels of `Op`, a product that csr_spmm computes as well, but from another layout of A: by_rows, the same by
// csr_spmm, and autograd: products that record a gradient go there. Argument `first` of Op is crow, followed by col,
// values, dense and columns; argument `order` is followed by longest.
template <class Op, size_t first, size_t order, class Signature = typename Op::Signature>
struct SpmmByLayout;
template <class Op, size_t first, size_t order, class... A>
struct SpmmByLayout<Op, first, order, at::Tensor(A...)> {
  static at::Tensor by_rows(A... arguments) {
    const auto all = std::forward_as_tuple(arguments...);
    return SpmmOp::call(std::get<first>(all), std::get<first + 1>(all), std::get<first + 2>(all),
                        std::get<first + 3>(all), std::get<first + 4>(all), "sum", 1, std::get<order>(all), {}, {}, {},
                        {}, false, std::get<order + 1>(all), -1);
  }
  static at::Tensor autograd(A... arguments) {
    const auto all = std::forward_as_tuple(arguments...);
    const bool recording = needs_gradient("spmm", {std::get<first + 2>(all), std::get<first + 3>(all)});
    return recording ? by_rows(arguments...) : Op::below_autograd(arguments...);
  }
};

}  // namespace matmuls
