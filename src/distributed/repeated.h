// Defines custom_mm._C.RowSums, Step and RepeatedProduct: a distributed product that is repeated without Python.
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

void define_repeated_product(pybind11::module_& m);

}  // namespace matmuls
