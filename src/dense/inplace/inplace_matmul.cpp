// matmul_: a <- a @ op(b) + bias, over a's own rows, with a workspace that does not grow with a.
//
// A row of the result needs only the same row of a. On Hopper one kernel does the product (panels_sm90.cu). Elsewhere a
// panel of rows is copied to the workspace, and cuBLAS (torch's BLAS on the CPU) writes the product over the panel; on
// a GPU two streams do so.
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "dense/gemm.h"
#include "dense/inplace/inplace_matmul.h"
#include "dense/invariant/cpu.h"
#include "dense/ops.h"
#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "glue/batch_invariance.h"
#include "glue/kernel_switch.h"

#ifdef MATMULS_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "glue/handles.h"
#include "gpu/second_stream.h"
#endif

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char* kInplaceOp = "matmul_";

struct Call {
  Tensor a, b, bias;
  bool transb;
  int64_t workspace;  // bytes

  int64_t columns() const { return b.size(transb ? 0 : 1); }
};

template <class Int>
void check_sizes(c10::ArrayRef<Int> a, c10::ArrayRef<Int> b, const Tensor& bias, c10::ArrayRef<Int> bias_sizes,
                 bool transb) {
  TORCH_CHECK(b.size() == 2, kInplaceOp, ": expected b of two dimensions, got shape ", b);
  const auto shape = product_shape(kInplaceOp, a, b, false, transb);
  TORCH_CHECK(at_most(shape.n, shape.k), kInplaceOp, ": expected a product no wider than a, ", shape.k,
              " columns, got ", shape.n);
  if (bias.defined()) check_bias(kInplaceOp, bias_sizes, shape);
}

void check_types(const Tensor& a, const Tensor& b, const Tensor& bias) {
  check_operands(kInplaceOp, a, b, bias);
  TORCH_CHECK(!a.is_complex(), kInplaceOp, ": expected a of a floating-point dtype, got ", a.scalar_type());
}

template <class Int>
void check_workspace(const Int& row_bytes, const Int& workspace) {
  TORCH_CHECK(at_most(row_bytes, workspace), kInplaceOp, ": expected a workspace of at least one row of a, ", row_bytes,
              " bytes, got ", workspace);
}

void check(const Call& c) {
  check_types(c.a, c.b, c.bias);
  check_sizes(c.a.sizes(), c.b.sizes(), c.bias, c.bias.defined() ? c.bias.sizes() : at::IntArrayRef(), c.transb);
  check_workspace(c.a.size(-1) * c.a.element_size(), c.workspace);
  check_no_overlap(kInplaceOp, c.a, {{"b", c.b}, {"bias", c.bias}});
}

// Calls f for a as matrices with one row stride; few tensors need more than one.
template <class F>
void each_matrix(const Tensor& a, const F& f) {
  if (a.dim() == 1) return f(a.unsqueeze(0));
  if (a.dim() == 2) return f(a);
  const std::array<int64_t, 2> matrix{a.numel() / a.size(-1), a.size(-1)};
  if (at::detail::computeStride(a.sizes(), a.strides(), matrix)) return f(a.view(matrix));
  for (int64_t i = 0; i < a.size(0); ++i) each_matrix(a.select(0, i), f);
}

// t.narrow without a view where it is all of t: a view costs the host a microsecond.
Tensor part_of(const Tensor& t, int64_t dim, int64_t begin, int64_t size) {
  return size == t.size(dim) ? t : t.narrow(dim, begin, size);
}

// Panels of rows of a, and copies of them in turn. Panel i is copied to copies[i % copies.size()].
struct Panels {
  Tensor a;
  int64_t columns;  // of the result
  int64_t rows;     // of a panel; the last one may have fewer
  std::vector<Tensor> copies;

  // `most` copies at most, all in the workspace. The rows are a multiple of `multiple`, where they are enough.
  Panels(const Tensor& a, int64_t columns, int64_t workspace, int64_t multiple, int64_t most) : a(a), columns(columns) {
    // If a's columns are strided, the library's result passes through a second buffer.
    const int64_t buffers = a.size(1) > 1 && a.stride(1) != 1 ? 2 : 1;
    const int64_t row_bytes = buffers * a.size(1) * a.element_size();
    const int64_t all = std::max<int64_t>(1, workspace / row_bytes);
    const int64_t count = all >= a.size(0) || all < most ? 1 : most;  // one copy, if it holds all rows
    const int64_t fit = all / count, panels = ceil_of(a.size(0), fit), even = ceil_of(a.size(0), panels);
    rows = std::min(fit, ceil_of(even, multiple) * multiple);
    for (int64_t i = 0; i < count; ++i)
      copies.push_back(at::empty({std::min(rows, a.size(0)), a.size(1)}, a.options()));
  }

  int64_t count() const { return ceil_of(a.size(0), rows); }

  // Calls product(from, to): to <- from @ op(b) + bias. `from` is a copy of the rows of a that contain `to`.
  template <class Product>
  void multiply(int64_t i, const Product& product) const {
    const int64_t begin = i * rows, size = std::min(rows, a.size(0) - begin);
    const Tensor here = part_of(a, 0, begin, size);
    const Tensor from = part_of(copies[static_cast<size_t>(i) % copies.size()], 0, 0, size);
    from.copy_(here);
    product(from, part_of(here, 1, 0, columns));
  }
};

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef MATMULS_CUDA
// Two streams take the panels in turn, so that the GPU is not left idle by the copies and by each product's last
// blocks:
//
//    current stream   copy 0, product 0 | copy 2, product 2 | ...
//    second stream      copy 1, product 1 | copy 3, product 3 | ...
template <class Product>
void multiply_on_two_streams(const Panels& panels, const Product& product) {
  if (panels.copies.size() == 1) {
    for (int64_t i = 0; i < panels.count(); ++i) panels.multiply(i, product);
    return;
  }
  Concurrent concurrent;
  for (int64_t i = 0; i < panels.count(); ++i) {
    std::optional<c10::cuda::CUDAStreamGuard> guard;
    if (i % 2 == 1) guard.emplace(concurrent.stream());
    panels.multiply(i, product);
  }
  concurrent.join();
}

void run_cuda(const Call& c) {
  if (c.a.numel() == 0 || c.columns() == 0) return;
  const OperationGuard guard(kInplaceOp, c.a);
  each_matrix(c.a, [&](const Tensor& a) {
    // The kernels of Hopper are chosen by the number of rows.
    if (!is_batch_invariant() && multiply_in_place_sm90(a, c.b, c.bias, c.transb)) return;
    TORCH_CHECK_VALUE(!KernelSwitch<InplaceKernel>::is_off(InplaceKernel::workspace), kInplaceOp,
                      ": every kernel that takes this product is switched off, workspace the last");
    // Multiples of 128 rows at most: a panel then ends at a tile's end.
    multiply_on_two_streams(Panels(a, c.columns(), c.workspace, 128, 2), [&](const Tensor& from, const Tensor& to) {
      if (c.bias.defined())
        LtMatmulOutOp::call(from, c.b, c.bias, std::nullopt, false, c.transb, to);
      else
        MatmulOutOp::call(from, c.b, false, c.transb, to);
    });
  });
}
#endif

constexpr int64_t kPanelBytes = 2 << 20;  // stays in the caches between the copy and the product

void run_cpu(const Call& c) {
  if (c.a.numel() == 0 || c.columns() == 0) return;
  const Tensor b = c.transb ? c.b.t() : c.b;
  each_matrix(c.a, [&](const Tensor& a) {
    const Panels panels(a, c.columns(), std::min(c.workspace, kPanelBytes), 1, 1);
    const auto product = [&](const Tensor& from, Tensor to) {
      if (is_batch_invariant())
        batch_invariant_product_cpu(kInplaceOp, from, b, c.bias, to, false, false);
      else if (c.bias.defined())
        at::addmm_out(to, c.bias, from, b);
      else
        at::mm_out(to, from, b);
    };
    for (int64_t i = 0; i < panels.count(); ++i) panels.multiply(i, product);
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(InplaceOp, "custom_mm::matmul_", "",
                 void(Tensor, const Tensor&, bool, const OptionalTensor&, bool, int64_t));

template <void run(const Call&)>
void matmul_(Tensor a, const Tensor& b, bool transb, const OptionalTensor& bias, bool, int64_t workspace) {
  const Call c{a, b, tensor_or_none(bias), transb, workspace};
  check(c);
  at::AutoDispatchBelowADInplaceOrView guard;
  run(c);
}

void inplace_meta(Tensor a, const Tensor& b, bool transb, const OptionalTensor& maybe_bias, bool, int64_t workspace) {
  const Tensor bias = tensor_or_none(maybe_bias);
  check_types(a, b, bias);
  check_sizes(a.sym_sizes(), b.sym_sizes(), bias, bias.defined() ? bias.sym_sizes() : c10::SymIntArrayRef(), transb);
  check_workspace<c10::SymInt>(a.sym_size(-1) * a.element_size(), workspace);
}

// ---------------------------------------------------------------------------------------------------------- gradient

// A copy made before the write. Inductor may move the read of a clone of a view after an operator that writes it, but
// not the read of an operator.
MATMULS_OPERATOR(KeptOp, "custom_mm::kept", "", Tensor(const Tensor&));

Tensor kept(const Tensor& a) { return a.clone(); }

struct KeptGradient : KernelFunction<KeptGradient> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a) {
    ctx->set_materialize_grads(false);  // a first derivative has none: zeros would be added to that of the product
    return KeptOp::below_autograd(a);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0]};
  }
};

Tensor kept_autograd(const Tensor& a) {
  return needs_gradient(kInplaceOp, {a}) ? KeptGradient::apply(a) : KeptOp::below_autograd(a);
}

// Gradient of Y = A op(B) + bias over the first columns of A; the other columns of A stay. dA = dY op(B)^T, next to the
// gradient of the other columns; dbias = sum dY. dB = A^T dY needs the overwritten A: `before` is a copy of it, made on
// request.
struct InplaceGradient : KernelFunction<InplaceGradient> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b, bool transb,
                        const OptionalTensor& bias, int64_t workspace, const OptionalTensor& before) {
    ctx->save_for_backward({a.requires_grad() ? b : Tensor(), tensor_or_none(before)});
    ctx->saved_data["transb"] = transb;
    ctx->saved_data["need_bias"] = bias && bias->defined() && bias->requires_grad();
    ctx->saved_data["columns"] = b.sym_size(transb ? 0 : 1);
    write_recorded<InplaceOp>(a, b, transb, bias, tensor_or_none(before).defined(), workspace);
    ctx->mark_dirty({a});
    return a;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &b = saved[0], &before = saved[1];
    const bool transb = ctx->saved_data["transb"].toBool();
    const c10::SymInt columns = ctx->saved_data["columns"].toSymInt(), all = grads[0].sym_size(-1);
    const Tensor dy = grads[0].narrow_symint(-1, 0, columns);
    Tensor da, db, dbias;
    if (b.defined()) {
      da = MatmulOp::call(dy, b, false, !transb);
      if (columns != all)
        da = da + at::constant_pad_nd_symint(grads[0].narrow_symint(-1, columns, all - columns), {columns, 0});
    }
    if (before.defined())
      db = transb ? MatmulOp::call(as_rows(dy), as_rows(before), true, false)
                  : MatmulOp::call(as_rows(before), as_rows(dy), true, false);
    if (ctx->saved_data["need_bias"].toBool()) dbias = at::sum_to(dy, {columns});
    return {da, db, {}, dbias, {}, {}};
  }
};

void inplace_autograd(Tensor a, const Tensor& b, bool transb, const OptionalTensor& bias, bool keep_input,
                      int64_t workspace) {
  if (!needs_gradient(kInplaceOp, {a, b, tensor_or_none(bias)}))
    return InplaceOp::below_autograd(a, b, transb, bias, keep_input, workspace);
  inplace_meta(a, b, transb, bias, keep_input, workspace);  // checks types and shapes
  check_recorded(kInplaceOp, a, a.requires_grad() ? b : Tensor());
  TORCH_CHECK(keep_input || !b.requires_grad(), kInplaceOp,
              ": expected b without a gradient, which needs the a that is written over, got one that requires grad; "
              "pass keep_input=True to keep a copy of a");
  const auto before = b.requires_grad() ? OptionalTensor(KeptOp::call(a)) : std::nullopt;
  InplaceGradient::apply(a, b, transb, bias, workspace, before);
}

}  // namespace

InplaceChoice explain_in_place(const Tensor& a, const Tensor& b, bool transb, const OptionalTensor& bias,
                               int64_t workspace) {
  const Call c{a, b, tensor_or_none(bias), transb, workspace};
  check(c);
  InplaceChoice choice{InplaceKernel::workspace, "torch's BLAS, over a copy of a panel of rows"};
#ifdef MATMULS_CUDA
  if (a.is_cuda() && is_batch_invariant()) {
    choice.why = "handles(batch_invariant=True): cuBLASLt, over a copy of a panel of rows";
  } else if (a.is_cuda() && a.numel() > 0 && c.columns() > 0) {
    const OperationGuard guard(kInplaceOp, a);
    bool first = true;
    each_matrix(a, [&](const Tensor& matrix) {
      if (std::exchange(first, false)) choice = choose_in_place(matrix, b, c.bias, transb);
    });
  }
#endif
  return choice;
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "matmul_(Tensor(a!) a, Tensor b, bool transb=False, Tensor? bias=None, bool keep_input=False, "
      "int workspace=16777216) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def("kept(Tensor a) -> Tensor", {at::Tag::pt2_compliant_tag});
}

MATMULS_KERNELS("matmul_", matmul_<run_cpu>, matmul_<run_cuda>, inplace_meta, inplace_autograd)
MATMULS_KERNELS("kept", kept, kept, kept, kept_autograd)
MATMULS_WRITES("matmul_", InplaceOp, 0)

}  // namespace matmuls
