// bias_act_: x <- activation(x + bias) in place, one bias value per column. Also gelu and gelu_backward: the same
// activation out of place, for products whose gradient is recorded.
//
// bias_act_ follows a product for which cuBLASLt has no epilogue: gelu by erf, and float64. One pass over x, read once
// and written once, in float32 arithmetic (float64 for float64). gelu(-inf) is 0; torch's is NaN.
#include <ATen/core/Tensor.h>

#include "glue/activation.h"
#include "glue/checks.h"

namespace matmuls {

// A checked call. out is x or another tensor with x's strides; bias may be undefined. With `grad`, out <- grad *
// activation'(x) for gelu and gelu_tanh, without a bias.
struct ActivationCall {
  const char* op;
  at::Tensor x, out;
  Activation activation;
  at::Tensor bias = {}, grad = {};
};
// Requires leading dimensions of x that form rows of one stride, and bias contiguous or undefined; else returns false,
// doing nothing.
bool activate_on_gpu(const ActivationCall& c);

namespace {

using at::Tensor;

constexpr const char* kBiasAct = "bias_act_";

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <bit>

#include "glue/handles.h"
#include "gpu/activations.cuh"
#include "gpu/device_limits.h"
#include "gpu/vector_io.cuh"

namespace matmuls {
namespace {

// gelu's derivative by torch's formulas, with z clamped to kGeluEnd.
template <Activation activation, class F>
__device__ F derivative(F z) {
  const F end = F(kGeluEnd);
  z = z < -end ? -end : z > end ? end : z;  // NaN propagates
  if constexpr (activation == Activation::gelu)
    return F(0.5) * (F(1) + erf(z * F(0.70710678118654752440))) + z * exp(F(-0.5) * z * z) * F(0.39894228040143267794);
  if constexpr (activation == Activation::gelu_tanh) {
    constexpr F k = F(0.79788456080286535588), cubic = F(0.044715);
    const F t = tanh(k * (z + cubic * z * z * z));
    return F(0.5) * (F(1) + t + z * (F(1) - t * t) * k * (F(1) + F(3) * cubic * z * z));
  }
  return F(1);
}

template <class T>
struct Pointers {
  const T *x, *grad, *bias;  // grad and bias may be null
  T* out;
};

// Each thread handles V columns, keeps their bias and loops over rows, with U rows in flight.
template <class T, int V, Activation activation, bool backward>
__global__ void __launch_bounds__(256)
    activation_kernel(Pointers<T> p, int64_t rows, int64_t columns, int64_t row_stride) {
  using F = arithmetic_t<T>;
  constexpr int U = (sizeof(T) == 2 ? 2 : 4) / (backward ? 2 : 1);
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V;
  if (column >= columns) return;
  F b[V];
#pragma unroll
  for (int v = 0; v < V; ++v) b[v] = p.bias ? F(p.bias[column + v]) : F(0);
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += U * step) {
    Vec<T, V> z[U], g[backward ? U : 1];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t at = (row + u * step) * row_stride + column;
      if (row + u * step < rows) z[u] = *reinterpret_cast<const Vec<T, V>*>(p.x + at);
      if constexpr (backward)
        if (row + u * step < rows) g[u] = *reinterpret_cast<const Vec<T, V>*>(p.grad + at);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row + u * step >= rows) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const F sum = F(z[u].at[v]) + b[v];
        if constexpr (backward)
          z[u].at[v] = T(F(g[u].at[v]) * derivative<activation>(sum));
        else if constexpr (sizeof(T) == 2)
          z[u].at[v] = T(activated_16bit<activation>(sum));
        else
          z[u].at[v] = T(activated<activation>(sum));
      }
      *reinterpret_cast<Vec<T, V>*>(p.out + (row + u * step) * row_stride + column) = z[u];
    }
  }
}

template <class T, int V>
void launch(const Pointers<T>& p, int64_t rows, int64_t columns, int64_t row_stride, Activation activation) {
  const int64_t vectors = columns / V;
  unsigned tx = std::min<uint64_t>(256, std::bit_ceil(static_cast<uint64_t>(vectors)));
  while (tx > 32 && vectors % tx != 0 && vectors % tx <= tx / 2) tx /= 2;  // else half of the last block is idle
  const unsigned ty = 256 / tx;
  const int64_t blocks_x = (vectors + tx - 1) / tx, blocks_y = (rows + ty - 1) / ty;
  // 2 to 16 rows per thread: as many as leave 32 blocks per multiprocessor, four times what it holds at once, so that
  // the last blocks take little of the time.
  const int64_t enough = int64_t{32} * device_limits().multiprocessors;
  const int64_t rows_a_thread = std::clamp<int64_t>(blocks_x * blocks_y / enough, 2, 16);
  const dim3 grid(static_cast<unsigned>(blocks_x),
                  static_cast<unsigned>(std::min<int64_t>((blocks_y + rows_a_thread - 1) / rows_a_thread, 65535)));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto run = [&](auto kernel) { kernel<<<grid, dim3(tx, ty), 0, stream>>>(p, rows, columns, row_stride); };
  const auto gelu = [&](auto forward, auto backward) { p.grad ? run(backward) : run(forward); };
  switch (activation) {
    case Activation::none: run(activation_kernel<T, V, Activation::none, false>); break;
    case Activation::relu: run(activation_kernel<T, V, Activation::relu, false>); break;
    case Activation::gelu:
      gelu(activation_kernel<T, V, Activation::gelu, false>, activation_kernel<T, V, Activation::gelu, true>);
      break;
    case Activation::gelu_tanh:
      gelu(activation_kernel<T, V, Activation::gelu_tanh, false>, activation_kernel<T, V, Activation::gelu_tanh, true>);
      break;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The stride of the rows if x's leading dimensions merge into rows of one stride.
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

bool activate_on_gpu(const ActivationCall& c) {
  const Tensor& x = c.x;
  const OperationGuard guard(c.op, x);
  const auto row_stride = row_stride_of(x);
  if (!row_stride) return false;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "activation", [&] {
    constexpr int V = 16 / sizeof(scalar_t);
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<scalar_t>() : nullptr; };
    const Pointers<scalar_t> p{data(x), data(c.grad), data(c.bias), c.out.mutable_data_ptr<scalar_t>()};
    const int64_t columns = x.size(-1), rows = x.numel() / columns;
    bool aligned = columns % V == 0 && *row_stride % V == 0;
    for (const void* pointer :
         {static_cast<const void*>(p.x), static_cast<const void*>(p.grad), static_cast<const void*>(p.out)})
      aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    if (aligned)
      launch<scalar_t, V>(p, rows, columns, *row_stride, c.activation);
    else
      launch<scalar_t, 1>(p, rows, columns, *row_stride, c.activation);
  });
  return true;
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, registration

#include <ATen/Dispatch.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "cpu/row_functions.h"
#include "dense/ops.h"
#include "glue/autograd.h"
#include "glue/rows.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

Activation check(const Tensor& x, const Tensor& bias, std::optional<std::string_view> activation) {
  TORCH_CHECK(x.dim() >= 1, kBiasAct, ": expected x of at least one dimension, got a scalar");
  TORCH_CHECK(is_real(x.scalar_type()), kBiasAct, ": expected a floating-point dtype, got ", x.scalar_type());
  if (bias.defined()) {
    TORCH_CHECK(bias.device() == x.device() && bias.scalar_type() == x.scalar_type(), kBiasAct, ": expected bias in ",
                x.scalar_type(), " on ", x.device(), ", got ", bias.scalar_type(), " on ", bias.device());
    TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == x.sym_size(-1), kBiasAct, ": expected bias of shape [",
                x.sym_size(-1), "], got ", bias.sym_sizes());
  }
  return parse_activation(kBiasAct, activation);
}

using Runner = void(const ActivationCall&);

#ifdef MATMULS_CUDA
void run_cuda(const ActivationCall& c) {
  if (c.x.numel() == 0 || activate_on_gpu(c)) return;
  ActivationCall contiguous = c;
  contiguous.x = contiguous.out = c.x.contiguous();
  activate_on_gpu(contiguous);
  c.out.copy_(contiguous.out);
}
#endif

// Runs along the dimension of smallest stride; without a bias, dense memory is treated as one row.
void run_cpu(const ActivationCall& c) {
  const Tensor& x = c.x;
  if (x.numel() == 0) return;
  const Tensor bias = c.bias.defined() ? c.bias.expand_as(x) : c.bias;
  Rows<2> rows;
  if (!bias.defined() && x.is_non_overlapping_and_dense()) {
    rows.columns = x.numel();
    rows.column_strides = {1, 0};
  } else {
    auto order = innermost_first(x.dim());
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return x.size(a) > 1 && (x.size(b) == 1 || x.stride(a) < x.stride(b));
    });
    const at::IntArrayRef bias_strides = bias.defined() ? bias.strides() : at::IntArrayRef{};
    rows = rows_of<2>(c.op, x.sizes(), {x.strides(), bias_strides}, order[0], order);
  }
  const int64_t step = rows.column_strides[0], bias_step = rows.column_strides[1];
  const int64_t piece = step == 1 ? std::min(rows.columns, kGrain) : rows.columns;
  const int64_t pieces = ceil_of(rows.columns, piece);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "activation", [&] {
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<scalar_t>() : nullptr; };
    const scalar_t *from = data(x), *grad = data(c.grad), *added = data(bias);
    scalar_t* to = c.out.mutable_data_ptr<scalar_t>();
    for_rows<scalar_t, 2>(rows.count * pieces, piece, [&](int64_t unit, RowBuffers<scalar_t, 2>& buffers) {
      const int64_t row = unit / pieces, begin = unit % pieces * piece;
      const int64_t offset = rows.offset(0, row) + begin, columns = std::min(piece, rows.columns - begin);
      const scalar_t* x_row = buffers.gather(0, from + offset, step);
      scalar_t* out_row = buffers.target(1, to + offset, step);
      if (grad)
        gelu_backward_row(grad + offset, x_row, out_row, columns, c.activation);
      else
        activation_row(x_row, added ? added + rows.offset(1, row) + begin * bias_step : nullptr, bias_step, out_row,
                       columns, c.activation);
      buffers.scatter(out_row, to + offset, step);
    });
  });
}

template <Runner run>
void bias_act_(Tensor x, const OptionalTensor& maybe_bias, std::optional<std::string_view> name) {
  const Tensor bias = tensor_or_none(maybe_bias).defined() ? maybe_bias->contiguous() : Tensor();
  const Activation activation = check(x, bias, name);
  check_no_overlap(kBiasAct, x, {{"bias", bias}});
  run({kBiasAct, x, x, activation, bias});
}

void bias_act_meta(Tensor x, const OptionalTensor& bias, std::optional<std::string_view> name) {
  check(x, tensor_or_none(bias), name);
}

MATMULS_OPERATOR(BiasActOp, "custom_mm::bias_act_", "",
                 void(Tensor, const OptionalTensor&, std::optional<std::string_view>));

void bias_act_autograd(Tensor x, const OptionalTensor& bias, std::optional<std::string_view> name) {
  TORCH_CHECK(!needs_gradient(kBiasAct, {x, tensor_or_none(bias)}), kBiasAct,
              ": expected no gradient to be recorded, since x, which the gradient needs, is written over; use "
              "matmul(..., bias=, activation=) or torch.no_grad()");
  BiasActOp::below_autograd(x, bias, name);
}

// ---------------------------------------------------------------------------------------------- gelu, its gradient

constexpr const char *kGelu = "gelu", *kGeluBackward = "gelu_backward";
MATMULS_OPERATOR(GeluBackwardOp, "custom_mm::gelu_backward", "", Tensor(const Tensor&, const Tensor&, bool));

Activation gelu_by(bool tanh) { return tanh ? Activation::gelu_tanh : Activation::gelu; }

void check_gradient(const Tensor& grad, const Tensor& x) {
  check_floating(kGeluBackward, "x", x);
  check_like(kGeluBackward, "grad", grad, "x", x);
  TORCH_CHECK(grad.sym_sizes() == x.sym_sizes(), kGeluBackward, ": expected grad of x's shape ", x.sym_sizes(),
              ", got ", grad.sym_sizes());
}

template <Runner run>
Tensor gelu(const Tensor& x, bool tanh) {
  check_floating(kGelu, "x", x);
  const Tensor from = at_least_1d(x.contiguous()), out = at::empty_like(from);
  run({kGelu, from, out, gelu_by(tanh)});
  return out.view(x.sizes());
}
template <Runner run>
Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  check_gradient(grad, x);
  const Tensor from = at_least_1d(x.contiguous()), out = at::empty_like(from);
  run({kGeluBackward, from, out, gelu_by(tanh), Tensor(), at_least_1d(grad.contiguous())});
  return out.view(x.sizes());
}
Tensor gelu_meta(const Tensor& x, bool) {
  check_floating(kGelu, "x", x);
  return at::empty_symint(x.sym_sizes(), x.options());
}
Tensor gelu_backward_meta(const Tensor& grad, const Tensor& x, bool) {
  check_gradient(grad, x);
  return at::empty_symint(x.sym_sizes(), x.options());
}

struct GeluGradient : KernelFunction<GeluGradient> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, bool tanh) {
    ctx->save_for_backward({x});
    ctx->saved_data["tanh"] = tanh;
    return GeluOp::below_autograd(x, tanh);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return {GeluBackwardOp::call(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["tanh"].toBool()), {}};
  }
};

// The same with torch's operators, which torch differentiates: for compilers to fuse and for second derivatives.
const char* approximate(bool tanh) { return tanh ? "tanh" : "none"; }
Tensor near(const Tensor& x) { return at::clamp(x, -kGeluEnd, kGeluEnd); }

Tensor gelu_autograd(const Tensor& x, bool tanh) {
  if (!needs_gradient(kGelu, {x})) return GeluOp::below_autograd(x, tanh);
  if (is_traced(x)) return at::where(x > kGeluEnd, x, at::gelu(near(x), approximate(tanh)));
  return GeluGradient::apply(x, tanh);
}
Tensor gelu_backward_autograd(const Tensor& grad, const Tensor& x, bool tanh) {
  if (needs_gradient(kGeluBackward, {grad, x})) return at::gelu_backward(grad, near(x), approximate(tanh));
  return GeluBackwardOp::below_autograd(grad, x, tanh);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("bias_act_(Tensor(a!) x, Tensor? bias=None, str? activation=None) -> ()", tags);
  m.def("gelu(Tensor x, bool tanh=False) -> Tensor", tags);
  m.def("gelu_backward(Tensor grad, Tensor x, bool tanh=False) -> Tensor", tags);
}

MATMULS_KERNELS("bias_act_", bias_act_<run_cpu>, bias_act_<run_cuda>, bias_act_meta, bias_act_autograd)
MATMULS_KERNELS("gelu", gelu<run_cpu>, gelu<run_cuda>, gelu_meta, gelu_autograd)
MATMULS_KERNELS("gelu_backward", gelu_backward<run_cpu>, gelu_backward<run_cuda>, gelu_backward_meta,
                gelu_backward_autograd)
MATMULS_WRITES("bias_act_", BiasActOp, 0)

}  // namespace matmuls
#endif
