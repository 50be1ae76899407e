#include "activation.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

namespace matmuls {

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return at::relu(x);
    case Activation::gelu: return at::gelu(x, "none");
    case Activation::gelu_tanh: return at::gelu(x, "tanh");
  }
  return x;
}

void activate_(at::Tensor x, Activation activation) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: at::relu_(x); break;
    case Activation::gelu: at::gelu_(x, "none"); break;
    case Activation::gelu_tanh: at::gelu_(x, "tanh"); break;
  }
}

}  // namespace matmuls
