// A registered operator as a type: typed calls through the dispatcher, and the kernels that all operators of a kind
// share.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

namespace matmuls {

// True when a gradient must be recorded. Forward-mode tangents are refused rather than dropped.
inline bool needs_gradient(const char* op, std::initializer_list<at::Tensor> inputs) {
  bool needed = false;
  for (const auto& t : inputs) {
    if (!t.defined()) continue;
    TORCH_CHECK(!t._fw_grad(0).defined(), op,
                ": expected inputs without forward-mode tangents (not implemented), got a dual tensor");
    needed |= t.requires_grad();
  }
  return needed && c10::GradMode::is_enabled();
}

// Operators that write an output argument have no gradient formula, like torch's own out= variants.
inline void check_no_gradient_into(const char* op, const char* written, std::initializer_list<at::Tensor> tensors) {
  TORCH_CHECK(!needs_gradient(op, tensors), op, ": expected no gradient to be recorded through ", written,
              "=, got an argument that requires grad; drop ", written, "= or use torch.no_grad()");
}

// Bumps the version counter, as ATen's kernels do for their outputs: autograd then detects that a saved tensor changed.
inline void mark_written(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// torch's fallback materializes lazily conjugated or negated arguments, but fails for operators that return nothing.
// Those that write an argument resolve their inputs themselves and refuse such an output.
inline at::Tensor resolved(const at::Tensor& t) { return t.defined() ? t.resolve_conj().resolve_neg() : t; }
inline void check_not_lazy(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(!t.is_conj() && !t.is_neg(), op, ": expected ", name,
              " without a lazy conjugation or negation, got such a view");
}

// True if a tracer or compiler records the operators called with t.
inline bool is_traced(const at::Tensor& t) {
  return t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

// True if an incoming gradient may be overwritten without anyone noticing: this is the last reference to it and to its
// memory, it needs no gradient itself, and nothing is traced or batched.
inline bool nobody_else_holds(const at::Tensor& grad) {
  return !c10::GradMode::is_enabled() && !is_traced(grad) && grad.use_count() == 1 && grad.has_storage() &&
         grad.storage().use_count() == 1 && grad.is_non_overlapping_and_dense();
}

// Autocast's dtype for the device, and the cast that autocast applies to an operator's argument. torch's header for
// both includes all of ATen.
at::ScalarType autocast_dtype(c10::DeviceType device);
at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& t, c10::DeviceType device);
inline std::optional<at::Tensor> autocast_to(at::ScalarType dtype, const std::optional<at::Tensor>& t,
                                             c10::DeviceType device) {
  return t ? std::optional(autocast_to(dtype, *t, device)) : t;
}

// Example: MATMULS_OPERATOR(SoftmaxOp, "custom_mm::softmax", "", Tensor(const Tensor&, int64_t));
#define MATMULS_OPERATOR(type, name, overload, ...)                       \
  struct type : Operator<type, __VA_ARGS__> {                             \
    static constexpr const char *kName = (name), *kOverload = (overload); \
  }

template <class Self, class Signature>
struct Operator;

template <class Self, class R, class... A>
struct Operator<Self, R(A...)> {
  using Signature = R(A...);
  static const auto& handle() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Self::kName, Self::kOverload).template typed<R(A...)>();
    return op;
  }
  static R call(A... args) { return handle().call(args...); }

  // Calls the kernel below the Autograd key; for an operator that writes an argument that is `inplace` below.
  static R below_autograd(A... args) {
    at::AutoDispatchBelowAutograd guard;
    return handle().call(args...);
  }

  // Autocast kernel of an operator whose floating-point tensors are cast to autocast's dtype, as torch.matmul's are.
  template <c10::DeviceType device>
  static R autocast(A... args) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    const auto dtype = autocast_dtype(device);
    const auto cast = [&]<class X>(const X& x) -> decltype(auto) {
      if constexpr (std::is_same_v<X, at::Tensor> || std::is_same_v<X, std::optional<at::Tensor>>)
        return autocast_to(dtype, x, device);
      else
        return (x);
    };
    return handle().call(cast(args)...);
  }

  // CPU kernel of an operator that reads or makes a layout for a GPU's kernels.
  static R gpu_only(A...) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, std::strchr(Self::kName, ':') + 2,
                                ": expected tensors on a GPU, got them on a CPU");
  }

  // ADInplaceOrView for an operator that writes argument `written`.
  template <size_t written>
  static R inplace(c10::DispatchKeySet keys, A... args) {
    const auto& t = std::get<written>(std::forward_as_tuple(args...));
    TORCH_CHECK(!t.is_inference() || c10::InferenceMode::is_enabled(), std::strchr(Self::kName, ':') + 2,
                ": expected to write over a tensor made outside torch.inference_mode(), or to do so within it");
    const auto marked = [&] { mark_written(t); };
    at::AutoDispatchBelowADInplaceOrView guard;
    if constexpr (std::is_void_v<R>) {
      handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
      marked();
    } else {
      R result = handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
      marked();
      return result;
    }
  }

  // Conjugate and Negative kernels of an operator that writes argument `written`: the other arguments are resolved.
  template <size_t written>
  static R lazy(A... args) {
    auto all = std::forward_as_tuple(args...);
    const char* const name = std::strchr(Self::kName, ':') + 2;  // without the namespace "custom_mm::"
    check_not_lazy(name, handle().schema().arguments()[written].name().c_str(), std::get<written>(all));
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return handle().call(resolve<I == written>(std::get<I>(all))...);
    }(std::index_sequence_for<A...>());
  }

 private:
  template <bool as_it_is, class X>
  static auto resolve(const X& x) {
    if constexpr (std::is_same_v<X, at::Tensor> && !as_it_is)
      return resolved(x);
    else if constexpr (std::is_same_v<X, std::optional<at::Tensor>>)
      return x ? X(resolved(*x)) : x;
    else
      return x;
  }
};

// Registers what every operator that writes one of its arguments needs besides its kernels. name: as defined in the
// library.
#define MATMULS_WRITES(name, type, written)                                                   \
  TORCH_LIBRARY_IMPL(custom_mm, ADInplaceOrView, m) { m.impl(name, type::inplace<written>); } \
  TORCH_LIBRARY_IMPL(custom_mm, Conjugate, m) { m.impl(name, type::lazy<written>); }          \
  TORCH_LIBRARY_IMPL(custom_mm, Negative, m) { m.impl(name, type::lazy<written>); }

// Registers an operator's kernels.
#ifdef MATMULS_CUDA
#define MATMULS_CUDA_KERNEL(name, kernel) \
  TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl(name, kernel); }
#else
#define MATMULS_CUDA_KERNEL(name, kernel)
#endif
#define MATMULS_KERNELS(name, cpu, cuda, meta, autograd)         \
  TORCH_LIBRARY_IMPL(custom_mm, CPU, m) { m.impl(name, cpu); }   \
  MATMULS_CUDA_KERNEL(name, cuda)                                \
  TORCH_LIBRARY_IMPL(custom_mm, Meta, m) { m.impl(name, meta); } \
  TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) { m.impl(name, autograd); }

// Registers Operator::autocast on a CPU and a GPU.
#define MATMULS_AUTOCAST(name, type)                                                        \
  TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) { m.impl(name, type::autocast<at::kCPU>); } \
  TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) { m.impl(name, type::autocast<at::kCUDA>); }

}  // namespace matmuls
