// Defines custom_mm._C.BoundCalls (prepared operator calls).
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_bound_calls(pybind11::module_& m);

}  // namespace matmuls
