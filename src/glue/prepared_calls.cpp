// Prepared operator calls: all arguments but one tensor are fixed. The arguments are parsed and checked once; later
// calls only compare the tensor's dtype, shape, strides and device, the dispatch state and the fixed tensors. A call
// takes 2 us instead of 10 in Python, with a gradient too: the operator records it as always.
#include "glue/prepared_calls.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "glue/autograd.h"
#include "glue/call_state.h"
#include "glue/function_modes.h"
#include "glue/handles.h"
#include "glue/values_graph.h"

namespace matmuls {
namespace {

namespace py = pybind11;
using at::Tensor;
using torch::jit::Stack;

constexpr size_t kMost = 16;   // prepared calls kept, the most recent ones
constexpr size_t kPassed = 4;  // tensors given again with each call, at most

// State, apart from the arguments, that decides the path of a call through the dispatcher.
struct Modes {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  Switches switches = Switches::now();
  bool recording = at::GradMode::is_enabled();

  bool operator==(const Modes& other) const {
    return keys.included_ == other.keys.included_ && keys.excluded_ == other.keys.excluded_ &&
           switches == other.switches;
  }
};

// A tensor as it was when the call was prepared.
struct TensorSnapshot {
  Tensor tensor;
  TensorState state;
  int64_t version;
  bool requires_grad;

  explicit TensorSnapshot(const Tensor& t)
      : tensor(t), state(t), version(t._version()), requires_grad(t.requires_grad()) {}
  // True if everything that Python's choice depends on is unchanged. The values and their place may differ.
  bool is_alike() const { return state.form.is_of(tensor) && tensor.requires_grad() == requires_grad; }
  bool is_unchanged() const {
    return tensor._version() == version && state.is_of(tensor) && tensor.requires_grad() == requires_grad;
  }
};

bool is_traced_or_transformed(const Tensor& t) {
  return t.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize}));
}
bool is_plain(const Tensor& t) {
  return !t.is_inference() && t.layout() == at::kStrided && !is_traced_or_transformed(t);
}

// A sparse CSR tensor whose values are read anew for each call, with the indices it had. It is not kept alive.
class Matrix {
 public:
  Matrix(const Tensor& a, size_t place)
      : place_(place),
        keys_(a.key_set()),
        requires_grad_(a.requires_grad()),
        crow_(parts(a).compressed_indices()),
        col_(parts(a).plain_indices()) {}

  size_t place() const { return place_; }  // of the values among the arguments
  bool is_unchanged(const Tensor& a) const {
    if (a.layout() != at::kSparseCsr || a.key_set() != keys_ || a.requires_grad() != requires_grad_) return false;
    return parts(a).compressed_indices().is_same(crow_.tensor) && parts(a).plain_indices().is_same(col_.tensor) &&
           crow_.is_unchanged() && col_.is_unchanged();
  }
  // As matmuls/sparse/csr_pattern.py's values_of.
  static Tensor values(const Tensor& a) {
    if (!a.requires_grad() || !at::GradMode::is_enabled()) return parts(a).values();
    if (a.grad_fn()) return values_of_sparse(a);
    const Tensor values = a.values();
    return at::_unsafe_view(values, values.sizes());
  }
  static bool is_taken(const Tensor& a) {
    return a.layout() == at::kSparseCsr && a.dim() == 2 && !a.is_inference() && !is_traced_or_transformed(a) &&
           is_plain(parts(a).compressed_indices()) && is_plain(parts(a).plain_indices()) &&
           is_plain(parts(a).values()) && parts(a).values().dim() == 1;
  }

 private:
  static const at::SparseCsrTensorImpl& parts(const Tensor& a) {
    return *static_cast<const at::SparseCsrTensorImpl*>(a.unsafeGetTensorImpl());
  }

  size_t place_;
  c10::DispatchKeySet keys_;
  bool requires_grad_;
  TensorSnapshot crow_, col_;
};

// True if a subclass's __torch_function__ decides what happens with a tensor.
bool is_overridden(py::handle t) { return THPVariable_Check(t.ptr()) && !THPVariable_CheckExact(t.ptr()); }

// Python objects given with a call. Those it was prepared with are kept alive, so that their addresses tell them.
using Passed = std::array<PyObject*, kPassed>;

struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  size_t at;  // index of the open argument
  TensorForm x;
  bool records_x, others_require_grad;
  Modes modes;
  Passed passed;
  std::vector<TensorSnapshot> alike, watched;
  std::optional<Matrix> matrix;  // passed[0], whose identity the caller checks
  bool of_rows, transposed;      // the operator takes the rows of x, or those transposed, and gives its result as well
  Tensor bias;                   // added to a transposed result; may be undefined

  bool is_for(const Tensor& other, const Passed& given, const Modes& now) const {
    const size_t first = matrix ? 1 : 0;
    return x.is_of(other) && std::equal(passed.begin() + first, passed.end(), given.begin() + first) && now == modes &&
           (now.recording && other.requires_grad()) == records_x &&
           (!others_require_grad || now.recording == modes.recording);
  }
  bool is_unchanged() const {
    return std::all_of(watched.begin(), watched.end(), [](const TensorSnapshot& s) { return s.is_unchanged(); }) &&
           std::all_of(alike.begin(), alike.end(), [](const TensorSnapshot& s) { return s.is_alike(); });
  }
};

c10::IValue value_of(py::handle x, const c10::Argument& argument) {
  if (x.is_none()) return {};
  if (THPVariable_Check(x.ptr())) return THPVariable_Unpack(x.ptr());
  if (py::isinstance<py::str>(x)) return x.cast<std::string>();
  if (py::isinstance<py::bool_>(x)) return x.cast<bool>();
  if (argument.type()->kind() == c10::TypeKind::FloatType) return x.cast<double>();
  return x.cast<int64_t>();
}

Passed passed_of(const py::sequence& given) {
  TORCH_CHECK_VALUE(given.size() <= kPassed, "PreparedCalls: expected at most ", kPassed, " tensors, got ",
                    given.size());
  Passed passed;
  passed.fill(Py_None);
  for (size_t i = 0; i < given.size(); ++i) passed[i] = py::object(given[i]).ptr();
  return passed;
}

// The rows y, which nothing else refers to, in the shape of x but for its last dimension: not a view of them, which
// FSDP warns about.
Tensor in_shape_of(const Tensor& x, const Tensor& y) {
  at::DimVector shape(x.sizes());
  shape.back() = y.size(1);
  return at::_unsafe_view(x.dim() == 2 ? y : y.contiguous(), shape);
}

class PreparedCalls {
 public:
  void bind(const std::string& name, const py::sequence& arguments, size_t at, const py::sequence& passed,
            const std::vector<Tensor>& watched, std::optional<size_t> values, const OptionalTensor& rows_of,
            bool transposed) {
    const auto overridden = [](const py::sequence& some) {
      return std::any_of(some.begin(), some.end(), is_overridden);
    };
    if (is_overridden_by_mode() || overridden(arguments) || overridden(passed)) return;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    const auto& expected = op.schema().arguments();
    Stack stack;
    for (size_t i = 0; i < expected.size(); ++i)
      stack.push_back(i < arguments.size() ? value_of(arguments[i], expected[i]) : expected[i].default_value().value());
    const Tensor operand = std::exchange(stack.at(at), c10::IValue()).toTensor(), x = rows_of.value_or(operand);
    Passed objects = passed_of(passed);
    std::optional<Matrix> matrix;
    if (values) {
      const Tensor& a = THPVariable_Unpack(objects[0]);
      if (!Matrix::is_taken(a)) return;
      matrix.emplace(a, *values);
      stack.at(*values) = c10::IValue();
    }
    std::vector<Tensor> alike;
    const auto add = [&](const Tensor& t) {
      if (std::none_of(watched.begin(), watched.end(), [&](const Tensor& w) { return w.is_same(t); }))
        alike.push_back(t);
    };
    for (size_t i = matrix ? 1 : 0; i < kPassed; ++i)
      if (objects[i] != Py_None) add(THPVariable_Unpack(objects[i]));
    for (const c10::IValue& value : stack)
      if (value.isTensor()) add(value.toTensor());
    const auto all_plain = [](const std::vector<Tensor>& all) { return std::all_of(all.begin(), all.end(), is_plain); };
    if (is_traced_or_transformed(x) || x.layout() != at::kStrided || !all_plain(alike) || !all_plain(watched) ||
        at::autocast::is_autocast_enabled(x.device().type()) || is_capturing(x.device()))
      return;
    const auto requires_grad = [](const Tensor& t) { return t.requires_grad(); };
    const bool others_require_grad = std::any_of(alike.begin(), alike.end(), requires_grad) ||
                                     std::any_of(watched.begin(), watched.end(), requires_grad) ||
                                     (matrix && THPVariable_Unpack(objects[0]).requires_grad());
    const Modes modes;
    Call call{op,
              std::move(stack),
              at,
              TensorForm(x),
              modes.recording && x.requires_grad(),
              others_require_grad,
              modes,
              objects,
              {alike.begin(), alike.end()},
              {watched.begin(), watched.end()},
              std::move(matrix),
              rows_of.has_value(),
              transposed,
              transposed && objects[1] != Py_None ? THPVariable_Unpack(objects[1]) : Tensor()};
    std::vector<Call> gone;  // freed after calls_ is consistent again: freeing a tensor may release the GIL
    for (auto other = calls_.begin(); other != calls_.end();)
      other = other->is_for(x, objects, call.modes) || !other->is_unchanged() ? take(other, gone) : other + 1;
    if (calls_.size() == kMost) take(calls_.begin(), gone);
    calls_.push_back(std::move(call));
  }

  std::optional<Tensor> operator()(py::handle maybe_x, const Passed& passed) {
    if (calls_.empty() || !THPVariable_CheckExact(maybe_x.ptr())) return {};
    const Tensor& x = THPVariable_Unpack(maybe_x.ptr());
    const Call* const call = find(x, passed);
    if (call == nullptr) return {};
    ReadyCall ready = filled(*call, passed);
    c10::IValue& open = ready.arguments[call->at];
    const bool of_rows = call->of_rows, transposed = call->transposed;
    const Tensor bias = call->bias;
    const py::gil_scoped_release no_gil;  // other threads may call bind() from here on
    open = of_rows ? as_rows(x) : x;
    if (transposed) open = open.toTensor().t();
    Tensor y = std::move(ready).run();
    if (transposed) y = bias.defined() ? y.t() + bias : y.t();
    return of_rows ? in_shape_of(x, y) : y;
  }

  std::optional<ReadyCall> ready(const Tensor& x, const Passed& passed) {
    const Call* const call = find(x, passed);
    if (call == nullptr || call->of_rows || call->transposed) return {};
    ReadyCall ready = filled(*call, passed);
    ready.arguments[call->at] = x;
    return ready;
  }

 private:
  using Place = std::vector<Call>::iterator;

  // The call for x, if there is one that still holds; one that does not is dropped.
  const Call* find(const Tensor& x, const Passed& passed) {
    if (is_overridden_by_mode()) return nullptr;
    const Modes now;
    for (auto call = calls_.begin(); call != calls_.end(); ++call) {
      if (!call->is_for(x, passed, now)) continue;
      if (!call->is_unchanged() || (call->matrix && !call->matrix->is_unchanged(THPVariable_Unpack(passed[0])))) {
        std::vector<Call> gone;
        take(call, gone);
        return nullptr;
      }
      return is_capturing(call->x.device) ? nullptr : &*call;
    }
    return nullptr;
  }

  // The call's arguments but for the open one.
  static ReadyCall filled(const Call& call, const Passed& passed) {
    ReadyCall ready{call.op, call.arguments};
    if (call.matrix) ready.arguments[call.matrix->place()] = Matrix::values(THPVariable_Unpack(passed[0]));
    return ready;
  }

  Place take(Place call, std::vector<Call>& to) {
    to.push_back(std::move(*call));
    return calls_.erase(call);
  }

  std::vector<Call> calls_;
};

}  // namespace

std::optional<ReadyCall> ready_call(py::handle calls, const Tensor& x, py::handle passed) {
  return calls.cast<PreparedCalls&>().ready(x, {passed.ptr(), Py_None, Py_None, Py_None});
}

void define_prepared_calls(py::module_& m) {
  find_device_context();
  py::class_<PreparedCalls>(m, "PreparedCalls")
      .def(py::init())
      .def("bind", &PreparedCalls::bind, py::arg("name"), py::arg("arguments"), py::arg("at"), py::arg("passed"),
           py::arg("watched"), py::arg("values") = py::none(), py::arg("rows_of") = py::none(),
           py::arg("transposed") = false)
      .def("__call__",
           torch::wrap_pybind_function(
               [](PreparedCalls& self, py::handle x, py::handle first, py::handle second, py::handle third,
                  py::handle fourth) { return self(x, {first.ptr(), second.ptr(), third.ptr(), fourth.ptr()}); }),
           py::arg("x"), py::arg("first"), py::arg("second") = py::none(), py::arg("third") = py::none(),
           py::arg("fourth") = py::none())
      .def(py::pickle([](const PreparedCalls&) { return py::tuple(); },
                      [](const py::tuple&) { return PreparedCalls(); }));
}

}  // namespace matmuls
