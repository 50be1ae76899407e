// custom_mm._C.unchanged: whether Python dictionaries, classes and tensors are as they were.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "glue/call_state.h"

namespace matmuls {

// The states of tensors, which it does not keep alive.
struct TensorStates {
  std::vector<TensorState> all;
};

// items: [dictionary or class, key, value, ...], None for what is absent, the same objects or equal; sizes:
// [dictionary, size, ...]; types: [object, class, ...]; places: [dictionary, key, ...] of tensors with these states.
bool unchanged(const pybind11::list& items, const pybind11::list& sizes, const pybind11::list& types,
               const pybind11::list& places, const TensorStates& states);

void define_unchanged(pybind11::module_& m);

}  // namespace matmuls
