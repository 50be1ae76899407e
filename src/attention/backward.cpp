// attention: context and probabilities with their gradient, computed in one of three ways.
//
// 1. 16-bit tensors on a GPU, no mask, no gradient into the probabilities: the backward of torch's fused attention,
// which needs each row's sum instead of the row. The sums come from the one kernel or from another forward of torch's.
//
// 2. Otherwise: backward runs in the pieces in which attention.cpp computes the scores. One score-sized tensor is
// saved, or none and the scores are computed again.
//
// 3. If the gradient itself may be differentiated: attention is recomputed with differentiable operations, and autograd
// does the rest.
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <array>
#include <utility>

#include "attention/attention.h"
#include "attention/ops.h"
#include "dense/ops.h"
#include "glue/autograd.h"
#include "glue/checks.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Largest head size that torch's fused attentions support on every GPU, forward and backward.
constexpr int64_t kFusedHead = 128;
constexpr size_t kArguments = 9;  // arguments of forward

// True if torch has a fused attention for these inputs, whose backward needs no probabilities.
bool has_fused(const Tensor& q, const Tensor& v, const Tensor& mask) {
  const auto type = q.scalar_type();
  return q.is_cuda() && !mask.defined() && (type == at::kHalf || type == at::kBFloat16) && q.size(3) == v.size(3) &&
         q.size(3) <= kFusedHead && q.size(3) % 8 == 0;
}

// What forward saved. y, context and sums may be undefined.
struct Kept {
  Tensor q, k, v, mask, y, context, sums;
  double scale;
  bool causal, fused;
  int64_t piece_bytes;
  std::array<bool, 3> needed;  // whether q, k and v need a gradient

  explicit Kept(AutogradContext* ctx) {
    const auto saved = ctx->get_saved_variables();
    q = saved[0], k = saved[1], v = saved[2], mask = saved[3], y = saved[4], context = saved[5], sums = saved[6];
    auto& data = ctx->saved_data;
    scale = data["scale"].toDouble(), causal = data["causal"].toBool(), fused = data["fused"].toBool();
    piece_bytes = data["piece_bytes"].toInt();
    for (size_t i = 0; i < needed.size(); ++i) needed[i] = ctx->needs_input_grad(i);
  }
};

using Gradients = std::array<Tensor, 3>;  // of q, k and v: undefined where not needed

// grad, grad_y: gradients of context and probabilities; either may be undefined.
Gradients differentiable_gradients(const Kept& c, const Tensor& grad, const Tensor& grad_y) {
  // Views, as one tensor may be passed twice or be computed from another.
  const Gradients inputs = {c.q.view_as(c.q), c.k.view_as(c.k), c.v.view_as(c.v)};
  const auto [q, scale] = folded(inputs[0], c.scale);
  const Tensor y = MatmulOp::call(q, inputs[1], false, true);
  MaskedSoftmaxOp::call(y, c.mask, scale, c.causal);
  variable_list outputs, grads, needed;
  if (grad.defined()) {
    outputs.push_back(MatmulOp::call(y, inputs[2], false, false).transpose(1, 2));
    grads.push_back(grad);
  }
  if (grad_y.defined() && y.requires_grad()) {  // not if only v needs a gradient
    outputs.push_back(y);
    grads.push_back(grad_y);
  }
  for (size_t i = 0; i < inputs.size(); ++i)
    if (c.needed[i]) needed.push_back(inputs[i]);
  if (outputs.empty()) return {};
  const auto found = torch::autograd::grad(outputs, needed, grads, std::nullopt, /*create_graph=*/true,
                                           /*allow_unused=*/true);
  Gradients results;
  for (size_t i = 0, n = 0; i < results.size(); ++i)
    if (c.needed[i]) results[i] = found[n++];
  return results;
}

// Backward of torch's attention, with whichever backend torch selects. grad: [B, Q, H, D].
Gradients fused_gradients(const Kept& c, const Tensor& grad) {
  const auto &q = c.q, &k = c.k, &v = c.v;
  const auto choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(q, k, v, {}, 0.0, c.causal, c.scale));
  const Tensor by_heads = grad.transpose(1, 2);
  Tensor out, sums, offsets_q, offsets_k, seed, offset;
  c10::SymInt queries = q.size(2), keys = k.size(2);
  if (c.sums.defined()) {
    out = c.context.transpose(1, 2), sums = c.sums;
    seed = offset = at::empty({}, q.options().dtype(at::kLong));  // of a dropout that is not used
  }
  if (choice == at::SDPBackend::cudnn_attention) {
    if (!out.defined())
      std::tie(out, sums, offsets_q, offsets_k, queries, keys, seed, offset, std::ignore) =
          at::_scaled_dot_product_cudnn_attention(q, k, v, {}, true, 0.0, c.causal, false, c.scale);
    auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward_symint(
        by_heads, q, k, v, out, sums.view({q.size(0), q.size(1), q.size(2), 1}), seed, offset, {}, offsets_q, offsets_k,
        queries, keys, 0.0, c.causal, c.scale);
    return {dq, dk, dv};
  }
  if (choice == at::SDPBackend::flash_attention) {
    if (!out.defined())
      std::tie(out, sums, offsets_q, offsets_k, queries, keys, seed, offset, std::ignore) =
          at::_scaled_dot_product_flash_attention(q, k, v, 0.0, c.causal, false, c.scale);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward_symint(
        by_heads, q, k, v, out, sums, offsets_q, offsets_k, queries, keys, 0.0, c.causal, seed, offset, c.scale);
    return {dq, dk, dv};
  }
  const at::AutoGradMode recorded(true);
  variable_list leaves = {q.detach(), k.detach(), v.detach()};
  for (const Tensor& leaf : leaves) leaf.requires_grad_();
  const Tensor context = at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {}, 0.0, c.causal, c.scale);
  const auto found = torch::autograd::grad({context}, leaves, {by_heads});
  return {found[0], found[1], found[2]};
}

// The gradient of the probabilities is turned into that of the scores in place.
Gradients gradients_in_pieces(Kept c, Tensor grad, const Tensor& grad_y) {
  c.q = c.q.contiguous(), c.k = c.k.contiguous(), c.v = c.v.contiguous();  // once for all pieces, as in attention.cpp
  // To recompute the scores.
  const auto [scaled, scale] = c.y.defined() ? std::pair(Tensor(), 1.0) : folded(c.q, c.scale);
  Gradients results;
  auto& [dq, dk, dv] = results;
  if (c.needed[0]) dq = at::empty_like(c.q);
  if (c.needed[1]) dk = at::empty_like(c.k);
  if (c.needed[2] && grad.defined()) dv = at::empty_like(c.v);
  if (grad.defined()) grad = grad.transpose(1, 2).contiguous();
  for (const Piece& piece : pieces_of(c.q, c.k, c.piece_bytes)) {
    const Tensor q = piece.of(c.q), k = piece.of(c.k);
    const auto scores_sized = [&](const Tensor& a, const Tensor& b) {  // a @ b^T in a's dtype, also under autocast
      const Tensor product = at::empty({a.size(0), a.size(1), a.size(2), b.size(2)}, a.options());
      MatmulOutOp::call(a, b, false, true, product);
      return product;
    };
    Tensor y, ds;
    if (c.y.defined()) {
      y = piece.of(c.y);
    } else {
      y = scores_sized(piece.of(scaled), k);
      MaskedSoftmaxOp::call(y, piece.of_mask(c.mask), scale, c.causal);
    }
    if (grad.defined()) {
      if (dv.defined()) MatmulOutOp::call(y, piece.of(grad), true, false, piece.of(dv));
      ds = scores_sized(piece.of(grad), piece.of(c.v));
      if (grad_y.defined()) ds += piece.of(grad_y);
    } else {
      ds = piece.of(grad_y).clone(at::MemoryFormat::Contiguous);
    }
    SoftmaxBackwardOutOp::call(y, ds, -1, c.scale, c.causal, ds);
    if (dq.defined()) MatmulOutOp::call(ds, k, false, false, piece.of(dq));
    if (dk.defined()) MatmulOutOp::call(ds, q, true, false, piece.of(dk));
  }
  return results;
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& maybe_mask, double scale, bool causal, bool probabilities,
                               bool recompute, int64_t piece_bytes) {
    const bool once = attends_at_once(q, k, v, maybe_mask, scale);
    const Tensor mask = tensor_or_none(maybe_mask);
    const bool fused = has_fused(q, v, mask), keep = !recompute && !fused;
    const auto sizes = q.sizes();
    Tensor y, sums;
    if (probabilities || keep) y = at::empty({sizes[0], sizes[1], sizes[2], k.size(2)}, q.options());
    if (fused && probabilities && once) sums = at::empty(sizes.slice(0, 3), q.options().dtype(at::kFloat));
    const Tensor context = AttentionOp::call(q, k, v, mask, scale, causal, piece_bytes, y, sums);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, mask, keep ? y : Tensor(), sums.defined() ? context : Tensor(), sums});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["fused"] = fused;
    ctx->saved_data["piece_bytes"] = piece_bytes;
    return probabilities ? variable_list{context, y} : variable_list{context};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(kArguments);
    const Tensor grad = grads[0], grad_y = grads.size() > 1 ? grads[1] : Tensor();
    if (!grad.defined() && !grad_y.defined()) return results;
    const Kept c(ctx);
    const Gradients found = c10::GradMode::is_enabled()    ? differentiable_gradients(c, grad, grad_y)
                            : c.fused && !grad_y.defined() ? fused_gradients(c, grad)
                                                           : gradients_in_pieces(c, grad, grad_y);
    for (size_t i = 0; i < found.size(); ++i)
      if (c.needed[i]) results[i] = found[i];
    return results;
  }
};

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                     double scale, bool causal, bool probabilities, bool recompute,
                                     int64_t piece_bytes) {
  needs_gradient("attention", {q, k, v, tensor_or_none(mask)});  // raises on forward-mode tangents
  if (const auto& functorch = at::functorch::functorchTLSAccessor()) functorch->checkSupportsCppAutogradFunction();
  const auto found = Attention::apply(q, k, v, mask, scale, causal, probabilities, recompute, piece_bytes);
  return {found[0], probabilities ? found[1] : Tensor()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, bool probabilities, "
      "bool recompute, int piece_bytes) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(custom_mm, CompositeImplicitAutograd, m) { m.impl("attention", attention); }

}  // namespace matmuls
