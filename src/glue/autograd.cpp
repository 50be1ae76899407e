// Recorded: the autograd Function that every KernelFunction applies.
#include "glue/autograd.h"

#include <c10/util/irange.h>

namespace at::functorch {  // ATen/functorch/DynamicLayer.h, which includes a header that torch does not install
TORCH_API void setSingleLevelAutogradFunctionAllowed(bool allowed);
TORCH_API bool getSingleLevelAutogradFunctionAllowed();
}  // namespace at::functorch

namespace matmuls {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The keys under which a call's backward and its arguments are saved.
constexpr const char *kBackward = "matmuls.backward", *kArguments = "matmuls.arguments";

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list forward(AutogradContext* ctx, const RecordedCall& call, at::TensorList) {
    const at::AutoGradMode recorded(at::functorch::functorchTLSAccessor() != nullptr);
    variable_list results = call.forward(ctx);
    int64_t arguments = 1;  // one bit each, set for a tensor, after a leading 1
    for (const bool is_tensor : call.is_tensor) arguments = arguments << 1 | (is_tensor ? 1 : 0);
    ctx->saved_data[kBackward] = reinterpret_cast<int64_t>(call.backward);
    ctx->saved_data[kArguments] = arguments;
    return results;
  }

  // The gradients of forward's arguments: none for the call itself, then one for each tensor.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto call = reinterpret_cast<decltype(RecordedCall::backward)>(ctx->saved_data[kBackward].toInt());
    variable_list found = call(ctx, grads);
    const int64_t arguments = ctx->saved_data[kArguments].toInt();
    int64_t n = 0;
    while (arguments >> (n + 1)) ++n;
    TORCH_CHECK(static_cast<int64_t>(found.size()) >= n, "expected a gradient for each of ", n, " arguments, got ",
                found.size());
    variable_list gradients(1);
    for (const auto i : c10::irange(n))
      if (arguments >> (n - 1 - i) & 1) gradients.push_back(std::move(found[i]));
    return gradients;
  }
};

}  // namespace

variable_list record(const RecordedCall& call) {
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
  return Recorded::apply(call, at::TensorList(call.tensors));
}

}  // namespace matmuls
