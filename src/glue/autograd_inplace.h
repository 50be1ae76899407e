// Helpers for gradients of operators that write over an argument.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <memory>
#include <type_traits>

namespace matmuls {

// Raises before a recorded write over x what torch would raise after it: x is a leaf or a view that must not be
// written, or x or `kept` (a tensor saved for backward) was made under inference_mode.
inline void check_recorded(const char* op, const at::Tensor& x, const at::Tensor& kept = {}) {
  torch::autograd::check_inplace(x, true);
  // Under a transform, an x that it does not differentiate belongs to an outer level: the write would be lost to it.
  if (const auto& functorch = at::functorch::functorchTLSAccessor(); functorch && !x.requires_grad())
    functorch->checkSupportsCppAutogradFunction();
  for (const auto& t : {x, kept})
    TORCH_CHECK(!t.defined() || !t.is_inference(), op,
                ": expected tensors that autograd knows, for a gradient to be recorded, got one made under "
                "torch.inference_mode; clone it");
}

// Calls the kernel below autograd from a Function's forward, with grad mode on (it is off there): under torch.compile
// no gradient goes through a write made without it.
template <class Op, class... A>
auto write_recorded(A&&... args) {
  const at::AutoGradMode recorded(true);
  return Op::below_autograd(std::forward<A>(args)...);
}

// The smart pointer by which torch holds a Node: std::shared_ptr, or from torch 2.13 on an intrusive pointer.
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
