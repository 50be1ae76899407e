// RepeatedProduct: a distributed product A @ x of one shape, dtype and device, and its gradient to x, by calls that
// were prepared. Python selects the kernels of the first product and of the first backward pass; this repeats them.
//
//     forward    send x  ->  y = own columns @ x  ->  wait  ->  y += halo @ received
//     backward   part = halo^T @ grad  ->  send part  ->  grad_x = own columns^T @ grad  ->  wait  ->  add received
//
// Both are one Step. Its stages are C++ objects where rows are few and GPUs write into each other's memory, and Python
// callables elsewhere (gloo, NCCL, all-gathers, halos with many nonzeros).
#include "distributed/repeated.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "distributed/row_sums.h"
#include "glue/autograd.h"
#include "glue/checks.h"
#include "glue/prepared_calls.h"
#ifdef MATMULS_CUDA
#include "distributed/peer_rows.h"
#endif

namespace matmuls {
namespace {

namespace py = pybind11;
using at::Tensor;

template <class F>
auto without_gil(F f) {
  const py::gil_scoped_release no_gil;
  return f();
}

// A Python object that is None, an object of the C++ type T, or a callable.
template <class T>
struct Stage {
  py::object object;
  T* native = nullptr;

  explicit Stage(py::object given) : object(std::move(given)) {
    if (!object.is_none() && py::isinstance<T>(object)) native = object.cast<T*>();
  }
  bool exists() const { return !object.is_none(); }
};

#ifndef MATMULS_CUDA
struct PeerRows {  // no GPU: rows are sent by Python callables
  void send(const Tensor&) {}
  void wait() {}
  int lost() const { return -1; }
};
#endif

// One direction of a product. All of it needs the GIL, which it releases where C++ runs.
class Step {
 public:
  // own: PreparedCalls of the own columns, or of those transposed, with their values. before: RowSums, or a callable
  // (grad) -> rows to send; None: x is sent. sender: PeerRows, which writes into `received`, or a callable (rows) -> a
  // callable () -> rows received; None: nothing is sent. after: RowSums, or a callable (y, received), adds to y.
  Step(py::object own, py::object values, py::object before, py::object sender, std::optional<Tensor> received,
       py::object after)
      : own_(std::move(own)),
        values_(std::move(values)),
        before_(std::move(before)),
        sender_(std::move(sender)),
        received_(std::move(received)),
        after_(std::move(after)) {
    TORCH_CHECK_VALUE(sender_.native == nullptr || received_, "Step: expected the rows that are received, got none");
  }

  std::optional<ReadyCall> ready(const Tensor& x) const { return ready_call(own_, x, values_); }

  Tensor run(ReadyCall own, const Tensor& x) const {
    if (!sender_.exists()) return without_gil([&] { return std::move(own).run(); });
    const Tensor sent = rows_to_send(x);  // lives until the rows are on their way
    py::object pending;
    if (sender_.native == nullptr) pending = sender_.object(sent);
    Tensor received;
    Tensor y = without_gil([&] {
      if (sender_.native == nullptr) return std::move(own).run();
      sender_.native->send(sent);
      Tensor product;
      try {
        product = std::move(own).run();
      } catch (...) {
        sender_.native->wait();  // `sent` is read until then
        throw;
      }
      sender_.native->wait();
      received = *received_;
      if (after_.native != nullptr) add(product, received);
      return product;
    });
    if (sender_.native == nullptr) received = pending().cast<Tensor>();
    if (after_.native == nullptr) {
      if (after_.exists()) after_.object(y, received);
    } else if (sender_.native == nullptr) {
      without_gil([&] { add(y, received); });
    }
    return y;
  }

  // True if a rank did not answer: this process can use its GPU no more.
  bool is_lost() const { return sender_.native != nullptr && sender_.native->lost() >= 0; }

 private:
  Tensor rows_to_send(const Tensor& x) const {
    if (before_.native != nullptr) return without_gil([&] { return before_.native->product(x); });
    const Tensor rows = before_.exists() ? before_.object(x).cast<Tensor>() : x;
    return sender_.native != nullptr ? rows.contiguous() : rows;
  }

  void add(Tensor& y, const Tensor& received) const {
    y = y.contiguous();
    after_.native->add(y, received.contiguous());
  }

  py::object own_, values_;
  Stage<RowSums> before_;
  Stage<PeerRows> sender_;
  std::optional<Tensor> received_;
  Stage<RowSums> after_;
};

// A product is for x of one shape, dtype and device that needs a gradient, or needs none.
class RepeatedProduct : public torch::CustomClassHolder {
 public:
  // slow: a callable (this, grad) -> gradient to x, which may call bind_backward. lost: a callable (error message) that
  // raises an error which names the ranks that do not answer.
  // valid: [True], or [False] once the values have changed, and with them what the backward pass would repeat.
  RepeatedProduct(const Tensor& x, bool recorded, Step forward, py::object slow, py::object lost, py::list valid)
      : rows_(x.size(0)),
        n_(x.size(1)),
        dtype_(x.scalar_type()),
        device_(x.device()),
        recorded_(recorded),
        python_(std::make_unique<Python>(
            Python{std::move(forward), {}, std::move(slow), std::move(lost), std::move(valid)})) {}

  // Autograd may drop the last reference on a thread without the GIL, or after Python has ended.
  ~RepeatedProduct() override {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      python_.reset();
    } else {
      static_cast<void>(python_.release());
    }
  }

  // Only once: another thread may run the first one.
  void bind_backward(Step backward) {
    if (!python_->backward) python_->backward.emplace(std::move(backward));
  }

  std::optional<Tensor> operator()(py::handle maybe_x);
  Tensor forward(ReadyCall own, const Tensor& x) {
    return named(python_->forward, [&](const Step& step) { return step.run(std::move(own), x); });
  }
  static constexpr const char* kExpired =
      "distributed.plan: expected the values of the product in its backward pass, got others by update()";
  Tensor backward(const Tensor& grad) {
    const py::gil_scoped_acquire gil;
    TORCH_CHECK(python_->valid[0].cast<bool>(), kExpired);
    if (python_->backward) {
      const auto repeat = [&](const Step& step) {
        auto own = step.ready(grad);
        return own ? step.run(std::move(*own), grad) : Tensor();
      };
      if (Tensor found = named(*python_->backward, repeat); found.defined()) return found;
    }
    const auto self = c10::intrusive_ptr<RepeatedProduct>::reclaim_copy(this);
    return python_->slow(self, grad).cast<Tensor>();
  }

 private:
  struct Python {
    Step forward;
    std::optional<Step> backward;
    py::object slow, lost;
    py::list valid;
  };

  // f(step); an error that names the ranks that do not answer, if it fails for one of them.
  template <class F>
  std::invoke_result_t<F, const Step&> named(const Step& step, F f) {
    try {
      return f(step);
    } catch (const std::exception& error) {
      if (step.is_lost()) python_->lost(std::string(error.what()));
      throw;
    }
  }

  int64_t rows_, n_;
  at::ScalarType dtype_;
  at::Device device_;
  bool recorded_;
  std::unique_ptr<Python> python_;
};

using Product = c10::intrusive_ptr<RepeatedProduct>;

struct RepeatedFunction : KernelFunction<RepeatedFunction> {
  using Context = torch::autograd::AutogradContext;
  using Gradients = torch::autograd::variable_list;

  static Tensor forward(Context* ctx, const Tensor& x, const Product& product, ReadyCall& own) {
    const at::AutoGradMode off(false);
    ctx->saved_data["product"] = c10::IValue::make_capsule(product);
    return product->forward(std::move(own), x);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "distributed.plan: expected first derivatives, got create_graph=True: it has no second ones");
    const auto product = ctx->saved_data["product"].toCapsule();
    return {static_cast<RepeatedProduct&>(*product).backward(grads[0]), Tensor(), Tensor()};
  }
};

std::optional<Tensor> RepeatedProduct::operator()(py::handle maybe_x) {
  if (!THPVariable_CheckExact(maybe_x.ptr())) return {};
  const Tensor& x = THPVariable_Unpack(maybe_x.ptr());
  const bool is_recorded = at::GradMode::is_enabled() && x.requires_grad();
  if (is_recorded != recorded_ || x.dim() != 2 || x.size(0) != rows_ || x.size(1) != n_ || x.scalar_type() != dtype_ ||
      x.device() != device_ || x._fw_grad(0).defined())
    return {};
  std::optional<ReadyCall> own;
  {
    const at::AutoGradMode off(false);  // as in the autograd Function
    own = named(python_->forward, [&](const Step& step) { return step.ready(x); });
  }
  if (!own) return {};
  if (!is_recorded) {
    const at::AutoGradMode off(false);
    return forward(std::move(*own), x);
  }
  return RepeatedFunction::apply(x, Product::reclaim_copy(this), *own);
}

}  // namespace

void define_repeated_product(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<RowSums>(m, "RowSums")
      .def(py::init([](Tensor items, int64_t long_rows, Tensor col, std::optional<Tensor> order,
                       std::optional<Tensor> values, int64_t rows, int64_t columns) {
             return RowSums{std::move(items),  long_rows, std::move(col), std::move(order),
                            std::move(values), rows,      columns};
           }),
           py::kw_only(), py::arg("items"), py::arg("long_rows"), py::arg("col"), py::arg("order"), py::arg("values"),
           py::arg("rows"), py::arg("columns"))
      .def_readonly("items", &RowSums::items)
      .def_readonly("col", &RowSums::col)
      .def("add", &RowSums::add, py::arg("out"), py::arg("b"), no_gil())
      .def("product", &RowSums::product, py::arg("b"), no_gil());
  py::class_<Step>(m, "Step").def(
      py::init<py::object, py::object, py::object, py::object, std::optional<Tensor>, py::object>(), py::kw_only(),
      py::arg("own"), py::arg("values"), py::arg("before"), py::arg("sender"), py::arg("received"), py::arg("after"));
  py::class_<RepeatedProduct, Product>(m, "RepeatedProduct")
      .def(py::init([](const Tensor& x, bool recorded, const Step& forward, py::object slow, py::object lost,
                       py::list valid) {
             return c10::make_intrusive<RepeatedProduct>(x, recorded, forward, std::move(slow), std::move(lost),
                                                         std::move(valid));
           }),
           py::kw_only(), py::arg("x"), py::arg("recorded"), py::arg("forward"), py::arg("slow"), py::arg("lost"),
           py::arg("valid"))
      .def(
          "bind_backward", [](RepeatedProduct& self, const Step& step) { self.bind_backward(step); },
          py::arg("backward"))
      .def_property_readonly_static("expired", [](const py::object&) { return RepeatedProduct::kExpired; })
      .def("__call__", torch::wrap_pybind_function([](RepeatedProduct& self, py::handle x) { return self(x); }),
           py::arg("x"));
}

}  // namespace matmuls
