// custom_mm._C.unchanged (unchanged.h).
#include "glue/unchanged.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace matmuls {
namespace {

namespace py = pybind11;

// The elements of a list in groups of N; stops at the first that is not `same`.
template <int N, class F>
bool all(const py::list& flat, F same) {
  const Py_ssize_t count = PyList_GET_SIZE(flat.ptr());
  TORCH_CHECK(count % N == 0, "unchanged: expected a list of ", N, " elements for each fact, got ", count);
  for (Py_ssize_t i = 0; i < count; i += N)
    if (!same(reinterpret_cast<PyListObject*>(flat.ptr())->ob_item + i)) return false;
  return true;
}

// A borrowed reference to what a dictionary, or a class itself, has under a key; null if it has nothing.
PyObject* found(PyObject* holder, PyObject* key) {
  PyObject* const items = PyType_Check(holder) ? reinterpret_cast<PyTypeObject*>(holder)->tp_dict : holder;
  TORCH_CHECK(items != nullptr && PyDict_Check(items), "unchanged: expected a dictionary or a class");
  PyObject* const value = PyDict_GetItemWithError(items, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

bool is_equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

bool is_in_place(PyObject* tensor, const TensorState& state) {
  return tensor != nullptr && THPVariable_Check(tensor) && state.is_of(THPVariable_Unpack(tensor));
}

}  // namespace

bool unchanged(const py::list& items, const py::list& sizes, const py::list& types, const py::list& places,
               const TensorStates& states) {
  TORCH_CHECK(py::len(places) == 2 * states.all.size(), "unchanged: expected a state for each place, got ",
              states.all.size(), " states and a list of ", py::len(places));
  auto state = states.all.begin();
  const bool same = all<2>(places, [&](PyObject** at) { return is_in_place(found(at[0], at[1]), *state++); }) &&
                    all<2>(sizes, [](PyObject** at) { return PyDict_Size(at[0]) == PyLong_AsSsize_t(at[1]); }) &&
                    all<2>(types, [](PyObject** at) { return reinterpret_cast<PyObject*>(Py_TYPE(at[0])) == at[1]; }) &&
                    all<3>(items, [](PyObject** at) {
                      PyObject* const value = found(at[0], at[1]);
                      return is_equal(value == nullptr ? Py_None : value, at[2]);
                    });
  if (PyErr_Occurred()) throw py::error_already_set();  // of a size that is no number
  return same;
}

void define_unchanged(py::module_& m) {
  py::class_<TensorStates>(m, "TensorStates").def(py::init([](const std::vector<at::Tensor>& tensors) {
    return TensorStates{{tensors.begin(), tensors.end()}};
  }));
  m.def("unchanged", unchanged, py::arg("items"), py::arg("sizes"), py::arg("types"), py::arg("places"),
        py::arg("states"));
  m.def("note_kernels_off", [](int64_t number) { kernels_off = number; }, py::arg("number"));
  m.def("switches", [] {
    const Switches now = Switches::now();
    return py::bytes(reinterpret_cast<const char*>(now.words.data()), sizeof(now.words));
  });
}

}  // namespace matmuls
