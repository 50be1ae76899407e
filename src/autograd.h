// What every operation's gradient registration asks of its operands.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
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

}  // namespace matmuls
