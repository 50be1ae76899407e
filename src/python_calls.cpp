// matmul and scaled_masked_softmax as Python functions that call the operator's dispatcher entry at once. torch.ops
// would first convert the arguments by the operator's schema, to a stack, and its result back, about 1.5 us.
#include "python_calls.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>

#include "dense/ops.h"
#include "glue/function_modes.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

namespace py = pybind11;

// A call's arguments. Everything but plain tensors and numbers goes to torch.ops: subclasses and modes that override
// torch's functions, torch.jit.trace, and what the operator refuses.
struct Arguments {
  PyObject* const* all;
  Py_ssize_t count;

  bool is_tensor(int i) const { return THPVariable_CheckExact(all[i]); }
  bool is_bool(int i) const { return PyBool_Check(all[i]); }
  const at::Tensor& tensor(int i) const { return THPVariable_Unpack(all[i]); }
  bool flag(int i) const { return all[i] == Py_True; }

  static bool are_overridden() { return is_overridden_by_mode() || torch::jit::tracer::isTracing(); }
  PyObject* to_torch_ops(const char* name) const {
    const py::object ops = py::module_::import("torch").attr("ops");
    const py::object operation = ops.attr("custom_mm").attr(name).attr("default");
    return PyObject_Vectorcall(operation.ptr(), all, static_cast<size_t>(count), nullptr);
  }
};

PyObject* matmul(PyObject*, PyObject* const* all, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Arguments given{all, count};
  if (count != 4 || !given.is_tensor(0) || !given.is_tensor(1) || !given.is_bool(2) || !given.is_bool(3) ||
      Arguments::are_overridden())
    return given.to_torch_ops("matmul");
  at::Tensor y;
  {
    const py::gil_scoped_release no_gil;
    y = MatmulOp::call(given.tensor(0), given.tensor(1), given.flag(2), given.flag(3));
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyObject* scaled_masked_softmax(PyObject*, PyObject* const* all, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Arguments given{all, count};
  if (count != 4 || !given.is_tensor(0) || !(all[1] == Py_None || given.is_tensor(1)) || !PyFloat_CheckExact(all[2]) ||
      !given.is_bool(3) || Arguments::are_overridden())
    return given.to_torch_ops("scaled_masked_softmax");
  const std::optional<at::Tensor> mask = all[1] == Py_None ? std::nullopt : std::optional(given.tensor(1));
  at::Tensor y;
  {
    const py::gil_scoped_release no_gil;
    y = ScaledMaskedSoftmaxOp::call(given.tensor(0), mask, PyFloat_AS_DOUBLE(all[2]), given.flag(3));
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyCFunction by_vector(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void define_python_calls(py::module_& m) {
  // A pybind11 function would take 0.5 us to read its arguments.
  static PyMethodDef methods[] = {{"matmul", by_vector(matmul), METH_FASTCALL, nullptr},
                                  {"scaled_masked_softmax", by_vector(scaled_masked_softmax), METH_FASTCALL, nullptr},
                                  {}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace matmuls
