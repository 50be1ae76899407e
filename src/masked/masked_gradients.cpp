// The autograd nodes of masked_linear and masked_ffn: the formulas of matmuls/masked/linear.py and ffn.py, for plain
// CUDA tensors.
#ifdef MATMULS_CUDA
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>

#include "glue/autograd.h"
#include "glue/checks.h"
#include "gpu/device_limits.h"
#include "masked/replay.h"

namespace matmuls {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

MATMULS_OPERATOR(LinearOp, "custom_mm::masked_linear", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const OptionalTensor&, const OptionalTensor&, c10::SymInt));
MATMULS_OPERATOR(LinearForwardOp, "custom_mm::masked_linear_forward", "",
                 std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const OptionalTensor&, const OptionalTensor&, c10::SymInt, c10::SymInt));
MATMULS_OPERATOR(LinearBackwardOp, "custom_mm::masked_linear_backward", "",
                 std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, bool, bool, c10::SymInt,
                                                    const OptionalTensor&));
MATMULS_OPERATOR(WeightsOp, "custom_mm::masked_weights", "",
                 std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool,
                                            c10::SymInt));
MATMULS_OPERATOR(SumsOp, "custom_mm::masked_sums", "", Tensor(const Tensor&, const Tensor&, const Tensor&));
MATMULS_OPERATOR(FfnForwardOp, "custom_mm::masked_ffn_forward", "",
                 std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool));

// The rows of x in the plan's order that forward saves for backward; 0: backward does not read x that way. As rows_kept
// in matmuls/triton/masked_gradients.py, which masked_linear_forward compares with it.
int64_t rows_kept(const Tensor& x, const Tensor& w, int64_t known) {
  if (x.dim() == 0 || w.dim() != 2 || x.element_size() != 2) return 0;
  const int64_t k = x.size(-1), n = w.size(0), m = k == 0 ? 0 : x.numel() / k;
  const bool few = m >= 256 && m <= 1024 && n % 256 == 0 && k % 256 == 0 && std::min(n, k) >= 2048;
  if (!few || known == 0 || known == m || device_limits(x.device().index()).major < 9) return 0;
  return m + 64 + 128;
}

// The kernels read rows whose elements are side by side. A gradient that was expanded is copied here rather than there,
// where a copy would keep the call from being repeated without Python.
Tensor by_rows(const Tensor& grad) { return grad.stride(-1) == 1 ? grad : grad.contiguous(); }

struct MaskedLinear : KernelFunction<MaskedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& rows,
                        const Tensor& counts, const OptionalTensor& b1, const OptionalTensor& b2, int64_t known) {
    const bool to_x = x.requires_grad(), to_weights = w1.requires_grad() || w2.requires_grad();
    const int64_t kept = to_x && to_weights ? rows_kept(x, w1, known) : 0;
    Tensor y, ordered;
    if (kept > 0)
      std::tie(y, ordered) = LinearForwardOp::below_autograd(x, w1, w2, rows, counts, b1, b2, known, kept);
    else
      y = LinearOp::below_autograd(x, w1, w2, rows, counts, b1, b2, known);
    ctx->save_for_backward(
        {to_weights ? x : Tensor(), to_x ? w1 : Tensor(), to_x ? w2 : Tensor(), rows, counts, ordered});
    ctx->saved_data["known"] = known;
    ctx->saved_data["bias"] = b1.has_value() && b1->defined();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &w1 = saved[1], &w2 = saved[2], &rows = saved[3], &counts = saved[4];
    const int64_t known = ctx->saved_data["known"].toInt();
    const bool to_x = ctx->needs_input_grad(0), to_1 = ctx->needs_input_grad(1), to_2 = ctx->needs_input_grad(2);
    const bool bias = ctx->saved_data["bias"].toBool();
    const bool to_b1 = bias && ctx->needs_input_grad(5), to_b2 = bias && ctx->needs_input_grad(6);
    variable_list found(8);
    if (!grads[0].defined()) return found;
    const Tensor dy = by_rows(grads[0]);
    if (to_x && (to_1 || to_2) && !c10::GradMode::is_enabled()) {
      std::tie(found[0], found[1], found[2]) =
          LinearBackwardOp::call(dy, x, w1, w2, rows, counts, to_1, to_2, known, saved[5]);
    } else {
      if (to_x) found[0] = LinearOp::call(dy, w1.t(), w2.t(), rows, counts, {}, {}, known);
      if (to_1 || to_2) std::tie(found[1], found[2]) = WeightsOp::call(dy, x, rows, counts, to_1, to_2, known);
    }
    if (!to_1) found[1] = Tensor();
    if (!to_2) found[2] = Tensor();
    if (to_b1 || to_b2) {
      const Tensor sums = SumsOp::call(dy, rows, counts);
      if (to_b1) found[5] = sums.select(0, 0);
      if (to_b2) found[6] = sums.select(0, 1);
    }
    return found;
  }
};

using Weights = std::array<Tensor, 6>;  // w1, w2, w3, u1, u2, u3

struct MaskedFfn : KernelFunction<MaskedFfn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& w3,
                        const Tensor& u1, const Tensor& u2, const Tensor& u3, const Tensor& rows, const Tensor& counts,
                        bool recompute) {
    auto [y, t] = FfnForwardOp::below_autograd(x, w1, w2, w3, u1, u2, u3, rows, counts, !recompute);
    ctx->save_for_backward({x, w1, w2, w3, u1, u2, u3, rows, counts, recompute ? Tensor() : t});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list found(10);
    if (!grads[0].defined()) return found;
    const Tensor dy = by_rows(grads[0]);
    std::array<bool, 7> needs;
    for (size_t i = 0; i < needs.size(); ++i) needs[i] = ctx->needs_input_grad(i);
    const variable_list computed =
        c10::GradMode::is_enabled() ? differentiable(saved, dy, needs) : by_kernels(saved, dy, needs);
    for (size_t i = 0; i < needs.size(); ++i)
      if (needs[i]) found[i] = computed[i];
    return found;
  }

 private:
  static variable_list by_kernels(const variable_list& saved, const Tensor& dy, const std::array<bool, 7>& needs) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("custom_mm::masked_ffn_backward", "");
    torch::jit::Stack stack{dy};
    for (size_t i = 0; i < 9; ++i) stack.emplace_back(saved[i]);
    stack.push_back(saved[9].defined() ? c10::IValue(saved[9]) : c10::IValue());
    c10::List<bool> wanted;
    for (const bool need : needs) wanted.push_back(need);
    stack.emplace_back(wanted);
    op.callBoxed(stack);
    variable_list found;
    for (const c10::IValue& v : stack) found.push_back(v.toTensor());
    return found;
  }

  // By operators that are differentiable themselves, for a second derivative.
  static variable_list differentiable(const variable_list& saved, const Tensor& dy, const std::array<bool, 7>& needs) {
    // Views, as one tensor may be passed twice or be computed from another.
    variable_list own, wanted;
    for (size_t i = 0; i < needs.size(); ++i) own.push_back(saved[i].view_as(saved[i]));
    const auto linear = [&](const Tensor& x, size_t w) {
      return LinearOp::call(x, own[w], own[w + 3], saved[7], saved[8], {}, {}, -1);
    };
    const Tensor y = linear(at::silu(linear(own[0], 1)) * linear(own[0], 3), 2);
    for (size_t i = 0; i < needs.size(); ++i)
      if (needs[i]) wanted.push_back(own[i]);
    const variable_list found = torch::autograd::grad({y}, wanted, {dy}, std::nullopt, /*create_graph=*/true);
    variable_list placed(needs.size());
    for (size_t i = 0, n = 0; i < needs.size(); ++i)
      if (needs[i]) placed[i] = found[n++];
    return placed;
  }
};

void apply_linear(torch::jit::Stack& stack) {
  const auto a = torch::jit::pop(stack, 8);
  stack.emplace_back(MaskedLinear::apply(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(),
                                         a[4].toTensor(), a[5].toOptional<Tensor>(), a[6].toOptional<Tensor>(),
                                         a[7].toInt()));
}

void apply_ffn(torch::jit::Stack& stack) {
  const auto a = torch::jit::pop(stack, 10);
  stack.emplace_back(MaskedFfn::apply(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(),
                                      a[4].toTensor(), a[5].toTensor(), a[6].toTensor(), a[7].toTensor(),
                                      a[8].toTensor(), a[9].toBool()));
}

}  // namespace

ApplyNode* node_of(std::string_view name) {
  if (name == "masked_linear") return apply_linear;
  if (name == "masked_ffn") return apply_ffn;
  return nullptr;
}

}  // namespace matmuls
#endif
