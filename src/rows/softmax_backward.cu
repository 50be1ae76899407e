// softmax_backward: dx = scale * y * (grad - sum(y * grad)) along one dimension, where y is the result of softmax.
//
// It is the gradient of every softmax here: where a mask made y 0, dx is 0. dx may overwrite y or grad. With `causal`,
// columns that a row does not see do not count. Each element is read once and written once.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "glue/rows.h"
#include "rows/facts.h"

namespace matmuls {

struct SoftmaxBackwardCall {
  at::Tensor y, grad, out;
  int64_t dim;
  double scale;
  bool causal;
};
void run_cuda(const SoftmaxBackwardCall& c);

namespace {

using at::Tensor;

constexpr const char* kSoftmaxBackward = "softmax_backward";

// Rows of y, grad, out, and of the query's position.
Rows<4> rows_of_call(const SoftmaxBackwardCall& c) {
  const int64_t dims = c.y.dim();
  const auto position = position_strides(dims, c.causal);
  return rows_of<4>(kSoftmaxBackward, c.y.sizes(), {c.y.strides(), c.grad.strides(), c.out.strides(), position}, c.dim,
                    innermost_first(dims));
}
RowFacts facts_of_call(const SoftmaxBackwardCall& c, const Rows<4>& rows) {
  RowFacts f = facts_of(RowOperation::softmax_backward, c.y.element_size(), rows,
                        std::array{c.y.const_data_ptr(), c.grad.const_data_ptr(), c.out.const_data_ptr()});
  read_alike(f, c.dim, c.y.dim());
  f.causal = c.causal;
  return f;
}

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "rows/launch_rows.cuh"

namespace matmuls {
namespace {

// The operation. A thread holds two vectors of each input (`few`), or four: in rows that fill them, and causal rows.
template <class T, bool few>
struct SoftmaxBackward {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr RowTraits kTraits = softmax_backward_traits(sizeof(T), few);
  static constexpr int kInputs = kTraits.inputs, kOutputs = 1, kConstants = kTraits.constants;
  static constexpr bool kNumber = false, kColumnSums = false, kEnds = true;

  struct Row {
    const T *y, *grad;
    T* dx;
    const int64_t* steps;
    int last;

    __device__ const T* input(int k) const { return k == 0 ? y : grad; }
    __device__ int64_t column_stride(int k) const { return steps[k]; }
    __device__ int visible(int columns) const { return min(columns, last + 1); }
    __device__ T* output(int) const { return dx; }
    __device__ void place(T* const* tiles) { dx = tiles[0]; }
  };
  struct State {
    F dot;
  };
  template <int V, int NV>
  struct Held {};

  RowIndex<4> index;
  const T *y, *grad;
  T* dx;
  int64_t steps[3];
  bool causal;
  F scale;

  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    const auto& at = offsets.at;
    Row row{y + at[0], grad + at[1], dx + at[2], steps, causal ? last_column(at[3]) : kLastColumn};
    ptx::opaque(row.y);
    ptx::opaque(row.grad);
    return row;
  }
  __device__ Row row_for_copies(int64_t r, int64_t offset) const {
    return {y + offset, grad + offset, dx + offset, steps, causal ? last_column(index(r).at[3]) : kLastColumn};
  }
  __device__ static const T* constant(int) { return nullptr; }
  __device__ static F absent(int) { return F(0); }
  __device__ static State identity() { return {F(0)}; }

  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>&, const Row& row, const Columns& span, const Inputs& inputs,
                       const Constants&) const {
    const int visible = row.visible(span.columns);
    F dots[4] = {};
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      const int seen = visible - span.column(i);
      if (seen <= 0) break;
      auto y_words = inputs.words(i, 0), g_words = inputs.words(i, 1);
      if (sizeof(T) == 2 && seen < V) {
        keep_first<T, V>(seen, y_words);
        keep_first<T, V>(seen, g_words);
      }
      F y[V], g[V];
      unpack(y_words, y);
      unpack(g_words, g);
      if constexpr (sizeof(T) > 2) {
        span.clear_outside(i, visible, F(0), y);
        span.clear_outside(i, visible, F(0), g);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) dots[(i * V + j) % 4] += y[j] * g[j];
    }
    state.dot += (dots[0] + dots[1]) + (dots[2] + dots[3]);
  }
  __device__ State merge(const State& state, Lanes lanes) const { return {lanes.sum(state.dot)}; }
  template <int lanes>
  __device__ State merge_even(const State& state, int) const {
    return {sum_of_group<lanes>(state.dot)};
  }
  __device__ F finish(const State& state) const { return state.dot; }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, F dot, const Held<V, NV>&, const Columns& span, const Inputs& inputs,
                        const Constants&, Sums&) const {
    const int visible = row.visible(span.columns);
    const F scaled_dot = scale * dot;
    T* dx_row = row.dx;
    ptx::opaque(dx_row);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      F y[V] = {};
      if (span.column(i) < visible) {
        F g[V];
        unpack(inputs.words(i, 0), y);
        unpack(inputs.words(i, 1), g);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] *= scale * g[j] - scaled_dot;
        span.clear_outside(i, visible, F(0), y);
      }
      span.store(dx_row, row.steps[2], i, y);
    }
  }

  // fold, merge and write in one, for rows/kernels/staged.cuh.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs, const Constants&,
                            Sums&, const Group& lanes, F) const {
    const int visible = row.visible(span.columns);
    F y[N][1], g[N][1], dots[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      unpack(inputs.words(i, 0), y[i]);
      unpack(inputs.words(i, 1), g[i]);
      if (causal && span.column(i) >= visible) y[i][0] = g[i][0] = 0;
      dots[i % 4] += y[i][0] * g[i][0];
    }
    const F scaled_dot = scale * lanes.sum((dots[0] + dots[1]) + (dots[2] + dots[3]));
    if (!own) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i][0] *= scale * g[i][0] - scaled_dot;
      if (causal && span.column(i) >= visible) y[i][0] = 0;
      span.store(row.dx, 1, i, y[i]);
    }
  }
};

template <class T, bool few>
SoftmaxBackward<T, few> operation(std::type_identity<SoftmaxBackward<T, few>>, const SoftmaxBackwardCall& c,
                                  const Rows<4>& rows) {
  const auto& steps = rows.column_strides;
  return {RowIndex<4>(rows),
          c.y.const_data_ptr<T>(),
          c.grad.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          {steps[0], steps[1], steps[2]},
          c.causal,
          static_cast<arithmetic_t<T>>(c.scale)};
}

template <class T>
struct Kernels {
  template <class Use>
  static void with(const RowFacts&, const RowChoice& c, const Use& use) {
    if constexpr (sizeof(T) == 2)
      if (c.form == RowForm::few_vectors) return with_kernel<SoftmaxBackward<T, true>>(c, use);
    with_kernel<SoftmaxBackward<T, false>>(c, use);
  }
};

}  // namespace

void run_cuda(const SoftmaxBackwardCall& c) {
  if (c.out.numel() == 0) return;
  const OperationGuard guard(kSoftmaxBackward, c.y);
  const auto rows = rows_of_call(c);
  RowFacts facts = facts_of_call(c, rows);
  facts.device = row_device();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.y.scalar_type(), kSoftmaxBackward, [&] {
    launch_rows<Kernels<scalar_t>>(facts, [&]<class Op>() { return operation(std::type_identity<Op>(), c, rows); });
  });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "glue/autograd.h"
#include "rows/explain.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

int64_t check(const Tensor& y, const Tensor& grad, int64_t dim, const Tensor& out = {}) {
  check_floating(kSoftmaxBackward, "y", y);
  const auto like_y = [&](const char* name, const Tensor& t) {
    check_like(kSoftmaxBackward, name, t, "y", y);
    TORCH_CHECK(t.sym_sizes() == y.sym_sizes(), kSoftmaxBackward, ": expected ", name, " of y's shape ", y.sym_sizes(),
                ", got ", t.sym_sizes());
  };
  like_y("grad", grad);
  if (out.defined()) like_y("out", out);
  return check_dim(kSoftmaxBackward, y, dim);
}

void run_cpu(const SoftmaxBackwardCall& c) {
  if (c.out.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const auto& steps = rows.column_strides;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.y.scalar_type(), kSoftmaxBackward, [&] {
    const scalar_t* y = c.y.const_data_ptr<scalar_t>();
    const scalar_t* grad = c.grad.const_data_ptr<scalar_t>();
    scalar_t* out = c.out.mutable_data_ptr<scalar_t>();
    if (!c.causal && lie_side_by_side<scalar_t>(rows, 3))
      return for_rows_side_by_side<scalar_t>(rows, kMostSideBySide, [&](int64_t row, int64_t width) {
        softmax_backward_side_by_side(y + rows.offset(0, row), grad + rows.offset(1, row), out + rows.offset(2, row),
                                      {steps[0], steps[1], steps[2]}, rows.columns, width, c.scale);
      });
    for_rows<scalar_t, 3>(rows.count, rows.columns, [&](int64_t row, RowBuffers<scalar_t, 3>& buffers) {
      const scalar_t* y_row = buffers.gather(0, y + rows.offset(0, row), steps[0]);
      const scalar_t* grad_row = buffers.gather(1, grad + rows.offset(1, row), steps[1]);
      scalar_t* to = buffers.target(2, out + rows.offset(2, row), steps[2]);
      const int64_t visible = c.causal ? std::min(rows.columns, rows.offset(3, row) + 1) : rows.columns;
      softmax_backward_row(y_row, grad_row, to, rows.columns, visible, c.scale);
      buffers.scatter(to, out + rows.offset(2, row), steps[2]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(BackwardInplaceOp, "custom_mm::softmax_backward_", "",
                 void(Tensor, const Tensor&, int64_t, double, bool));

// A row is read whole before any of it is written, so out may be y or grad. Any other overlap is an error.
template <void run(const SoftmaxBackwardCall&)>
void backward_out(const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal, Tensor out) {
  dim = check(y, grad, dim, out);
  const auto unless_same = [&](const Tensor& t) {
    return t.is_same(out) || (t.const_data_ptr() == out.const_data_ptr() && t.strides() == out.strides()) ? Tensor()
                                                                                                          : t;
  };
  check_no_overlap(kSoftmaxBackward, out, {{"y", unless_same(y)}, {"grad", unless_same(grad)}});
  run({at_least_1d(y), at_least_1d(grad), at_least_1d(out), dim, scale, causal});
}
template <void run(const SoftmaxBackwardCall&)>
Tensor backward(const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal) {
  check(y, grad, dim);
  Tensor out = in_huge_pages(at::empty_like(y));
  backward_out<run>(y, grad, dim, scale, causal, out);
  return out;
}
template <void run(const SoftmaxBackwardCall&)>
void backward_inplace(Tensor y, const Tensor& grad, int64_t dim, double scale, bool causal) {
  backward_out<run>(y, grad, dim, scale, causal, y);
}

Tensor backward_meta(const Tensor& y, const Tensor& grad, int64_t dim, double, bool) {
  check(y, grad, dim);
  return at::empty_like(y);
}
void backward_out_meta(const Tensor& y, const Tensor& grad, int64_t dim, double, bool, Tensor out) {
  check(y, grad, dim, out);
}
void backward_inplace_meta(Tensor y, const Tensor& grad, int64_t dim, double, bool) { check(y, grad, dim); }

// The second derivative, with v the gradient of dx. For grad it is the same operator, which is symmetric. For y it is
// scale * (v * (grad - sum(y * grad)) - grad * sum(y * v)) over the visible columns. Both are differentiable again.
struct BackwardGradient : KernelFunction<BackwardGradient> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& y, const Tensor& grad, int64_t dim,
                        double scale, bool causal) {
    ctx->save_for_backward({y, grad});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["causal"] = causal;
    return SoftmaxBackwardOp::below_autograd(y, grad, dim, scale, causal);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &y = saved[0], &grad = saved[1], &v = grads[0];
    const auto dim = ctx->saved_data["dim"].toInt();
    const auto scale = ctx->saved_data["scale"].toDouble();
    const bool causal = ctx->saved_data["causal"].toBool();
    Tensor grad_y, grad_grad;
    if (ctx->needs_input_grad(0)) {
      const auto seen = [&](const Tensor& t) { return causal ? t.tril() : t; };
      const Tensor p = seen(y), g = seen(grad), w = seen(v);
      grad_y = scale * (w * (g - (p * g).sum(dim, true)) - g * (p * w).sum(dim, true));
    }
    if (ctx->needs_input_grad(1)) grad_grad = SoftmaxBackwardOp::call(y, v, dim, scale, causal);
    return {grad_y, grad_grad, {}, {}, {}};
  }
};

Tensor backward_autograd(const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal) {
  if (needs_gradient(kSoftmaxBackward, {y, grad})) return BackwardGradient::apply(y, grad, dim, scale, causal);
  return SoftmaxBackwardOp::below_autograd(y, grad, dim, scale, causal);
}
void backward_out_autograd(const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal, Tensor out) {
  check_no_gradient_into(kSoftmaxBackward, "out", {y, grad, out});
  SoftmaxBackwardOutOp::below_autograd(y, grad, dim, scale, causal, out);
}
void backward_inplace_autograd(Tensor y, const Tensor& grad, int64_t dim, double scale, bool causal) {
  TORCH_CHECK(!needs_gradient(kSoftmaxBackward, {y, grad}),
              "softmax_backward_: expected no gradient to be recorded, since y, which "
              "the gradient needs, is written over; use softmax_backward or torch.no_grad()");
  BackwardInplaceOp::below_autograd(y, grad, dim, scale, causal);
}

}  // namespace

RowPlan explain_softmax_backward(const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal,
                                 const OptionalTensor& out, const OtherGpu& gpu) {
  dim = check(y, grad, dim, tensor_or_none(out));
  if (y.numel() == 0) return {};
  const Tensor dx = out ? *out : at::empty_like(y, y.options().device(at::kMeta));
  const SoftmaxBackwardCall c{at_least_1d(y), at_least_1d(grad), at_least_1d(dx), dim, scale, causal};
  const auto rows = rows_of_call(c);
  const bool side_by_side =
      !causal && AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), kSoftmaxBackward,
                                                 [&] { return lie_side_by_side<scalar_t>(rows, 3); });
  return plan_of(kSoftmaxBackward, y, facts_of_call(c, rows), gpu,
                 side_by_side ? "softmax_backward_side_by_side" : "softmax_backward_row");
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("softmax_backward(Tensor y, Tensor grad, int dim=-1, float scale=1.0, bool causal=False) -> Tensor", tags);
  m.def(
      "softmax_backward.out(Tensor y, Tensor grad, int dim=-1, float scale=1.0, bool causal=False, *, Tensor(a!) out) "
      "-> ()",
      tags);
  m.def("softmax_backward_(Tensor(a!) y, Tensor grad, int dim=-1, float scale=1.0, bool causal=False) -> ()", tags);
}

MATMULS_KERNELS("softmax_backward", backward<run_cpu>, backward<run_cuda>, backward_meta, backward_autograd)
MATMULS_KERNELS("softmax_backward.out", backward_out<run_cpu>, backward_out<run_cuda>, backward_out_meta,
                backward_out_autograd)
MATMULS_KERNELS("softmax_backward_", backward_inplace<run_cpu>, backward_inplace<run_cuda>, backward_inplace_meta,
                backward_inplace_autograd)
MATMULS_WRITES("softmax_backward.out", SoftmaxBackwardOutOp, 5)
MATMULS_WRITES("softmax_backward_", BackwardInplaceOp, 0)

}  // namespace matmuls
#endif
