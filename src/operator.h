// A registered operator as a type: called through the dispatcher, and the kernels that every operator of a kind shares.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "autograd.h"

namespace matmuls {

// MATMULS_OPERATOR(SoftmaxOp, "custom_mm::softmax", "", Tensor(const Tensor&, int64_t));
#define MATMULS_OPERATOR(type, name, overload, ...)                       \
  struct type : Operator<type, __VA_ARGS__> {                             \
    static constexpr const char *kName = (name), *kOverload = (overload); \
  }

template <class Self, class Signature>
struct Operator;

template <class Self, class R, class... A>
struct Operator<Self, R(A...)> {
  static const auto& handle() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Self::kName, Self::kOverload).template typed<R(A...)>();
    return op;
  }
  static R call(A... args) { return handle().call(args...); }

  // To the kernel under the Autograd key, which for an operator that writes is `inplace` below.
  static R below_autograd(A... args) {
    at::AutoDispatchBelowAutograd guard;
    return handle().call(args...);
  }

  // ADInplaceOrView for an operator that writes argument `written`.
  template <size_t written>
  static R inplace(c10::DispatchKeySet keys, A... args) {
    const auto marked = [&] { mark_written(std::get<written>(std::forward_as_tuple(args...))); };
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

  // Conjugate and Negative for an operator that writes argument `written`: the others are resolved.
  template <size_t written>
  static R lazy(A... args) {
    auto all = std::forward_as_tuple(args...);
    const char* const name = std::strchr(Self::kName, ':') + 2;  // without the library's
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

// What every operator that writes one of its arguments registers besides its kernels; by the name it is defined with.
#define MATMULS_WRITES(name, type, written)                                                   \
  TORCH_LIBRARY_IMPL(custom_mm, ADInplaceOrView, m) { m.impl(name, type::inplace<written>); } \
  TORCH_LIBRARY_IMPL(custom_mm, Conjugate, m) { m.impl(name, type::lazy<written>); }          \
  TORCH_LIBRARY_IMPL(custom_mm, Negative, m) { m.impl(name, type::lazy<written>); }

}  // namespace matmuls
