// Helpers for gradients written in C++: autograd Functions that run under torch.func, and the gradient of products.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// By default a C++ autograd Function refuses to run under torch.func's transforms, which do not see the operators of
// its forward level by level. Kernels of the Autograd key do run per level, so they use the check of Python's
// Functions.
#define checkSupportsCppAutogradFunction checkSupportsSingleLevelAutogradFunction
#include <torch/csrc/autograd/custom_function.h>
#undef checkSupportsCppAutogradFunction

namespace matmuls {

// What Recorded, the one autograd Function behind all KernelFunctions, needs of a call. torch's Function is
// instantiated for Recorded alone (autograd.cpp): each further instantiation takes the compiler 8 s.
constexpr int kArgumentBits = 48;
struct RecordedCall {
  using Context = torch::autograd::AutogradContext;
  using Gradients = torch::autograd::variable_list;
  c10::function_ref<Gradients(Context*)> forward;
  int64_t backward;                              // as remember_backward numbered it
  int64_t arguments = 1;                         // of forward, one bit each, set for a tensor, after a leading 1
  c10::SmallVector<at::Tensor, 6> tensors = {};  // the arguments that are tensors

  void add(const at::Tensor& t) {
    arguments = arguments << 1 | 1;
    tensors.push_back(t);
  }
  void add(const std::optional<at::Tensor>& t) {
    if (t && t->defined())
      add(*t);
    else
      arguments <<= 1;
  }
  template <class A>
  void add(const A&) {
    static_assert(!std::is_convertible_v<const A&, at::TensorList>, "a list of tensors is recorded one by one");
    arguments <<= 1;
  }
};
using BackwardFunction = torch::autograd::variable_list(torch::autograd::AutogradContext*,
                                                        const torch::autograd::variable_list&);
int64_t remember_backward(BackwardFunction* backward);
torch::autograd::variable_list record(const RecordedCall& call);

// The autograd Function that an operator's Autograd kernel applies; T provides forward and backward. Under transforms
// the operators called in forward are recorded at the levels below, which requires grad mode.
template <class T>
struct KernelFunction {
  template <class... A>
  static auto apply(A&&... args) {
    using Context = torch::autograd::AutogradContext;
    using Result = decltype(T::forward(static_cast<Context*>(nullptr), std::forward<A>(args)...));
    static_assert(sizeof...(A) < kArgumentBits, "RecordedCall::arguments has one bit for each");
    const auto forward = [&](Context* ctx) -> torch::autograd::variable_list {
      if constexpr (std::is_same_v<Result, at::Tensor>)
        return {T::forward(ctx, std::forward<A>(args)...)};
      else
        return T::forward(ctx, std::forward<A>(args)...);
    };
    static const int64_t backward = remember_backward(&T::backward);
    RecordedCall call{forward, backward};
    (call.add(std::as_const(args)), ...);
    auto results = record(call);
    if constexpr (std::is_same_v<Result, at::Tensor>)
      return std::move(results[0]);
    else
      return results;
  }
};

// Saves the inputs of a product's gradient: dA needs b, dB needs a, and both need the sizes of a and b. Those of two
// matrices follow from the saved one and the gradient: each entry of saved_data costs 0.1 us, a list 0.3.
inline void save_product(torch::autograd::AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b, bool transa,
                         bool transb) {
  ctx->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor()});
  const bool matrices = a.dim() == 2 && b.dim() == 2;
  ctx->saved_data["product"] = int64_t{transa} | int64_t{transb} << 1 | int64_t{matrices} << 2;
  if (matrices) return;
  ctx->saved_data["a_sizes"] = a.sym_sizes();
  ctx->saved_data["b_sizes"] = b.sym_sizes();
}

inline std::tuple<at::Tensor, at::Tensor> product_gradients(torch::autograd::AutogradContext* ctx,
                                                            const at::Tensor& grad) {
  using Optional = std::optional<at::Tensor>;
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("custom_mm::matmul_backward", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const Optional&, const Optional&,
                                                    c10::SymIntArrayRef, c10::SymIntArrayRef, bool, bool)>();
  const auto saved = ctx->get_saved_variables();
  const at::Tensor &a = saved[0], &b = saved[1];
  if (!a.defined() && !b.defined()) return {};
  auto& data = ctx->saved_data;
  const int64_t product = data["product"].toInt();
  const bool transa = product & 1, transb = product & 2;
  if (!(product & 4))
    return op.call(grad, a, b, data["a_sizes"].toSymIntVector(), data["b_sizes"].toSymIntVector(), transa, transb);
  const c10::SymInt m = grad.sym_size(0), n = grad.sym_size(1);
  const c10::SymInt k = a.defined() ? a.sym_size(transa ? 0 : 1) : b.sym_size(transb ? 1 : 0);
  const std::array<c10::SymInt, 2> a_sizes{transa ? k : m, transa ? m : k}, b_sizes{transb ? n : k, transb ? k : n};
  return op.call(grad, a, b, a_sizes, b_sizes, transa, transb);
}

// Flattens the leading dimensions into one. flatten() has no batching rule for batched gradients.
inline at::Tensor as_rows(const at::Tensor& t) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows = rows * t.sym_size(d);
  return t.reshape_symint({rows, t.sym_size(-1)});
}

}  // namespace matmuls
