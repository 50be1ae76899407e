// custom_mm._C.unchanged: whether Python dictionaries, classes and tensors are as they were.
#pragma once

#include <pybind11/pybind11.h>

namespace matmuls {

// items: [dictionary or class, key, value, ...], None for what is absent, the same objects or equal; sizes:
// [dictionary, size, ...]; types: [object, class, ...]; addresses:
// [dictionary, key, address of the tensor, its dtype, its number of elements, ...].
bool unchanged(const pybind11::list& items, const pybind11::list& sizes, const pybind11::list& types,
               const pybind11::list& addresses);

}  // namespace matmuls
