// linear_rows (linear_rows.h): its checks, the CPU, and the call of the kernel.
#include "dense/rows/linear_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>

#include "dense/ops.h"
#include "glue/operator.h"

#ifdef MATMULS_CUDA
#include "glue/handles.h"
#include "gpu/device_limits.h"
#endif

namespace matmuls {
namespace {

constexpr const char* kLinearRows = "linear_rows";

void check(const dense_rows::Operands& o) {
  const at::Tensor &x = o.x, &w = o.w, &out = o.out;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf, kLinearRows,
              ": expected x in BFloat16 or Half, got ", x.scalar_type());
  TORCH_CHECK(x.layout() == at::kStrided, kLinearRows, ": expected a strided x, got ", x.layout());
  check_same(kLinearRows, "w", w, x);
  check_same(kLinearRows, "bias", o.bias, x);
  check_same(kLinearRows, "out", out, x);
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1), kLinearRows,
              ": expected x [M, K] and w [N, K], got ", x.sizes(), " and ", w.sizes());
  TORCH_CHECK(!o.bias.defined() || (o.bias.dim() == 1 && o.bias.size(0) == w.size(0) && o.bias.is_contiguous()),
              kLinearRows, ": expected contiguous bias of shape [", w.size(0), "], got ",
              o.bias.defined() ? o.bias.sizes() : at::IntArrayRef(), " with strides ",
              o.bias.defined() ? o.bias.strides() : at::IntArrayRef());
  if (o.count.defined())
    TORCH_CHECK(o.count.scalar_type() == at::kInt && o.count.numel() == 1 && o.count.device() == x.device(),
                kLinearRows, ": expected count of one element in Int on ", x.device(), ", got ", o.count.sizes(),
                " in ", o.count.scalar_type(), " on ", o.count.device());
  if (out.defined()) {
    TORCH_CHECK(out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == w.size(0), kLinearRows,
                ": expected out of shape [", x.size(0), ", ", w.size(0), "], got ", out.sizes());
    check_no_overlap(kLinearRows, out, {{"x", x}, {"w", w}, {"bias", o.bias}, {"count", o.count}});
  }
  TORCH_CHECK(!needs_gradient(kLinearRows, {x, w, o.bias}), kLinearRows,
              ": expected no gradient to be recorded; use torch.no_grad()");
}

// In float32, rounded once, as the kernel does.
void run_on_cpu(const dense_rows::Operands& o) {
  int64_t live = o.x.size(0);
  if (o.count.defined()) live = std::clamp<int64_t>(*o.count.const_data_ptr<int>(), 0, live);
  const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
  at::Tensor y = at::linear(wide(o.x.narrow(0, 0, live)), wide(o.w), wide(o.bias));
  if (o.activation == Activation::relu)
    y = at::relu(y);
  else if (o.activation != Activation::none)
    y = GeluOp::call(y, o.activation == Activation::gelu_tanh);
  o.out.narrow(0, 0, live).copy_(y);
}

void run(const dense_rows::Operands& o) {
#ifdef MATMULS_CUDA
  if (o.x.is_cuda()) {
    const OperationGuard guard(kLinearRows, o.x);
    TORCH_CHECK(dense_rows::fits(o), kLinearRows,
                ": expected a Hopper GPU, and x, w and out of contiguous rows of a multiple of 8 elements, 8 at least, "
                "that start at multiples of 16 bytes, got shapes ",
                o.x.sizes(), " and ", o.w.sizes(), " with strides ", o.x.strides(), ", ", o.w.strides(), " and ",
                o.out.strides());
    const auto how =
        dense_rows::choose(o.x.size(0), o.w.size(0), o.x.size(1), o.count.defined(), device_limits().multiprocessors);
    return dense_rows::launch(o, how);
  }
#endif
  TORCH_CHECK(o.x.is_cpu(), kLinearRows, ": expected x on a CPU or a GPU, got ", o.x.device());
  run_on_cpu(o);
}

}  // namespace

at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias,
                       std::optional<std::string_view> activation, const OptionalTensor& count,
                       const OptionalTensor& out) {
  dense_rows::Operands o{x,
                         w,
                         tensor_or_none(bias),
                         tensor_or_none(count),
                         tensor_or_none(out),
                         parse_activation(kLinearRows, activation)};
  check(o);
  if (!o.out.defined()) o.out = at::empty({x.size(0), w.size(0)}, x.options());
  if (o.out.numel() == 0) return o.out;
  run(o);
  mark_written(o.out);
  return o.out;
}

}  // namespace matmuls
