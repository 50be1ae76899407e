// Recorded: the autograd Function that every KernelFunction applies.
#include "glue/autograd.h"

#include <c10/util/irange.h>

#include <array>
#include <atomic>

namespace at::functorch {  // ATen/functorch/DynamicLayer.h, which includes a header that torch does not install
TORCH_API void setSingleLevelAutogradFunctionAllowed(bool allowed);
TORCH_API bool getSingleLevelAutogradFunctionAllowed();
}  // namespace at::functorch

namespace matmuls {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The key under which a call is saved: its backward's number above kArgumentBits bits of RecordedCall::arguments.
constexpr const char* kCall = "matmuls.call";  // at most 15 characters: longer strings are allocated

// Backward functions by number, added once each by static initializers of their callers. Without a lock, which a child
// of fork() could find held.
constexpr int64_t kMostBackwards = 256;
std::array<BackwardFunction*, kMostBackwards> backwards;
std::atomic<int64_t> count{0};

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list forward(AutogradContext* ctx, const RecordedCall& call, at::TensorList) {
    const at::AutoGradMode recorded(at::functorch::functorchTLSAccessor() != nullptr);
    variable_list results = call.forward(ctx);
    ctx->saved_data[kCall] = call.backward << kArgumentBits | call.arguments;
    return results;
  }

  // The gradients of forward's arguments: none for the call itself, then one for each tensor.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t call = ctx->saved_data[kCall].toInt();
    variable_list found = backwards[static_cast<size_t>(call >> kArgumentBits)](ctx, grads);
    const int64_t arguments = call & ((int64_t{1} << kArgumentBits) - 1);
    int64_t n = 0;
    while (arguments >> (n + 1)) ++n;
    TORCH_CHECK(static_cast<int64_t>(found.size()) >= n, "expected a gradient for each of ", n, " arguments, got ",
                found.size());
    variable_list gradients(1);
    gradients.reserve(static_cast<size_t>(n) + 1);
    for (const auto i : c10::irange(n))
      if (arguments >> (n - 1 - i) & 1) gradients.push_back(std::move(found[i]));
    return gradients;
  }
};

}  // namespace

int64_t remember_backward(BackwardFunction* backward) {
  const int64_t number = count.fetch_add(1);
  TORCH_CHECK(number < kMostBackwards, "matmuls: expected at most ", kMostBackwards, " backward functions");
  backwards[static_cast<size_t>(number)] = backward;
  return number;
}

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
