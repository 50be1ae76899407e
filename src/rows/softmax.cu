// softmax and its scaled, masked and causal form: y = exp(z - max z) / sum exp(z - max z) along one dimension, with z =
// scale * x + mask, in place or into another tensor.
//
// A masked column gets 0; a row whose columns are all masked is 0; NaN propagates as in torch.softmax. Statistics and
// the scale are float32 (float64 for float64). Each element is read once and written once.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <cmath>

#include "glue/checks.h"
#include "glue/masks.h"
#include "glue/rows.h"

namespace matmuls {

// One checked call. In place, `out` is x.
struct SoftmaxCall {
  const char* op;
  at::Tensor x, out;
  int64_t dim = -1;
  at::Tensor mask = {};  // expanded to x's sizes: stride 0 in broadcast dimensions
  MaskKind kind = MaskKind::none;
  double scale = 1;
  bool causal = false;

  bool masked() const { return kind != MaskKind::none || causal || scale != 1; }
};
void run_cuda(const SoftmaxCall& c);

namespace {

using at::Tensor;
using Call = SoftmaxCall;

// data: rows of x and out. beside: rows of the mask, and of the query's position, the index along the last but one
// dimension expressed as an offset. Fewer dimensions of these merge.
struct CallRows {
  Rows<2> data, beside;
};
CallRows rows_of_call(const Call& c) {
  const int64_t dims = c.x.dim();
  const auto position = position_strides(dims, c.causal);
  auto order = innermost_first(dims);
  if (c.kind != MaskKind::none && dims > 2 && c.x.stride(-2) != 0) {
    // If more than 16 MB of x pass before a mask row is needed again (by the next head), the dimensions that share the
    // row become the innermost ones, so that it is still in the L2.
    const int64_t between = 2 * c.x.size(-1) * c.x.size(-2) * c.x.element_size();
    if (between > (int64_t{16} << 20))
      std::stable_partition(order.begin(), order.end(),
                            [&](int64_t d) { return c.mask.stride(d) == 0 && d < dims - 2; });
  }
  const at::IntArrayRef mask = c.mask.defined() ? c.mask.strides() : at::IntArrayRef{};
  return {rows_of<2>(c.op, c.x.sizes(), {c.x.strides(), c.out.strides()}, c.dim, order),
          rows_of<2>(c.op, c.x.sizes(), {mask, position}, c.dim, order)};
}

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "rows/kernels/even_rows.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/kernels/two_pass.cuh"
#include "rows/launch_rows.cuh"
#include "rows/softmax_math.cuh"

namespace matmuls {
namespace {

// True if the mask allows vector loads: V columns of x match V elements of the mask, aligned to their size or 16 bytes.
bool by_words(const Call& c, const Rows<2>& beside, int V) {
  if (!c.mask.defined()) return true;
  const int64_t element = c.mask.element_size(), bytes = std::min<int64_t>(V * element, 16);
  bool aligned = beside.column_strides[0] == 1 && reinterpret_cast<uintptr_t>(c.mask.const_data_ptr()) % bytes == 0;
  for (int d = 0; d < beside.dims; ++d) aligned &= beside.strides[0][d] * element % bytes == 0;
  return aligned;
}

template <class T, class Mask, bool holds = true, bool anywhere = false>
Softmax<T, Mask, holds, anywhere> operation(const Call& c, const CallRows& rows) {
  using Op = Softmax<T, Mask, holds, anywhere>;
  return {decltype(Op::index)(rows.data),
          RowIndex<2, 3>(rows.beside),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr,
          rows.data.column_strides[0],
          rows.data.column_strides[1],
          rows.beside.column_strides[0],
          c.mask.defined() ? static_cast<int>(c.mask.element_size()) : 0,
          c.kind,
          c.causal,
          static_cast<arithmetic_t<T>>(c.scale)};
}

template <class T, class Mask, bool holds = true>
void launch(const Call& c, const CallRows& rows) {
  const auto op = operation<T, Mask, holds>(c, rows);
  launch_rows(op, rows.data, std::array<const void*, 2>{op.x, op.y});
}

// 16-bit rows that give each thread of row_kernel exactly four vectors: 1 to 2 % faster there.
bool shared_by_fours(int64_t columns) { return columns == 2048 || columns == 4096; }

float packed_factor(const Call& c) { return static_cast<float>(std::abs(c.scale)) * kLog2e; }

template <class T, bool bytes, bool ends, bool anywhere = false>
PackedSoftmax<T, bytes, ends, anywhere> packed(const Call& c, const CallRows& rows) {
  return {RowIndex<2, 3>(rows.data),
          RowIndex<2, 3>(rows.beside),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          bytes ? static_cast<const unsigned char*>(c.mask.const_data_ptr()) : nullptr,
          c.causal,
          c.scale < 0,
          packed_factor(c)};
}

// Byte masks, causal rows and both, in packed 16-bit arithmetic. If `ragged` (unaligned rows of x; mask rows may start
// anywhere) returns false, launching nothing, for lengths without a kernel.
template <class T, bool bytes, bool ends, bool ragged>
bool launch_packed(const Call& c, const CallRows& rows) {
  constexpr bool anywhere = ragged && bytes;
  const auto op = packed<T, bytes, ends, anywhere>(c, rows);
  const Rows<2>& data = rows.data;
  if constexpr (ragged) {
    return launch_ragged_warps(op, data) || launch_nearly_even<true, 5, 6, 7, 8>(op, data);
  } else {
    if (data.count <= INT32_MAX) {
      if (data.columns == 128) return launch_even_rows<ends ? 4 : 2, ends ? 4 : 8, true>(op, data), true;
      // 512 and 1024 causal columns: 0.90 and 0.93 of a copy; 0.87 and 0.92 by row_kernel.
      if constexpr (ends) {
        if (launch_even_fours<16, 32>(op, data)) return true;
        // 1032 and 1280 causal columns: 0.93 and 0.94 of a copy; 0.56 and 0.69 by row_kernel.
        if (!shared_by_fours(data.columns) && launch_warps<5, 6, 7, 8>(op, data)) return true;
      }
    }
    if (data.columns > 1024 && !shared_by_fours(data.columns))
      if (launch_nearly_even<false, 5, 6, 7, 8>(op, data)) return true;
    launch_rows(op, data, std::array<const void*, 2>{op.x, op.y});
    return true;
  }
}
// The same for a mask of type Mask.
template <class T, class Mask, bool ragged>
bool launch_behind(const Call& c, const CallRows& rows) {
  const auto op = operation<T, Mask, true, ragged>(c, rows);
  const Rows<2>& data = rows.data;
  constexpr int kMost = sizeof(T) == 4 ? 8 : 6;  // vectors of 16-bit elements take twice the registers
  if constexpr (ragged) {
    if constexpr (sizeof(T) == 2)
      if (launch_ragged_warps(op, data)) return true;
    return launch_nearly_even<true, 3, 4, 5, kMost>(op, data);
  } else {
    if (data.columns > 1024 && !shared_by_fours(data.columns))
      if (launch_nearly_even<false, 3, 4, 5, kMost>(op, data)) return true;
    launch_rows(op, data, std::array<const void*, 2>{op.x, op.y});
    return true;
  }
}

// Selects the kernel for the kind of mask, with 16-byte vectors. Returns false, launching nothing, if there is none.
template <class T, bool ragged>
bool launch_by_kind(const Call& c, const CallRows& rows) {
  if (c.kind == MaskKind::same) {
    if (sizeof(T) == 2 && !std::isfinite(static_cast<float>(c.scale))) return false;  // 0 * inf would be NaN
    return launch_behind<T, T, ragged>(c, rows);
  }
  if constexpr (sizeof(T) == 2) {
    if (c.kind == MaskKind::float32) return launch_behind<T, float, ragged>(c, rows);
    if (!std::isfinite(packed_factor(c)) || packed_factor(c) <= 1e-30f) return false;
    if (c.kind == MaskKind::none) return launch_packed<T, false, true, ragged>(c, rows);
    return c.causal ? launch_packed<T, true, true, ragged>(c, rows) : launch_packed<T, true, false, ragged>(c, rows);
  } else {
    return launch_behind<T, uint8_t, ragged>(c, rows);
  }
}

constexpr int kTiledMost = 800;
// The most columns for which unaligned 16-bit rows are staged through shared memory. Shares of a copy on an H100,
// staged and (by vectors):
//
//   added mask [B,1,1,K], as many bytes as x   131 columns .88 (.57), 785 .95 (.81), 1025 .85 (.88)
//   no mask                                    197 .98 (.95), 257 .98 (1.01)
//   causal, of which vectors read half         150 .65 (.61), 197 .65 (.72)
//   byte mask [B,1,Q,K]                        150 .74 (.81)
int short_columns(const Call& c) {
  if (c.kind == MaskKind::bytes) return 127;
  if (c.kind == MaskKind::none) return c.causal ? 160 : 208;
  return kTiledMost;
}

template <class T>
void launch_masked(const Call& c, const CallRows& rows) {
  constexpr int V = 16 / sizeof(T);
  if constexpr (V > 2) {
    const auto a = alignment_of<T>(rows.data, std::array{c.x.const_data_ptr(), c.out.const_data_ptr()});
    if (a.whole && by_words(c, rows.beside, V) && launch_by_kind<T, false>(c, rows)) return;
    // Unaligned rows. Short ones are staged element by element, longer ones and their masks go by vectors. Float32 rows
    // are staged at every length that has a kernel (2048 columns: 0.82 of a copy, 0.69 otherwise); aligned float32 rows
    // with an unaligned mask are not.
    constexpr bool narrow = sizeof(T) == 2;
    if (a.vectors && (narrow || !a.whole)) {
      const bool is_short = !a.whole && (!narrow || rows.data.columns <= short_columns(c));
      if (is_short && launch_short_rows<2, narrow ? kTiledMost : INT_MAX>(operation<T, AnyMask>(c, rows), rows.data))
        return;
      const bool by_vectors = !c.mask.defined() || rows.beside.column_strides[0] == 1;
      if (rows.data.columns > 127 && by_vectors && launch_by_kind<T, true>(c, rows)) return;
    }
  }
  launch<T, AnyMask>(c, rows);
}

// softmax without a mask. Rows of middle length keep their exponentials in registers. Longer ones use few threads with
// many vectors each, which compute the exponentials twice. The longest are held in registers and shared memory
// (two_pass).
template <class T>
void launch_plain(const Call& c, const CallRows& rows) {
  const auto a = alignment_of<T>(rows.data, std::array{c.x.const_data_ptr(), c.out.const_data_ptr()});
  const int64_t columns = rows.data.columns, bytes = columns * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) <= 4) {
    // 513 to 672 float32 columns are five to six vectors for each lane of a warp.
    const bool fives = sizeof(T) == 4 && columns > 512 && columns <= 672;
    const bool few_threads = fives || bytes > (sizeof(T) == 2 ? 2 : 16) * 1024;
    if (a.vectors && !a.whole && launch_short_rows<2>(operation<T, NoMask>(c, rows), rows.data)) return;
    if (a.vectors && few_threads && !shared_by_fours(columns)) {
      const auto again = operation<T, NoMask, false>(c, rows);
      if (a.whole ? launch_nearly_even<false, 5, 6, 7, 8>(again, rows.data)
                  : launch_nearly_even<true, 5, 6, 7, 8>(again, rows.data))
        return;
      if (bytes > 32768 && launch_held_rows(again, rows.data)) return;
    }
  }
  if (a.whole && bytes > 16384) return launch<T, NoMask, false>(c, rows);
  launch<T, NoMask>(c, rows);
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.out.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  const auto rows = rows_of_call(c);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    if (c.masked())
      launch_masked<scalar_t>(c, rows);
    else
      launch_plain<scalar_t>(c, rows);
  });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "glue/handles.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

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
  TORCH_CHECK(type == at::kFloat && x.scalar_type() != at::kDouble, op, ": expected a mask in Bool, Byte, ",
              x.scalar_type(), " as x is", x.scalar_type() == at::kDouble ? "" : " or Float", ", got ", type);
  return MaskKind::float32;
}

void check_out(const char* op, const Tensor& x, const Tensor& out) {
  check_like(op, "out", out, "x", x);
  TORCH_CHECK(out.sym_sizes() == x.sym_sizes(), op, ": expected out of shape ", x.sym_sizes(), ", got ",
              out.sym_sizes());
}

void run_cpu(const Call& c) {
  if (c.out.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const char* mask = c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr;
  const int64_t element = c.mask.defined() ? c.mask.element_size() : 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    const scalar_t* x = c.x.const_data_ptr<scalar_t>();
    scalar_t* y = c.out.mutable_data_ptr<scalar_t>();
    const Rows<2>& data = rows.data;
    const auto& steps = data.column_strides;
    if (!c.mask.defined() && !c.causal) {
      const auto side_by_side = [&](int64_t row, int64_t width) {
        softmax_side_by_side(x + data.offset(0, row), steps[0], y + data.offset(1, row), steps[1], data.columns, width,
                             c.scale);
      };
      const auto short_rows = [&](int64_t row, int64_t count) {
        const int64_t x_step = data.dims > 0 ? data.strides[0][0] : 0, y_step = data.dims > 0 ? data.strides[1][0] : 0;
        return softmax_short_rows(x + data.offset(0, row), x_step, y + data.offset(1, row), y_step, count, data.columns,
                                  c.scale);
      };
      if (for_rows_side_by_side<scalar_t>(data, 2, kMostSideBySide, side_by_side)) return;
      if (steps[0] == 1 && steps[1] == 1 && short_rows(0, 0)) return for_runs_of_rows(data, short_rows);
    }
    for_rows<scalar_t, 2>(rows.data.count, rows.data.columns, [&](int64_t row, RowBuffers<scalar_t, 2>& buffers) {
      const scalar_t* from = buffers.gather(0, x + rows.data.offset(0, row), rows.data.column_strides[0]);
      scalar_t* to = buffers.target(1, y + rows.data.offset(1, row), rows.data.column_strides[1]);
      const int64_t visible =
          c.causal ? std::min(rows.data.columns, rows.beside.offset(1, row) + 1) : rows.data.columns;
      softmax_row(from, to, rows.data.columns, visible, c.scale,
                  MaskRow{c.kind, mask + rows.beside.offset(0, row) * element, rows.beside.column_strides[0]});
      buffers.scatter(to, y + rows.data.offset(1, row), rows.data.column_strides[1]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(SoftmaxOp, "custom_mm::softmax", "", Tensor(const Tensor&, int64_t));
MATMULS_OPERATOR(SoftmaxOutOp, "custom_mm::softmax", "out", void(const Tensor&, int64_t, Tensor));
MATMULS_OPERATOR(SoftmaxInplaceOp, "custom_mm::softmax_", "", void(Tensor, int64_t));
MATMULS_OPERATOR(MaskedOp, "custom_mm::scaled_masked_softmax", "",
                 Tensor(const Tensor&, const OptionalTensor&, double, bool));
MATMULS_OPERATOR(MaskedInplaceOp, "custom_mm::scaled_masked_softmax_", "",
                 void(Tensor, const OptionalTensor&, double, bool));
using Runner = void(const Call&);

constexpr const char* kMasked = "scaled_masked_softmax";

void softmax_into(Runner run, const char* op, const Tensor& x, int64_t dim, const Tensor& out) {
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
void masked_into(Runner run, const Tensor& x, const OptionalTensor& mask, double scale, bool causal,
                 const Tensor& out) {
  const MaskKind kind = check_masked(x, mask, causal);
  check_no_overlap(kMasked, out, {{"mask", kind == MaskKind::none ? Tensor() : *mask}});
  const Tensor wide = at_least_1d(x);
  run({.op = kMasked,
       .x = wide,
       .out = at_least_1d(out),
       .dim = wide.dim() - 1,
       .mask = kind == MaskKind::none ? Tensor() : mask->expand_as(wide),
       .kind = kind,
       .scale = scale,
       .causal = causal});
}

template <Runner run>
Tensor softmax(const Tensor& x, int64_t dim) {
  check_x("softmax", x, dim);
  Tensor out = in_huge_pages(at::empty_like(x));
  softmax_into(run, "softmax", x, dim, out);
  return out;
}
template <Runner run>
void softmax_out(const Tensor& x, int64_t dim, Tensor out) {
  softmax_into(run, "softmax", x, dim, out);
}
template <Runner run>
void softmax_(Tensor x, int64_t dim) {
  softmax_into(run, "softmax_", x, dim, x);
}
template <Runner run>
Tensor masked_softmax(const Tensor& x, const OptionalTensor& mask, double scale, bool causal) {
  check_masked(x, mask, causal);
  Tensor out = in_huge_pages(at::empty_like(x));
  masked_into(run, x, mask, scale, causal, out);
  return out;
}
template <Runner run>
void masked_softmax_(Tensor x, const OptionalTensor& mask, double scale, bool causal) {
  masked_into(run, x, mask, scale, causal, x);
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

// ---------------------------------------------------------------------------------------------------------- gradient

// dx = scale * y * (dy - sum(y * dy)) needs only the result y, which in place is x itself. If the mask wants a
// gradient, its sizes are kept too.
struct SoftmaxGradient : KernelFunction<SoftmaxGradient> {
  struct Arguments {
    int64_t dim;
    double scale;
    bool masked, causal;
  };

  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const OptionalTensor& mask,
                        Arguments a) {
    const Tensor y =
        a.masked ? MaskedOp::below_autograd(x, mask, a.scale, a.causal) : SoftmaxOp::below_autograd(x, a.dim);
    ctx->save_for_backward({y});
    ctx->saved_data["dim"] = a.dim;
    ctx->saved_data["scale"] = a.scale;
    ctx->saved_data["causal"] = a.causal;
    if (mask && mask->requires_grad()) ctx->saved_data["mask_sizes"] = mask->sym_sizes();
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto& data = ctx->saved_data;
    const Tensor y = ctx->get_saved_variables()[0];
    const auto dim = data["dim"].toInt();
    const auto scale = data["scale"].toDouble();
    const auto causal = data["causal"].toBool();
    if (!data.count("mask_sizes")) return {SoftmaxBackwardOp::call(y, grads[0], dim, scale, causal), {}, {}};
    const Tensor dz = SoftmaxBackwardOp::call(y, grads[0], dim, 1, causal);
    return {dz * scale, at::sum_to(dz, data["mask_sizes"].toSymIntVector()), {}};
  }
};

// The in-place form needs a Node of its own. A Function that writes to a view either keeps it through a reference
// cycle, which frees the memory only if backward runs, or loses its history, which a second derivative needs.
struct SoftmaxInplaceGradient : torch::autograd::Node {
  torch::autograd::SavedVariable y;
  int64_t dim = -1;
  double scale = 1;
  bool causal = false, of_view = false;
  std::optional<std::vector<c10::SymInt>> mask_sizes;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor(), Tensor()};
    const Tensor result = y.unpack(held(this));
    if (mask_sizes) {
      const Tensor dz = SoftmaxBackwardOp::call(result, grad, dim, 1, causal);
      return {dz * scale, at::sum_to(dz, *mask_sizes)};
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
  if (mask.defined() && mask.requires_grad()) node->mask_sizes = mask.sym_sizes().vec();
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
  if (!needs_gradient(kMasked, {x, m})) return MaskedOp::below_autograd(x, mask, scale, causal);
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
  return MaskedOp::call(from, casts ? autocast_to(at::kFloat, mask, device) : mask, scale, causal);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("softmax(Tensor x, int dim=-1) -> Tensor", tags);
  m.def("softmax.out(Tensor x, int dim=-1, *, Tensor(a!) out) -> ()", tags);
  m.def("softmax_(Tensor(a!) x, int dim=-1) -> ()", tags);
  m.def("scaled_masked_softmax(Tensor x, Tensor? mask=None, float scale=1.0, bool causal=False) -> Tensor", tags);
  m.def("scaled_masked_softmax_(Tensor(a!) x, Tensor? mask=None, float scale=1.0, bool causal=False) -> ()", tags);
}

#define MATMULS_SOFTMAX_KERNELS(run)                    \
  m.impl("softmax", softmax<run>);                      \
  m.impl("softmax.out", softmax_out<run>);              \
  m.impl("softmax_", softmax_<run>);                    \
  m.impl("scaled_masked_softmax", masked_softmax<run>); \
  m.impl("scaled_masked_softmax_", masked_softmax_<run>);

TORCH_LIBRARY_IMPL(custom_mm, CPU, m){MATMULS_SOFTMAX_KERNELS(run_cpu)}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m){MATMULS_SOFTMAX_KERNELS(run_cuda)}
#endif

TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("softmax", softmax_meta);
  m.impl("softmax.out", softmax_out_meta);
  m.impl("softmax_", softmax_inplace_meta);
  m.impl("scaled_masked_softmax", masked_meta);
  m.impl("scaled_masked_softmax_", masked_inplace_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("softmax", softmax_autograd);
  m.impl("softmax.out", softmax_out_autograd);
  m.impl("softmax_", softmax_inplace_autograd);
  m.impl("scaled_masked_softmax", masked_autograd);
  m.impl("scaled_masked_softmax_", masked_inplace_autograd);
}
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
#endif
