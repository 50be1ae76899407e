// matmul(a, b, transa, transb) as a Python function that calls the operator's dispatcher entry at once. torch.ops would
// first convert the arguments by the operator's schema, to a stack, and its result back, about 1.5 us.
#include "dense/python_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "dense/ops.h"

namespace matmuls {
namespace {

namespace py = pybind11;

// Everything but two plain tensors and two booleans goes to torch.ops: subclasses and modes that override torch's
// functions, torch.jit.trace, and what the operator refuses.
PyObject* by_torch_ops(PyObject* const* arguments, Py_ssize_t count) {
  static const auto operation = [] {
    const py::object all = py::module_::import("torch").attr("ops");
    return py::object(all.attr("custom_mm").attr("matmul").attr("default")).release();  // never freed
  }();
  return PyObject_Vectorcall(operation.ptr(), arguments, static_cast<size_t>(count), nullptr);
}

PyObject* matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto is_plain = [&](int i) { return THPVariable_CheckExact(arguments[i]); };
  if (count != 4 || !is_plain(0) || !is_plain(1) || !PyBool_Check(arguments[2]) || !PyBool_Check(arguments[3]) ||
      at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing())
    return by_torch_ops(arguments, count);
  at::Tensor y;
  {
    const py::gil_scoped_release no_gil;
    y = MatmulOp::call(THPVariable_Unpack(arguments[0]), THPVariable_Unpack(arguments[1]), arguments[2] == Py_True,
                       arguments[3] == Py_True);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace

void define_matmul(py::module_& m) {
  // A pybind11 function would take 0.5 us to read its arguments.
  static PyMethodDef methods[] = {
      {"matmul", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul)), METH_FASTCALL, nullptr}, {}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace matmuls
