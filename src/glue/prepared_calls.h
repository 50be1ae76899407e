// Defines custom_mm._C.PreparedCalls (prepared operator calls).
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_prepared_calls(pybind11::module_& m);

}  // namespace matmuls
