// layer_norm_ and rms_norm_: x <- xhat * weight + bias over the last dimension, in place, with xhat = (h - mean(h)) *
// rstd, h = x + residual, rstd = 1 / sqrt(var(h) + eps). rms_norm_ subtracts no mean: its var is mean(h^2).
//
// Statistics are float32 (float64 for float64), and h is not rounded before them. The gradient needs xhat and rstd.
// Without weight and bias xhat is x itself, and only rstd is saved.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "glue/rows.h"

namespace matmuls {

struct NormCall {
  const char* op;
  at::Tensor x, weight, bias, residual;  // weight, bias and residual may be undefined
  double eps;
  bool rms;
  at::Tensor xhat, rstd;  // written if defined
};
void run_cuda(const NormCall& c);

namespace {

using at::Tensor;
using Call = NormCall;

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "rows/kernels/even_passes.cuh"
#include "rows/kernels/persistent_unaligned.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/launch_rows.cuh"

namespace matmuls {
namespace {

template <class T, bool rms, bool with_residual>
struct Norm {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr int kInputs = with_residual ? 2 : 1, kOutputs = 2, kConstants = rms ? 1 : 2;
  static constexpr int kVectors = with_residual && sizeof(T) == 2 ? 2 : 4,
                       kLongVectors = with_residual || sizeof(T) == 8 ? 4 : 8;
  static constexpr int kHeldVectors = with_residual ? kVectors : kLongVectors;
  // Rows that need more threads use the persistent kernel, as measured on an H200.
  static constexpr int kRowMost = sizeof(T) == 2 ? (rms ? 256 : 128) : 512;
  static constexpr int kThreadsPerSm = 768, kMostThreads = 512;
  static constexpr bool kNumber = false, kColumnSums = false, kWholeRows = false, kEnds = false;

  struct Row {
    T *x, *xhat;
    const T* residual;
    F* rstd;
    const int64_t* steps;

    __device__ const T* input(int k) const { return k == 0 ? x : residual; }
    __device__ T* output(int n) const { return n == 0 ? x : xhat; }
    __device__ void place(T* const* tiles) {
      x = tiles[0];
      if (xhat) xhat = tiles[1];
    }
    __device__ int64_t column_stride(int k) const { return steps[k]; }
    __device__ int visible(int columns) const { return columns; }
  };
  struct State {
    F count, mean, squares;  // squares: sum of squared distances from the mean
  };
  template <int V, int NV>
  struct Held {};
  struct Result {
    F mean, rstd;
  };

  RowIndex<3> index;
  T *x, *xhat;
  const T *residual, *weight, *bias;
  F* rstd;
  int64_t steps[3];
  F columns, eps;

  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    return {x + offsets.at[0], xhat ? xhat + offsets.at[2] : nullptr, residual + offsets.at[1],
            rstd ? rstd + r : nullptr, steps};
  }
  __device__ Row row_beside(int64_t r, int64_t offset) const {
    return {x + offset, xhat ? xhat + offset : nullptr, residual + offset, rstd ? rstd + r : nullptr, steps};
  }
  __host__ __device__ const T* constant(int c) const { return c == 0 ? weight : bias; }
  __device__ static F absent(int c) { return c == 0 ? F(1) : F(0); }
  __device__ static State identity() { return {F(0), F(0), F(0)}; }

  // h = x + residual of one vector.
  template <int V, class Inputs>
  __device__ static void sum_of(const Inputs& inputs, int i, F (&h)[V]) {
    unpack(inputs.words(i, 0), h);
    if constexpr (with_residual) {
      F r[V];
      unpack(inputs.words(i, 1), r);
#pragma unroll
      for (int j = 0; j < V; ++j) h[j] += r[j];
    }
  }

  // Several spans of a row merge by Chan's formula.
  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>&, const Row&, const Columns& span, const Inputs& inputs,
                       const Constants&) const {
    constexpr bool ragged = Columns::kRagged;
    // With many elements one pass computes both sums, from distances to the first element. That element is at most
    // sqrt(held) standard deviations from the mean.
    constexpr bool once = !rms && !ragged && (NV > 4 || Columns::kOnce);
    F sums[4] = {}, squares[4] = {}, from = 0;
    int held = 0;
    if constexpr (once) {
      F h[V];
      sum_of(inputs, 0, h);
      from = h[0];
    }
    for_vectors<NV>(span, [&](int i, auto) {
      held += span.count(i);
      F h[V];
      sum_of(inputs, i, h);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if constexpr (once) h[j] -= from;
        if constexpr (Columns::kEven) h[j] = span.begins(i) ? h[j] : F(0);
        if constexpr (!rms) sums[j % 4] += h[j];
        if constexpr (rms || once) squares[j % 4] += h[j] * h[j];
      }
    });
    const F count = held;
    F mean = 0;
    if constexpr (!rms) mean = quotient((sums[0] + sums[1]) + (sums[2] + sums[3]), larger(count, F(1)));
    if constexpr (!rms && !once) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        F h[V];
        sum_of(inputs, i, h);
        if constexpr (ragged) span.clear_outside(i, span.columns, mean, h);
        const F own = ragged || span.begins(i) ? mean : F(0);  // vectors outside the row are 0
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const F distance = h[j] - own;
          squares[j % 4] += distance * distance;
        }
      }
    }
    F all_squares = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    if constexpr (once) {
      all_squares -= mean * mean * count;
      if (all_squares < F(0)) all_squares = 0;
      mean += from;
    }
    if constexpr (Columns::kEven) {
      if constexpr (Columns::kAlone) {
        state = {count, mean, all_squares};
        return;
      }
    }
    const F all = state.count + count, apart = mean - state.mean;
    state.squares += all_squares;
    if constexpr (!rms) {
      const F share = state.count == F(0) ? F(1) : quotient(count, all);
      state.squares += (apart * state.count) * (apart * share);  // 0 if there were no columns before, at any distance
      state.mean += apart * share;
    }
    state.count = all;
  }

  __device__ State merge(const State& state, Lanes lanes) const {
    if constexpr (rms) return {F(0), F(0), lanes.sum(state.squares)};
    F sums[2] = {state.count, state.mean * state.count};
    lanes.sums(sums);
    const F mean = quotient(sums[1], sums[0]), apart = state.mean - mean;
    return {sums[0], mean, lanes.sum(state.squares + apart * (apart * state.count))};
  }
  // Merges `lanes` states of `each` columns.
  template <int lanes>
  __device__ static State merge_even(const State& state, int each) {
    if constexpr (rms) return {F(0), F(0), sum_of_group<lanes>(state.squares)};
    const F mean = sum_of_group<lanes>(state.mean) * (F(1) / lanes), apart = state.mean - mean;
    return {F(0), mean, sum_of_group<lanes>(state.squares + apart * apart * each)};
  }
  __device__ Result finish(const State& state) const { return {state.mean, rsqrt(state.squares / columns + eps)}; }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, const Result& result, const Held<V, NV>&, const Columns& span,
                        const Inputs& inputs, const Constants& constants, Sums&) const {
    if (row.rstd && span.first <= 0 && span.first + V > 0) *row.rstd = result.rstd;
    for_vectors<NV>(span, [&](int i, auto whole) {
      const auto store = [&](T* to, int64_t step, const F(&values)[V]) {
        if constexpr (decltype(whole)::value)
          store_vector(to + span.column(i), pack<T, V>(values));
        else
          span.store(to, step, i, values);
      };
      F y[V], w[V];
      sum_of(inputs, i, y);
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = (y[j] - result.mean) * result.rstd;
      if (row.xhat) store(row.xhat, steps[2], y);
      constants(0, i, w);
      if constexpr (rms) {
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] *= w[j];
      } else {
        F b[V];
        constants(1, i, b);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = y[j] * w[j] + b[j];
      }
      store(row.x, steps[0], y);
    });
  }

  // fold, merge and write in one, for rows/kernels/staged.cuh.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs,
                            const Constants& constants, Sums&, const Group& lanes, F) const {
    F h[N][1], sums[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum_of(inputs, i, h[i]);
      sums[i % 4] += h[i][0];
    }
    if constexpr (!rms) {
      const F mean = quotient(lanes.sum((sums[0] + sums[1]) + (sums[2] + sums[3])), columns);
#pragma unroll
      for (int i = 0; i < N; ++i) h[i][0] = span.begins(i) ? h[i][0] - mean : F(0);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) squares[i % 4] += h[i][0] * h[i][0];
    const F all_squares = lanes.sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const F scale = rsqrt(all_squares / columns + eps);  // may be inf, of which quotient() would make NaN
    if (!own) return;
    if (row.rstd && span.first == 0) *row.rstd = scale;
    const auto put = [&](auto keeps) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        h[i][0] *= scale;
        if constexpr (decltype(keeps)::value) span.store(row.xhat, 1, i, h[i]);
        h[i][0] *= constants(0, i);
        if constexpr (!rms) h[i][0] += constants(1, i);
        span.store(row.x, 1, i, h[i]);
      }
    };
    row.xhat ? put(std::true_type{}) : put(std::false_type{});
  }
};

// Launches a kernel for rows that divide evenly among the threads, where an H200 gains by it. Returns false, launching
// nothing, for other rows.
template <class T, bool rms>
bool launch_even(const Norm<T, rms, false>& op, const Rows<3>& rows) {
  if constexpr (sizeof(T) == 4) {
    if constexpr (rms) {
      if (rows.columns == 8192) return launch_even_rows<4, 512, true>(op, rows), true;
      if (rows.columns == 16384) return launch_even_passes<2, 2, 1, 1024, 2>(op, rows), true;
    } else {
      if (rows.columns == 8192) return launch_even_passes<2, 2, 1, 512, 3>(op, rows), true;
      if (rows.columns == 16384) return launch_even_passes<2, 4, 1, 512, 2>(op, rows), true;
    }
  } else if constexpr (!rms) {
    const int64_t vectors = rows.columns / 8;
    if (vectors == 48) return launch_even_rows<3, 16, true>(op, rows), true;
    if (vectors == 96) return launch_even_rows<3, 32, true>(op, rows), true;
    if (launch_threes(op, rows)) return true;
    if (vectors > 48 && vectors < 64) return launch_even_rows<4, 16, false>(op, rows), true;
    if (vectors > 96 && vectors < 128) return launch_even_rows<4, 32, false>(op, rows), true;
    if (vectors == 1024) return launch_even_rows<8, 128, true>(op, rows), true;
    if (vectors == 2048) return launch_even_passes<4, 1, 2, 512, 3>(op, rows), true;
    return launch_even_fours<4, 128>(op, rows);
  }
  return false;
}
template <class T, bool rms>
bool launch_even(const Norm<T, rms, true>& op, const Rows<3>& rows) {
  if constexpr (sizeof(T) == 2) return launch_threes(op, rows);
  return false;
}
// Launches nearly_even_kernel, or returns false. With a residual a thread holds twice as many vectors for each column,
// so half as many columns need the same threads.
template <class T, bool rms, bool with_residual>
bool launch_nearly_even_norm(const Norm<T, rms, with_residual>& op, const Rows<3>& rows) {
  if constexpr (sizeof(T) == 4 && !with_residual)  // five vectors for each lane of a warp
    return rows.columns > 512 && rows.columns <= 640 && launch_nearly_even<false, 5>(op, rows);
  else if constexpr (sizeof(T) != 2)
    return false;
  else if constexpr (with_residual)
    return rows.columns > 768 && launch_nearly_even<false, 3, 4>(op, rows);
  else
    return rows.columns > 1024 && launch_nearly_even<false, 5, 6, 7, 8>(op, rows);
}
template <class T, bool rms, bool with_residual>
void launch(const Call& c) {
  using F = arithmetic_t<T>;
  const auto rows = rows_of<3>(c.op, {c.x, c.residual, c.xhat}, c.x.dim() - 1);
  const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
  const Norm<T, rms, with_residual> op{RowIndex<3>(rows),
                                       c.x.mutable_data_ptr<T>(),
                                       c.xhat.defined() ? c.xhat.mutable_data_ptr<T>() : nullptr,
                                       data(c.residual),
                                       data(c.weight),
                                       data(c.bias),
                                       c.rstd.defined() ? c.rstd.mutable_data_ptr<F>() : nullptr,
                                       {rows.column_strides[0], rows.column_strides[1], rows.column_strides[2]},
                                       static_cast<F>(rows.columns),
                                       static_cast<F>(c.eps)};
  // Absent tensors get the address and strides of x.
  const std::array<const void*, 3> pointers{op.x, op.residual ? op.residual : op.x, op.xhat ? op.xhat : op.x};
  auto known = rows;
  for (int t = 1; t < 3; ++t) {
    if (pointers[t] != op.x) continue;
    known.strides[t] = rows.strides[0];
    known.column_strides[t] = rows.column_strides[0];
  }
  if constexpr (sizeof(T) <= 4) {
    const auto a = alignment_of<T>(known, pointers);
    if (a.whole) {
      if (known.count <= INT32_MAX && has_plain_constants(op) && launch_even(op, known)) return;
      if (launch_nearly_even_norm(op, known)) return;
    } else if (a.vectors) {
      if (launch_short_rows<3>(op, known, op.residual || op.xhat ? 2 : 1)) return;
      if (launch_shifted(op, known)) return;
    }
  }
  launch_rows(op, known, pointers);
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.x.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "norm", [&] {
    if (c.rms)
      c.residual.defined() ? launch<scalar_t, true, true>(c) : launch<scalar_t, true, false>(c);
    else
      c.residual.defined() ? launch<scalar_t, false, true>(c) : launch<scalar_t, false, false>(c);
  });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "glue/autograd.h"
#include "glue/autograd_inplace.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

void check(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
           double eps) {
  check_floating(op, "x", x);
  TORCH_CHECK(x.dim() >= 1, op, ": expected x of at least one dimension, got a scalar");
  TORCH_CHECK(eps >= 0, op, ": expected eps of 0 or more, got ", eps);
  const auto like_x = [&](const char* name, const Tensor& t) { check_like(op, name, t, "x", x); };
  const auto of_a_row = [&](const char* name, const Tensor& t) {
    if (!t.defined()) return;
    like_x(name, t);
    TORCH_CHECK(t.dim() == 1 && t.sym_size(0) == x.sym_size(-1), op, ": expected ", name, " of shape [", x.sym_size(-1),
                "], got ", t.sym_sizes());
  };
  of_a_row("weight", weight);
  of_a_row("bias", bias);
  if (!residual.defined()) return;
  like_x("residual", residual);
  TORCH_CHECK(residual.sym_sizes() == x.sym_sizes(), op, ": expected residual of x's shape ", x.sym_sizes(), ", got ",
              residual.sym_sizes());
}

void run_cpu(const Call& c) {
  if (c.x.numel() == 0) return;
  const auto rows = rows_of<3>(c.op, {c.x, c.residual, c.xhat}, c.x.dim() - 1);
  const auto& steps = rows.column_strides;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "norm", [&] {
    using F = arithmetic_t<scalar_t>;
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<scalar_t>() : nullptr; };
    scalar_t* x = c.x.mutable_data_ptr<scalar_t>();
    scalar_t* xhat = c.xhat.defined() ? c.xhat.mutable_data_ptr<scalar_t>() : nullptr;
    F* rstd = c.rstd.defined() ? c.rstd.mutable_data_ptr<F>() : nullptr;
    const scalar_t *weight = data(c.weight), *bias = data(c.bias), *residual = data(c.residual);
    for_rows<scalar_t, 3>(rows.count, rows.columns, [&](int64_t r, RowBuffers<scalar_t, 3>& buffers) {
      scalar_t* row = x + rows.offset(0, r);
      const scalar_t* from = buffers.gather(0, row, steps[0]);
      const scalar_t* added = residual ? buffers.gather(1, residual + rows.offset(1, r), steps[1]) : nullptr;
      scalar_t* to = buffers.target(2, row, steps[0]);
      scalar_t* kept = xhat ? xhat + rows.offset(2, r) : nullptr;
      const F scale = norm_row(from, added, weight, bias, to, kept, rows.columns, c.eps, c.rms);
      if (rstd) rstd[r] = scale;
      buffers.scatter(to, row, steps[0]);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(LayerNormOp, "custom_mm::layer_norm_", "",
                 void(Tensor, const OptionalTensor&, const OptionalTensor&, double, const OptionalTensor&));
MATMULS_OPERATOR(RmsNormOp, "custom_mm::rms_norm_", "",
                 void(Tensor, const OptionalTensor&, double, const OptionalTensor&));
MATMULS_OPERATOR(KeepOp, "custom_mm::norm_keep_", "",
                 std::tuple<Tensor, Tensor>(Tensor, const OptionalTensor&, const OptionalTensor&, double,
                                            const OptionalTensor&, bool));
using Runner = void(const Call&);
const char* name_of(bool rms) { return rms ? "rms_norm_" : "layer_norm_"; }

// rstd is one number per row in the arithmetic type. xhat is like x, or empty if x itself becomes xhat.
std::tuple<Tensor, Tensor> kept_tensors(const Tensor& x, bool affine) {
  const auto sizes = x.sym_sizes();
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {affine ? in_huge_pages(at::empty_symint(sizes, x.options())) : at::empty({0}, x.options()),
          at::empty_symint(sizes.slice(0, sizes.size() - 1), x.options().dtype(type))};
}

void normalize(Runner run, Call c) {
  check(c.op, c.x, c.weight, c.bias, c.residual, c.eps);
  check_no_overlap(c.op, c.x, {{"weight", c.weight}, {"bias", c.bias}, {"residual", c.residual}});
  if (c.weight.defined()) c.weight = c.weight.contiguous();
  if (c.bias.defined()) c.bias = c.bias.contiguous();
  run(c);
}

template <Runner run>
void layer_norm_(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                 const OptionalTensor& residual) {
  normalize(
      run,
      {name_of(false), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps, false, {}, {}});
}
template <Runner run>
void rms_norm_(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  normalize(run, {name_of(true), x, tensor_or_none(weight), Tensor(), tensor_or_none(residual), eps, true, {}, {}});
}
template <Runner run>
std::tuple<Tensor, Tensor> norm_keep_(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                      const OptionalTensor& residual, bool rms) {
  check(name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
  const bool affine = tensor_or_none(weight).defined() || tensor_or_none(bias).defined();
  auto [xhat, rstd] = kept_tensors(x, affine);
  normalize(run, {name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps, rms,
                  affine ? xhat : Tensor(), rstd});
  return {xhat, rstd};
}

void layer_norm_meta(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                     const OptionalTensor& residual) {
  check(name_of(false), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
}
void rms_norm_meta(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  check(name_of(true), x, tensor_or_none(weight), Tensor(), tensor_or_none(residual), eps);
}
std::tuple<Tensor, Tensor> norm_keep_meta(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, const OptionalTensor& residual, bool rms) {
  check(name_of(rms), x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual), eps);
  return kept_tensors(x, tensor_or_none(weight).defined() || tensor_or_none(bias).defined());
}

// ---------------------------------------------------------------------------------------------------------- gradient

// With d = dy * weight:  dx = rstd * (d - mean(d) - xhat * mean(d * xhat)), dweight = sum dy * xhat, dbias = sum dy
// over the rows. The residual's gradient is that of x. xhat and rstd are results too: a second derivative reaches x
// through them, through xhat as through y, and through d rstd / dx = -rstd^2 * xhat / n.
struct NormGradient : KernelFunction<NormGradient> {
  struct Arguments {
    double eps;
    bool rms;
  };

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                                                const OptionalTensor& weight, const OptionalTensor& bias,
                                                const OptionalTensor& residual, Arguments a) {
    const auto need = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
    ctx->saved_data["need_x"] = need(x);
    ctx->saved_data["need_weight"] = need(tensor_or_none(weight));
    ctx->saved_data["need_bias"] = need(tensor_or_none(bias));
    ctx->saved_data["need_residual"] = need(tensor_or_none(residual));
    auto [xhat, rstd] = write_recorded<KeepOp>(x, weight, bias, a.eps, residual, a.rms);
    const bool affine = tensor_or_none(weight).defined() || tensor_or_none(bias).defined();
    ctx->mark_dirty({x});
    ctx->set_materialize_grads(false);
    // For a view, x is saved without its history, which would create a reference cycle with this node.
    ctx->save_for_backward({affine ? xhat : x.is_view() ? x.detach() : x, rstd, tensor_or_none(weight)});
    ctx->saved_data["rms"] = a.rms;
    ctx->saved_data["affine"] = affine;
    // autograd allows a Function that writes to a view only one result, so its gradient is not differentiable.
    ctx->saved_data["view"] = x.is_view();
    if (x.is_view()) return {x};
    if (!affine) return {x, rstd};
    return {x, rstd, xhat};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &xhat = saved[0], &rstd = saved[1], &weight = saved[2];
    const bool rms = ctx->saved_data["rms"].toBool();
    const auto need = [&](const char* name) { return ctx->saved_data[name].toBool(); };
    const bool need_residual = need("need_residual"), need_x = need("need_x") || need_residual;
    const bool need_weight = need("need_weight"), need_bias = need("need_bias");
    const Tensor& dy = grads[0];
    const Tensor drstd = grads.size() > 1 ? grads[1] : Tensor(), dxhat = grads.size() > 2 ? grads[2] : Tensor();
    if (!c10::GradMode::is_enabled() && dy.defined() && !drstd.defined() && !dxhat.defined()) {
      auto [dx, dweight, dbias] =
          NormBackwardOp::call(dy, xhat, rstd, weight.defined() ? OptionalTensor(weight) : std::nullopt, rms, need_x,
                               need_weight || need_bias);
      return {need_x ? dx : Tensor(),
              need_weight ? dweight : Tensor(),
              need_bias ? dbias : Tensor(),
              need_residual ? dx : Tensor(),
              {}};
    }
    TORCH_CHECK(!ctx->saved_data["view"].toBool(), name_of(rms),
                ": expected first derivatives only, x being a view of another tensor; normalize the tensor itself");
    const auto wide = [&](const Tensor& t) { return t.to(rstd.scalar_type()); };
    const Tensor h = wide(xhat), r = rstd.unsqueeze(-1);
    Tensor d, dweight, dbias;
    if (dy.defined()) {
      const Tensor g = wide(dy);
      d = weight.defined() ? g * wide(weight) : g;
      if (need_weight) dweight = as_rows(g * h).sum(0).to(xhat.scalar_type());
      if (need_bias) dbias = as_rows(g).sum(0).to(xhat.scalar_type());
    }
    if (dxhat.defined()) d = d.defined() ? d + wide(dxhat) : wide(dxhat);
    Tensor dx;
    if (need_x && d.defined()) {
      dx = d - h * (d * h).mean(-1, true);
      if (!rms) dx = dx - d.mean(-1, true);
      dx = r * dx;
    }
    if (need_x && drstd.defined()) {
      const Tensor through = -drstd.unsqueeze(-1) * r * r * h / h.sym_size(-1);
      dx = dx.defined() ? dx + through : through;
    }
    if (dx.defined()) dx = dx.to(xhat.scalar_type());
    return {dx, dweight, dbias, need_residual ? dx : Tensor(), {}};
  }
};

void layer_norm_autograd(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                         const OptionalTensor& residual) {
  if (!needs_gradient(name_of(false), {x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual)}))
    return LayerNormOp::below_autograd(x, weight, bias, eps, residual);
  check_recorded(name_of(false), x, tensor_or_none(weight));
  NormGradient::apply(x, weight, bias, residual, NormGradient::Arguments{eps, false});
}
void rms_norm_autograd(Tensor x, const OptionalTensor& weight, double eps, const OptionalTensor& residual) {
  if (!needs_gradient(name_of(true), {x, tensor_or_none(weight), tensor_or_none(residual)}))
    return RmsNormOp::below_autograd(x, weight, eps, residual);
  check_recorded(name_of(true), x, tensor_or_none(weight));
  NormGradient::apply(x, weight, std::nullopt, residual, NormGradient::Arguments{eps, true});
}
std::tuple<Tensor, Tensor> norm_keep_autograd(Tensor x, const OptionalTensor& weight, const OptionalTensor& bias,
                                              double eps, const OptionalTensor& residual, bool rms) {
  if (!needs_gradient("norm_keep_", {x, tensor_or_none(weight), tensor_or_none(bias), tensor_or_none(residual)}))
    return KeepOp::below_autograd(x, weight, bias, eps, residual, rms);
  check_recorded("norm_keep_", x, tensor_or_none(weight));
  const auto results = NormGradient::apply(x, weight, bias, residual, NormGradient::Arguments{eps, rms});
  TORCH_CHECK(results.size() > 1,
              "norm_keep_: expected x not to be a view of another tensor where a gradient is recorded");
  return {results.size() > 2 ? results[2] : at::empty({0}, x.options()), results[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm_(Tensor(a!) x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, Tensor? residual=None) -> ()",
      tags);
  m.def("rms_norm_(Tensor(a!) x, Tensor? weight=None, float eps=1e-05, Tensor? residual=None) -> ()", tags);
  m.def(
      "norm_keep_(Tensor(a!) x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool rms) -> (Tensor xhat, "
      "Tensor rstd)",
      tags);
}

#define MATMULS_NORM_KERNELS(run)          \
  m.impl("layer_norm_", layer_norm_<run>); \
  m.impl("rms_norm_", rms_norm_<run>);     \
  m.impl("norm_keep_", norm_keep_<run>);

TORCH_LIBRARY_IMPL(custom_mm, CPU, m){MATMULS_NORM_KERNELS(run_cpu)}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m){MATMULS_NORM_KERNELS(run_cuda)}
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("layer_norm_", layer_norm_meta);
  m.impl("rms_norm_", rms_norm_meta);
  m.impl("norm_keep_", norm_keep_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("layer_norm_", layer_norm_autograd);
  m.impl("rms_norm_", rms_norm_autograd);
  m.impl("norm_keep_", norm_keep_autograd);
}
MATMULS_WRITES("layer_norm_", LayerNormOp, 0)
MATMULS_WRITES("rms_norm_", RmsNormOp, 0)
MATMULS_WRITES("norm_keep_", KeepOp, 0)

}  // namespace matmuls
#endif
