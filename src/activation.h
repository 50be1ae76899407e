// The activations that a product can end with, under torch's names.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>

namespace matmuls {

enum class Activation { none, relu, gelu, gelu_tanh };

inline Activation parse_activation(const char* op, std::optional<std::string_view> name) {
  if (!name) return Activation::none;
  if (*name == "relu") return Activation::relu;
  if (*name == "gelu") return Activation::gelu;
  if (*name == "gelu_tanh") return Activation::gelu_tanh;
  TORCH_CHECK(false, op, ": expected activation None, 'relu', 'gelu' or 'gelu_tanh', got '", *name, "'");
}

// torch's own activation, out of place and differentiable, or over its argument.
inline at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return at::relu(x);
    case Activation::gelu: return at::gelu(x, "none");
    case Activation::gelu_tanh: return at::gelu(x, "tanh");
  }
  return x;
}

inline void activate_(at::Tensor x, Activation activation) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: at::relu_(x); break;
    case Activation::gelu: at::gelu_(x, "none"); break;
    case Activation::gelu_tanh: at::gelu_(x, "tanh"); break;
  }
}

}  // namespace matmuls
