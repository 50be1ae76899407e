// What the gradients of operators that write over an argument share.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <memory>
#include <type_traits>

namespace matmuls {

// Before a write over x that is to be recorded, what torch would refuse after it: x a leaf or a view that may not be
// written; x, or what is kept for backward, made under inference_mode.
inline void check_recorded(const char* op, const at::Tensor& x, const at::Tensor& kept = {}) {
  torch::autograd::check_inplace(x, true);
  // Under a transform an x that it does not differentiate is not its own: the write would be lost to it.
  if (const auto& functorch = at::functorch::functorchTLSAccessor(); functorch && !x.requires_grad())
    functorch->checkSupportsCppAutogradFunction();
  for (const auto& t : {x, kept})
    TORCH_CHECK(!t.defined() || !t.is_inference(), op,
                ": expected tensors that autograd knows, for a gradient to be recorded, got one made under "
                "torch.inference_mode; clone it");
}

// Below autograd from a Function's forward. With grad mode, which is off there: under torch.compile a write without it
// is one that no gradient goes through.
template <class Op, class... A>
auto write_recorded(A&&... args) {
  const at::AutoGradMode recorded(true);
  return Op::below_autograd(std::forward<A>(args)...);
}

// How torch holds a Node, by the standard's pointer or by its own, which from 2.13 on it does.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class Ptr = NodePtr>
auto new_node() {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(new T, [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>();
}

template <class T, class Ptr = NodePtr>
Ptr held(T* node) {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<torch::autograd::Node>>)
    return node->getptr();
  else
    return Ptr::unsafe_reclaim_from_nonowning(node);
}

}  // namespace matmuls
