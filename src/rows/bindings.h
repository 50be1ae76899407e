// Defines custom_mm._C.explain_..., choose_row_kernel and row_kernels. Apart from explain.h, which the operations on
// rows include: pybind11 takes the compiler 5 s in each.
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_explain(pybind11::module_& m);

}  // namespace matmuls
