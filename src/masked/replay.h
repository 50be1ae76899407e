// Operators whose kernels Triton compiles: their CUDA and Autograd kernels. Repeated calls run without Python.
#pragma once

#include <pybind11/pybind11.h>

#include "glue/operator.h"

namespace matmuls {

void define_replay(pybind11::module_& m);

// Applies an operator's autograd node to the arguments on the stack, which it replaces by the results.
using ApplyNode = void(torch::jit::Stack& stack);
// The node of an operator, by its name without the namespace; null if Python records its gradient.
ApplyNode* node_of(std::string_view name);

}  // namespace matmuls
