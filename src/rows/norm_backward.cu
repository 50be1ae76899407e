// norm_backward: the gradient of layer_norm_ and rms_norm_. With d = grad * weight, over the last dimension of n
// columns
//
//   dx = rstd * (d - mean(d) - xhat * mean(d * xhat))          without mean(d) for rms
//
// and over the rows  dweight = sum grad * xhat,  dbias = sum grad.
//
// One pass reads grad and xhat and writes dx. Meanwhile each thread sums its columns over the rows in float32. A second
// kernel adds the threads' sums in a fixed order, so results are bitwise reproducible.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "rows/facts.h"

namespace matmuls {

struct NormBackwardCall {
  at::Tensor grad, xhat, rstd, weight;
  bool rms;
  at::Tensor dx, dweight, dbias;  // undefined if not requested
};
void run_cuda(const NormBackwardCall& c);

namespace {

using at::Tensor;

constexpr const char* kNormBackward = "norm_backward";

// Rows of grad, xhat and dx.
Rows<3> rows_of_call(const NormBackwardCall& c) {
  return rows_of<3>(kNormBackward, {c.grad, c.xhat, c.dx}, c.xhat.dim() - 1);
}

RowFacts facts_of_call(const NormBackwardCall& c, const Rows<3>& rows) {
  const std::array<const void*, 3> pointers{c.grad.const_data_ptr(), c.xhat.const_data_ptr(),
                                            c.dx.defined() ? c.dx.const_data_ptr() : nullptr};
  RowFacts f = facts_of(RowOperation::norm_backward, c.xhat.element_size(), rows, pointers);
  f.wants_dx = c.dx.defined();
  return f;
}

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "rows/kernels/column_sums.cuh"
#include "rows/kernels/norm_backward_stream.h"
#include "rows/launch_rows.cuh"

namespace matmuls {
namespace {

template <class T>
struct NormBackward {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr RowTraits kTraits = norm_backward_traits(sizeof(T));
  static constexpr int kInputs = kTraits.inputs, kOutputs = 1, kConstants = kTraits.constants;
  static constexpr bool kNumber = kTraits.number, kColumnSums = kTraits.column_sums;

  struct Row {
    const T *grad, *xhat;
    T* dx;
    const F* number;  // rstd
    const int64_t* steps;

    __device__ const T* input(int k) const { return k == 0 ? grad : xhat; }
    __device__ T* output(int) const { return dx; }
    __device__ void place(T* const* tiles) { dx = tiles[0]; }
    __device__ int64_t column_stride(int k) const { return steps[k]; }
    __device__ int visible(int columns) const { return columns; }
  };
  struct State {
    F d, dxhat;  // sums of d and d * xhat
  };
  template <int V, int NV>
  struct Held {};

  RowIndex<3> index;
  const T *grad, *xhat, *weight;
  T* dx;
  const F* rstd;
  int64_t steps[3];
  F columns;
  bool rms;
  F* partial;  // [teams][2][columns], or null if this kernel does not compute the sums

  __device__ F* partial_of(int64_t team) const { return partial + team * 2 * static_cast<int64_t>(columns); }
  __device__ Row row(int64_t r) const {
    const auto offsets = index(r);
    return {grad + offsets.at[0], xhat + offsets.at[1], dx ? dx + offsets.at[2] : nullptr, rstd + r, steps};
  }
  __device__ Row row_for_copies(int64_t r, int64_t offset) const {
    return {grad + offset, xhat + offset, dx + offset, rstd + r, steps};
  }
  __device__ const T* constant(int) const { return weight; }
  __device__ static F absent(int) { return F(1); }
  __device__ static State identity() { return {F(0), F(0)}; }

  // grad, grad * weight and xhat of one vector; 0 outside the row.
  template <int V, class Inputs, class Constants>
  __device__ void numbers(const Inputs& inputs, int i, const Constants& constants, F (&g)[V], F (&d)[V],
                          F (&h)[V]) const {
    unpack(inputs.words(i, 0), g);
    unpack(inputs.words(i, 1), h);
    F w[V];
    constants(0, i, w);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = g[j] * w[j];
  }

  template <int V, int NV, class Columns, class Inputs, class Constants>
  __device__ void fold(State& state, Held<V, NV>&, const Row&, const Columns&, const Inputs& inputs,
                       const Constants& constants) const {
    F sums[2] = {}, dots[2] = {};
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      F g[V], d[V], h[V];
      numbers(inputs, i, constants, g, d, h);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[j % 2] += d[j];
        dots[j % 2] += d[j] * h[j];
      }
    }
    state.d += sums[0] + sums[1];
    state.dxhat += dots[0] + dots[1];
  }
  __device__ State merge(const State& state, Lanes lanes) const {
    F both[2] = {state.d, state.dxhat};
    lanes.sums(both);
    return {both[0], both[1]};
  }
  __device__ State finish(const State& state) const { return {rms ? F(0) : state.d / columns, state.dxhat / columns}; }

  template <int V, int NV, class Columns, class Inputs, class Constants, class Sums>
  __device__ void write(const Row& row, const State& mean, const Held<V, NV>&, const Columns& span,
                        const Inputs& inputs, const Constants& constants, Sums& sums, F rstd = F(0)) const {
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      F g[V], d[V], h[V];
      numbers(inputs, i, constants, g, d, h);
      sums.add(1, i, g);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        d[j] = rstd * (d[j] - mean.d - h[j] * mean.dxhat);
        g[j] *= h[j];
      }
      sums.add(0, i, g);
      if (row.dx) span.store(row.dx, row.steps[2], i, d);
    }
  }

  // fold, merge and write in one, for rows/kernels/staged.cuh.
  template <int N, class Columns, class Inputs, class Constants, class Sums, class Group>
  __device__ void whole_row(const Row& row, bool own, const Columns& span, const Inputs& inputs,
                            const Constants& constants, Sums& sums, const Group& lanes, F rstd) const {
    F d[N][1], h[N][1], all[2] = {}, dots[2] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      F g[1];
      unpack(inputs.words(i, 0), g);
      unpack(inputs.words(i, 1), h[i]);
      d[i][0] = g[0] * constants(0, i);
      sums.add(1, i, g);
      g[0] *= h[i][0];
      sums.add(0, i, g);
      all[i % 2] += d[i][0];
      dots[i % 2] += d[i][0] * h[i][0];
    }
    const F share = quotient(rstd, columns), by_xhat = share * lanes.sum(dots[0] + dots[1]);
    const F less = rms ? F(0) : share * lanes.sum(all[0] + all[1]);
    if (!own) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      d[i][0] = rstd * d[i][0] - (h[i][0] * by_xhat + less);
      span.store(row.dx, 1, i, d[i]);
    }
  }

  template <int V, int NV, bool ragged>
  __device__ void write_sums(int64_t team, const Span<V, ragged>& span, const ColumnSums<F, V, NV>& sums) const {
    if (!partial) return;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      F* const to = partial + (team * 2 + s) * span.columns;
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        if constexpr (!ragged && V % 4 == 0) {
          if (span.begins(i)) store_floats(to + span.column(i), sums.at[s][i]);
        } else {
#pragma unroll
          for (int j = 0; j < V; ++j)
            if (span.holds(i, j, span.columns)) to[span.column(i) + j] = sums.at[s][i][j];
        }
      }
    }
  }
};

template <class T>
struct Kernels {
  template <class Use>
  static void with(const RowFacts&, const RowChoice& c, const Use& use) {
    with_kernel<NormBackward<T>>(c, use);
  }
};

// The sums over the rows, and how many partial ones there are.
struct Partial {
  Tensor sums;  // [parts][2][columns], in the arithmetic type
  int64_t parts = 0;
};

template <class T>
Partial launch_stream(const NormBackward<T>& op, const Rows<3>& rows, const RowChoice& c, bool wants_sums) {
  const bool whole = !c.unaligned;
  const auto options = at::TensorOptions().device(at::kCUDA, at::cuda::current_device());
  Tensor sums;
  if (wants_sums) sums = empty({c.teams, 2, rows.columns}, options.dtype(at::kFloat));
  const Tensor messages = empty({whole ? c.teams : 0, StreamNormBackward<T>::kMessages}, options.dtype(at::kLong));
  launch_stream_norm_backward<T>({op.grad,
                                  op.xhat,
                                  op.weight,
                                  op.rstd,
                                  op.dx,
                                  {rows.strides[0][0], rows.strides[1][0], rows.strides[2][0]},
                                  rows.count,
                                  static_cast<int>(rows.columns),
                                  op.rms,
                                  wants_sums ? sums.mutable_data_ptr<float>() : nullptr,
                                  reinterpret_cast<uint64_t*>(messages.mutable_data_ptr<int64_t>())},
                                 c.teams, c.blocks_per_row, whole);
  return {sums, c.teams};
}

// Computes dx, and the sums over the rows if the kernel can.
template <class T>
Partial launch_dx(const NormBackwardCall& c, const Rows<3>& rows, const RowFacts& facts, const NormBackward<T>& op) {
  const bool wants_sums = c.dweight.defined();
  const RowChoice choice = choose(facts, has_room<Kernels<T>>);
  if constexpr (sizeof(T) <= 4) {
    if (choice.kernel == RowKernel::norm_backward_stream) return launch_stream(op, rows, choice, wants_sums);
  }
  Partial partial;
  const auto prepare = [&](NormBackward<T>& o, int64_t teams) {
    // Each thread of unaligned rows must keep its columns from row to row.
    const bool keeps_columns = choice.kernel != RowKernel::persistent || !choice.unaligned || facts.aligned ||
                               (facts.constant_step && (teams % choice.elements == 0 || teams >= facts.rows));
    if (!wants_sums || !keeps_columns) return;
    partial = {empty({teams, 2, rows.columns}, c.rstd.options()), teams};
    o.partial = partial.sums.template mutable_data_ptr<arithmetic_t<T>>();
  };
  const auto make = [&]<class>() { return op; };
  Kernels<T>::with(facts, choice, LaunchRows{facts, choice, make, prepare});
  return partial;
}

template <class T>
void launch(const NormBackwardCall& c) {
  using F = arithmetic_t<T>;
  const auto rows = rows_of_call(c);
  RowFacts facts = facts_of_call(c, rows);
  facts.device = row_device();
  const NormBackward<T> op{RowIndex<3>(rows),
                           c.grad.const_data_ptr<T>(),
                           c.xhat.const_data_ptr<T>(),
                           c.weight.defined() ? c.weight.const_data_ptr<T>() : nullptr,
                           c.dx.defined() ? c.dx.mutable_data_ptr<T>() : nullptr,
                           c.rstd.const_data_ptr<F>(),
                           {rows.column_strides[0], rows.column_strides[1], rows.column_strides[2]},
                           static_cast<F>(rows.columns),
                           c.rms,
                           nullptr};
  Partial partial;
  if (c.dx.defined()) partial = launch_dx<T>(c, rows, facts, op);
  if (!c.dweight.defined()) return;
  const auto columns = static_cast<int>(rows.columns);
  if (!partial.sums.defined()) {
    const int64_t blocks = (columns + 255) / 256;
    partial.parts = std::clamp<int64_t>(4096 / blocks, 1, std::min<int64_t>(rows.count, 1024));
    partial.sums = empty({partial.parts, 2, rows.columns}, c.rstd.options());
    launch_column_sums<F>(op, rows.count, columns, partial.parts, partial.sums.template mutable_data_ptr<F>());
  }
  launch_add_partials<T>(partial.sums.template const_data_ptr<F>(), partial.parts, columns,
                         c.dweight.mutable_data_ptr<T>(), c.dbias.mutable_data_ptr<T>());
}

}  // namespace

void run_cuda(const NormBackwardCall& c) {
  if (c.xhat.numel() == 0) return;
  const OperationGuard guard(kNormBackward, c.xhat);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.xhat.scalar_type(), "norm_backward",
                                  [&] { launch<scalar_t>(c); });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu/huge_pages.h"
#include "cpu/row_functions.h"
#include "rows/explain.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

void check(const Tensor& grad, const Tensor& xhat, const Tensor& rstd, const Tensor& weight) {
  TORCH_CHECK(is_real(xhat.scalar_type()), kNormBackward, ": expected xhat of a floating-point dtype, got ",
              xhat.scalar_type());
  TORCH_CHECK(xhat.dim() >= 1, kNormBackward, ": expected xhat of at least one dimension, got a scalar");
  const auto like_xhat = [&](const char* name, const Tensor& t, at::ScalarType type) {
    TORCH_CHECK(t.layout() == at::kStrided && t.device() == xhat.device() && t.scalar_type() == type, kNormBackward,
                ": expected ", name, " to be a strided tensor in ", type, " on ", xhat.device(), ", got ", t.layout(),
                " in ", t.scalar_type(), " on ", t.device());
  };
  like_xhat("grad", grad, xhat.scalar_type());
  like_xhat("rstd", rstd, xhat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  TORCH_CHECK(grad.sym_sizes() == xhat.sym_sizes(), kNormBackward, ": expected grad of xhat's shape ", xhat.sym_sizes(),
              ", got ", grad.sym_sizes());
  TORCH_CHECK(rstd.sym_sizes() == xhat.sym_sizes().slice(0, xhat.dim() - 1), kNormBackward,
              ": expected rstd of one number for each row of ", xhat.sym_sizes(), ", got ", rstd.sym_sizes());
  if (!weight.defined()) return;
  like_xhat("weight", weight, xhat.scalar_type());
  TORCH_CHECK(weight.dim() == 1 && weight.sym_size(0) == xhat.sym_size(-1), kNormBackward,
              ": expected weight of shape [", xhat.sym_size(-1), "], got ", weight.sym_sizes());
}

constexpr int64_t kRowsASum = 64;  // rows summed in float32 before the sum is added in float64

// Each chunk of rows has its own column sums, added in order at the end: results are bitwise reproducible for a given
// number of threads.
void run_cpu(const NormBackwardCall& c) {
  if (c.xhat.numel() == 0) return;
  const auto rows = rows_of_call(c);
  const auto& steps = rows.column_strides;
  const int64_t chunks = std::min<int64_t>(rows.count, at::get_num_threads());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.xhat.scalar_type(), "norm_backward", [&] {
    using F = arithmetic_t<scalar_t>;
    const scalar_t *grad = c.grad.const_data_ptr<scalar_t>(), *xhat = c.xhat.const_data_ptr<scalar_t>();
    const scalar_t* weight = c.weight.defined() ? c.weight.const_data_ptr<scalar_t>() : nullptr;
    const F* rstd = c.rstd.const_data_ptr<F>();
    scalar_t* dx = c.dx.defined() ? c.dx.mutable_data_ptr<scalar_t>() : nullptr;
    Tensor sums =
        c.dweight.defined() ? at::zeros({chunks, 2, rows.columns}, c.rstd.options().dtype(at::kDouble)) : Tensor();
    double* sum = sums.defined() ? sums.mutable_data_ptr<double>() : nullptr;
    parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      RowBuffers<scalar_t, 3> buffers(rows.columns);
      std::vector<F> recent(sum ? 2 * rows.columns : 0);
      F* dweight = sum ? recent.data() : nullptr;
      F* dbias = sum ? recent.data() + rows.columns : nullptr;
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const auto add_up = [&] {
          for (size_t i = 0; i < recent.size(); ++i)
            sum[chunk * 2 * rows.columns + i] += std::exchange(recent[i], F(0));
        };
        for (int64_t r = rows.count * chunk / chunks; r < rows.count * (chunk + 1) / chunks; ++r) {
          scalar_t* to = dx ? dx + rows.offset(2, r) : nullptr;
          scalar_t* row = dx ? buffers.target(2, to, steps[2]) : nullptr;
          norm_backward_row(buffers.gather(0, grad + rows.offset(0, r), steps[0]),
                            buffers.gather(1, xhat + rows.offset(1, r), steps[1]), weight, rstd[r], row, dweight, dbias,
                            rows.columns, c.rms);
          if (dx) buffers.scatter(row, to, steps[2]);
          if (r % kRowsASum == kRowsASum - 1) add_up();
        }
        add_up();
      }
    });
    if (!sum) return;
    c.dweight.copy_(sums.select(1, 0).sum(0));
    c.dbias.copy_(sums.select(1, 1).sum(0));
  });
}

// -------------------------------------------------------------------------------------------------------- operators

std::tuple<Tensor, Tensor, Tensor> results(const Tensor& xhat, bool need_dx, bool need_columns) {
  const auto columns = [&] {
    return need_columns ? at::empty_symint({xhat.sym_size(-1)}, xhat.options()) : at::empty({0}, xhat.options());
  };
  return {need_dx ? in_huge_pages(at::empty_symint(xhat.sym_sizes(), xhat.options())) : at::empty({0}, xhat.options()),
          columns(), columns()};
}

template <void run(const NormBackwardCall&)>
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                                 const OptionalTensor& weight, bool rms, bool need_dx,
                                                 bool need_columns) {
  const Tensor w = tensor_or_none(weight);
  check(grad, xhat, rstd, w);
  auto [dx, dweight, dbias] = results(xhat, need_dx, need_columns);
  if (xhat.numel() == 0) dweight.zero_(), dbias.zero_();
  run({grad, xhat, rstd.contiguous(), w.defined() ? w.contiguous() : w, rms, need_dx ? dx : Tensor(),
       need_columns ? dweight : Tensor(), need_columns ? dbias : Tensor()});
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_meta(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                                      const OptionalTensor& weight, bool, bool need_dx,
                                                      bool need_columns) {
  check(grad, xhat, rstd, tensor_or_none(weight));
  return results(xhat, need_dx, need_columns);
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_autograd(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                                          const OptionalTensor& weight, bool rms, bool need_dx,
                                                          bool need_columns) {
  TORCH_CHECK(!needs_gradient(kNormBackward, {grad, xhat, rstd, tensor_or_none(weight)}), kNormBackward,
              ": expected no gradient to be recorded (second derivatives come through layer_norm_ and rms_norm_)");
  return NormBackwardOp::below_autograd(grad, xhat, rstd, weight, rms, need_dx, need_columns);
}

}  // namespace

RowPlan explain_norm_backward(const Tensor& grad, const Tensor& xhat, const Tensor& rstd, const OptionalTensor& weight,
                              bool rms, bool need_dx, bool need_columns, const OtherGpu& gpu) {
  check(grad, xhat, rstd, tensor_or_none(weight));
  if (xhat.numel() == 0 || !(need_dx || need_columns)) return {};
  const Tensor dx = need_dx ? at::empty(xhat.sizes(), xhat.options().device(at::kMeta)) : Tensor();
  const NormBackwardCall c{grad, xhat, rstd, tensor_or_none(weight), rms, dx, {}, {}};
  return plan_of(kNormBackward, xhat, facts_of_call(c, rows_of_call(c)), gpu, "norm_backward_row");
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "norm_backward(Tensor grad, Tensor xhat, Tensor rstd, Tensor? weight, bool rms, bool need_dx=True, bool "
      "need_columns=True) -> (Tensor dx, Tensor dweight, Tensor dbias)",
      {at::Tag::pt2_compliant_tag});
}
MATMULS_KERNELS("norm_backward", norm_backward<run_cpu>, norm_backward<run_cuda>, norm_backward_meta,
                norm_backward_autograd)

}  // namespace matmuls
#endif
