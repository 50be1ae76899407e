// csr_softmax: y = softmax(scale * x) over the nonzeros of each row of a sparse pattern (csr.h), and its gradient
// csr_softmax_backward: dx = scale * y * (grad - sum(y * grad)). x, y, grad: [..., nonzeros].
//
// Entries outside the pattern count as masked; an empty row yields nothing. Values as torch.softmax of the row, NaN and
// inf included.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "sparse/csr.h"

namespace matmuls {

// All [batch, nonzeros] and contiguous, except crow and order. Forward: x -> y. Backward: x holds y; y, grad -> dx.
struct SparseSoftmaxCall {
  at::Tensor crow, order, x, grad, out;  // grad: backward only; order: may be undefined
  double scale;
};
void run_cuda(const SparseSoftmaxCall& c);

namespace {

using at::Tensor;

constexpr const char *kSparseSoftmax = "sparse_softmax", *kSparseSoftmaxBackward = "sparse_softmax_backward";

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int64_t kLongRow = 1024;  // nonzeros; a longer row takes the whole block

template <class T, class I>
struct Args {
  const I *crow, *order;
  const T *x, *grad;
  T* out;
  int64_t rows, nonzeros, batches;
  arithmetic_t<T> scale;
};

// Reduces one number per thread to one number for the whole block, in an order independent of timing. fold: over a
// warp; fold8: over 8 lanes that hold the results of the 8 warps.
template <class F, class Fold, class Fold8>
__device__ F of_block(F x, F (&shared)[kSparseThreads / 32], const Fold& fold, const Fold8& fold8) {
  const F of_warp = fold(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return fold8(shared[threadIdx.x % (kSparseThreads / 32)]);
}

// The softmax of one row by `size` threads, of which this one is number `rank`. sum and largest reduce over these
// threads.
template <bool backward, class T, class I, class Sum, class Largest>
__device__ void softmax_of(const Args<T, I>& m, int64_t batch, int64_t begin, int64_t end, int rank, int size,
                           const Sum& sum, const Largest& largest) {
  using F = arithmetic_t<T>;
  const int64_t base = batch * m.nonzeros;
  const auto place = [&](int64_t p) { return base + (m.order ? static_cast<int64_t>(m.order[p]) : p); };
  if constexpr (backward) {
    F dot = 0;
    for (int64_t p = begin + rank; p < end; p += size) {
      const int64_t at = place(p);
      dot += static_cast<F>(m.x[at]) * static_cast<F>(m.grad[at]);
    }
    dot = sum(dot);
    for (int64_t p = begin + rank; p < end; p += size) {
      const int64_t at = place(p);
      m.out[at] = T(m.scale * static_cast<F>(m.x[at]) * (static_cast<F>(m.grad[at]) - dot));
    }
  } else {
    const auto z = [&](int64_t p) { return static_cast<F>(m.x[place(p)]) * m.scale; };
    F top = -std::numeric_limits<F>::infinity();
    for (int64_t p = begin + rank; p < end; p += size) top = larger(top, z(p));
    top = largest(top);
    F total = 0;
    for (int64_t p = begin + rank; p < end; p += size) total += exp_of(z(p) - top);
    total = sum(total);
    for (int64_t p = begin + rank; p < end; p += size) m.out[place(p)] = T(exp_of(z(p) - top) / total);
  }
}

// L lanes share a row; then the whole block takes each of its long rows in turn.
template <class T, class I, int L, bool backward>
__global__ void __launch_bounds__(kSparseThreads) sparse_softmax_kernel(const __grid_constant__ Args<T, I> m) {
  using F = arithmetic_t<T>;
  constexpr int kGroups = kSparseThreads / L;
  __shared__ F shared[kSparseThreads / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups, row = first + threadIdx.x / L;
  int64_t begin = 0, end = 0;
  if (row < m.rows) begin = m.crow[row], end = m.crow[row + 1];
  const bool is_long = end - begin > kLongRow;
  const bool any_long = __syncthreads_or(is_long);
  for (int64_t batch = blockIdx.y; batch < m.batches; batch += gridDim.y) {
    softmax_of<backward>(
        m, batch, begin, is_long ? begin : end, threadIdx.x % L, L, [](F x) { return sum_of_group<L>(x); },
        [](F x) { return largest_of_group<L>(x); });
    if (!any_long) continue;
    for (int64_t r = first; r < min(first + kGroups, m.rows); ++r) {
      const int64_t from = m.crow[r], to = m.crow[r + 1];
      if (to - from <= kLongRow) continue;
      constexpr int kWarps = kSparseThreads / 32;
      softmax_of<backward>(
          m, batch, from, to, threadIdx.x, kSparseThreads,
          [&](F x) {
            return of_block(
                x, shared, [](F y) { return sum_of_group<32>(y); }, [](F y) { return sum_of_group<kWarps>(y); });
          },
          [&](F x) {
            return of_block(
                x, shared, [](F y) { return largest_of_group<32>(y); },
                [](F y) { return largest_of_group<kWarps>(y); });
          });
    }
  }
}

template <bool backward>
void run_cuda_as(const SparseSoftmaxCall& c) {
  const OperationGuard guard(backward ? kSparseSoftmaxBackward : kSparseSoftmax, c.x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), kSparseSoftmax, [&] {
    AT_DISPATCH_INDEX_TYPES(c.crow.scalar_type(), kSparseSoftmax, [&] {
      const Args<scalar_t, index_t> m{c.crow.const_data_ptr<index_t>(),
                                      indices_or_null<index_t>(c.order),
                                      c.x.const_data_ptr<scalar_t>(),
                                      backward ? c.grad.const_data_ptr<scalar_t>() : nullptr,
                                      c.out.mutable_data_ptr<scalar_t>(),
                                      c.crow.size(0) - 1,
                                      c.x.size(1),
                                      c.x.size(0),
                                      static_cast<arithmetic_t<scalar_t>>(c.scale)};
      const auto launch = [&](auto lanes) {
        constexpr int L = decltype(lanes)::value;
        const int64_t blocks = ceil_of(m.rows, kSparseThreads / L);
        TORCH_CHECK_VALUE(blocks <= INT32_MAX, kSparseSoftmax, ": expected at most 2^31 blocks of rows, got ", blocks);
        const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min<int64_t>(m.batches, 65535)));
        sparse_softmax_kernel<scalar_t, index_t, L, backward>
            <<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      };
      if (m.nonzeros <= 16 * m.rows)
        launch(std::integral_constant<int, 8>{});
      else
        launch(std::integral_constant<int, 32>{});
    });
  });
}

}  // namespace

void run_cuda(const SparseSoftmaxCall& c) { c.grad.defined() ? run_cuda_as<true>(c) : run_cuda_as<false>(c); }

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "cpu/row_functions.h"
#include "cpu/threads.h"
#include "glue/autograd.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"

namespace matmuls {
namespace {

void check(const char* op, const char* name, const Tensor& crow, const Tensor& x, const Tensor& order) {
  check_floating(op, name, x);
  TORCH_CHECK_VALUE(crow.layout() == at::kStrided && crow.dim() == 1 && crow.sym_size(0) >= 1 &&
                        (crow.scalar_type() == at::kInt || crow.scalar_type() == at::kLong),
                    op, ": expected crow of shape [rows + 1] in Int or Long, got shape ", crow.sym_sizes(), " in ",
                    crow.scalar_type());
  TORCH_CHECK_VALUE(crow.sym_size(0) > 1 || x.dim() == 0 || x.sym_size(-1) == 0, op,
                    ": expected no nonzeros without rows, got ", x.sym_sizes());
  TORCH_CHECK(crow.device() == x.device(), op, ": expected the pattern on ", x.device(), " as ", name, " is, got ",
              crow.device());
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": expected ", name, " of shape [..., nonzeros], got a scalar");
  TORCH_CHECK_VALUE(!order.defined() || (order.dim() == 1 && order.scalar_type() == crow.scalar_type() &&
                                         order.sym_size(0) == x.sym_size(-1) && order.device() == x.device()),
                    op, ": expected order of shape [", x.sym_size(-1), "] in ", crow.scalar_type());
}

Tensor flat(const Tensor& t) { return t.contiguous().view({-1, t.size(-1)}); }

// The values of a row: in place if they are contiguous, else gathered through `order` into a buffer.
template <class T, class I>
class Values {
 public:
  explicit Values(const I* order) : order_(order) {}

  const T* gather(int which, const T* values, int64_t begin, int64_t end) {
    if (order_ == nullptr) return values + begin;
    T* const to = target(which, nullptr, begin, end);
    for (int64_t p = begin; p < end; ++p) to[p - begin] = values[order_[p]];
    return to;
  }
  T* target(int which, T* values, int64_t begin, int64_t end) {
    if (order_ == nullptr) return values + begin;
    buffers_[which].resize(std::max<size_t>(buffers_[which].size(), end - begin));
    return buffers_[which].data();
  }
  void scatter(const T* from, T* values, int64_t begin, int64_t end) const {
    if (order_ == nullptr) return;
    for (int64_t p = begin; p < end; ++p) values[order_[p]] = from[p - begin];
  }

 private:
  const I* order_;
  std::vector<T> buffers_[3];
};

void run_cpu(const SparseSoftmaxCall& c) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), kSparseSoftmax, [&] {
    AT_DISPATCH_INDEX_TYPES(c.crow.scalar_type(), kSparseSoftmax, [&] {
      const index_t* const crow = c.crow.const_data_ptr<index_t>();
      const int64_t rows = c.crow.size(0) - 1, nonzeros = c.x.size(1);
      constexpr int64_t kShare = 8192;
      const int64_t shares = shares_of(rows, nonzeros, kShare);
      for (int64_t b = 0; b < c.x.size(0); ++b) {
        const scalar_t* const x = c.x.const_data_ptr<scalar_t>() + b * nonzeros;
        const scalar_t* const grad = c.grad.defined() ? c.grad.const_data_ptr<scalar_t>() + b * nonzeros : nullptr;
        scalar_t* const out = c.out.mutable_data_ptr<scalar_t>() + b * nonzeros;
        parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
          Values<scalar_t, index_t> values(indices_or_null<index_t>(c.order));
          const int64_t row_end = place_of(crow, rows, last, kShare, INT64_MAX).row;
          for (int64_t r = place_of(crow, rows, first, kShare, INT64_MAX).row; r < row_end; ++r) {
            const int64_t begin = crow[r], end = crow[r + 1];
            if (begin == end) continue;
            const scalar_t* const from = values.gather(0, x, begin, end);
            scalar_t* const to = values.target(1, out, begin, end);
            if (grad != nullptr) {
              softmax_backward_row(from, values.gather(2, grad, begin, end), to, end - begin, end - begin, c.scale);
            } else {
              softmax_row(from, to, end - begin, end - begin, c.scale, MaskRow{});
            }
            values.scatter(to, out, begin, end);
          }
        });
      }
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(CsrSoftmaxOp, "custom_mm::csr_softmax", "",
                 Tensor(const Tensor&, const Tensor&, double, const OptionalTensor&));
MATMULS_OPERATOR(CsrSoftmaxBackwardOp, "custom_mm::csr_softmax_backward", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, double, const OptionalTensor&));

void validate(const char* op, const Tensor& crow, const Tensor& order, int64_t nonzeros) {
  validate_offsets(op, crow, nonzeros, "nonzeros");
  if (order.defined()) validate_order(op, order, nonzeros);
}

template <void run(const SparseSoftmaxCall&)>
Tensor softmax(const Tensor& crow, const Tensor& x, double scale, const OptionalTensor& order) {
  check(kSparseSoftmax, "x", crow, x, tensor_or_none(order));
  validate(kSparseSoftmax, crow, tensor_or_none(order), x.size(-1));
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor way = tensor_or_none(order);
  run({crow.contiguous(), way.defined() ? way.contiguous() : way, flat(x), {}, flat(out), scale});
  return out;
}
Tensor softmax_meta(const Tensor& crow, const Tensor& x, double, const OptionalTensor& order) {
  check(kSparseSoftmax, "x", crow, x, tensor_or_none(order));
  return at::empty_symint(x.sym_sizes(), x.options());
}

void check_backward(const Tensor& crow, const Tensor& y, const Tensor& grad, const Tensor& order) {
  check(kSparseSoftmaxBackward, "y", crow, y, order);
  check_like(kSparseSoftmaxBackward, "grad", grad, "y", y);
  TORCH_CHECK(y.sym_sizes() == grad.sym_sizes(), kSparseSoftmaxBackward, ": expected grad of y's shape ", y.sym_sizes(),
              ", got ", grad.sym_sizes());
}
template <void run(const SparseSoftmaxCall&)>
Tensor softmax_backward(const Tensor& crow, const Tensor& y, const Tensor& grad, double scale,
                        const OptionalTensor& order) {
  check_backward(crow, y, grad, tensor_or_none(order));
  validate(kSparseSoftmaxBackward, crow, tensor_or_none(order), y.size(-1));
  Tensor out = at::empty(y.sizes(), y.options());
  if (out.numel() == 0) return out;
  const Tensor way = tensor_or_none(order);
  run({crow.contiguous(), way.defined() ? way.contiguous() : way, flat(y), flat(grad), flat(out), scale});
  return out;
}
Tensor softmax_backward_meta(const Tensor& crow, const Tensor& y, const Tensor& grad, double,
                             const OptionalTensor& order) {
  check_backward(crow, y, grad, tensor_or_none(order));
  return at::empty_symint(y.sym_sizes(), y.options());
}

struct SoftmaxFunction : KernelFunction<SoftmaxFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& crow, double scale,
                        const OptionalTensor& order) {
    const Tensor y = CsrSoftmaxOp::below_autograd(crow, x, scale, order);
    ctx->save_for_backward({crow, tensor_or_none(order), y});
    ctx->saved_data["scale"] = scale;
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {CsrSoftmaxBackwardOp::call(saved[0], saved[2], grads[0], ctx->saved_data["scale"].toDouble(),
                                       none_or_tensor(saved[1])),
            {},
            {},
            {}};
  }
};

// Double backward, with v the gradient of dx. For grad: the same operator, which is symmetric. For y: scale * (v *
// (grad - sum(y * grad)) - grad * sum(y * v)), sums over rows. softmax_backward with y = 1 gives scale * (g - sum(g))
// for any g, and hence the sums.
struct SoftmaxBackwardFunction : KernelFunction<SoftmaxBackwardFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& y, const Tensor& grad, const Tensor& crow,
                        double scale, const OptionalTensor& order) {
    ctx->save_for_backward({crow, tensor_or_none(order), y, grad});
    ctx->saved_data["scale"] = scale;
    return CsrSoftmaxBackwardOp::below_autograd(crow, y, grad, scale, order);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &crow = saved[0], &y = saved[2], &grad = saved[3], &v = grads[0];
    const OptionalTensor order = none_or_tensor(saved[1]);
    const double scale = ctx->saved_data["scale"].toDouble();
    Tensor grad_y, grad_grad;
    if (ctx->needs_input_grad(0)) {
      const Tensor ones = at::ones_like(y);
      const auto row_sums = [&](const Tensor& g) { return g - CsrSoftmaxBackwardOp::call(crow, ones, g, 1, order); };
      grad_y = scale * (v * (grad - row_sums(y * grad)) - grad * row_sums(y * v));
    }
    if (ctx->needs_input_grad(1)) grad_grad = CsrSoftmaxBackwardOp::call(crow, y, v, scale, order);
    return {grad_y, grad_grad, {}, {}, {}};
  }
};

Tensor softmax_autograd(const Tensor& crow, const Tensor& x, double scale, const OptionalTensor& order) {
  if (needs_gradient(kSparseSoftmax, {x})) return SoftmaxFunction::apply(x, crow, scale, order);
  return CsrSoftmaxOp::below_autograd(crow, x, scale, order);
}
Tensor softmax_backward_autograd(const Tensor& crow, const Tensor& y, const Tensor& grad, double scale,
                                 const OptionalTensor& order) {
  if (needs_gradient(kSparseSoftmaxBackward, {y, grad}))
    return SoftmaxBackwardFunction::apply(y, grad, crow, scale, order);
  return CsrSoftmaxBackwardOp::below_autograd(crow, y, grad, scale, order);
}

// Casts as torch.softmax does: float32 on a GPU, x's dtype on a CPU.
Tensor softmax_autocast(const Tensor& crow, const Tensor& x, double scale, const OptionalTensor& order) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return CsrSoftmaxOp::call(crow, autocast_to(at::kFloat, x, at::kCUDA), scale, order);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_softmax(Tensor crow, Tensor x, float scale=1.0, Tensor? order=None) -> Tensor", tags);
  m.def("csr_softmax_backward(Tensor crow, Tensor y, Tensor grad, float scale=1.0, Tensor? order=None) -> Tensor",
        tags);
}
MATMULS_KERNELS("csr_softmax", softmax<run_cpu>, softmax<run_cuda>, softmax_meta, softmax_autograd)
MATMULS_KERNELS("csr_softmax_backward", softmax_backward<run_cpu>, softmax_backward<run_cuda>, softmax_backward_meta,
                softmax_backward_autograd)
TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) { m.impl("csr_softmax", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) { m.impl("csr_softmax", softmax_autocast); }

}  // namespace matmuls
#endif
