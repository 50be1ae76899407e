// Operators csr_spmm and csr_spmm_arg: checks, batching, gradients, autocast.
#include "sparse/spmm/spmm.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/promote_types.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "dense/ops.h"
#include "glue/autograd.h"
#include "glue/checks.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"
#ifdef MATMULS_CUDA
#include "glue/handles.h"
#endif
#include "cpu/huge_pages.h"

namespace matmuls::spmm {

using at::Tensor;

c10::SymDimVector check_product(const Pattern& p, const Tensor& values, const Tensor& dense, const c10::SymInt& columns,
                                const Tensor& selected, bool by_column) {
  check_floating_or_complex(kOp, "dense", dense);
  check_like(kOp, "values", values, "dense", dense);
  check_pattern(kOp, p, dense);
  TORCH_CHECK_VALUE(values.dim() >= 1 && values.sym_size(-1) == p.col.sym_size(0), kOp,
                    ": expected values of shape [..., ", p.col.sym_size(0), "], one for each nonzero, got ",
                    values.sym_sizes());
  TORCH_CHECK(dense.dim() >= 2 && dense.sym_size(-2) == columns, kOp, ": expected dense of shape [..., ", columns,
              ", n] for a sparse matrix of ", columns, " columns, got ", dense.sym_sizes());
  TORCH_CHECK_VALUE(!p.t_crow.defined() || p.t_crow.sym_size(0) == columns + 1, kOp, ": expected t_crow of shape [",
                    columns + 1, "], got ", p.t_crow.defined() ? p.t_crow.sym_sizes() : c10::SymIntArrayRef{});
  const auto values_lead = values.sym_sizes().slice(0, values.dim() - 1);
  const auto dense_lead = dense.sym_sizes().slice(0, dense.dim() - 2);
  auto shape = c10::SymDimVector(at::infer_size_symdimvector(values_lead, dense_lead));
  if (selected.defined()) {
    check_floating(kOp, "dense, with selected,", dense);
    auto expected = shape;
    expected.push_back(by_column ? columns : p.sym_rows());
    expected.push_back(dense.sym_size(-1));
    TORCH_CHECK(selected.sym_sizes() == c10::SymIntArrayRef(expected) &&
                    selected.scalar_type() == p.crow.scalar_type() && selected.device() == dense.device(),
                kOp, ": expected selected of shape ", c10::SymIntArrayRef(expected), " in ", p.crow.scalar_type(),
                ", got ", selected.sym_sizes(), " in ", selected.scalar_type());
  }
  shape.push_back(p.sym_rows());
  shape.push_back(dense.sym_size(-1));
  return shape;
}

namespace {

Reduce reduce_of(std::string_view name, const Tensor& dense) {
  if (name == "sum") return Reduce::sum;
  if (name == "mean") return Reduce::mean;
  TORCH_CHECK_VALUE(name == "max" || name == "min", kOp, ": expected reduce to be sum, mean, max or min, got ", name);
  TORCH_CHECK(!dense.is_complex(), kOp, ": expected reduce to be sum or mean in ", dense.scalar_type(), ", got ", name);
  return name == "max" ? Reduce::max : Reduce::min;
}

// out <- beta * out: the product with alpha = 0. As in BLAS, its operands are not read, NaN or not.
void scale(const Tensor& out, double beta) {
  if (beta == 0)
    out.zero_();
  else if (beta != 1)
    out.mul_(beta);
}

#ifdef MATMULS_CUDA
// A complex product by the kernels for real ones: A B = re(A) B + i im(A) B, where B's columns are pairs of real ones.
void run_cuda_parts(const Call& c) {
  if (!c.out.is_complex()) return run_cuda(c);
  const Tensor values = at::view_as_real(c.values), dense = as_real_columns(c.dense), out = as_real_columns(c.out);
  const auto add = [&](int64_t part, double beta) {
    Call real = c;
    real.values = values.select(-1, part).contiguous();
    real.dense = dense, real.out = out, real.beta = beta;
    run_cuda(real);
  };
  const c10::complex<double> i(0, 1);
  if (c.beta != 0) c.out.mul_(-c.beta * i);
  add(1, c.beta != 0 ? 1 : 0);
  c.out.mul_(i);
  add(0, 1);
}
#endif

// Runs on `out`, or on a copy of it if its rows are not contiguous.
template <void run(const Call&)>
void run_batch(const Pattern& p, const Tensor& values, const Tensor& dense, Reduce reduce, double alpha, double beta,
               const Tensor& arg, const Tensor& selected, bool by_column, int64_t longest, const Tensor& out) {
  if (out.numel() == 0) return;
  if (alpha == 0 && !arg.defined()) return scale(out, beta);
  const Pattern whole = readable(kOp, p, dense.size(-2));
  const auto lead = out.sizes().slice(0, out.dim() - 2);
  const int64_t batch = c10::multiply_integers(lead), rows = out.size(-2), n = out.size(-1);
  const auto flat = [&](const Tensor& t, int64_t kept) { return as_batch(with_contiguous_rows(t), lead, batch, kept); };
  Tensor target = with_contiguous_rows(out);
  if (target.dim() > 3 && !target.is_same(out)) target = target.contiguous();
  Tensor over = target.dim() == 2 ? target.unsqueeze(0) : target;
  if (over.dim() > 3) {  // leading dimensions that do not merge are written through a copy
    const auto strides = at::detail::computeStride(over.sizes(), over.strides(), at::IntArrayRef({batch, rows, n}));
    if (!strides) over = target = target.contiguous();
    over = over.view({batch, rows, n});
  }
  run({whole, flat(values, 1), flat(dense, 2), over, reduce, alpha, beta,
       arg.defined() ? arg.view({batch, rows, n}) : arg, selected.defined() ? flat(selected, 2).contiguous() : selected,
       by_column, longest});
  if (!target.is_same(out)) out.copy_(target);
  if (alpha == 0) out.zero_();  // arg is computed all the same
}

MATMULS_OPERATOR(SpmmArgOp, "custom_mm::csr_spmm_arg", "",
                 std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                                            std::string_view, const OptionalTensor&, const OptionalTensor&,
                                            const OptionalTensor&, const OptionalTensor&, double));

template <void run(const Call&)>
Tensor csr_spmm(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                std::string_view reduce, double alpha, const OptionalTensor& order, const OptionalTensor& t_crow,
                const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& maybe_selected,
                bool by_column, int64_t longest, int64_t) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  const Tensor selected = tensor_or_none(maybe_selected);
  const Reduce how = reduce_of(reduce, dense);
  TORCH_CHECK_VALUE(!selected.defined() || how == Reduce::sum, kOp, ": expected reduce sum with selected, got ",
                    reduce);
  Tensor out =
      in_huge_pages(at::empty_symint(check_product(p, values, dense, columns, selected, by_column), dense.options()));
  run_batch<run>(p, values, dense, how, alpha, 0, {}, selected, by_column, longest, out);
  return out;
}

void check_out(const Pattern& p, const Tensor& values, const Tensor& dense, const c10::SymInt& columns,
               const Tensor& out) {
  const auto shape = check_product(p, values, dense, columns, {}, false);
  check_like(kOp, "out", out, "dense", dense);
  TORCH_CHECK(out.sym_sizes() == c10::SymIntArrayRef(shape), kOp, ": expected out of shape ",
              c10::SymIntArrayRef(shape), ", got ", out.sym_sizes());
}

template <void run(const Call&)>
void spmm_out(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
              std::string_view reduce, double alpha, const OptionalTensor& order, double beta, int64_t longest,
              Tensor out) {
  const Pattern p = pattern_of(crow, col, order);
  const Reduce how = reduce_of(reduce, dense);
  check_out(p, values, dense, columns, out);
  check_no_overlap(kOp, out, {{"values", values}, {"dense", dense}});
  run_batch<run>(p, values, dense, how, alpha, beta, {}, {}, false, longest, out);
}

template <void run(const Call&)>
std::tuple<Tensor, Tensor> spmm_arg(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                                    c10::SymInt columns, std::string_view reduce, const OptionalTensor& order,
                                    const OptionalTensor& t_crow, const OptionalTensor& t_col,
                                    const OptionalTensor& t_order, double alpha) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  const Reduce how = reduce_of(reduce, dense);
  TORCH_CHECK_VALUE(how == Reduce::max || how == Reduce::min, kOp, ": expected reduce to be max or min, got ", reduce);
  Tensor out = in_huge_pages(at::empty_symint(check_product(p, values, dense, columns, {}, false), dense.options()));
  Tensor arg = in_huge_pages(at::empty(out.sizes(), crow.options()));
  run_batch<run>(p, values, dense, how, alpha, 0, arg, {}, false, -1, out);
  return {out, arg};
}

Tensor spmm_meta(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                 std::string_view reduce, double, const OptionalTensor& order, const OptionalTensor& t_crow,
                 const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& selected,
                 bool by_column, int64_t, int64_t) {
  reduce_of(reduce, dense);
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  return at::empty_symint(check_product(p, values, dense, columns, tensor_or_none(selected), by_column),
                          dense.options());
}
void spmm_out_meta(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                   c10::SymInt columns, std::string_view reduce, double, const OptionalTensor& order, double, int64_t,
                   Tensor out) {
  reduce_of(reduce, dense);
  check_out(pattern_of(crow, col, order), values, dense, columns, out);
}
std::tuple<Tensor, Tensor> spmm_arg_meta(const Tensor& crow, const Tensor& col, const Tensor& values,
                                         const Tensor& dense, c10::SymInt columns, std::string_view reduce,
                                         const OptionalTensor& order, const OptionalTensor& t_crow,
                                         const OptionalTensor& t_col, const OptionalTensor& t_order, double) {
  reduce_of(reduce, dense);
  const auto shape =
      check_product(pattern_of(crow, col, order, t_crow, t_col, t_order), values, dense, columns, {}, false);
  return {at::empty_symint(shape, dense.options()), at::empty_symint(shape, crow.options())};
}

// --- Gradients: for values, G @ dense^T sampled at A's nonzeros (csr_sddmm); for dense, A^T @ G (csr_spmm). These
// operators have gradients themselves.

using Context = torch::autograd::AutogradContext;
using Gradients = torch::autograd::variable_list;

void save(Context* ctx, const Pattern& p, const Tensor& values, const Tensor& dense, const Tensor& selected) {
  const bool to_values = values.requires_grad(), to_dense = dense.requires_grad();
  ctx->save_for_backward({p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order, to_dense ? values : Tensor(),
                          to_values ? dense : Tensor(), selected});
  ctx->saved_data["values_sizes"] = values.sym_sizes();
  ctx->saved_data["dense_sizes"] = dense.sym_sizes();
}

// Whether alpha is multiplied into the gradient. alpha = 0 is passed to the products instead, which then read nothing.
bool is_factor(double alpha) { return alpha != 1 && alpha != 0; }

// Gradients of alpha * sum(A @ dense), or of its selected part; complex ones conjugate the other operand. `saved` is
// unpacked only once, as torch's checkpoint requires.
std::tuple<Tensor, Tensor> gradients(Context* ctx, const Gradients& saved, const Tensor& grad, double alpha,
                                     bool by_column, int64_t longest, int64_t t_longest) {
  const Pattern p{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
  const Tensor &values = saved[6], &dense = saved[7];
  const auto values_sizes = ctx->saved_data["values_sizes"].toSymIntVector();
  const auto dense_sizes = ctx->saved_data["dense_sizes"].toSymIntVector();
  const c10::SymInt columns = dense_sizes[dense_sizes.size() - 2];
  const OptionalTensor chosen = none_or_tensor(saved[8]);
  Tensor grad_values, grad_dense;
  if (ctx->needs_input_grad(0)) {
    const bool summed = values_sizes.size() == 1;  // one gradient for the whole batch: nothing larger is allocated
    grad_values = SddmmOp::call(p.crow, p.col, grad, dense.to(grad.scalar_type()).conj(), columns, alpha,
                                none_or_tensor(p.order), none_or_tensor(p.t_crow), none_or_tensor(p.t_col),
                                none_or_tensor(p.t_order), chosen, by_column, summed);
    grad_values = at::sum_to(grad_values, values_sizes);
  }
  if (ctx->needs_input_grad(1)) {
    const Pattern t = p.transposed(columns);
    grad_dense = SpmmOp::call(t.crow, t.col, values.to(grad.scalar_type()).conj(), grad, p.sym_rows(), "sum", alpha,
                              none_or_tensor(t.order), t.t_crow, t.t_col, none_or_tensor(t.t_order), chosen, !by_column,
                              t_longest, longest);
    grad_dense = at::sum_to(grad_dense, dense_sizes);
  }
  return {grad_values, grad_dense};
}

struct SpmmFunction : KernelFunction<SpmmFunction> {
  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& dense, const Pattern& p,
                        const c10::SymInt& columns, std::string_view reduce, double alpha,
                        const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
    save(ctx, p, values, dense, tensor_or_none(selected));
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["mean"] = reduce == "mean";
    ctx->saved_data["by_column"] = by_column;
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["t_longest"] = t_longest;
    return SpmmOp::below_autograd(p.crow, p.col, values, dense, columns, reduce, alpha, none_or_tensor(p.order),
                                  none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order),
                                  selected, by_column, longest, t_longest);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    const double alpha = ctx->saved_data["alpha"].toDouble();
    Tensor grad = is_factor(alpha) ? grads[0] * alpha : grads[0];
    if (ctx->saved_data["mean"].toBool()) {  // a row may be longer than float16 can represent
      const auto dtype = grad.scalar_type();
      grad = (grad / saved[0].diff().clamp_min(1).to(at::toOpMathType(dtype)).unsqueeze(-1)).to(dtype);
    }
    auto [grad_values, grad_dense] =
        gradients(ctx, saved, grad, alpha == 0 ? 0 : 1, ctx->saved_data["by_column"].toBool(),
                  ctx->saved_data["longest"].toInt(), ctx->saved_data["t_longest"].toInt());
    return {grad_values, grad_dense, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

struct SpmmArgFunction : KernelFunction<SpmmArgFunction> {
  static Gradients forward(Context* ctx, const Tensor& values, const Tensor& dense, const Pattern& p,
                           const c10::SymInt& columns, std::string_view reduce, double alpha) {
    auto [out, arg] =
        SpmmArgOp::below_autograd(p.crow, p.col, values, dense, columns, reduce, none_or_tensor(p.order),
                                  none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order), alpha);
    save(ctx, p, values, dense, arg);
    ctx->saved_data["alpha"] = alpha;
    ctx->mark_non_differentiable({arg});
    return {out, arg};
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const double alpha = ctx->saved_data["alpha"].toDouble();
    const Tensor grad = is_factor(alpha) ? grads[0] * alpha : grads[0];
    auto [grad_values, grad_dense] =
        gradients(ctx, ctx->get_saved_variables(), grad, alpha == 0 ? 0 : 1, false, -1, -1);
    return {grad_values, grad_dense, {}, {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor> spmm_arg_autograd(const Tensor& crow, const Tensor& col, const Tensor& values,
                                             const Tensor& dense, c10::SymInt columns, std::string_view reduce,
                                             const OptionalTensor& order, const OptionalTensor& t_crow,
                                             const OptionalTensor& t_col, const OptionalTensor& t_order, double alpha) {
  if (!needs_gradient(kOp, {values, dense}))
    return SpmmArgOp::below_autograd(crow, col, values, dense, columns, reduce, order, t_crow, t_col, t_order, alpha);
  const auto results = SpmmArgFunction::apply(values, dense, pattern_of(crow, col, order, t_crow, t_col, t_order),
                                              columns, reduce, alpha);
  return {results[0], results[1]};
}

Tensor spmm_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                     c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                     const OptionalTensor& t_crow, const OptionalTensor& t_col, const OptionalTensor& t_order,
                     const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
  if (!needs_gradient(kOp, {values, dense}))
    return SpmmOp::below_autograd(crow, col, values, dense, columns, reduce, alpha, order, t_crow, t_col, t_order,
                                  selected, by_column, longest, t_longest);
  if (reduce == "max" || reduce == "min")
    return std::get<0>(
        spmm_arg_autograd(crow, col, values, dense, columns, reduce, order, t_crow, t_col, t_order, alpha));
  return SpmmFunction::apply(values, dense, pattern_of(crow, col, order, t_crow, t_col, t_order), columns, reduce,
                             alpha, selected, by_column, longest, t_longest);
}

void spmm_out_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                       c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                       double beta, int64_t longest, Tensor out) {
  check_no_gradient_into(kOp, "out", {values, dense, out});
  SpmmOutOp::below_autograd(crow, col, values, dense, columns, reduce, alpha, order, beta, longest, out);
}

// Sums cast as torch.matmul does; max and min use the wider of both dtypes.
template <c10::DeviceType device>
Tensor spmm_autocast(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                     c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                     const OptionalTensor& t_crow, const OptionalTensor& t_col, const OptionalTensor& t_order,
                     const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = reduce == "max" || reduce == "min" ? at::promote_types(values.scalar_type(), dense.scalar_type())
                                                        : autocast_dtype(device);
  return SpmmOp::call(crow, col, autocast_to(dtype, values, device), autocast_to(dtype, dense, device), columns, reduce,
                      alpha, order, t_crow, t_col, t_order, selected, by_column, longest, t_longest);
}

}  // namespace

bool must_be_deterministic() { return at::globalContext().deterministicAlgorithms(); }
void multiply_dense(const Tensor& a, const Tensor& dense, const Tensor& out) {
  MatmulOutOp::call(a, dense, false, false, out);
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "csr_spmm(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce=\"sum\", float "
      "alpha=1.0, Tensor? order=None, Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None, Tensor? "
      "selected=None, bool by_column=False, int longest=-1, int t_longest=-1) -> Tensor",
      tags);
  m.def(
      "csr_spmm.out(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce=\"sum\", float "
      "alpha=1.0, Tensor? order=None, float beta=0.0, int longest=-1, *, Tensor(a!) out) -> ()",
      tags);
  m.def(
      "csr_spmm_arg(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce, Tensor? "
      "order=None, Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None, float alpha=1.0) -> (Tensor, Tensor)",
      tags);
}

MATMULS_KERNELS("csr_spmm", csr_spmm<run_cpu>, csr_spmm<run_cuda_parts>, spmm_meta, spmm_autograd)
MATMULS_KERNELS("csr_spmm.out", spmm_out<run_cpu>, spmm_out<run_cuda_parts>, spmm_out_meta, spmm_out_autograd)
MATMULS_KERNELS("csr_spmm_arg", spmm_arg<run_cpu>, spmm_arg<run_cuda_parts>, spmm_arg_meta, spmm_arg_autograd)
MATMULS_WRITES("csr_spmm.out", SpmmOutOp, 10)
TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) { m.impl("csr_spmm", spmm_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) { m.impl("csr_spmm", spmm_autocast<at::kCUDA>); }

}  // namespace matmuls::spmm
