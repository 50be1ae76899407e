// The Python function custom_mm._C.matmul.
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_matmul(pybind11::module_& m);

}  // namespace matmuls
