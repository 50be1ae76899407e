// Says whether a TorchFunctionMode may override a call that does not go through torch.ops.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

namespace matmuls {

// torch.utils._device.DeviceContext, the mode of torch.set_default_device and of torch.device as a context. It changes
// where tensors are created, and nothing else.
inline PyTypeObject* device_context = nullptr;
inline void find_device_context() {
  pybind11::object found = pybind11::module_::import("torch.utils._device").attr("DeviceContext");
  device_context = reinterpret_cast<PyTypeObject*>(found.release().ptr());  // kept for ever
}

// Needs Python's lock.
inline bool is_overridden_by_mode() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  for (int64_t i = 0; i < Modes::stack_len(); ++i)
    if (Py_TYPE(Modes::get_stack_at(i)->ptr(getPyInterpreter())) != device_context) return true;
  return false;
}

}  // namespace matmuls
