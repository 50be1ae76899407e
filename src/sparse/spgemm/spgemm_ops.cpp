// The operators of spgemm.h: checks, the CPU, tracing, gradients. Their CUDA kernels are called
// by spgemm_gpu.cpp; sampled.cu has one too.
//
// For C = A @ B, the gradient of A's values is dC @ B^T at A's nonzeros, and that of B's values is A^T @ dC at B's:
// transposed, dC^T @ A at the nonzeros of B^T. Both are csr_spgemm_sampled, whose gradients are the two operators
// again.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "glue/autograd.h"
#include "rows/ops.h"
#include "sparse/index_checks.h"
#include "sparse/spgemm.h"

#ifdef MATMULS_CUDA
#include "glue/handles.h"
#endif

namespace matmuls::spgemm {
namespace {

using at::Tensor;
using at::TensorList;

MATMULS_OPERATOR(SizeOp, "custom_mm::csr_spgemm_size", "",
                 std::tuple<Tensor, Tensor>(TensorList, TensorList, c10::SymInt));
MATMULS_OPERATOR(PatternOp, "custom_mm::csr_spgemm_pattern", "",
                 Made(TensorList, TensorList, c10::SymInt, const Tensor&, const Tensor&, c10::SymInt,
                      const OptionalTensor&, const OptionalTensor&));
MATMULS_OPERATOR(ProductOp, "custom_mm::csr_spgemm", "",
                 Tensor(const Tensor&, const Tensor&, TensorList, TensorList, TensorList, c10::SymInt));
MATMULS_OPERATOR(SampledOp, "custom_mm::csr_spgemm_sampled", "",
                 Tensor(const Tensor&, const Tensor&, TensorList, TensorList, TensorList, c10::SymInt));

// A pattern from its list of tensors, as spgemm.h describes it.
Pattern pattern_of_list(const char* op, const char* name, TensorList list, const Tensor& like) {
  TORCH_CHECK_VALUE(list.size() == 2 || list.size() == 3 || list.size() == 6, op, ": expected ", name,
                    " to be crow, col and order, and perhaps t_crow, t_col and t_order, got ", list.size(), " tensors");
  const auto given = [&](size_t i, const Tensor& of) {
    const bool is_none = list.size() <= i || (list[i].sym_numel() == 0 && of.sym_numel() != 0);
    return is_none ? Tensor() : list[i];
  };
  Pattern p{list[0], list[1], given(2, list[1]), {}, {}, {}};
  if (list.size() == 6) p.t_crow = list[3], p.t_col = list[4], p.t_order = given(5, list[4]);
  check_pattern(op, p, like);
  return p;
}

std::vector<Tensor> list_of(const Pattern& p) {
  const Tensor none = at::empty({0}, p.crow.options());
  const auto or_none = [&](const Tensor& t) { return t.defined() ? t : none; };
  if (!p.t_crow.defined()) return {p.crow, p.col, or_none(p.order)};
  return {p.crow, p.col, or_none(p.order), p.t_crow, p.t_col, or_none(p.t_order)};
}

void check_rows(const char* op, const char* name, const Pattern& p, const c10::SymInt& rows, const char* as) {
  TORCH_CHECK_VALUE(p.sym_rows() == rows, op, ": expected ", name, " of ", rows, " rows, ", as, ", got ", p.sym_rows());
}

void check_values(const char* op, const char* name, const Tensor& values, const Pattern& p) {
  TORCH_CHECK_VALUE(values.dim() == 1 && values.sym_size(0) == p.col.sym_size(0), op, ": expected ", name,
                    " of shape [", p.col.sym_size(0), "], one for each nonzero, got ", values.sym_sizes());
}

void check_index(const char* op, const char* name, const Pattern& p, const Pattern& like) {
  TORCH_CHECK_VALUE(p.crow.scalar_type() == like.crow.scalar_type(), op, ": expected ", name, " with indices in ",
                    like.crow.scalar_type(), " as the first pattern has, got ", p.crow.scalar_type());
}

void check_both_values(const char* op, const Product& call) {
  check_floating(op, "a_values", call.a_values);
  check_like(op, "b_values", call.b_values, "a_values", call.a_values);
  TORCH_CHECK(call.a_values.device() == call.a.crow.device(), op, ": expected a_values on ", call.a.crow.device(),
              " as a is, got ", call.a_values.device());
  check_values(op, "a_values", call.a_values, call.a);
  check_values(op, "b_values", call.b_values, call.b);
}

// Devices of lists are not compared by check_pattern.
void check_device(const char* op, const char* name, TensorList list, const Tensor& like) {
  for (const Tensor& t : list)
    TORCH_CHECK(t.device() == like.device(), op, ": expected ", name, " on ", like.device(),
                " as the other operands are, got ", t.device());
}

Sampled checked_sampled(const Tensor& g_values, const Tensor& m_values, TensorList p, TensorList g, TensorList m,
                        const c10::SymInt& columns) {
  check_floating(kSampled, "g_values", g_values);
  check_like(kSampled, "m_values", m_values, "g_values", g_values);
  Sampled call{pattern_of_list(kSampled, "p", p, g_values),
               pattern_of_list(kSampled, "g", g, g_values),
               pattern_of_list(kSampled, "m", m, g_values),
               g_values,
               m_values,
               columns};
  for (const auto& [name, list] : {std::pair("p", p), std::pair("g", g), std::pair("m", m)})
    check_device(kSampled, name, list, g_values);
  check_index(kSampled, "g", call.g, call.p);
  check_index(kSampled, "m", call.m, call.p);
  check_rows(kSampled, "g", call.g, call.p.sym_rows(), "as p has");
  check_values(kSampled, "g_values", g_values, call.g);
  check_values(kSampled, "m_values", m_values, call.m);
  TORCH_CHECK_VALUE(columns >= 0, kSampled, ": expected columns >= 0, got ", columns);
  return call;
}

// ------------------------------------------------------------------------------------------------------------ kernels

std::tuple<Tensor, Tensor> size_on_cpu(TensorList a, TensorList b, c10::SymInt columns) {
  const Product call = checked(kSize, a, b, columns);
  return {size_cpu(call), at::empty({0}, call.a.crow.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor> size_meta(TensorList a, TensorList b, c10::SymInt columns) {
  const Product call = checked(kSize, a, b, columns);
  const auto options = call.a.crow.options();
  return {at::empty_symint({call.a.sym_rows() + 1}, options.dtype(at::kLong)),
          at::empty({0}, options.dtype(at::kByte))};
}

Made pattern_on_cpu(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor& state,
                    c10::SymInt sym_nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  const Product call = checked_pattern(a, b, columns, offsets, sym_nonzeros, a_values, b_values);
  const auto index = call.a.crow.scalar_type();
  const auto at_once = [&](const Tensor& counted) {
    return call.a_values.defined() ? at_once_cpu(call, counted) : std::nullopt;
  };
  const bool is_counted = sym_nonzeros != -1;
  if (!is_counted)
    if (const auto made = at_once({})) return *made;
  const Tensor counted = is_counted ? offsets.contiguous() : size_cpu(call);
  const int64_t nonzeros = is_counted ? sym_nonzeros.expect_int() : counted[-1].item<int64_t>();
  expect_reachable(call, nonzeros);
  validate_offsets(kPattern, counted, nonzeros);
  if (const auto made = at_once(counted)) return *made;
  const Tensor col = pattern_cpu(call, counted, nonzeros);
  const Tensor crow = counted.to(index, /*non_blocking=*/false, /*copy=*/true);
  return {crow, col, values_of_pattern(call, crow, col)};
}

Made pattern_meta(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor&,
                  c10::SymInt nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  const Product call = checked_pattern(a, b, columns, offsets, nonzeros, a_values, b_values);
  const auto index = call.a.crow.options();
  return {at::empty_symint({call.a.sym_rows() + 1}, index), at::empty_symint({nonzeros}, index),
          call.a_values.defined() ? at::empty_symint({nonzeros}, call.a_values.options()) : at::empty({0}, index)};
}

Tensor product_on_cpu(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                      c10::SymInt columns) {
  return values_cpu(checked(kProduct, a_values, b_values, a, b, c, columns));
}

Tensor product_meta(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                    c10::SymInt columns) {
  const Product call = checked(kProduct, a_values, b_values, a, b, c, columns);
  return at::empty_symint({call.c.col.sym_size(0)}, a_values.options());
}

Tensor sampled_on_cpu(const Tensor& g_values, const Tensor& m_values, TensorList p, TensorList g, TensorList m,
                      c10::SymInt columns) {
  return sampled_cpu(checked_sampled(g_values, m_values, p, g, m, columns));
}

#ifdef MATMULS_CUDA
Tensor sampled_on_cuda(const Tensor& g_values, const Tensor& m_values, TensorList p, TensorList g, TensorList m,
                       c10::SymInt columns) {
  const Sampled call = checked_sampled(g_values, m_values, p, g, m, columns);
  const OperationGuard guard(kSampled, g_values);
  const Tensor x = wide(g_values), y = wide(m_values);
  const Tensor out = zeros({call.p.nonzeros()}, x.options());
  if (out.numel() > 0) sampled_on_gpu(contiguous(call.p), contiguous(call.g), contiguous(call.m), x, y, out);
  return out.to(g_values.scalar_type());
}
#endif

Tensor sampled_meta(const Tensor& g_values, const Tensor& m_values, TensorList p, TensorList g, TensorList m,
                    c10::SymInt columns) {
  const Sampled call = checked_sampled(g_values, m_values, p, g, m, columns);
  return at::empty_symint({call.p.col.sym_size(0)}, g_values.options());
}

// ---------------------------------------------------------------------------------------------------------- gradients

using Context = torch::autograd::AutogradContext;
using Gradients = torch::autograd::variable_list;

// Two lists of values and three patterns, saved for a backward pass.
void save(Context* ctx, const Tensor& x, const Tensor& y, std::initializer_list<Pattern> patterns,
          const c10::SymInt& columns) {
  Gradients all{x, y};
  for (const Pattern& p : patterns)
    for (const Tensor& t : {p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order}) all.push_back(t);
  ctx->save_for_backward(std::move(all));
  ctx->saved_data["columns"] = columns;
}

Pattern saved_pattern(const Gradients& saved, size_t which) {
  const Tensor* const t = saved.data() + 2 + 6 * which;
  return {t[0], t[1], t[2], t[3], t[4], t[5]};
}

struct ProductFunction : KernelFunction<ProductFunction> {
  static Tensor forward(Context* ctx, const Tensor& a_values, const Tensor& b_values, const Product& call) {
    save(ctx, a_values, b_values, {call.a, call.b, call.c}, call.columns);
    return ProductOp::below_autograd(a_values, b_values, list_of(call.a), list_of(call.b), list_of(call.c),
                                     call.columns);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    const Pattern a = saved_pattern(saved, 0), b = saved_pattern(saved, 1), c = saved_pattern(saved, 2);
    const c10::SymInt columns = ctx->saved_data["columns"].toSymInt();
    const Tensor& grad = grads[0];
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0))
      grad_a = SampledOp::call(grad, saved[1].to(grad.scalar_type()), list_of(a), list_of(c), list_of(b), columns);
    if (ctx->needs_input_grad(1))
      grad_b = SampledOp::call(grad, saved[0].to(grad.scalar_type()), list_of(b.transposed(columns)),
                               list_of(c.transposed(columns)), list_of(a.transposed(b.sym_rows())), a.sym_rows());
    return {grad_a, grad_b, {}};
  }
};

struct SampledFunction : KernelFunction<SampledFunction> {
  static Tensor forward(Context* ctx, const Tensor& g_values, const Tensor& m_values, const Sampled& call) {
    save(ctx, g_values, m_values, {call.p, call.g, call.m}, call.columns);
    return SampledOp::below_autograd(g_values, m_values, list_of(call.p), list_of(call.g), list_of(call.m),
                                     call.columns);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    const Pattern p = saved_pattern(saved, 0), g = saved_pattern(saved, 1), m = saved_pattern(saved, 2);
    const c10::SymInt columns = ctx->saved_data["columns"].toSymInt();
    const Tensor& grad = grads[0];
    Tensor grad_g, grad_m;
    if (ctx->needs_input_grad(0))
      grad_g = ProductOp::call(grad, saved[1].to(grad.scalar_type()), list_of(p), list_of(m), list_of(g), columns);
    if (ctx->needs_input_grad(1))
      grad_m = SampledOp::call(saved[0].to(grad.scalar_type()), grad, list_of(m.transposed(columns)),
                               list_of(g.transposed(columns)), list_of(p.transposed(m.sym_rows())), p.sym_rows());
    return {grad_g, grad_m, {}};
  }
};

Tensor product_autograd(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                        c10::SymInt columns) {
  if (!needs_gradient(kProduct, {a_values, b_values}))
    return ProductOp::below_autograd(a_values, b_values, a, b, c, columns);
  return ProductFunction::apply(a_values, b_values, checked(kProduct, a_values, b_values, a, b, c, columns));
}

Tensor sampled_autograd(const Tensor& g_values, const Tensor& m_values, TensorList p, TensorList g, TensorList m,
                        c10::SymInt columns) {
  if (!needs_gradient(kSampled, {g_values, m_values}))
    return SampledOp::below_autograd(g_values, m_values, p, g, m, columns);
  return SampledFunction::apply(g_values, m_values, checked_sampled(g_values, m_values, p, g, m, columns));
}

Made pattern_autograd(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor& state,
                      c10::SymInt nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  if (!needs_gradient(kPattern, {tensor_or_none(a_values), tensor_or_none(b_values)}))
    return PatternOp::below_autograd(a, b, columns, offsets, state, nonzeros, a_values, b_values);
  const Product call = checked_pattern(a, b, columns, offsets, nonzeros, a_values, b_values);
  const auto [crow, col, none] = PatternOp::below_autograd(a, b, columns, offsets, state, nonzeros, {}, {});
  return {crow, col, values_of_pattern(call, crow, col)};
}

template <c10::DeviceType device>
Made pattern_autocast(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets, const Tensor& state,
                      c10::SymInt nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = autocast_dtype(device);
  return PatternOp::call(a, b, columns, offsets, state, nonzeros, autocast_to(dtype, a_values, device),
                         autocast_to(dtype, b_values, device));
}

template <c10::DeviceType device>
Tensor product_autocast(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                        c10::SymInt columns) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = autocast_dtype(device);
  return ProductOp::call(autocast_to(dtype, a_values, device), autocast_to(dtype, b_values, device), a, b, c, columns);
}

}  // namespace

Product checked(const char* op, TensorList a, TensorList b, const c10::SymInt& columns) {
  TORCH_CHECK_VALUE(!a.empty() && !b.empty(), op, ": expected patterns a and b, got ", a.size(), " and ", b.size(),
                    " tensors");
  Product call{pattern_of_list(op, "a", a, a[0]), pattern_of_list(op, "b", b, a[0]), {}, {}, {}, columns};
  check_device(op, "a", a, a[0]);
  check_device(op, "b", b, a[0]);
  check_index(op, "b", call.b, call.a);
  TORCH_CHECK_VALUE(columns >= 0, op, ": expected columns >= 0, got ", columns);
  return call;
}

Product checked(const char* op, const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b,
                TensorList c, const c10::SymInt& columns) {
  Product call = checked(op, a, b, columns);
  call.a_values = a_values, call.b_values = b_values;
  check_both_values(op, call);
  call.c = pattern_of_list(op, "c", c, a_values);
  check_device(op, "c", c, a_values);
  check_index(op, "c", call.c, call.a);
  check_rows(op, "c", call.c, call.a.sym_rows(), "as a has");
  return call;
}

Product checked_pattern(TensorList a, TensorList b, const c10::SymInt& columns, const Tensor& offsets,
                        const c10::SymInt& nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values) {
  Product call = checked(kPattern, a, b, columns);
  call.a_values = tensor_or_none(a_values), call.b_values = tensor_or_none(b_values);
  TORCH_CHECK_VALUE(call.a_values.defined() == call.b_values.defined(), kPattern,
                    ": expected a_values and b_values together, got one of them");
  if (call.a_values.defined()) check_both_values(kPattern, call);
  if (nonzeros == -1 && (call.a.crow.is_cpu() || call.a.crow.is_cuda())) return call;
  TORCH_CHECK_VALUE(offsets.layout() == at::kStrided && offsets.scalar_type() == at::kLong && offsets.dim() == 1 &&
                        offsets.sym_size(0) == call.a.sym_rows() + 1 && offsets.device() == call.a.crow.device(),
                    kPattern, ": expected offsets of shape [", call.a.sym_rows() + 1, "] in Long on ",
                    call.a.crow.device(), ", got ", offsets.sym_sizes(), " in ", offsets.scalar_type(), " on ",
                    offsets.device());
  TORCH_CHECK_VALUE(nonzeros >= 0, kPattern, ": expected nonzeros >= 0, got ", nonzeros);
  return call;
}

void expect_reachable(const Product& call, int64_t nonzeros) {
  TORCH_CHECK_VALUE(call.a.crow.scalar_type() == at::kLong || nonzeros <= INT32_MAX, kPattern, ": expected at most ",
                    INT32_MAX, " nonzeros in the product of matrices with indices in Int, got ", nonzeros,
                    "; use indices in Long");
}

Tensor values_of_pattern(const Product& call, const Tensor& crow, const Tensor& col) {
  if (!call.a_values.defined()) return at::empty({0}, crow.options());
  return ProductOp::call(call.a_values, call.b_values, list_of(call.a), list_of(call.b), {{crow, col}}, call.columns);
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_spgemm_size(Tensor[] a, Tensor[] b, SymInt columns) -> (Tensor, Tensor)", tags);
  m.def(
      "csr_spgemm_pattern(Tensor[] a, Tensor[] b, SymInt columns, Tensor offsets, Tensor state, SymInt nonzeros, "
      "Tensor? a_values=None, Tensor? b_values=None) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def("csr_spgemm(Tensor a_values, Tensor b_values, Tensor[] a, Tensor[] b, Tensor[] c, SymInt columns) -> Tensor",
        tags);
  m.def(
      "csr_spgemm_sampled(Tensor g_values, Tensor m_values, Tensor[] p, Tensor[] g, Tensor[] m, SymInt columns) -> "
      "Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("csr_spgemm_size", size_on_cpu);
  m.impl("csr_spgemm_pattern", pattern_on_cpu);
  m.impl("csr_spgemm", product_on_cpu);
  m.impl("csr_spgemm_sampled", sampled_on_cpu);
}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl("csr_spgemm_sampled", sampled_on_cuda); }
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("csr_spgemm_size", size_meta);
  m.impl("csr_spgemm_pattern", pattern_meta);
  m.impl("csr_spgemm", product_meta);
  m.impl("csr_spgemm_sampled", sampled_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("csr_spgemm_size", SizeOp::below_autograd);
  m.impl("csr_spgemm_pattern", pattern_autograd);
  m.impl("csr_spgemm", product_autograd);
  m.impl("csr_spgemm_sampled", sampled_autograd);
}
TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) {
  m.impl("csr_spgemm_pattern", pattern_autocast<at::kCPU>);
  m.impl("csr_spgemm", product_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) {
  m.impl("csr_spgemm_pattern", pattern_autocast<at::kCUDA>);
  m.impl("csr_spgemm", product_autocast<at::kCUDA>);
}

}  // namespace matmuls::spgemm
