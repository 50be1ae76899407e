// What every operation's gradient registration asks of its operands.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

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

// An output that is written over has no gradient formula, as torch's own out= variants.
inline void check_no_gradient_into(const char* op, const char* written, std::initializer_list<at::Tensor> tensors) {
  TORCH_CHECK(!needs_gradient(op, tensors), op, ": expected no gradient to be recorded through ", written,
              "=, got an argument that requires grad; drop ", written, "= or use torch.no_grad()");
}

// What ATen's own kernels do for their outputs: a saved tensor written over is then noticed by autograd.
inline void mark_written(const at::Tensor& t) {
  if (!t.is_inference()) torch::autograd::impl::bump_version(t);
}

// torch's fallback materializes lazily conjugated or negated arguments, but knows no operator that returns nothing:
// those that write resolve their inputs themselves and refuse such an output.
inline at::Tensor resolved(const at::Tensor& t) { return t.defined() ? t.resolve_conj().resolve_neg() : t; }
inline void check_not_lazy(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(!t.is_conj() && !t.is_neg(), op, ": expected ", name,
              " without a lazy conjugation or negation, got such a view");
}

// Whether a gradient that came in may be written over unseen: this is the last reference to it and to its memory, no
// gradient of it will be asked for, and nothing is being traced.
inline bool nobody_else_holds(const at::Tensor& grad) {
  constexpr c10::DispatchKeySet traced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return !c10::GradMode::is_enabled() && !grad.key_set().has_any(traced) && grad.use_count() == 1 &&
         grad.storage().use_count() == 1 && grad.is_non_overlapping_and_dense();
}

// What the gradient of a product keeps: dA needs b, dB needs a, and the sizes of both.
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

}  // namespace matmuls
