// The activations that a product can end with, under torch's names.
#pragma once

#include <ATen/core/Tensor.h>

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

// torch's own activation, out of place and differentiable, or over its argument. In product.cpp.
at::Tensor activate(const at::Tensor& x, Activation activation);
void activate_(at::Tensor x, Activation activation);
// x <- activation(x + bias), by torch; in 16 bits rounded once, with a MiB of float32 beside it.
void add_and_activate_(at::Tensor x, const at::Tensor& bias, Activation activation);

}  // namespace matmuls
