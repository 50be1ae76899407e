// The CPU and the operators of softmax and scaled_masked_softmax; rows/softmax.cu has the formula and the GPU.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "glue/handles.h"
#include "rows/explain.h"
#include "rows/ops.h"
#include "rows/softmax.h"

namespace matmuls {
namespace {

using at::Tensor;

int64_t check_x(const char* op, const Tensor& x, int64_t dim) {
  check_floating(op, "x", x);
  return check_dim(op, x, dim);
}

MaskKind check_mask(const char* op, const Tensor& x, const OptionalTensor& mask) {
  if (!mask || !mask->defined()) return MaskKind::none;
  TORCH_CHECK(mask->device() == x.device(), op, ": expected mask on ", x.device(), " as x is, got ", mask->device());
  TORCH_CHECK(mask->layout() == at::kStrided, op, ": expected mask to be a strided tensor, got layout ",
              mask->layout());
  bool broadcasts = mask->dim() <= x.dim();
  for (int64_t d = 1; broadcasts && d <= mask->dim(); ++d)
    broadcasts = mask->sym_size(-d) == 1 || mask->sym_size(-d) == x.sym_size(-d);
  TORCH_CHECK(broadcasts, op, ": expected a mask whose shape broadcasts to x's ", x.sym_sizes(), ", got ",
              mask->sym_sizes());
  const auto type = mask->scalar_type();
  if (type == at::kBool || type == at::kByte) return MaskKind::bytes;
  if (type == x.scalar_type()) return MaskKind::same;
  const bool narrow = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(type == at::kFloat && narrow, op, ": expected a mask in Bool, Byte", narrow ? ", Float" : "", " or ",
              x.scalar_type(), " as x is, got ", type);
  return MaskKind::float32;
}

void check_out(const char* op, const Tensor& x, const Tensor& out) {
  check_like(op, "out", out, "x", x);
  TORCH_CHECK(out.sym_sizes() == x.sym_sizes(), op, ": expected out of shape ", x.sym_sizes(), ", got ",
              out.sym_sizes());
}

// The function of cpu/row_functions.h that takes the rows of a call.
enum class CpuLoop { side_by_side, short_rows, row };
template <class T>
CpuLoop loop_of(const SoftmaxCall& c, const Rows<2>& rows) {
  if (c.mask.defined() || c.causal || is_batch_invariant()) return CpuLoop::row;
  if (lie_side_by_side<T>(rows, 2)) return CpuLoop::side_by_side;
  const bool contiguous = rows.column_strides[0] == 1 && rows.column_strides[1] == 1;
  const bool is_short = contiguous && softmax_short_rows<T>(nullptr, 0, nullptr, 0, 0, rows.columns, c.scale);
  return is_short ? CpuLoop::short_rows : CpuLoop::row;
}

void run_cpu(const SoftmaxCall& c) {
  if (c.out.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const char* mask = c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr;
  const int64_t element = c.mask.defined() ? c.mask.element_size() : 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    const scalar_t* x = c.x.const_data_ptr<scalar_t>();
    scalar_t* y = c.out.mutable_data_ptr<scalar_t>();
    const Rows<2>& data = rows.data;
    const auto& steps = data.column_strides;
    const CpuLoop loop = loop_of<scalar_t>(c, data);
    if (loop == CpuLoop::side_by_side)
      return for_rows_side_by_side<scalar_t>(data, kMostSideBySide, [&](int64_t row, int64_t width) {
        softmax_side_by_side(x + data.offset(0, row), steps[0], y + data.offset(1, row), steps[1], data.columns, width,
                             c.scale);
      });
    if (loop == CpuLoop::short_rows)
      return for_runs_of_rows(data, [&](int64_t row, int64_t count) {
        const int64_t x_step = data.dims > 0 ? data.strides[0][0] : 0, y_step = data.dims > 0 ? data.strides[1][0] : 0;
        softmax_short_rows(x + data.offset(0, row), x_step, y + data.offset(1, row), y_step, count, data.columns,
                           c.scale);
      });
    for_rows<scalar_t, 2>(rows.data.count, rows.data.columns, [&](int64_t row, RowBuffers<scalar_t, 2>& buffers) {
      const scalar_t* from = buffers.gather(0, x + rows.data.offset(0, row), rows.data.column_strides[0]);
      scalar_t* to = buffers.target(1, y + rows.data.offset(1, row), rows.data.column_strides[1]);
      const int64_t visible =
          c.causal ? std::min(rows.data.columns, rows.mask_rows.offset(1, row) + 1) : rows.data.columns;
      softmax_row(from, to, rows.data.columns, visible, c.scale,
                  MaskRow{c.kind, mask + rows.mask_rows.offset(0, row) * element, rows.mask_rows.column_strides[0]});
      buffers.scatter(to, y + rows.data.offset(1, row), rows.data.column_strides[1]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(SoftmaxOp, "custom_mm::softmax", "", Tensor(const Tensor&, int64_t));
MATMULS_OPERATOR(SoftmaxOutOp, "custom_mm::softmax", "out", void(const Tensor&, int64_t, Tensor));
MATMULS_OPERATOR(SoftmaxInplaceOp, "custom_mm::softmax_", "", void(Tensor, int64_t));
MATMULS_OPERATOR(MaskedInplaceOp, "custom_mm::scaled_masked_softmax_", "",
                 void(Tensor, const OptionalTensor&, double, bool));
using SoftmaxRunner = void(const SoftmaxCall&);

constexpr const char* kMasked = "scaled_masked_softmax";

void softmax_into(SoftmaxRunner run, const char* op, const Tensor& x, int64_t dim, const Tensor& out) {
  dim = check_x(op, x, dim);
  const bool in_place = out.is_same(x);
  if (!in_place) check_out(op, x, out);
  check_no_overlap(op, out, {{"x", in_place ? Tensor() : x}});
  run({.op = op, .x = at_least_1d(x), .out = at_least_1d(out), .dim = dim});
}

MaskKind check_masked(const Tensor& x, const OptionalTensor& mask, bool causal) {
  check_x(kMasked, x, -1);
  TORCH_CHECK(!causal || x.dim() >= 2, kMasked, ": expected x of at least two dimensions where causal, got ", x.dim());
  return check_mask(kMasked, x, mask);
}
// kind: as check_masked found it.
SoftmaxCall masked_call(const Tensor& x, const OptionalTensor& mask, MaskKind kind, double scale, bool causal,
                        const Tensor& out) {
  const Tensor wide = at_least_1d(x);
  const bool whole = kind == MaskKind::none || mask->sizes() == wide.sizes();
  return {.op = kMasked,
          .x = wide,
          .out = at_least_1d(out),
          .dim = wide.dim() - 1,
          .mask = kind == MaskKind::none ? Tensor()
                  : whole                ? *mask
                                         : mask->expand_as(wide),
          .kind = kind,
          .scale = scale,
          .causal = causal};
}

template <SoftmaxRunner run>
Tensor softmax(const Tensor& x, int64_t dim) {
  dim = check_x("softmax", x, dim);
  Tensor out = in_huge_pages(at::empty_like(x));
  run({.op = "softmax", .x = at_least_1d(x), .out = at_least_1d(out), .dim = dim});
  return out;
}
template <SoftmaxRunner run>
void softmax_out(const Tensor& x, int64_t dim, Tensor out) {
  softmax_into(run, "softmax", x, dim, out);
}
template <SoftmaxRunner run>
void softmax_(Tensor x, int64_t dim) {
  softmax_into(run, "softmax_", x, dim, x);
}
template <SoftmaxRunner run>
Tensor masked_softmax(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  const MaskKind kind = check_masked(x, mask, causal);
  Tensor out = in_huge_pages(at::empty_like(x));
  run(masked_call(x, mask, kind, scale, causal, out));
  return out;
}
template <SoftmaxRunner run>
void masked_softmax_(Tensor x, const OptionalTensor& mask, double scale, bool causal) {
  const MaskKind kind = check_masked(x, mask, causal);
  const SoftmaxCall call = masked_call(x, mask, kind, scale, causal, x);
  check_no_overlap(kMasked, x, {{"mask", kind == MaskKind::none ? Tensor() : *mask}});
  run(call);
}

// Meta kernels: the checks, and the shape.
Tensor softmax_meta(const Tensor& x, int64_t dim) {
  check_x("softmax", x, dim);
  return at::empty_like(x);
}
void softmax_out_meta(const Tensor& x, int64_t dim, Tensor out) {
  check_x("softmax", x, dim);
  check_out("softmax", x, out);
}
void softmax_inplace_meta(Tensor x, int64_t dim) { check_x("softmax_", x, dim); }
Tensor masked_meta(const Tensor& x, const OptionalTensor& mask, double, bool causal) {
  check_masked(x, mask, causal);
  return at::empty_like(x);
}
void masked_inplace_meta(Tensor x, const OptionalTensor& mask, double, bool causal) { check_masked(x, mask, causal); }

RowPlan explain(const SoftmaxCall& c, const OtherGpu& gpu) {
  if (c.x.numel() == 0) return {};
  const auto rows = rows_of_call(c);
  const CpuLoop loop = AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax",
                                                       [&] { return loop_of<scalar_t>(c, rows.data); });
  const char* const name = loop == CpuLoop::side_by_side ? "softmax_side_by_side"
                           : loop == CpuLoop::short_rows ? "softmax_short_rows"
                                                         : "softmax_row";
  return plan_of(c.op, c.x, facts_of_call(c, rows), gpu, name);
}

// ---------------------------------------------------------------------------------------------------------- gradient

// Computes the gradient of a mask from dz, the gradient of scale * x + mask: the sum of dz over the dimensions that the
// mask is broadcast along. The sum is in the mask's dtype: in x's, many 16-bit numbers would lose digits or overflow.
struct MaskGradient {
  std::vector<c10::SymInt> sizes;
  at::ScalarType dtype;

  Tensor of(const Tensor& dz) const {
    const auto lead = static_cast<size_t>(dz.dim()) - sizes.size();
    at::DimVector dims;
    for (size_t d = 0; d < static_cast<size_t>(dz.dim()); ++d)
      if (d < lead || sizes[d - lead] == 1) dims.push_back(static_cast<int64_t>(d));
    return dims.empty() ? dz : dz.sum(dims, /*keepdim=*/true, dtype).view_symint(sizes);
  }
};

// dx = scale * y * (dy - sum(y * dy)) needs only the result y, which in place is x itself.
struct SoftmaxGradient : KernelFunction<SoftmaxGradient> {
  struct Arguments {
    int64_t dim;
    double scale;
    bool masked, causal;
  };

  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const OptionalTensor& mask,
                        Arguments a) {
    const Tensor y = a.masked ? ScaledMaskedSoftmaxOp::below_autograd(x, mask, a.scale, a.causal)
                              : SoftmaxOp::below_autograd(x, a.dim);
    ctx->save_for_backward({y});
    // Few entries: each costs 0.1 us.
    const bool to_mask = mask && mask->requires_grad();
    ctx->saved_data["call"] = a.dim * 4 + to_mask * 2 + a.causal;
    ctx->saved_data["scale"] = a.scale;
    if (to_mask) {
      ctx->saved_data["mask_sizes"] = mask->sym_sizes();
      ctx->saved_data["mask_dtype"] = mask->scalar_type();
    }
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto& data = ctx->saved_data;
    const Tensor y = ctx->get_saved_variables()[0];
    const int64_t call = data["call"].toInt(), dim = call >> 2;
    const bool to_mask = call & 2, causal = call & 1;
    const double scale = data["scale"].toDouble();
    if (!to_mask) return {SoftmaxBackwardOp::call(y, grads[0], dim, scale, causal), {}, {}};
    const Tensor dz = SoftmaxBackwardOp::call(y, grads[0], dim, 1, causal);
    const MaskGradient mask{data["mask_sizes"].toSymIntVector(), data["mask_dtype"].toScalarType()};
    return {ctx->needs_input_grad(0) ? dz * scale : Tensor(), mask.of(dz), {}};
  }
};

// The in-place form needs a Node of its own. A Function that writes to a view either keeps it through a reference
// cycle, which frees the memory only if backward runs, or loses its history, which a second derivative needs.
struct SoftmaxInplaceGradient : torch::autograd::Node {
  torch::autograd::SavedVariable y;
  int64_t dim = -1;
  double scale = 1;
  bool causal = false, of_view = false;
  std::optional<MaskGradient> mask;  // if it wants a gradient

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor(), Tensor()};
    const Tensor result = y.unpack(held(this));
    if (mask) {
      const Tensor dz = SoftmaxBackwardOp::call(result, grad, dim, 1, causal);
      return {task_should_compute_output(0) ? dz * scale : Tensor(), mask->of(dz)};
    }
    // In place, the gradient should not take a second tensor of this size either, so dx overwrites grad if no one else
    // holds it. Outside the default stream and a capture, another stream may still read a tensor without owners.
    const bool alone = !grad.is_cuda() || is_capturing(grad.device()) || current_stream(grad.device()) == 0;
    if (!alone || !nobody_else_holds(grad))
      return {SoftmaxBackwardOp::call(result, grad, dim, scale, causal), Tensor()};
    SoftmaxBackwardOutOp::call(result, grad, dim, scale, causal, grad);
    return {grad, Tensor()};
  }

  // For a view, autograd releases this node as a whole. Until then a second derivative may reach it twice: through the
  // history of the base and, once the view is gone, through that of y.
  void release_variables() override {
    if (of_view) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    y.reset_data();
  }

  std::string name() const override { return "SoftmaxInplaceGradient"; }
};

// Runs write() over x and records it.
template <class Write>
void record_in_place(const char* op, const Tensor& x, const Tensor& mask, int64_t dim, double scale, bool causal,
                     const Write& write) {
  check_recorded(op, x);
  const auto node = new_node<SoftmaxInplaceGradient>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, mask));
  node->dim = dim, node->scale = scale, node->causal = causal, node->of_view = x.is_view();
  if (mask.defined() && mask.requires_grad()) node->mask = MaskGradient{mask.sym_sizes().vec(), mask.scalar_type()};
  write();
  torch::autograd::rebase_history(x, NodePtr(node));
  node->y = torch::autograd::SavedVariable(x, /*is_output=*/true, /*is_inplace_on_view=*/x.is_view());
}

Tensor softmax_autograd(const Tensor& x, int64_t dim) {
  if (!needs_gradient("softmax", {x})) return SoftmaxOp::below_autograd(x, dim);
  return SoftmaxGradient::apply(x, std::nullopt, SoftmaxGradient::Arguments{dim, 1, false, false});
}
void softmax_out_autograd(const Tensor& x, int64_t dim, Tensor out) {
  check_no_gradient_into("softmax", "out", {x, out});
  SoftmaxOutOp::below_autograd(x, dim, out);
}
void softmax_inplace_autograd(Tensor x, int64_t dim) {
  const auto write = [&] { SoftmaxInplaceOp::below_autograd(x, dim); };
  needs_gradient("softmax_", {x}) ? record_in_place("softmax_", x, {}, dim, 1, false, write) : write();
}
Tensor masked_autograd(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  const Tensor m = tensor_or_none(mask);
  if (!needs_gradient(kMasked, {x, m})) return ScaledMaskedSoftmaxOp::below_autograd(x, mask, scale, causal);
  return SoftmaxGradient::apply(x, mask, SoftmaxGradient::Arguments{-1, scale, true, causal});
}
void masked_inplace_autograd(Tensor x, const OptionalTensor& mask, double scale, bool causal) {
  const Tensor m = tensor_or_none(mask);
  const auto write = [&] { MaskedInplaceOp::below_autograd(x, mask, scale, causal); };
  needs_gradient(kMasked, {x, m}) ? record_in_place(kMasked, x, m, -1, scale, causal, write) : write();
}

// Autocast follows torch.softmax: float32 on a GPU, x's dtype on a CPU. In place the dtype stays.
Tensor softmax_autocast(const Tensor& x, int64_t dim) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return SoftmaxOp::call(autocast_to(at::kFloat, x, at::kCUDA), dim);
}
template <c10::DeviceType device>
Tensor masked_autocast(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Tensor from = device == at::kCUDA ? autocast_to(at::kFloat, x, device) : x;
  const bool casts = mask && mask->defined() && mask->is_floating_point() && mask->scalar_type() != from.scalar_type();
  return ScaledMaskedSoftmaxOp::call(from, casts ? autocast_to(at::kFloat, mask, device) : mask, scale, causal);
}

}  // namespace

RowPlan explain_softmax(const char* op, const Tensor& x, int64_t dim, const OptionalTensor& out, const OtherGpu& gpu) {
  dim = check_x(op, x, dim);
  if (out) check_out(op, x, *out);
  const Tensor y = out ? *out : at::empty_like(x, x.options().device(at::kMeta));
  return explain({.op = op, .x = at_least_1d(x), .out = at_least_1d(y), .dim = dim}, gpu);
}
RowPlan explain_masked_softmax(const Tensor& x, const OptionalTensor& mask, double scale, bool causal,
                               const OptionalTensor& out, const OtherGpu& gpu) {
  const MaskKind kind = check_masked(x, mask, causal);
  const Tensor y = out ? *out : at::empty_like(x, x.options().device(at::kMeta));
  return explain(masked_call(x, mask, kind, scale, causal, y), gpu);
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("softmax(Tensor x, int dim=-1) -> Tensor", tags);
  m.def("softmax.out(Tensor x, int dim=-1, *, Tensor(a!) out) -> ()", tags);
  m.def("softmax_(Tensor(a!) x, int dim=-1) -> ()", tags);
  m.def("scaled_masked_softmax(Tensor x, Tensor? mask=None, float scale=1.0, bool causal=False) -> Tensor", tags);
  m.def("scaled_masked_softmax_(Tensor(a!) x, Tensor? mask=None, float scale=1.0, bool causal=False) -> ()", tags);
}

MATMULS_KERNELS("softmax", softmax<run_cpu>, softmax<run_cuda>, softmax_meta, softmax_autograd)
MATMULS_KERNELS("softmax.out", softmax_out<run_cpu>, softmax_out<run_cuda>, softmax_out_meta, softmax_out_autograd)
MATMULS_KERNELS("softmax_", softmax_<run_cpu>, softmax_<run_cuda>, softmax_inplace_meta, softmax_inplace_autograd)
MATMULS_KERNELS("scaled_masked_softmax", masked_softmax<run_cpu>, masked_softmax<run_cuda>, masked_meta,
                masked_autograd)
MATMULS_KERNELS("scaled_masked_softmax_", masked_softmax_<run_cpu>, masked_softmax_<run_cuda>, masked_inplace_meta,
                masked_inplace_autograd)
MATMULS_WRITES("softmax.out", SoftmaxOutOp, 2)
MATMULS_WRITES("softmax_", SoftmaxInplaceOp, 0)
MATMULS_WRITES("scaled_masked_softmax_", MaskedInplaceOp, 0)

TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) {
  m.impl("softmax", torch::CppFunction::makeFallthrough());
  m.impl("scaled_masked_softmax", masked_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) {
  m.impl("softmax", softmax_autocast);
  m.impl("scaled_masked_softmax", masked_autocast<at::kCUDA>);
}

}  // namespace matmuls
