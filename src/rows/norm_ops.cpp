// The CPU and the operators of layer_norm_ and rms_norm_; rows/norm.cu has the formula and the GPU.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "rows/explain.h"
#include "rows/norm.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

using at::Tensor;

void check(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
           double eps) {
  check_floating(op, "x", x);
  TORCH_CHECK(x.dim() >= 1, op, ": expected x of at least one dimension, got a scalar");
  TORCH_CHECK(eps >= 0, op, ": expected eps of 0 or more, got ", eps);
  const auto like_x = [&](const char* name, const Tensor& t) { check_like(op, name, t, "x", x); };
  const auto of_a_row = [&](const char* name, const Tensor& t) {
    if (!t.defined()) return;
    like_x(name, t);
    TORCH_CHECK(t.dim() == 1 && t.sym_size(0) == x.sym_size(-1), op, ": expected ", name, " of shape [", x.sym_size(-1),
                "], got ", t.sym_sizes());
  };
  of_a_row("weight", weight);
  of_a_row("bias", bias);
  if (!residual.defined()) return;
  like_x("residual", residual);
  TORCH_CHECK(residual.sym_sizes() == x.sym_sizes(), op, ": expected residual of x's shape ", x.sym_sizes(), ", got ",
              residual.sym_sizes());
}

void run_cpu(const NormCall& c) {
  if (c.x.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const auto& steps = rows.column_strides;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "norm", [&] {
    using F = arithmetic_t<scalar_t>;
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<scalar_t>() : nullptr; };
    scalar_t* x = c.x.mutable_data_ptr<scalar_t>();
    scalar_t* xhat = c.xhat.defined() ? c.xhat.mutable_data_ptr<scalar_t>() : nullptr;
    F* rstd = c.rstd.defined() ? c.rstd.mutable_data_ptr<F>() : nullptr;
    const scalar_t *weight = data(c.weight), *bias = data(c.bias), *residual = data(c.residual);
    // Rows of one length take one loop, however many there are: a row's result does not depend on the others.
    NormRows<scalar_t> m{
        .x = nullptr, .weight = weight, .bias = bias, .columns = rows.columns, .eps = c.eps, .rms = c.rms};
    const bool contiguous = steps[0] == 1 && (residual == nullptr || steps[1] == 1);
    if (contiguous && norm_short_rows(m, 0))
      return for_runs_of_rows(rows, [&](int64_t first, int64_t count) {
        const auto step = [&](int t) { return rows.dims > 0 ? rows.strides[t][0] : 0; };
        NormRows<scalar_t> some = m;
        some.x = x + rows.offset(0, first), some.x_step = step(0);
        if (residual) some.residual = residual + rows.offset(1, first), some.residual_step = step(1);
        if (xhat) some.xhat = xhat + rows.offset(2, first), some.xhat_step = step(2);
        if (rstd) some.rstd = rstd + first;
        norm_short_rows(some, count);
      });
    for_rows<scalar_t, 3>(rows.count, rows.columns, [&](int64_t r, RowBuffers<scalar_t, 3>& buffers) {
      scalar_t* row = x + rows.offset(0, r);
      const scalar_t* from = buffers.gather(0, row, steps[0]);
      const scalar_t* added = residual ? buffers.gather(1, residual + rows.offset(1, r), steps[1]) : nullptr;
      scalar_t* to = buffers.target(2, row, steps[0]);
      scalar_t* kept = xhat ? xhat + rows.offset(2, r) : nullptr;
      const F scale = norm_row(from, added, weight, bias, to, kept, rows.columns, c.eps, c.rms);
      if (rstd) rstd[r] = scale;
      buffers.scatter(to, row, steps[0]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(LayerNormOp, "custom_mm::layer_norm_", "",
                 void(Tensor, const OptionalTensor&, const OptionalTensor&, double, const OptionalTensor&));
MATMULS_OPERATOR(RmsNormOp, "custom_mm::rms_norm_", "",
                 void(Tensor, const OptionalTensor&, double, const OptionalTensor&));
MATMULS_OPERATOR(KeepOp, "custom_mm::norm_keep_", "",
                 std::tuple<Tensor, Tensor>(Tensor, const OptionalTensor&, const OptionalTensor&, double,
                                            const OptionalTensor&, bool));
using NormRunner = void(const NormCall&);
const char* name_of(bool rms) { return rms ? "rms_norm_" : "layer_norm_"; }

// rstd is one number per row in the arithmetic type. xhat is like x, or empty if x itself becomes xhat.
std::tuple<Tensor, Tensor> kept_tensors(const Tensor& x, bool affine) {
  const auto sizes = x.sym_sizes();
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {affine ? in_huge_pages(at::empty_symint(sizes, x.options())) : at::empty({0}, x.options()),
          at::empty_symint(sizes.slice(0, sizes.size() - 1), x.options().dtype(type))};
}

void normalize(NormRunner run, NormCall c) {
  check(c.op, c.x, c.weight, c.bias, c.residual, c.eps);
  check_no_overlap(c.op, c.x, {{"weight", c.weight}, {"bias", c.bias}, {"residual", c.residual}});
  if (c.weight.defined()) c.weight = c.weight.contiguous();
  if (c.bias.defined()) c.bias = c.bias.contiguous();
  run(c);
}

template <NormRunner run>
void layer_norm_(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                 const OptionalTensor& residual) {
  normalize(
      run,
      {name_of(false), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps, false, {}, {}});
}
template <NormRunner run>
void rms_norm_(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  normalize(run, {name_of(true), x, tensor_or_none(weight), Tensor(), tensor_or_none(residual), eps, true, {}, {}});
}
template <NormRunner run>
std::tuple<Tensor, Tensor> norm_keep_(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                      const OptionalTensor& residual, bool rms) {
  check(name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
  const bool affine = tensor_or_none(weight).defined() || tensor_or_none(bias).defined();
  auto [xhat, rstd] = kept_tensors(x, affine);
  normalize(run, {name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps, rms,
                  affine ? xhat : Tensor(), rstd});
  return {xhat, rstd};
}

void layer_norm_meta(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                     const OptionalTensor& residual) {
  check(name_of(false), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
}
void rms_norm_meta(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  check(name_of(true), x, tensor_or_none(weight), Tensor(), tensor_or_none(residual), eps);
}
std::tuple<Tensor, Tensor> norm_keep_meta(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, const OptionalTensor& residual, bool rms) {
  check(name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
  return kept_tensors(x, tensor_or_none(weight).defined() || tensor_or_none(bias).defined());
}

// ---------------------------------------------------------------------------------------------------------- gradient

// With d = dy * weight:  dx = rstd * (d - mean(d) - xhat * mean(d * xhat)), dweight = sum dy * xhat, dbias = sum dy
// over the rows. The residual's gradient is that of x. xhat and rstd are results too: a second derivative reaches x
// through them, through xhat as through y, and through d rstd / dx = -rstd^2 * xhat / n.
struct NormGradient : KernelFunction<NormGradient> {
  struct Arguments {
    double eps;
    bool rms;
  };

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                                                const OptionalTensor& weight, const OptionalTensor& bias,
                                                const OptionalTensor& residual, Arguments a) {
    const auto need = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
    ctx->saved_data["need_x"] = need(x);
    ctx->saved_data["need_weight"] = need(tensor_or_none(weight));
    ctx->saved_data["need_bias"] = need(tensor_or_none(bias));
    ctx->saved_data["need_residual"] = need(tensor_or_none(residual));
    auto [xhat, rstd] = write_recorded<KeepOp>(x, weight, bias, a.eps, residual, a.rms);
    const bool affine = tensor_or_none(weight).defined() || tensor_or_none(bias).defined();
    ctx->mark_dirty({x});
    ctx->set_materialize_grads(false);
    // For a view, x is saved without its history, which would create a reference cycle with this node.
    ctx->save_for_backward({affine ? xhat : x.is_view() ? x.detach() : x, rstd, tensor_or_none(weight)});
    ctx->saved_data["rms"] = a.rms;
    ctx->saved_data["affine"] = affine;
    // autograd allows a Function that writes to a view only one result, so its gradient is not differentiable.
    ctx->saved_data["view"] = x.is_view();
    if (x.is_view()) return {x};
    if (!affine) return {x, rstd};
    return {x, rstd, xhat};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &xhat = saved[0], &rstd = saved[1], &weight = saved[2];
    const bool rms = ctx->saved_data["rms"].toBool();
    const auto need = [&](const char* name) { return ctx->saved_data[name].toBool(); };
    const bool need_residual = need("need_residual"), need_x = need("need_x") || need_residual;
    const bool need_weight = need("need_weight"), need_bias = need("need_bias");
    const Tensor& dy = grads[0];
    const Tensor drstd = grads.size() > 1 ? grads[1] : Tensor(), dxhat = grads.size() > 2 ? grads[2] : Tensor();
    if (!c10::GradMode::is_enabled() && dy.defined() && !drstd.defined() && !dxhat.defined()) {
      auto [dx, dweight, dbias] =
          NormBackwardOp::call(dy, xhat, rstd, weight.defined() ? OptionalTensor(weight) : std::nullopt, rms, need_x,
                               need_weight || need_bias);
      return {need_x ? dx : Tensor(),
              need_weight ? dweight : Tensor(),
              need_bias ? dbias : Tensor(),
              need_residual ? dx : Tensor(),
              {}};
    }
    TORCH_CHECK(!ctx->saved_data["view"].toBool(), name_of(rms),
                ": expected first derivatives only, x being a view of another tensor; normalize the tensor itself");
    const auto wide = [&](const Tensor& t) { return t.to(rstd.scalar_type()); };
    const Tensor h = wide(xhat), r = rstd.unsqueeze(-1);
    Tensor d, dweight, dbias;
    if (dy.defined()) {
      const Tensor g = wide(dy);
      d = weight.defined() ? g * wide(weight) : g;
      if (need_weight) dweight = as_rows(g * h).sum(0).to(xhat.scalar_type());
      if (need_bias) dbias = as_rows(g).sum(0).to(xhat.scalar_type());
    }
    if (dxhat.defined()) d = d.defined() ? d + wide(dxhat) : wide(dxhat);
    Tensor dx;
    if (need_x && d.defined()) {
      dx = d - h * (d * h).mean(-1, true);
      if (!rms) dx = dx - d.mean(-1, true);
      dx = r * dx;
    }
    if (need_x && drstd.defined()) {
      const Tensor through = -drstd.unsqueeze(-1) * r * r * h / h.sym_size(-1);
      dx = dx.defined() ? dx + through : through;
    }
    if (dx.defined()) dx = dx.to(xhat.scalar_type());
    return {dx, dweight, dbias, need_residual ? dx : Tensor(), {}};
  }
};

void layer_norm_autograd(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                         const OptionalTensor& residual) {
  if (!needs_gradient(name_of(false), {x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual)}))
    return LayerNormOp::below_autograd(x, weight, bias, eps, residual);
  check_recorded(name_of(false), x, tensor_or_none(weight));
  NormGradient::apply(x, weight, bias, residual, NormGradient::Arguments{eps, false});
}
void rms_norm_autograd(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  if (!needs_gradient(name_of(true), {x, tensor_or_none(weight), tensor_or_none(residual)}))
    return RmsNormOp::below_autograd(x, weight, eps, residual);
  check_recorded(name_of(true), x, tensor_or_none(weight));
  NormGradient::apply(x, weight, std::nullopt, residual, NormGradient::Arguments{eps, true});
}
std::tuple<Tensor, Tensor> norm_keep_autograd(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias,
                                              double eps, const OptionalTensor& residual, bool rms) {
  if (!needs_gradient("norm_keep_", {x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual)}))
    return KeepOp::below_autograd(x, weight, bias, eps, residual, rms);
  check_recorded("norm_keep_", x, tensor_or_none(weight));
  const auto results = NormGradient::apply(x, weight, bias, residual, NormGradient::Arguments{eps, rms});
  TORCH_CHECK(results.size() > 1,
              "norm_keep_: expected x not to be a view of another tensor where a gradient is recorded");
  return {results.size() > 2 ? results[2] : at::empty({0}, x.options()), results[1]};
}

}  // namespace

RowPlan explain_norm(const char* op, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps, const OptionalTensor& residual, bool rms, bool keep, const OtherGpu& gpu) {
  // A copy made to be contiguous is aligned, as one on the GPU would be.
  const auto contiguous = [](const Tensor& t) {
    return !t.defined() || t.is_contiguous() ? t : at::empty_like(t, t.options().device(at::kMeta));
  };
  const Tensor w = tensor_or_none(weight), b = tensor_or_none(bias), r = tensor_or_none(residual);
  check(op, x, w, b, r, eps);
  if (x.numel() == 0) return {};
  const bool keeps_xhat = keep && (w.defined() || b.defined());
  const Tensor xhat = keeps_xhat ? at::empty(x.sizes(), x.options().device(at::kMeta)) : Tensor();
  const NormCall c{op, x, contiguous(w), contiguous(b), r, eps, rms, xhat, {}};
  return plan_of(op, x, facts_of_call(c, rows_of_call(c)), gpu, "norm_row");
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm_(Tensor(a!) x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, Tensor? residual=None) -> ()",
      tags);
  m.def("rms_norm_(Tensor(a!) x, Tensor? weight=None, float eps=1e-05, Tensor? residual=None) -> ()", tags);
  m.def(
      "norm_keep_(Tensor(a!) x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool rms) -> (Tensor xhat, "
      "Tensor rstd)",
      tags);
}

MATMULS_KERNELS("layer_norm_", layer_norm_<run_cpu>, layer_norm_<run_cuda>, layer_norm_meta, layer_norm_autograd)
MATMULS_KERNELS("rms_norm_", rms_norm_<run_cpu>, rms_norm_<run_cuda>, rms_norm_meta, rms_norm_autograd)
MATMULS_KERNELS("norm_keep_", norm_keep_<run_cpu>, norm_keep_<run_cuda>, norm_keep_meta, norm_keep_autograd)
MATMULS_WRITES("layer_norm_", LayerNormOp, 0)
MATMULS_WRITES("rms_norm_", RmsNormOp, 0)
MATMULS_WRITES("norm_keep_", KeepOp, 0)

}  // namespace matmuls
