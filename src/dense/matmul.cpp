// matmul: out = op(a) @ op(b) by cuBLAS.
//
// Source: cublasGemmEx and cublasGemmStridedBatchedEx; on the CPU torch's BLAS. Under handles(batch_invariant=True)
// cublasLtMatmul with a fixed algorithm, and loops of dense/invariant/.
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include "dense/gemm.h"
#include "dense/invariant/cpu.h"
#include "dense/ops.h"
#include "glue/autograd.h"
#include "glue/batch_invariance.h"

#ifdef MATMULS_CUDA
#include "dense/gemm_types.h"
#include "dense/lt_product.h"
#include "glue/handles.h"
#endif

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char *kMatmulOp = "matmul", *kBackward = "matmul_backward";

ProductShape<int64_t> check(const Tensor& a, const Tensor& b, bool transa, bool transb, const Tensor& out = {}) {
  check_operands(kMatmulOp, a, b, {}, out);
  auto shape = product_shape(kMatmulOp, a.sizes(), b.sizes(), transa, transb);
  if (out.defined()) check_out(kMatmulOp, out, shape.out(), {{"a", a}, {"b", b}});
  return shape;
}

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef MATMULS_CUDA

void launch(const Tensor& a, const Tensor& b, const Tensor& out, const ProductShape<int64_t>& shape, bool transa,
            bool transb) {
  if (out.numel() == 0) return;
  if (shape.k == 0) {
    out.zero_();
    return;
  }
  if (is_batch_invariant())
    return batch_invariant_product(kMatmulOp, a, b, {}, CUBLASLT_EPILOGUE_DEFAULT, out, shape, transa, transb);
  const Gemm g = describe(a, b, out, shape, transa, transb);
  const GemmTypes types(out.scalar_type());
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  Borrowed handle(Library::cublas, kMatmulOp);
  g.each([&](const char* x, const char* y, char* d) {
    if (g.strided.size == 1) {
      MATMULS_CUBLAS_CHECK(cublasGemmEx_64(handle.cublas(), op(g.x.transposed), op(g.y.transposed), g.m, g.n, g.k,
                                           types.one(), x, types.data, g.x.ld, y, types.data, g.y.ld, types.zero(), d,
                                           types.data, g.ldd, types.compute, CUBLAS_GEMM_DEFAULT),
                           " for a ", a.sizes(), " and b ", b.sizes(), " in ", a.scalar_type());
    } else {
      MATMULS_CUBLAS_CHECK(cublasGemmStridedBatchedEx_64(
                               handle.cublas(), op(g.x.transposed), op(g.y.transposed), g.m, g.n, g.k, types.one(), x,
                               types.data, g.x.ld, g.strided.x, y, types.data, g.y.ld, g.strided.y, types.zero(), d,
                               types.data, g.ldd, g.strided.d, g.strided.size, types.compute, CUBLAS_GEMM_DEFAULT),
                           " for a ", a.sizes(), " and b ", b.sizes(), " in ", a.scalar_type());
    }
  });
  if (g.out_is_copy) out.copy_(g.out.view(out.sizes()));
}

Tensor matmul_cuda(const Tensor& a, const Tensor& b, bool transa, bool transb) {
  const auto shape = check(a, b, transa, transb);
  const OperationGuard guard(kMatmulOp, a);
  Tensor out = at::empty(shape.out(), a.options());
  launch(a, b, out, shape, transa, transb);
  return out;
}

void matmul_out_cuda(const Tensor& a, const Tensor& b, bool transa, bool transb, Tensor out) {
  const auto shape = check(a, b, transa, transb, out);
  const OperationGuard guard(kMatmulOp, a);
  launch(a, b, out, shape, transa, transb);
}

#endif

// ----------------------------------------------------------------------------------------------------------- CPU

Tensor matmul_cpu(const Tensor& a, const Tensor& b, bool transa, bool transb) {
  const auto shape = check(a, b, transa, transb);
  if (is_batch_invariant()) {
    const Tensor out = at::empty(shape.out(), a.options());
    batch_invariant_product_cpu(kMatmulOp, a, b, {}, out, transa, transb);
    return out;
  }
  return at::matmul(op_of(a, transa), op_of(b, transb));
}

void matmul_out_cpu(const Tensor& a, const Tensor& b, bool transa, bool transb, Tensor out) {
  check(a, b, transa, transb, out);
  if (is_batch_invariant()) return batch_invariant_product_cpu(kMatmulOp, a, b, {}, out, transa, transb);
  // The dtype of out decides, not autocast.
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(c10::autocast_dispatch_keyset);
  const Tensor x = op_of(a, transa), y = op_of(b, transb);
  if (out.is_contiguous() && x.dim() > 1 && y.dim() > 1)
    at::matmul_out(out, x, y);
  else  // torch fails on a batch of column-major results (2.11 to 2.13) and resizes a vector (2.15)
    out.copy_(at::matmul(x, y));
}

// ---------------------------------------------------------------------------------------- tracing, gradient, autocast

Tensor matmul_meta(const Tensor& a, const Tensor& b, bool transa, bool transb) {
  check_operands(kMatmulOp, a, b);
  return at::empty_symint(product_shape(kMatmulOp, a.sym_sizes(), b.sym_sizes(), transa, transb).out(), a.options());
}

void matmul_out_meta(const Tensor& a, const Tensor& b, bool transa, bool transb, Tensor out) {
  check_operands(kMatmulOp, a, b, {}, out);
  const auto shape = product_shape(kMatmulOp, a.sym_sizes(), b.sym_sizes(), transa, transb).out();
  TORCH_CHECK(out.sym_sizes() == c10::SymIntArrayRef(shape), kMatmulOp, ": expected out of shape ", shape, ", got ",
              out.sym_sizes());
}

void check_backward(const Tensor& grad, const std::optional<Tensor>& a, const std::optional<Tensor>& b,
                    c10::SymIntArrayRef a_sizes, c10::SymIntArrayRef b_sizes, bool transa, bool transb) {
  const auto expect = [](const char* name, const Tensor& t, c10::SymIntArrayRef sizes) {
    const auto found = t.sym_sizes();
    bool fits = found.size() == sizes.size();
    for (size_t d = 0; fits && d < sizes.size(); ++d) fits = equal(found[d], sizes[d]);
    TORCH_CHECK(fits, kBackward, ": expected ", name, " of shape ", sizes, ", got ", found);
  };
  expect("grad", grad, product_shape(kBackward, a_sizes, b_sizes, transa, transb).out());
  if (a && a->defined()) expect("a", *a, a_sizes);
  if (b && b->defined()) expect("b", *b, b_sizes);
}

// With A = op(a), B = op(b), Y = A B: dA = dY B^H, dB = A^H dY, each transposed back and summed over broadcast
// dimensions. dA needs only b, dB only a: an undefined operand was not saved and the other's gradient is not computed.
// All operations here are differentiable.
std::tuple<Tensor, Tensor> matmul_backward(const Tensor& grad, const std::optional<Tensor>& a,
                                           const std::optional<Tensor>& b, c10::SymIntArrayRef a_sizes,
                                           c10::SymIntArrayRef b_sizes, bool transa, bool transb) {
  check_backward(grad, a, b, a_sizes, b_sizes, transa, transb);
  const auto mm = [](const Tensor& x, const Tensor& y, bool tx, bool ty) { return MatmulOp::call(x, y, tx, ty); };
  const bool a_vector = a_sizes.size() == 1, b_vector = b_sizes.size() == 1;
  // A vector is a row on the left and a column on the right. Under autocast the product is narrower than a saved
  // operand.
  const auto matrix = [&](const Tensor& t, bool vector, int64_t dim) {
    const Tensor conj = t.is_complex() ? t.conj() : t, shaped = vector ? conj.unsqueeze(dim) : conj;
    return shaped.scalar_type() == grad.scalar_type() ? shaped : shaped.to(grad.scalar_type());
  };
  Tensor g = b_vector ? grad.unsqueeze(-1) : grad;
  if (a_vector) g = g.unsqueeze(-2);
  const bool tx = transa && !a_vector, ty = transb && !b_vector;

  Tensor grad_a, grad_b;
  if (b && b->defined()) {
    const Tensor y = matrix(*b, b_vector, 1);
    grad_a = tx ? mm(y, g, ty, true) : mm(g, y, false, !ty);
    if (a_vector)
      grad_a = at::sum_to(grad_a, {c10::SymInt(1), a_sizes[0]}).squeeze(0);
    else if (grad_a.dim() > 2)  // matrices do not broadcast
      grad_a = at::sum_to(grad_a, a_sizes);
  }
  if (a && a->defined()) {
    const Tensor x = matrix(*a, a_vector, 0);
    if (b_sizes.size() <= 2 && x.dim() > 2 && !tx) {
      // One weight for a whole batch: fold the batch into the inner dimension, so that one product also does the sum.
      const Tensor xf = x.flatten(0, -2), gf = g.flatten(0, -2);
      grad_b = ty ? mm(gf, xf, true, false) : mm(xf, gf, true, false);
    } else {
      grad_b = ty ? mm(g, x, true, tx) : mm(x, g, !tx, false);
    }
    if (b_vector)
      grad_b = at::sum_to(grad_b, {b_sizes[0], c10::SymInt(1)}).squeeze(1);
    else if (grad_b.dim() > 2)
      grad_b = at::sum_to(grad_b, b_sizes);
  }
  return {grad_a, grad_b};
}

struct MatmulFunction : KernelFunction<MatmulFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b, bool transa,
                        bool transb) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_product(ctx, a, b, transa, transb);
    return MatmulOp::call(a, b, transa, transb);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto [grad_a, grad_b] = product_gradients(ctx, grads[0]);
    return {grad_a, grad_b, {}, {}};
  }
};

Tensor matmul_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b, bool transa, bool transb) {
  if (needs_gradient(kMatmulOp, {a, b})) return MatmulFunction::apply(a, b, transa, transb);
  at::AutoDispatchBelowADInplaceOrView guard;
  return MatmulOp::handle().redispatch(keys & c10::after_autograd_keyset, a, b, transa, transb);
}

void matmul_out_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b, bool transa, bool transb,
                         Tensor out) {
  check_no_gradient_into(kMatmulOp, "out", {a, b, out});
  at::AutoDispatchBelowAutograd guard;
  MatmulOutOp::handle().redispatch(keys & c10::after_autograd_keyset, a, b, transa, transb, out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def("matmul(Tensor a, Tensor b, bool transa=False, bool transb=False) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("matmul.out(Tensor a, Tensor b, bool transa=False, bool transb=False, *, Tensor(a!) out) -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "matmul_backward(Tensor grad, Tensor? a, Tensor? b, SymInt[] a_sizes, SymInt[] b_sizes, bool transa, bool "
      "transb) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(custom_mm, CompositeImplicitAutograd, m) { m.impl("matmul_backward", matmul_backward); }
TORCH_LIBRARY_IMPL(custom_mm, FuncTorchBatchedDecomposition, m) { m.impl("matmul_backward", matmul_backward); }

MATMULS_KERNELS("matmul", matmul_cpu, matmul_cuda, matmul_meta, matmul_autograd)
MATMULS_KERNELS("matmul.out", matmul_out_cpu, matmul_out_cuda, matmul_out_meta, matmul_out_autograd)

MATMULS_WRITES("matmul.out", MatmulOutOp, 4)

MATMULS_AUTOCAST("matmul", MatmulOp)

}  // namespace matmuls
