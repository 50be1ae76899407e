// cublaslt_matmul: out = activation(op(a) @ op(b) + bias) by cuBLASLt, bias and activation in the product's epilogue.
//
// Source: cublasLtMatmul; on the CPU torch's BLAS and activations. cuBLASLt has no epilogue for gelu by erf and none
// for float64: bias_act_ follows the product then. (Processing panels of rows small enough to stay in the L2 between
// the two kernels was slower: 353 us instead of 320 at 16384x1024x4096 on an H200.)
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include "dense/gemm.h"
#include "dense/ops.h"
#include "glue/activation.h"
#include "glue/autograd.h"

#ifdef MATMULS_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <array>
#include <bit>
#include <limits>
#include <memory>
#include <unordered_map>

#include "dense/gemm_types.h"
#include "glue/handles.h"
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

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* p) const {
    destroy(p);
  }
};
using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using MatrixLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

// Everything that the choice of an algorithm depends on.
struct PlanKey {
  int64_t device, dtype, compute, transx, transy, m, n, k, ldx, ldy, ldd, batch, stride_x, stride_y, stride_d;
  int64_t align_x, align_y, align_d, epilogue, workspace;
  bool operator==(const PlanKey&) const = default;
};
static_assert(sizeof(PlanKey) == 20 * sizeof(int64_t));

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    const auto words = std::bit_cast<std::array<uint64_t, sizeof(PlanKey) / 8>>(key);
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const uint64_t w : words) hash = (hash ^ w) * 0xff51afd7ed558ccd, hash ^= hash >> 32;
    return hash;
  }
};

struct Plan {
  Desc desc;
  MatrixLayout x, y, d;
  cublasLtMatmulAlgo_t algo;
  bool supported;
};

template <class T>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}
template <class T>
void set(const MatrixLayout& layout, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof(value)));
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

MatrixLayout matrix_layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int64_t stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&raw, type, rows, cols, ld));
  MatrixLayout layout(raw);
  set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
  set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  return layout;
}

Plan make_plan(const Borrowed& handle, const PlanKey& key, const GemmTypes& types) {
  Plan plan{};
  cublasLtMatmulDesc_t raw = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatmulDescCreate(&raw, types.compute, types.scale));
  plan.desc.reset(raw);
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, key.transx ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, key.transy ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(key.epilogue));
  const auto rows = [](bool transposed, int64_t r, int64_t c) { return transposed ? c : r; };
  plan.x = matrix_layout(types.data, rows(key.transx, key.m, key.k), rows(key.transx, key.k, key.m), key.ldx, key.batch,
                         key.stride_x);
  plan.y = matrix_layout(types.data, rows(key.transy, key.k, key.n), rows(key.transy, key.n, key.k), key.ldy, key.batch,
                         key.stride_y);
  plan.d = matrix_layout(types.data, key.m, key.n, key.ldd, key.batch, key.stride_d);

  cublasLtMatmulPreference_t raw_preference = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&raw_preference));
  const Preference preference(raw_preference);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_x));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_y));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_d));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));
  // Keep split-K partial sums in the compute type.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const auto status = cublasLtMatmulAlgoGetHeuristic(handle.cublaslt(), plan.desc.get(), plan.x.get(), plan.y.get(),
                                                     plan.d.get(), plan.d.get(), preference.get(), 1, &result, &found);
  plan.supported = status == CUBLAS_STATUS_SUCCESS && found > 0;
  TORCH_CHECK(plan.supported || status == CUBLAS_STATUS_SUCCESS || status == CUBLAS_STATUS_NOT_SUPPORTED,
              "cublasLtMatmulAlgoGetHeuristic failed with ", cublasGetStatusName(status), " in ", kCublasLtOp);
  plan.algo = result.algo;
  return plan;
}

// The plans of one handle; bounded, for processes that never repeat a shape.
using Plans = std::unordered_map<PlanKey, Plan, PlanKeyHash>;
constexpr size_t kMaxPlans = 8192;

Plan& plan_for(const Borrowed& handle, const PlanKey& key, const GemmTypes& types) {
  auto& attachment = handle.attachment();
  if (!attachment) attachment = std::make_shared<Plans>();
  auto& plans = *static_cast<Plans*>(attachment.get());
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans.emplace(key, make_plan(handle, key, types)).first->second;
}

int64_t alignment(const void* data, int64_t stride, int64_t item) {
  const auto bits = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride * item) | 256;
  return static_cast<int64_t>(bits & -bits);
}

// One cuBLASLt product, batch included. Returns false if cuBLASLt has no algorithm for it with this epilogue.
bool product(const Gemm& g, const Tensor& bias, cublasLtEpilogue_t epilogue) {
  if (g.strided.size > std::numeric_limits<int32_t>::max()) return false;  // cuBLASLt's batch count has 32 bits
  const GemmTypes types(g.out.scalar_type());
  const int64_t item = g.out.element_size();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Borrowed handle(Library::cublaslt, kCublasLtOp);
  bool supported = true;
  g.each([&](const char* x, const char* y, char* d) {
    if (!supported) return;
    const PlanKey key{stream.device_index(),
                      types.data,
                      types.compute,
                      g.x.transposed,
                      g.y.transposed,
                      g.m,
                      g.n,
                      g.k,
                      g.x.ld,
                      g.y.ld,
                      g.ldd,
                      g.strided.size,
                      g.strided.x,
                      g.strided.y,
                      g.strided.d,
                      alignment(x, g.strided.x, item),
                      alignment(y, g.strided.y, item),
                      alignment(d, g.strided.d, item),
                      epilogue,
                      static_cast<int64_t>(handle.workspace_nbytes())};
    auto& plan = plan_for(handle, key, types);
    supported = plan.supported;
    if (!supported) return;
    if (bias.defined()) set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.const_data_ptr());
    MATMULS_CUBLAS_CHECK(cublasLtMatmul(handle.cublaslt(), plan.desc.get(), types.one(), x, plan.x.get(), y,
                                        plan.y.get(), types.zero(), d, plan.d.get(), d, plan.d.get(), &plan.algo,
                                        handle.workspace(), handle.workspace_nbytes(), stream),
                         " for a ", g.a.sizes(), " and b ", g.b.sizes(), " in ", g.out.scalar_type());
  });
  return supported;
}

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
    const Gemm g = describe(a, b, out, shape, transa, transb, /*row_major_out=*/bias.defined());
    const auto epilogue = epilogue_of(fuse_bias && bias.defined(), fuse_both ? activation : Activation::none);
    if (product(g, fuse_bias ? bias : Tensor(), epilogue)) {
      if (g.out_is_copy) out.copy_(g.out.view(out.sizes()));
      return bias_act_(out, rest_bias, rest);
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
  check(a, b, bias, transa, transb);
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

template <c10::DeviceType device>
Tensor cublaslt_matmul_autocast(const Tensor& a, const Tensor& b, const OptionalTensor& bias, Name name, bool transa,
                                bool transb) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = autocast_dtype(device);
  return LtMatmulOp::call(autocast_to(dtype, a, device), autocast_to(dtype, b, device),
                          autocast_to(dtype, bias, device), name, transa, transb);
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

TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("cublaslt_matmul", cublaslt_matmul_cpu);
  m.impl("cublaslt_matmul.out", cublaslt_matmul_out_cpu);
}

#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("cublaslt_matmul", cublaslt_matmul_cuda);
  m.impl("cublaslt_matmul.out", cublaslt_matmul_out_cuda);
}
#endif

TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("cublaslt_matmul", cublaslt_matmul_meta);
  m.impl("cublaslt_matmul.out", cublaslt_matmul_out_meta);
}

TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("cublaslt_matmul", cublaslt_matmul_autograd);
  m.impl("cublaslt_matmul.out", cublaslt_matmul_out_autograd);
}

MATMULS_WRITES("cublaslt_matmul.out", LtMatmulOutOp, 6)

TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) { m.impl("cublaslt_matmul", cublaslt_matmul_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) { m.impl("cublaslt_matmul", cublaslt_matmul_autocast<at::kCUDA>); }

}  // namespace matmuls
