// The Python functions custom_mm._C.matmul and scaled_masked_softmax.
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_python_calls(pybind11::module_& m);

}  // namespace matmuls
