// Helpers for gradients written in C++: autograd Functions that run under torch.func, and the gradient of products.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

// By default a C++ autograd Function refuses to run under torch.func's transforms, which do not see the operators of
// its forward level by level. Kernels of the Autograd key do run per level, so they use the check of Python's
// Functions.
#define checkSupportsCppAutogradFunction checkSupportsSingleLevelAutogradFunction
#include <torch/csrc/autograd/custom_function.h>
#undef checkSupportsCppAutogradFunction

namespace at::functorch {  // ATen/functorch/DynamicLayer.h, which includes a header that torch does not install
TORCH_API void setSingleLevelAutogradFunctionAllowed(bool allowed);
TORCH_API bool getSingleLevelAutogradFunctionAllowed();
}  // namespace at::functorch

namespace matmuls {

// The autograd Function that an operator's Autograd kernel applies; T provides forward and backward. Under transforms
// the operators called in forward are recorded at the levels below, which requires grad mode.
template <class T>
struct KernelFunction {
  struct Applied : torch::autograd::Function<Applied> {
    template <class... A>
    static auto forward(torch::autograd::AutogradContext* ctx, A&&... args) {
      const at::AutoGradMode recorded(at::functorch::functorchTLSAccessor() != nullptr);
      return T::forward(ctx, std::forward<A>(args)...);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   const torch::autograd::variable_list& grads) {
      return T::backward(ctx, grads);
    }
  };

  template <class... A>
  static auto apply(A&&... args) {
    struct Allowed {
      const bool transformed = at::functorch::functorchTLSAccessor() != nullptr;
      const bool before = transformed && at::functorch::getSingleLevelAutogradFunctionAllowed();
      Allowed() {
        if (transformed) at::functorch::setSingleLevelAutogradFunctionAllowed(true);
      }
      ~Allowed() {
        if (transformed) at::functorch::setSingleLevelAutogradFunctionAllowed(before);
      }
    } allowed;
    return Applied::apply(std::forward<A>(args)...);
  }
};

// Saves the inputs of a product's gradient: dA needs b, dB needs a, and both need the sizes of a and b.
inline void save_product(torch::autograd::AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b, bool transa,
                         bool transb) {
  ctx->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor()});
  ctx->saved_data["a_sizes"] = a.sym_sizes();
  ctx->saved_data["b_sizes"] = b.sym_sizes();
  ctx->saved_data["transa"] = transa;
  ctx->saved_data["transb"] = transb;
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
  auto& data = ctx->saved_data;
  return op.call(grad, saved[0], saved[1], data["a_sizes"].toSymIntVector(), data["b_sizes"].toSymIntVector(),
                 data["transa"].toBool(), data["transb"].toBool());
}

// Flattens the leading dimensions into one. flatten() has no batching rule for batched gradients.
inline at::Tensor as_rows(const at::Tensor& t) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows = rows * t.sym_size(d);
  return t.reshape_symint({rows, t.sym_size(-1)});
}

}  // namespace matmuls
