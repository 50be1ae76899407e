// Operator csr_linear: x A^T + bias for a sparse A [rows, columns] and x [..., columns], with one autograd node.
//
// The product is A x^T by csr_spmm. Its B is x^T [columns, n], n the rows of x; the result [rows, n] is transposed
// while the bias is added. On a GPU, few operands (few.h) take one kernel forward and one for each gradient.
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "glue/autograd.h"
#include "glue/checks.h"
#include "glue/operator.h"
#include "sparse/dense_blocks.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"
#include "sparse/spmm/few.h"

namespace matmuls::linear {
namespace {

using at::Tensor;

constexpr const char* kLinear = "csr_linear";

MATMULS_OPERATOR(LinearOp, "custom_mm::csr_linear", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        int64_t, int64_t));

void check(const Pattern& p, const Tensor& values, const Tensor& x, const Tensor& bias) {
  check_floating_or_complex(kLinear, "x", x);
  TORCH_CHECK(x.dim() >= 1, kLinear, ": expected x of shape [..., columns], got []");
  check_like(kLinear, "values", values, "x", x);
  check_pattern(kLinear, p, x);
  TORCH_CHECK_VALUE(values.dim() == 1 && values.sym_size(0) == p.col.sym_size(0), kLinear,
                    ": expected values of shape [", p.col.sym_size(0), "], one for each nonzero, got ",
                    values.sym_sizes());
  TORCH_CHECK_VALUE(!p.t_crow.defined() || p.t_crow.sym_size(0) == x.sym_size(-1) + 1, kLinear,
                    ": expected t_crow of shape [", x.sym_size(-1) + 1, "] for x of ", x.sym_size(-1), " columns, got ",
                    p.t_crow.defined() ? p.t_crow.sym_sizes() : c10::SymIntArrayRef{});
  if (!bias.defined()) return;
  check_like(kLinear, "bias", bias, "x", x);
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == p.sym_rows(), kLinear, ": expected bias of shape [", p.sym_rows(),
              "], got ", bias.sym_sizes());
}

Tensor rows_of(const Tensor& x) { return x.dim() == 2 ? x : as_rows(x); }

// x as B [columns, n] of the product.
Tensor transposed(const Tensor& x) { return rows_of(x).t().contiguous(); }

// A @ b by csr_spmm. b: [columns of A, n].
Tensor product(const Pattern& p, const Tensor& values, const Tensor& b, int64_t longest, int64_t t_longest) {
  return SpmmOp::call(p.crow, p.col, values, b, b.sym_size(0), "sum", 1, none_or_tensor(p.order),
                      none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order), {}, false, longest,
                      t_longest);
}

// y_t^T + bias in the shape of the result. y_t: [rows, n].
Tensor result(const Tensor& y_t, const Tensor& x, const Tensor& bias) {
  auto shape = c10::SymDimVector(x.sym_sizes());
  shape.back() = y_t.sym_size(0);
  if (!bias.defined()) return at::_unsafe_view_symint(y_t.t().contiguous(), shape);
  if (is_traced(x))  // a DTensor makes its results itself
    return at::_unsafe_view_symint(at::add(y_t.t(), bias).contiguous(), shape);
  const Tensor y = at::empty_symint(shape, x.options());
  Tensor rows = y.view_symint({y_t.sym_size(1), y_t.sym_size(0)});
  at::add_out(rows, y_t.t(), bias);
  return y;
}

Tensor csr_linear(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& x,
                  const OptionalTensor& maybe_bias, const OptionalTensor& order, const OptionalTensor& t_crow,
                  const OptionalTensor& t_col, const OptionalTensor& t_order, int64_t longest, int64_t t_longest) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  check(p, values, x, bias);
  if (has_data(x) && takes_dense_linear(p, x)) {
    const Pattern whole = readable(kLinear, p, x.size(-1));
    at::DimVector shape(x.sizes());
    shape.back() = p.rows();
    const Tensor y = at::empty(shape, x.options());
    dense_linear(whole, values.contiguous(), rows_of(x), bias, y.view({-1, p.rows()}));
    return y;
  }
  return result(product(p, values, transposed(x), longest, t_longest), x, bias);
}

#ifdef MATMULS_CUDA
Tensor csr_linear_cuda(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& x,
                       const OptionalTensor& maybe_bias, const OptionalTensor& order, const OptionalTensor& t_crow,
                       const OptionalTensor& t_col, const OptionalTensor& t_order, int64_t longest, int64_t t_longest) {
  const int64_t columns = x.dim() > 0 ? x.size(-1) : 0, n = columns > 0 ? x.numel() / columns : 0;
  const Pattern p = pattern_of(crow, col, order);
  if (x.is_complex() || n == 0 || crow.dim() != 1 || col.dim() != 1 || !are_few(p.nonzeros(), p.rows(), n, longest))
    return csr_linear(crow, col, values, x, maybe_bias, order, t_crow, t_col, t_order, longest, t_longest);
  const Tensor bias = tensor_or_none(maybe_bias);
  check(pattern_of(crow, col, order, t_crow, t_col, t_order), values, x, bias);
  at::DimVector shape(x.sizes());
  shape.back() = p.rows();
  const Tensor y = at::empty(shape, x.options());
  if (y.numel() > 0)
    run_few(contiguous(p), values.contiguous(), with_contiguous_rows(rows_of(x)),
            bias.defined() ? bias.contiguous() : bias, y);
  return y;
}
#endif

struct LinearFunction : KernelFunction<LinearFunction> {
  using Context = torch::autograd::AutogradContext;
  using Gradients = torch::autograd::variable_list;

  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& x, const OptionalTensor& bias,
                        const Pattern& p, int64_t longest, int64_t t_longest) {
    ctx->save_for_backward({p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order, x.requires_grad() ? values : Tensor(),
                            values.requires_grad() ? x : Tensor()});
    ctx->saved_data["sizes"] = x.sym_sizes();
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["t_longest"] = t_longest;
    ctx->saved_data["bias"] = bias && bias->requires_grad();
    return LinearOp::below_autograd(p.crow, p.col, values, x, bias, none_or_tensor(p.order), none_or_tensor(p.t_crow),
                                    none_or_tensor(p.t_col), none_or_tensor(p.t_order), longest, t_longest);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    const Pattern p{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
    const Tensor &values = saved[6], &x = saved[7];
    const auto sizes = ctx->saved_data["sizes"].toSymIntVector();
    const int64_t longest = ctx->saved_data["longest"].toInt(), t_longest = ctx->saved_data["t_longest"].toInt();
    const Tensor rows = rows_of(grads[0]);
    Tensor grad_values, grad_x, grad_bias;
    const bool few = rows.is_cuda() && !is_traced(rows) && !rows.is_complex() &&
                     are_few(p.nonzeros(), std::max(p.rows(), sizes.back().expect_int()), rows.size(0),
                             std::max(longest, t_longest));
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1)) {
      const Tensor g_t = few ? rows.t() : rows.t().contiguous();  // [rows of A, n]
      if (ctx->needs_input_grad(0)) {
        const Tensor like_g = x.to(g_t.scalar_type()).conj();
        grad_values = SddmmOp::call(p.crow, p.col, g_t, few ? rows_of(like_g).t() : transposed(like_g), sizes.back(), 1,
                                    none_or_tensor(p.order), none_or_tensor(p.t_crow), none_or_tensor(p.t_col),
                                    none_or_tensor(p.t_order), {}, false, true);
      }
      if (ctx->needs_input_grad(1)) {
        const Pattern t = p.transposed(sizes.back());
        const Tensor like_g = values.to(g_t.scalar_type()).conj();
        if (few || (has_data(rows) && takes_dense_linear(t, rows)))
          grad_x = LinearOp::call(t.crow, t.col, like_g, grads[0], {}, none_or_tensor(t.order), t.t_crow, t.t_col,
                                  none_or_tensor(t.t_order), t_longest, longest);
        else
          grad_x = product(t, like_g, g_t, t_longest, longest).t().reshape_symint(sizes);
      }
    }
    if (ctx->saved_data["bias"].toBool()) grad_bias = rows.sum(0);
    return {grad_values, grad_x, grad_bias, {}, {}, {}};
  }
};

Tensor linear_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& x,
                       const OptionalTensor& bias, const OptionalTensor& order, const OptionalTensor& t_crow,
                       const OptionalTensor& t_col, const OptionalTensor& t_order, int64_t longest, int64_t t_longest) {
  if (!needs_gradient(kLinear, {values, x, tensor_or_none(bias)}))
    return LinearOp::below_autograd(crow, col, values, x, bias, order, t_crow, t_col, t_order, longest, t_longest);
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  check(p, values, x, tensor_or_none(bias));
  return LinearFunction::apply(values, x, bias, p, longest, t_longest);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "csr_linear(Tensor crow, Tensor col, Tensor values, Tensor x, Tensor? bias=None, Tensor? order=None, Tensor? "
      "t_crow=None, Tensor? t_col=None, Tensor? t_order=None, int longest=-1, int t_longest=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
MATMULS_KERNELS("csr_linear", csr_linear, csr_linear_cuda, csr_linear, linear_autograd)
MATMULS_AUTOCAST("csr_linear", LinearOp)

}  // namespace matmuls::linear
