// Activations that can follow a product, named as in torch.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string_view>

namespace matmuls {

enum class Activation { none, relu, gelu, gelu_tanh };

// For |x| above this, gelu(x) is x or 0 and its gradient 1 or 0 in every dtype. torch's formulas give NaN there: -inf *
// 0.
constexpr double kGeluEnd = 64;

inline Activation parse_activation(const char* op, std::optional<std::string_view> name) {
  if (!name) return Activation::none;
  if (*name == "relu") return Activation::relu;
  if (*name == "gelu") return Activation::gelu;
  if (*name == "gelu_tanh") return Activation::gelu_tanh;
  TORCH_CHECK(false, op, ": expected activation None, 'relu', 'gelu' or 'gelu_tanh', got '", *name, "'");
}

}  // namespace matmuls
