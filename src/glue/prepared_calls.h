// Defines custom_mm._C.PreparedCalls (prepared operator calls), and lets C++ make such a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace matmuls {

void define_prepared_calls(pybind11::module_& m);

// A prepared call with all its arguments, which needs no Python any more.
struct ReadyCall {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;

  at::Tensor run() && {
    op.callBoxed(arguments);
    return std::move(arguments.at(0)).toTensor();
  }
};

// Looks up the prepared call for x itself (not for its rows) and `passed`; empty if none is valid. The GIL is held.
std::optional<ReadyCall> ready_call(pybind11::handle calls, const at::Tensor& x, pybind11::handle passed);

}  // namespace matmuls
