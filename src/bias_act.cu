// bias_act_: x <- activation(x + bias) over x, bias one value per column.
//
// What a product ends with where cuBLASLt has no epilogue for it: gelu by erf, float64. One pass over x, read once and
// written once; float32 arithmetic (float64 for float64).
#include <ATen/core/Tensor.h>

#include "activation.h"
#include "common.h"

namespace matmuls {

// x's leading dimensions are rows one stride apart, bias contiguous or undefined; false, and nothing done, where not.
bool bias_act_on_gpu(const at::Tensor& x, const at::Tensor& bias, Activation activation);

namespace {

using at::Tensor;

constexpr const char* kOp = "bias_act_";

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <bit>

#include "device.cuh"
#include "device_limits.h"
#include "handles.h"

namespace matmuls {
namespace {

// float32 and float64: torch's formulas.
template <Activation activation, class F>
__device__ F activated(F z) {
  if constexpr (activation == Activation::relu) return z < F(0) ? F(0) : z;  // NaN stays
  if constexpr (activation == Activation::gelu) return F(0.5) * z * (F(1) + erf(z * F(0.70710678118654752440)));
  if constexpr (activation == Activation::gelu_tanh)
    return F(0.5) * z * (F(1) + tanh(F(0.79788456080286535588) * (z + F(0.044715) * z * z * z)));
  return z;
}

// 16-bit results: the same functions to 4e-5, a twelfth of float16's rounding, in half of the instructions. With erff
// (32 instructions an element) the kernel is bound by arithmetic: 2.8 of 4.2 TB/s.
template <Activation activation>
__device__ float activated_16bit(float z) {
  if constexpr (activation == Activation::gelu) {
    // Phi(-|z|) = P(t) exp(-z^2 / 2), t = 1 / (1 + 0.38 |z|), P fitted for the least relative error on |z| < 14.
    const float t = ptx::reciprocal_approx(fmaf(0.38f, fabsf(z), 1.f));
    float p = -0.0899285882f;
    p = fmaf(p, t, 0.188877054f);
    p = fmaf(p, t, 0.0919792529f);
    p = fmaf(p, t, 0.157829639f);
    p = fmaf(p, t, 0.151225119f);
    const float tail = p * t * ptx::exp2_approx(-0.721347520f * z * z);  // log2(e) / 2
    return z * (z > 0.f ? 1.f - tail : tail);
  }
  if constexpr (activation == Activation::gelu_tanh) {
    // (1 + tanh u) / 2 = 1 / (1 + exp(-2u)),  u = sqrt(2 / pi) (z + 0.044715 z^3);  the factors hold -2 log2(e) too
    const float exponent = z * fmaf(-0.102943240f, z * z, -2.30220819f);
    return z * ptx::reciprocal_approx(1.f + ptx::exp2_approx(exponent));
  }
  return activated<activation>(z);
}

// A thread keeps V columns and their bias and walks down the rows, U of them in flight.
template <class T, int V, Activation activation>
__global__ void __launch_bounds__(256)
    bias_act_kernel(T* x, const T* bias, int64_t rows, int64_t columns, int64_t row_stride) {
  using F = arithmetic_t<T>;
  constexpr int U = sizeof(T) == 2 ? 2 : 4;
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V;
  if (column >= columns) return;
  F b[V];
#pragma unroll
  for (int v = 0; v < V; ++v) b[v] = bias ? F(bias[column + v]) : F(0);
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += U * step) {
    Vec<T, V> z[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (row + u * step < rows) z[u] = *reinterpret_cast<const Vec<T, V>*>(x + (row + u * step) * row_stride + column);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * step >= rows) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const F sum = F(z[u].at[v]) + b[v];
        if constexpr (sizeof(T) == 2)
          z[u].at[v] = T(activated_16bit<activation>(sum));
        else
          z[u].at[v] = T(activated<activation>(sum));
      }
      *reinterpret_cast<Vec<T, V>*>(x + (row + u * step) * row_stride + column) = z[u];
    }
  }
}

template <class T, int V>
void launch(T* x, const T* bias, int64_t rows, int64_t columns, int64_t row_stride, Activation activation) {
  const int64_t vectors = columns / V;
  const unsigned tx = std::min<uint64_t>(256, std::bit_ceil(static_cast<uint64_t>(vectors))), ty = 256 / tx;
  const int64_t blocks_x = (vectors + tx - 1) / tx, blocks_y = (rows + ty - 1) / ty;
  // 4 to 16 rows a thread: as many as leave 8 blocks for each multiprocessor.
  const int64_t enough = int64_t{8} * device_limits().multiprocessors;
  const int64_t rows_a_thread = std::clamp<int64_t>(blocks_x * blocks_y / enough, 4, 16);
  const dim3 grid(static_cast<unsigned>(blocks_x),
                  static_cast<unsigned>(std::min<int64_t>((blocks_y + rows_a_thread - 1) / rows_a_thread, 65535)));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto run = [&](auto kernel) { kernel<<<grid, dim3(tx, ty), 0, stream>>>(x, bias, rows, columns, row_stride); };
  switch (activation) {
    case Activation::none: run(bias_act_kernel<T, V, Activation::none>); break;
    case Activation::relu: run(bias_act_kernel<T, V, Activation::relu>); break;
    case Activation::gelu: run(bias_act_kernel<T, V, Activation::gelu>); break;
    case Activation::gelu_tanh: run(bias_act_kernel<T, V, Activation::gelu_tanh>); break;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The leading dimensions as rows one stride apart, if they are.
std::optional<int64_t> row_stride_of(const Tensor& x) {
  if (x.stride(-1) != 1 && x.size(-1) != 1) return std::nullopt;
  int64_t stride = -1, expected = 0;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (stride < 0)
      stride = x.stride(d);
    else if (x.stride(d) != expected)
      return std::nullopt;
    expected = x.stride(d) * x.size(d);
  }
  return stride < 0 ? x.size(-1) : stride;
}

}  // namespace

bool bias_act_on_gpu(const Tensor& x, const Tensor& bias, Activation activation) {
  const OperationGuard guard(kOp, x);
  const auto row_stride = row_stride_of(x);
  if (!row_stride) return false;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), kOp, [&] {
    constexpr int V = 16 / sizeof(scalar_t);
    scalar_t* data = x.mutable_data_ptr<scalar_t>();
    const scalar_t* bias_data = bias.defined() ? bias.const_data_ptr<scalar_t>() : nullptr;
    const int64_t columns = x.size(-1), rows = x.numel() / columns;
    const bool aligned = columns % V == 0 && *row_stride % V == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    if (aligned)
      launch<scalar_t, V>(data, bias_data, rows, columns, *row_stride, activation);
    else
      launch<scalar_t, 1>(data, bias_data, rows, columns, *row_stride, activation);
  });
  return true;
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, registration

#include <torch/library.h>

#include "operator.h"

namespace matmuls {
namespace {

Activation check(const Tensor& x, const Tensor& bias, std::optional<std::string_view> activation) {
  TORCH_CHECK(x.dim() >= 1, kOp, ": expected x of at least one dimension, got a scalar");
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), kOp, ": expected a floating-point dtype, got ", x.scalar_type());
  if (bias.defined()) {
    TORCH_CHECK(bias.device() == x.device() && bias.scalar_type() == x.scalar_type(), kOp, ": expected bias in ",
                x.scalar_type(), " on ", x.device(), ", got ", bias.scalar_type(), " on ", bias.device());
    TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == x.sym_size(-1), kOp, ": expected bias of shape [",
                x.sym_size(-1), "], got ", bias.sym_sizes());
  }
  return parse_activation(kOp, activation);
}

#ifdef MATMULS_CUDA
void bias_act_cuda(Tensor x, const OptionalTensor& maybe_bias, std::optional<std::string_view> name) {
  const Tensor bias = tensor_or_none(maybe_bias).defined() ? maybe_bias->contiguous() : Tensor();
  const Activation activation = check(x, bias, name);
  check_no_overlap(kOp, x, {{"bias", bias}});
  if (x.numel() > 0 && !bias_act_on_gpu(x, bias, activation)) add_and_activate_(x, bias, activation);
}
#endif

void bias_act_cpu(Tensor x, const OptionalTensor& maybe_bias, std::optional<std::string_view> name) {
  const Tensor bias = tensor_or_none(maybe_bias);
  const Activation activation = check(x, bias, name);
  check_no_overlap(kOp, x, {{"bias", bias}});
  add_and_activate_(x, bias, activation);
}

void bias_act_meta(Tensor x, const OptionalTensor& bias, std::optional<std::string_view> name) {
  check(x, tensor_or_none(bias), name);
}

MATMULS_OPERATOR(BiasActOp, "custom_mm::bias_act_", "",
                 void(Tensor, const OptionalTensor&, std::optional<std::string_view>));

void bias_act_autograd(Tensor x, const OptionalTensor& bias, std::optional<std::string_view> name) {
  TORCH_CHECK(!needs_gradient(kOp, {x, tensor_or_none(bias)}), kOp,
              ": expected no gradient to be recorded, since x, which the gradient needs, is written over; use "
              "matmul(..., bias=, activation=) or torch.no_grad()");
  BiasActOp::below_autograd(x, bias, name);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def("bias_act_(Tensor(a!) x, Tensor? bias=None, str? activation=None) -> ()", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(custom_mm, CPU, m) { m.impl("bias_act_", bias_act_cpu); }
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl("bias_act_", bias_act_cuda); }
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) { m.impl("bias_act_", bias_act_meta); }
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) { m.impl("bias_act_", bias_act_autograd); }
MATMULS_WRITES("bias_act_", BiasActOp, 0)

}  // namespace matmuls
#endif
