// The dispatcher's kernels of operators whose kernels Triton compiles.
//
// CUDA: the first call with some shapes runs in Python. The second does too, and is recorded: its allocations and its
// launches. Later calls repeat the recording. Which kernels run depends on nothing but what the key below contains: the
// mask stays on the GPU.
// Autograd: a call that needs no gradient goes on to CUDA, and one that does applies a node written in C++. Whatever
// is not a plain CUDA tensor (a transform, a trace, a CPU tensor) goes to Python.
#include "masked/replay.h"

#ifdef MATMULS_CUDA
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "glue/call_state.h"
#include "glue/handles.h"
#include "gpu/second_stream.h"
#include "masked/recording.h"

namespace matmuls {
namespace {

namespace py = pybind11;
using torch::jit::Stack;
using Arguments = c10::ArrayRef<c10::IValue>;

py::object to_python(const c10::IValue& value) {
  if (value.isNone()) return py::none();
  if (value.isTensor()) return value.toTensor().defined() ? py::cast(value.toTensor()) : py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isSymInt()) return py::cast(value.toSymInt());
  TORCH_CHECK(value.isBoolList(), "expected tensors, integers and booleans, got ", value.tagKind());
  py::list list;
  for (const bool b : value.toBoolList()) list.append(py::bool_(b));
  return list;
}

py::tuple to_python(const Arguments& arguments) {
  py::tuple all(arguments.size());
  for (const auto i : c10::irange(arguments.size())) all[i] = to_python(arguments[i]);
  return all;
}

// Replaces the arguments on the stack by the results of a Python function: a tensor, or a sequence of them.
void push_results(Stack& stack, size_t arguments, const py::handle& results) {
  torch::jit::drop(stack, arguments);
  if (THPVariable_Check(results.ptr())) {
    stack.emplace_back(THPVariable_Unpack(results.ptr()));
    return;
  }
  for (const py::handle t : results) stack.emplace_back(t.cast<at::Tensor>());
}

// All that decides what a call does, apart from the numbers in its tensors. Empty: the call cannot be repeated.
using Key = c10::SmallVector<int64_t, 128>;
Key key_of(const Arguments& arguments) {
  Key key;
  for (const uint64_t word : Switches::now().words) key.push_back(static_cast<int64_t>(word));
  c10::SmallVector<const void*, 16> pointers;
  for (const c10::IValue& value : arguments) {
    if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) {
      key.push_back(-1);
    } else if (value.isTensor()) {
      const at::Tensor& t = value.toTensor();
      const void* const pointer = t.const_data_ptr();
      const auto first =
          std::find(pointers.begin(), pointers.end(), pointer) - pointers.begin();  // two may be the same
      pointers.push_back(pointer);
      const bool aligned = reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
      for (const int64_t fact : {int64_t{first}, int64_t{aligned}}) key.push_back(fact);
      TensorForm::append(t, key);
    } else if (value.isInt()) {
      key.push_back(value.toInt());
    } else if (value.isBool()) {
      key.push_back(value.toBool());
    } else if (value.isBoolList()) {
      for (const bool b : value.toBoolList()) key.push_back(b);
    } else {
      return {};
    }
  }
  return key;
}

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t n : key) {
      hash = (hash ^ static_cast<uint64_t>(n)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

std::atomic<int64_t> forgotten{0}, replays{0};  // how often all recordings were dropped; how many calls were repeated

// What is known of a call: seen once, recorded, or that it does more than to allocate and to launch.
struct Known {
  std::shared_ptr<const Recording> recording;
  bool refused = false;
};

class CudaKernel : public c10::OperatorKernel {
 public:
  // kernel: computes the results in Python. record(kernel, arguments) does too, and returns them with a description of
  // the call, or with None if it cannot be repeated.
  CudaKernel(std::string name, py::object kernel, py::object record)
      : name_(std::move(name)), kernel_(kernel.release()), record_(record.release()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const Arguments arguments(stack->data() + stack->size() - count, count);
    const auto x = std::find_if(arguments.begin(), arguments.end(),
                                [](const c10::IValue& v) { return v.isTensor() && v.toTensor().is_cuda(); });
    TORCH_CHECK(x != arguments.end(), name_, ": expected a CUDA tensor, got none");
    const OperationGuard guard(name_.c_str(), x->toTensor());
    const Key key = key_of(arguments);
    bool record = false;
    if (const auto found = look_up(key, record)) {
      std::vector<at::Tensor> results = found->run(arguments, x->toTensor().device());
      replays.fetch_add(1, std::memory_order_relaxed);
      torch::jit::drop(*stack, count);
      for (at::Tensor& t : results) stack->emplace_back(std::move(t));
      return;
    }
    const py::gil_scoped_acquire gil;
    const py::tuple all = to_python(arguments);
    if (!record) {
      push_results(*stack, count, kernel_(*all));
      return;
    }
    const py::tuple made = record_(kernel_, all);
    keep(key, made[1].is_none() ? nullptr : recorded_or_refused(made[1], static_cast<int64_t>(count)));
    push_results(*stack, count, made[0]);
  }

 private:
  static constexpr size_t kMost = 1024;  // calls known; more: all are dropped

  // The recording of this call, or null and whether to make one.
  std::shared_ptr<const Recording> look_up(const Key& key, bool& record) {
    if (key.empty()) return nullptr;
    const std::lock_guard lock(mutex_);
    if (const int64_t now = forgotten.load(); now != forgotten_ || known_.size() >= kMost) {
      known_.clear();
      forgotten_ = now;
    }
    const auto [at, fresh] = known_.try_emplace(key);
    record = !fresh && !at->second.recording && !at->second.refused;
    return at->second.recording;
  }

  void keep(const Key& key, std::shared_ptr<const Recording> recording) {
    const std::lock_guard lock(mutex_);
    known_[key] = Known{recording, !recording};
  }

  std::shared_ptr<const Recording> recorded_or_refused(const py::handle& description, int64_t count) {
    try {
      return recorded(description, count);
    } catch (const std::exception& error) {  // of torch, or of pybind11 for a description of another form
      const auto* const own = dynamic_cast<const c10::Error*>(&error);
      TORCH_WARN_ONCE("matmuls: calls of ", name_,
                      " run in Python each time: ", own != nullptr ? own->what_without_backtrace() : error.what());
      return nullptr;
    }
  }

  // From what matmuls/triton/record.py describes.
  std::shared_ptr<const Recording> recorded(const py::handle& description, int64_t count) {
    auto made = std::make_shared<Recording>(name_, count);
    using Numbers = std::vector<int64_t>;
    for (const py::handle b : description["buffers"])
      made->add_buffer(b["sizes"].cast<Numbers>(), b["strides"].cast<Numbers>(), b["dtype"].cast<at::ScalarType>());
    for (const py::handle l : description["launches"]) {
      if (py::isinstance<py::str>(l)) {
        l.cast<std::string>() == "fork" ? made->add_fork() : made->add_join();
        continue;
      }
      std::vector<Parameter> parameters;
      for (const py::handle p : l["parameters"]) {
        if (py::isinstance<py::tuple>(p)) {  // a number and its bytes
          parameters.push_back(
              {Parameter::Kind::number, {}, p[py::int_(0)].cast<int64_t>(), p[py::int_(1)].cast<int64_t>()});
          continue;
        }
        const Place place{p["tensor"].cast<int64_t>(), p["delta"].cast<int64_t>()};
        Parameter parameter{Parameter::Kind::pointer, place};
        if (p.contains("box")) {
          parameter.kind = Parameter::Kind::descriptor;
          parameter.type = p["type"].cast<int64_t>();
          parameter.swizzle = p["swizzle"].cast<int64_t>();
          parameter.element_bytes = p["element_bytes"].cast<int64_t>();
          parameter.box = p["box"].cast<Numbers>();
          parameter.sizes = p["sizes"].cast<Numbers>();
          parameter.strides = p["strides"].cast<Numbers>();
        }
        parameters.push_back(std::move(parameter));
      }
      made->add_launch(l["function"].cast<uint64_t>(), l["grid"].cast<std::array<unsigned, 3>>(),
                       l["threads"].cast<unsigned>(), l["shared"].cast<unsigned>(), l["early"].cast<bool>(),
                       l["second"].cast<bool>(), parameters);
    }
    for (const py::handle o : description["outputs"])
      made->add_output(o["buffer"].cast<int64_t>(), o["sizes"].cast<Numbers>(), o["strides"].cast<Numbers>(),
                       o["offset"].cast<int64_t>());
    made->finish();
    return made;
  }

  const std::string name_;
  const py::handle kernel_, record_;  // owned, and never freed: the interpreter may have ended
  std::mutex mutex_;
  std::unordered_map<Key, Known, Hash> known_;
  int64_t forgotten_ = 0;
};

// Whether a transform of torch.func is active. Its thread-local state stays allocated after any look at it.
bool is_transforming() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

class AutogradKernel : public c10::OperatorKernel {
 public:
  // function: the Autograd kernel in Python, for all calls that are not plain.
  AutogradKernel(const std::string& name, py::object function) : node_(node_of(name)), function_(function.release()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const Arguments arguments(stack->data() + stack->size() - count, count);
    bool plain = (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::CUDA &&
                 !is_transforming();
    bool needed = false;
    for (const c10::IValue& v : arguments) {
      if (!plain || !v.isTensor() || !v.toTensor().defined()) continue;
      plain = !v.toTensor()._fw_grad(0).defined();
      needed |= v.toTensor().requires_grad();
    }
    needed &= c10::GradMode::is_enabled();
    if (plain && !needed) {
      const at::AutoDispatchBelowAutograd guard;
      op.callBoxed(stack);
    } else if (plain && node_ != nullptr) {
      node_(*stack);
    } else {
      const py::gil_scoped_acquire gil;
      push_results(*stack, count, function_(*to_python(arguments)));
    }
  }

 private:
  ApplyNode* const node_;
  const py::handle function_;  // owned, and never freed
};

// Libraries outlive the interpreter: at its end Python's functions are gone.
torch::Library& library(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "custom_mm", key, __FILE__, __LINE__);
}

template <class Kernel, class... A>
void implement(c10::DispatchKey key, const std::string& name, A&&... arguments) {
  library(key).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                      std::make_unique<Kernel>(name, std::forward<A>(arguments)...)));
}

}  // namespace

void define_replay(py::module_& m) {
  m.def(
      "replay_on_gpu",
      [](const std::string& name, py::object kernel, py::object record) {
        implement<CudaKernel>(c10::DispatchKey::CUDA, name, std::move(kernel), std::move(record));
      },
      py::arg("name"), py::arg("kernel"), py::arg("record"));
  m.def(
      "record_gradient",
      [](const std::string& name, py::object function) {
        implement<AutogradKernel>(c10::DispatchKey::Autograd, name, std::move(function));
      },
      py::arg("name"), py::arg("function"));
  m.def(
      "second_stream",
      [](c10::DeviceIndex device) {
        return reinterpret_cast<uintptr_t>(second_stream(c10::cuda::getCurrentCUDAStream(device)).stream);
      },
      py::arg("device"));
  m.def("forget_recordings", [] { ++forgotten; });
  m.def("replays", [] { return replays.load(); });
}

}  // namespace matmuls
#endif
