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
#include "glue/rows.h"

namespace matmuls {

struct NormBackwardCall {
  at::Tensor grad, xhat, rstd, weight;
  bool rms;
  at::Tensor dx, dweight, dbias;  // undefined if not requested
};
void run_cuda(const NormBackwardCall& c);

namespace {

using at::Tensor;
using Call = NormBackwardCall;

constexpr const char* kOp = "norm_backward";

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "rows/kernels/norm_backward_stream.h"
#include "rows/kernels/persistent_unaligned.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/launch_rows.cuh"

namespace matmuls {
namespace {

template <class T>
struct NormBackward {
  using Storage = T;
  using F = arithmetic_t<T>;
  static constexpr int kInputs = 2, kOutputs = 1, kConstants = 1;
  // Each column has two sums, which take 64 of a thread's 128 registers: the elements stay in shared memory.
  static constexpr int kVectors = 4, kLongVectors = sizeof(T) == 4 ? 8 : 4, kHeldVectors = 2;
  static constexpr int kRowMost = 0;
  static constexpr int kThreadsPerSm = sizeof(T) == 2 ? 512 : 768, kMostThreads = 512;
  static constexpr bool kNumber = true, kColumnSums = true, kWholeRows = false;

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
  __device__ Row row_beside(int64_t r, int64_t offset) const {
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

// Sums partial [rows][2][columns] over its rows into dweight and dbias, in a fixed order. `among` warps share 32
// columns of one of them: one warp (1024 columns per block) if there are few rows, up to all 32.
template <class T, class F>
__global__ void __launch_bounds__(1024)
    add_partials_kernel(const F* partial, int64_t rows, int columns, int among, T* dweight, T* dbias) {
  __shared__ F warps[32][32];
  const int group = threadIdx.y / among, first = threadIdx.y - group * among;
  const int column = (blockIdx.x * (32 / among) + group) * 32 + threadIdx.x;
  const int64_t stride = 2 * static_cast<int64_t>(columns);
  partial += blockIdx.y * static_cast<int64_t>(columns);
  ptx::griddepcontrol_wait();
  F sum = 0, lost = 0;  // Kahan summation: there may be thousands of rows
  if (column < columns) {
#pragma unroll 8
    for (int64_t r = first; r < rows; r += among) {
      const F value = partial[r * stride + column] - lost, next = sum + value;
      lost = isfinite(next) ? (next - sum) - value : F(0);
      sum = next;
    }
  }
  warps[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (first > 0 || column >= columns) return;
#pragma unroll 4
  for (int w = 1; w < among; ++w) sum += warps[threadIdx.y + w][threadIdx.x];
  (blockIdx.y == 0 ? dweight : dbias)[column] = T(sum);
}

// Computes only the column sums, partial [block][2][columns], for rows that the fused kernels cannot sum: differently
// aligned ones, or too long for registers.
template <class T, class F>
__global__ void __launch_bounds__(256)
    column_sums_kernel(const __grid_constant__ NormBackward<T> op, int64_t rows, int columns, F* partial) {
  const int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= columns) return;
  F dweight = 0, dbias = 0;
  for (int64_t begin = blockIdx.y; begin < rows; begin += int64_t(16) * gridDim.y) {
    F some_dweight = 0, some_dbias = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int64_t r = begin + int64_t(i) * gridDim.y;
      if (r >= rows) break;
      const auto offsets = op.index(r);
      const F g = F(op.grad[offsets.at[0] + column * op.steps[0]]);
      some_dweight += g * F(op.xhat[offsets.at[1] + column * op.steps[1]]);
      some_dbias += g;
    }
    dweight += some_dweight;
    dbias += some_dbias;
  }
  partial[(int64_t(blockIdx.y) * 2) * columns + column] = dweight;
  partial[(int64_t(blockIdx.y) * 2 + 1) * columns + column] = dbias;
}

// Launches rows/kernels/norm_backward_stream.cu for rows that it serves better than the kernels of
// rows/launch_rows.cuh. Returns the number of partial sums it writes; 0 if nothing was launched.
template <class T>
int64_t launch_stream(const NormBackward<T>& op, const Rows<3>& rows, Tensor& partial, bool sums) {
  if (!op.dx || rows.dims > 1 || rows.columns > INT32_MAX / 4) return 0;
  const auto a = alignment_of<T>(rows, std::array<const void*, 3>{op.grad, op.xhat, op.dx});
  const int teams = a.vectors ? stream_norm_backward_teams<T>(rows.columns, rows.count, a.whole) : 0;
  if (teams == 0) return 0;
  const auto options = at::TensorOptions().device(at::kCUDA, at::cuda::current_device());
  if (sums) partial = empty({teams, 2, rows.columns}, options.dtype(at::kFloat));
  const Tensor letters = empty({a.whole ? teams : 0, StreamNormBackward<T>::kLetters}, options.dtype(at::kLong));
  const bool launched =
      launch_stream_norm_backward<T>({op.grad,
                                      op.xhat,
                                      op.weight,
                                      op.rstd,
                                      op.dx,
                                      {rows.strides[0][0], rows.strides[1][0], rows.strides[2][0]},
                                      rows.count,
                                      static_cast<int>(rows.columns),
                                      op.rms,
                                      sums ? partial.mutable_data_ptr<float>() : nullptr,
                                      reinterpret_cast<uint64_t*>(letters.mutable_data_ptr<int64_t>())},
                                     teams, a.whole);
  if (!launched) partial = Tensor();
  return launched ? teams : 0;
}

template <class T>
void launch(const Call& c) {
  using F = arithmetic_t<T>;
  auto rows = rows_of<3>(kOp, {c.grad, c.xhat, c.dx}, c.xhat.dim() - 1);
  check_columns(rows.columns);
  const auto stream = c10::cuda::getCurrentCUDAStream();
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
  const bool sums = c.dweight.defined();
  Tensor partial;
  int64_t parts = 0;
  if constexpr (sizeof(F) == 4) parts = launch_stream(op, rows, partial, sums);
  if (c.dx.defined() && parts == 0) {
    const std::array<const void*, 3> pointers{op.grad, op.xhat, op.dx};
    const auto prepare = [&](NormBackward<T>& o, int64_t teams) {
      if (!sums) return;
      parts = teams;
      partial = empty({teams, 2, rows.columns}, c.rstd.options());
      o.partial = partial.mutable_data_ptr<F>();
    };
    bool done = false;
    if constexpr (sizeof(T) <= 4) {
      const auto a = alignment_of<T>(rows, pointers);
      done = a.vectors && !a.whole && (launch_short_rows<3>(op, rows, 2, prepare) || launch_shifted(op, rows, prepare));
    }
    if (!done) launch_rows(op, rows, pointers, prepare);
  }
  if (!sums) return;
  const auto columns = static_cast<int>(rows.columns);
  if (!partial.defined()) {
    const int64_t blocks = (columns + 255) / 256;
    parts = std::clamp<int64_t>(4096 / blocks, 1, std::min<int64_t>(rows.count, 1024));
    partial = empty({parts, 2, rows.columns}, c.rstd.options());
    column_sums_kernel<T, F><<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(parts)), 256, 0, stream>>>(
        op, rows.count, columns, partial.mutable_data_ptr<F>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  // About eight partial rows per warp. With all 32 warps on 32 columns, each block of 1024 threads had 8 rows to add at
  // 262144 columns.
  const int among = static_cast<int>(std::min<uint64_t>(std::bit_ceil(static_cast<uint64_t>((parts + 7) / 8)), 32));
  const dim3 blocks(static_cast<unsigned>((columns * int64_t{among} + 1023) / 1024), 2);
  launch_early(add_partials_kernel<T, F>, blocks, dim3(32, 32), partial.const_data_ptr<F>(), parts, columns, among,
               c.dweight.mutable_data_ptr<T>(), c.dbias.mutable_data_ptr<T>());
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.xhat.numel() == 0) return;
  const OperationGuard guard(kOp, c.xhat);
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
#include "rows/ops.h"

namespace matmuls {
namespace {

void check(const Tensor& grad, const Tensor& xhat, const Tensor& rstd, const Tensor& weight) {
  TORCH_CHECK(at::isFloatingType(xhat.scalar_type()), kOp, ": expected xhat of a floating-point dtype, got ",
              xhat.scalar_type());
  TORCH_CHECK(xhat.dim() >= 1, kOp, ": expected xhat of at least one dimension, got a scalar");
  const auto like_xhat = [&](const char* name, const Tensor& t, at::ScalarType type) {
    TORCH_CHECK(t.layout() == at::kStrided && t.device() == xhat.device() && t.scalar_type() == type, kOp,
                ": expected ", name, " to be a strided tensor in ", type, " on ", xhat.device(), ", got ", t.layout(),
                " in ", t.scalar_type(), " on ", t.device());
  };
  like_xhat("grad", grad, xhat.scalar_type());
  like_xhat("rstd", rstd, xhat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  TORCH_CHECK(grad.sym_sizes() == xhat.sym_sizes(), kOp, ": expected grad of xhat's shape ", xhat.sym_sizes(), ", got ",
              grad.sym_sizes());
  TORCH_CHECK(rstd.sym_sizes() == xhat.sym_sizes().slice(0, xhat.dim() - 1), kOp,
              ": expected rstd of one number for each row of ", xhat.sym_sizes(), ", got ", rstd.sym_sizes());
  if (!weight.defined()) return;
  like_xhat("weight", weight, xhat.scalar_type());
  TORCH_CHECK(weight.dim() == 1 && weight.sym_size(0) == xhat.sym_size(-1), kOp, ": expected weight of shape [",
              xhat.sym_size(-1), "], got ", weight.sym_sizes());
}

constexpr int64_t kRowsASum = 64;  // rows summed in float32 before the sum is added in float64

// Each chunk of rows has its own column sums, added in order at the end: results are bitwise reproducible for a given
// number of threads.
void run_cpu(const Call& c) {
  if (c.xhat.numel() == 0) return;
  const auto rows = rows_of<3>(kOp, {c.grad, c.xhat, c.dx}, c.xhat.dim() - 1);
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

template <void run(const Call&)>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                            const OptionalTensor& weight, bool rms, bool need_dx, bool need_columns) {
  const Tensor w = tensor_or_none(weight);
  check(grad, xhat, rstd, w);
  auto [dx, dweight, dbias] = results(xhat, need_dx, need_columns);
  if (xhat.numel() == 0) dweight.zero_(), dbias.zero_();
  run({grad, xhat, rstd.contiguous(), w.defined() ? w.contiguous() : w, rms, need_dx ? dx : Tensor(),
       need_columns ? dweight : Tensor(), need_columns ? dbias : Tensor()});
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                                 const OptionalTensor& weight, bool, bool need_dx, bool need_columns) {
  check(grad, xhat, rstd, tensor_or_none(weight));
  return results(xhat, need_dx, need_columns);
}

std::tuple<Tensor, Tensor, Tensor> backward_autograd(const Tensor& grad, const Tensor& xhat, const Tensor& rstd,
                                                     const OptionalTensor& weight, bool rms, bool need_dx,
                                                     bool need_columns) {
  TORCH_CHECK(!needs_gradient(kOp, {grad, xhat, rstd, tensor_or_none(weight)}), kOp,
              ": expected no gradient to be recorded (second derivatives come through layer_norm_ and rms_norm_)");
  return NormBackwardOp::below_autograd(grad, xhat, rstd, weight, rms, need_dx, need_columns);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "norm_backward(Tensor grad, Tensor xhat, Tensor rstd, Tensor? weight, bool rms, bool need_dx=True, bool "
      "need_columns=True) -> (Tensor dx, Tensor dweight, Tensor dbias)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(custom_mm, CPU, m) { m.impl("norm_backward", backward<run_cpu>); }
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl("norm_backward", backward<run_cuda>); }
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) { m.impl("norm_backward", backward_meta); }
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) { m.impl("norm_backward", backward_autograd); }

}  // namespace matmuls
#endif
