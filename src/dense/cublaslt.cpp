// cublaslt_matmul: out = activation(op(a) @ op(b) + bias) by cuBLASLt, bias and activation in the product's epilogue.
//
// Source: cublasLtMatmul; on the CPU torch's BLAS and activations. cuBLASLt has no epilogue for gelu by erf and none
// for float64: bias_act_ follows the product then, unless a kernel of our own computes all of it (rows/linear_rows.h).
// (Processing panels of rows small enough to stay in the L2 between the two kernels was slower: 353 us instead of 320
// at 16384x1024x4096 on an H200.)
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include "dense/gemm.h"
#include "dense/invariant/cpu.h"
#include "dense/ops.h"
#include "glue/activation.h"
#include "glue/autograd.h"
#include "glue/batch_invariance.h"

#ifdef MATMULS_CUDA
#include "dense/lt_product.h"
#include "dense/rows/linear_rows.h"
#include "glue/handles.h"
#include "glue/kernel_switch.h"
#include "gpu/device_limits.h"
#endif

namespace matmuls {
namespace {

using at::Tensor;
using Name = std::optional<std::string_view>;

constexpr const char* kCublasLtOp = "cublaslt_matmul";

ProductShape<int64_t> check(const Tensor& a, const Tensor& b, const Tensor& bias, bool transa, bool transb,
                            const Tensor& out = {}) {
  check_operands(kCublasLtOp, a, b, bias, out);
  auto shape = product_shape(kCublasLtOp, a.sizes(), b.sizes(), transa, transb);
  if (bias.defined()) check_bias(kCublasLtOp, bias.sizes(), shape);
  if (out.defined()) check_out(kCublasLtOp, out, shape.out(), {{"a", a}, {"b", b}, {"bias", bias}});
  return shape;
}

Activation check_activation(const Tensor& a, Name name) {
  const auto activation = parse_activation(kCublasLtOp, name);
  TORCH_CHECK(activation == Activation::none || !a.is_complex(), kCublasLtOp, ": expected no activation for ",
              a.scalar_type(), ", got '", *name, "'");
  return activation;
}

void bias_act_(const Tensor& x, const Tensor& bias, Activation activation) {
  if (!bias.defined() && activation == Activation::none) return;
  if (x.dim() == 0) return bias_act_(x.view({1}), bias, activation);  // a product of two vectors
  if (x.is_complex()) {
    x.add_(bias);
    return;
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("custom_mm::bias_act_", "")
                             .typed<void(Tensor, const OptionalTensor&, Name)>();
  static constexpr Name names[] = {std::nullopt, "relu", "gelu", "gelu_tanh"};
  op.call(x, bias.defined() ? OptionalTensor(bias) : std::nullopt, names[static_cast<int>(activation)]);
}

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef MATMULS_CUDA

cublasLtEpilogue_t epilogue_of(bool bias, Activation activation) {
  switch (activation) {
    case Activation::relu: return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu_tanh: return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default: return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// True if cuBLASLt has an epilogue for this dtype and activation. Its gelu is the tanh form, with a tanh accurate
// enough for 16 bits only: in float32 its error is far larger than torch's.
bool has_epilogue(at::ScalarType dtype, Activation activation) {
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  switch (activation) {
    case Activation::none:
    case Activation::relu: return half || dtype == at::kFloat;
    case Activation::gelu_tanh: return half;
    case Activation::gelu: return false;
  }
  return false;
}

bool is_off(ProductKernel kernel) { return KernelSwitch<ProductKernel>::is_off(kernel); }

void need_cublaslt() {
  TORCH_CHECK_VALUE(!is_off(ProductKernel::cublaslt), kCublasLtOp,
                    ": every kernel that takes this product is switched off, cublaslt the last");
}

// Returns false, doing nothing, if cuBLASLt is to compute the product.
bool product_by_one_kernel(const Gemm& g, const Tensor& bias, Activation activation) {
  const int multiprocessors = device_limits().multiprocessors;
  const bool rows = !is_off(ProductKernel::linear_rows), tiles = !is_off(ProductKernel::linear_tiles);
  auto kernel = dense_rows::fastest(g.n, g.m, g.k, activation, multiprocessors, tiles);
  if (is_off(kernel)) {
    const bool by_lt = !is_off(ProductKernel::cublaslt) || !(rows || tiles);
    kernel = by_lt ? ProductKernel::cublaslt : rows ? ProductKernel::linear_rows : ProductKernel::linear_tiles;
  }
  if (kernel == ProductKernel::cublaslt || !dense_rows::fits(g)) return false;
  if (kernel == ProductKernel::linear_tiles) return dense_rows::launch_tiles(g, bias, activation);
  dense_rows::launch(g, bias, activation, dense_rows::choose(g.n, g.m, g.k, multiprocessors));
  return true;
}

void launch(const Tensor& a, const Tensor& b, const Tensor& given_bias, Activation activation, const Tensor& out,
            const ProductShape<int64_t>& shape, bool transa, bool transb) {
  if (out.numel() == 0) return;
  // The bias epilogues read 16 bytes at a time and need that alignment.
  Tensor bias = given_bias.defined() ? given_bias.contiguous() : given_bias;
  if (bias.defined() && reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 != 0) bias = bias.clone();

  // Put as much as possible in the epilogue and the rest in one pass over the result.
  const bool fuse_bias = !bias.defined() || has_epilogue(out.scalar_type(), Activation::none);
  const bool fuse_both = fuse_bias && (activation == Activation::none || has_epilogue(out.scalar_type(), activation));
  const Tensor rest_bias = fuse_bias ? Tensor() : bias;
  const Activation rest = fuse_both ? Activation::none : activation;
  if (shape.k > 0) {
    const auto epilogue = epilogue_of(fuse_bias && bias.defined(), fuse_both ? activation : Activation::none);
    const Tensor fused = fuse_bias ? bias : Tensor();
    if (is_batch_invariant()) {
      need_cublaslt();
      batch_invariant_product(kCublasLtOp, a, b, fused, epilogue, out, shape, transa, transb);
      return bias_act_(out, rest_bias, rest);
    }
    const Gemm g = describe(a, b, out, shape, transa, transb, /*row_major_out=*/bias.defined());
    const bool by_one = product_by_one_kernel(g, bias, activation);
    if (!by_one) need_cublaslt();
    if (by_one || product_by_lt(kCublasLtOp, g, fused, epilogue)) {
      if (g.out_is_copy) out.copy_(g.out.view(out.sizes()));
      return by_one ? void() : bias_act_(out, rest_bias, rest);
    }
  }
  MatmulOutOp::call(a, b, transa, transb, out);
  bias_act_(out, bias, activation);
}

Tensor cublaslt_matmul_cuda(const Tensor& a, const Tensor& b, const OptionalTensor& maybe_bias, Name name, bool transa,
                            bool transb) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const auto activation = check_activation(a, name);
  const auto shape = check(a, b, bias, transa, transb);
  const OperationGuard guard(kCublasLtOp, a);
  Tensor out = at::empty(shape.out(), a.options());
  launch(a, b, bias, activation, out, shape, transa, transb);
  return out;
}

void cublaslt_matmul_out_cuda(const Tensor& a, const Tensor& b, const OptionalTensor& maybe_bias, Name name,
                              bool transa, bool transb, Tensor out) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const auto activation = check_activation(a, name);
  const auto shape = check(a, b, bias, transa, transb, out);
  const OperationGuard guard(kCublasLtOp, a);
  launch(a, b, bias, activation, out, shape, transa, transb);
}

#endif

// ----------------------------------------------------------------------------------------------------------- CPU

Tensor cublaslt_matmul_cpu(const Tensor& a, const Tensor& b, const OptionalTensor& maybe_bias, Name name, bool transa,
                           bool transb) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const auto activation = check_activation(a, name);
  const auto shape = check(a, b, bias, transa, transb);
  if (is_batch_invariant()) {
    const Tensor out = at::empty(shape.out(), a.options());
    batch_invariant_product_cpu(kCublasLtOp, a, b, bias, out, transa, transb);
    bias_act_(out, {}, activation);
    return out;
  }
  const Tensor x = op_of(a, transa), y = op_of(b, transb);
  const bool with_bias = bias.defined() && y.dim() == 2;
  Tensor out = with_bias ? at::linear(x, y.t(), bias) : at::matmul(x, y);
  bias_act_(out, with_bias ? Tensor() : bias, activation);
  return out;
}

void cublaslt_matmul_out_cpu(const Tensor& a, const Tensor& b, const OptionalTensor& maybe_bias, Name name, bool transa,
                             bool transb, Tensor out) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const auto activation = check_activation(a, name);
  check(a, b, bias, transa, transb, out);
  if (is_batch_invariant()) {
    batch_invariant_product_cpu(kCublasLtOp, a, b, bias, out, transa, transb);
    return bias_act_(out, {}, activation);
  }
  const Tensor x = op_of(a, transa), y = op_of(b, transb);
  const bool with_bias = bias.defined() && x.dim() == 2 && y.dim() == 2 && x.size(1) > 0;
  if (with_bias)
    at::addmm_out(out, bias, x, y);
  else
    MatmulOutOp::call(a, b, transa, transb, out);
  bias_act_(out, with_bias ? Tensor() : bias, activation);
}

// ---------------------------------------------------------------------------------------- tracing, gradient, autocast

std::vector<c10::SymInt> traced_shape(const Tensor& a, const Tensor& b, const OptionalTensor& maybe_bias, Name name,
                                      bool transa, bool transb, const Tensor& out = {}) {
  const Tensor bias = tensor_or_none(maybe_bias);
  check_activation(a, name);
  check_operands(kCublasLtOp, a, b, bias, out);
  const auto shape = product_shape(kCublasLtOp, a.sym_sizes(), b.sym_sizes(), transa, transb);
  if (bias.defined()) check_bias(kCublasLtOp, bias.sym_sizes(), shape);
  return shape.out();
}

Tensor cublaslt_matmul_meta(const Tensor& a, const Tensor& b, const OptionalTensor& bias, Name name, bool transa,
                            bool transb) {
  return at::empty_symint(traced_shape(a, b, bias, name, transa, transb), a.options());
}

void cublaslt_matmul_out_meta(const Tensor& a, const Tensor& b, const OptionalTensor& bias, Name name, bool transa,
                              bool transb, Tensor out) {
  const auto shape = traced_shape(a, b, bias, name, transa, transb, out);
  TORCH_CHECK(out.sym_sizes() == c10::SymIntArrayRef(shape), kCublasLtOp, ": expected out of shape ", shape, ", got ",
              out.sym_sizes());
}

// op(a) @ op(b) + bias with its gradient; the activation is applied outside, where torch differentiates it.
struct AffineFunction : KernelFunction<AffineFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& bias,
                        bool transa, bool transb) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_product(ctx, a, b, transa, transb);
    return LtMatmulOp::call(a, b, bias, std::nullopt, transa, transb);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto [grad_a, grad_b] = product_gradients(ctx, grads[0]);
    const Tensor grad_bias = ctx->needs_input_grad(2) ? at::sum_to(grads[0], {grads[0].sym_size(-1)}) : Tensor();
    return {grad_a, grad_b, grad_bias, {}, {}};
  }
};

Tensor cublaslt_matmul_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b,
                                const OptionalTensor& maybe_bias, Name name, bool transa, bool transb) {
  const Tensor bias = tensor_or_none(maybe_bias);
  if (needs_gradient(kCublasLtOp, {a, b, bias})) {
    const auto activation = check_activation(a, name);
    const Tensor z =
        bias.defined() ? AffineFunction::apply(a, b, bias, transa, transb) : MatmulOp::call(a, b, transa, transb);
    if (activation == Activation::none) return z;
    return activation == Activation::relu ? at::relu(z) : GeluOp::call(z, activation == Activation::gelu_tanh);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return LtMatmulOp::handle().redispatch(keys & c10::after_autograd_keyset, a, b, maybe_bias, name, transa, transb);
}

void cublaslt_matmul_out_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b,
                                  const OptionalTensor& bias, Name name, bool transa, bool transb, Tensor out) {
  check_no_gradient_into(kCublasLtOp, "out", {a, b, tensor_or_none(bias), out});
  at::AutoDispatchBelowAutograd guard;
  LtMatmulOutOp::handle().redispatch(keys & c10::after_autograd_keyset, a, b, bias, name, transa, transb, out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "cublaslt_matmul(Tensor a, Tensor b, Tensor? bias=None, str? activation=None, bool transa=False, "
      "bool transb=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cublaslt_matmul.out(Tensor a, Tensor b, Tensor? bias=None, str? activation=None, bool transa=False, "
      "bool transb=False, *, Tensor(a!) out) -> ()",
      {at::Tag::pt2_compliant_tag});
}

MATMULS_KERNELS("cublaslt_matmul", cublaslt_matmul_cpu, cublaslt_matmul_cuda, cublaslt_matmul_meta,
                cublaslt_matmul_autograd)
MATMULS_KERNELS("cublaslt_matmul.out", cublaslt_matmul_out_cpu, cublaslt_matmul_out_cuda, cublaslt_matmul_out_meta,
                cublaslt_matmul_out_autograd)

MATMULS_WRITES("cublaslt_matmul.out", LtMatmulOutOp, 6)

MATMULS_AUTOCAST("cublaslt_matmul", LtMatmulOp)

}  // namespace matmuls
