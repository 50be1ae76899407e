// csr_sddmm: out[p] = alpha * dot(a[row of p], b[column of p]) for every nonzero p of a sparse pattern (csr.h).
//
//   a [..., rows, n], b [..., columns, n]: a @ b^T is sampled
//   out [..., nonzeros]: in the order of the values. summed: [nonzeros], summed over the batch
//   selected: as in sparse/spmm/spmm.h; column c counts only where it selected p's value
//
// Gives the gradient of a sparse product's values, and the scores of sparse attention, without materializing a @ b^T.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "glue/checks.h"
#include "sparse/csr.h"

namespace matmuls {

// a [batch, rows, n], b [batch, columns, n], contiguous in the last dimension but where noted; out [batch, nonzeros],
// if summed [1, nonzeros], contiguous.
struct SddmmCall {
  Pattern pattern;
  at::Tensor a, b, out;
  double alpha;
  at::Tensor selected;  // [batch, rows or columns, n], read if defined
  bool by_column, summed;
};
void run_cuda(const SddmmCall& c);  // for few nonzeros of one batch, a and b may have any strides

namespace {

using at::Tensor;

constexpr const char* kSddmm = "sddmm";

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef __CUDACC__
#include "glue/handles.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int kRun = 16;                       // neighbouring nonzeros that a group of lanes handles
constexpr int kMostColumns = INT32_MAX - 256;  // a group of lanes steps over as many
constexpr int kTogether = 4;

template <class T, class I>
struct Args {
  const I *crow, *col, *order;
  const T *a, *b;
  T* out;
  int64_t rows, nonzeros, batches;
  int n;
  int64_t a_stride, b_stride, a_batch, b_batch;
  int64_t a_step, b_step;  // between columns: 1, but for strided_kernel
  arithmetic_t<T> alpha;
  bool summed;
  const I* selected;  // may be null
  int64_t selected_rows;
  bool by_column;
};

// sums += products of kTogether rows of a and b, with all loads in flight at once. one_row: all use the same row of a,
// which is loaded once.
template <bool one_row, int V, class T, class I, class F>
__device__ void add_products(const T* a, const T* b, const Args<T, I>& m, const I (&rows)[kTogether],
                             const I (&columns)[kTogether], F (&sums)[kTogether]) {
  Words<T, V> left[kTogether], right[kTogether];
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    if (u == 0 || !one_row) left[u] = load_vector<T, V>(a + rows[u] * m.a_stride);
    right[u] = load_vector<T, V>(b + columns[u] * m.b_stride);
  }
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    F x[V], y[V];
    unpack(left[one_row ? 0 : u], x);
    unpack(right[u], y);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[u] += x[v] * y[v];
  }
}

// Reduces kTogether sums over L lanes; a lane returns the sum of product lane / (L / kTogether).
template <int L, class F>
__device__ F sum_of_lane(const F (&sums)[kTogether]) {
  static_assert(kTogether == 4 && L >= 4);
  constexpr unsigned kAll = 0xffffffffu;
  const bool upper = threadIdx.x & (L / 2), odd = threadIdx.x & (L / 4);
  const F first = (upper ? sums[2] : sums[0]) + __shfl_xor_sync(kAll, upper ? sums[0] : sums[2], L / 2);
  const F second = (upper ? sums[3] : sums[1]) + __shfl_xor_sync(kAll, upper ? sums[1] : sums[3], L / 2);
  return sum_of_group<L / 4>((odd ? second : first) + __shfl_xor_sync(kAll, odd ? first : second, L / 4));
}

// L lanes share a dot product, V columns each at a time; n is a multiple of V. kTogether dot products are in flight at
// once. Groups take equal numbers of nonzeros, however long rows are. Without the request for 3 blocks ptxas saves
// registers and keeps one product in flight.
template <class T, class I, int V, int L, bool with_selected>
__global__ void __launch_bounds__(kSparseThreads, with_selected ? 2 : 3)
    sddmm_kernel(const __grid_constant__ Args<T, I> m) {
  using F = arithmetic_t<T>;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / L) + threadIdx.x / L;
  const int lane = threadIdx.x % L;
  const auto place_of = [&](int64_t p) { return m.order ? static_cast<int64_t>(m.order[p]) : p; };
  // Groups past the end stay for the shuffles, with dot products of 0 columns.
  const int64_t begin = min(group * kRun, m.nonzeros), end = min(begin + kRun, m.nonzeros);
  int64_t row = row_of_group<L>(m.crow, m.rows, min(begin, m.nonzeros - 1));
#pragma unroll 1
  for (int64_t p = begin; p < begin + kRun; p += kTogether) {
    I rows[kTogether], columns[kTogether];
    const int64_t row_end = m.crow[min(row + 1 + lane, m.rows)];  // where the next L rows end
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      // Past the end, the last one again.
      const int64_t q = min(p + u, end - 1);
      const unsigned done = __ballot_sync(0xffffffffu, row_end <= q) >> (threadIdx.x % 32 / L * L);
      const int skipped = __popc(L == 32 ? done : done & ((1u << L % 32) - 1));
      rows[u] = static_cast<I>(skipped < L ? row + skipped : row_from(m.crow, m.rows, row + L, q));
      columns[u] = begin < end ? m.col[q] : I(0);
    }
    row = rows[kTogether - 1];
    // The entries of the batch that this block computes; all of them if they are summed.
#pragma unroll 1
    for (int64_t first = m.summed ? 0 : blockIdx.y; first < m.batches; first += m.summed ? m.batches : gridDim.y) {
      F sums[kTogether] = {};
#pragma unroll 1
      for (int64_t batch = first; batch < (m.summed ? m.batches : first + 1); ++batch) {
        const T* const a = m.a + batch * m.a_batch;
        const T* const b = m.b + batch * m.b_batch;
#pragma unroll 1
        for (int c = lane * V; c < m.n && begin < end; c += L * V) {
          if constexpr (with_selected) {
#pragma unroll
            for (int u = 0; u < kTogether; ++u) {
              const int64_t at = batch * m.selected_rows + (m.by_column ? columns[u] : rows[u]);
              if (static_cast<int64_t>(m.selected[at * m.n + c]) == place_of(min(p + u, end - 1)))
                sums[u] += static_cast<F>(a[rows[u] * m.a_stride + c]) * static_cast<F>(b[columns[u] * m.b_stride + c]);
            }
          } else if (rows[0] == rows[kTogether - 1]) {
            add_products<true, V>(a + c, b + c, m, rows, columns, sums);
          } else {
            add_products<false, V>(a + c, b + c, m, rows, columns, sums);
          }
        }
      }
      const F sum = sum_of_lane<L>(sums);
      const int64_t q = p + lane / (L / kTogether);
      if (lane % (L / kTogether) == 0 && q < end)
        m.out[(m.summed ? 0 : first) * m.nonzeros + place_of(q)] = T(m.alpha * sum);
    }
  }
}

// One dot product for each group of L lanes, of one batch; a and b with any strides.
template <class T, class I, int L>
__global__ void __launch_bounds__(kSparseThreads) strided_kernel(const __grid_constant__ Args<T, I> m) {
  using F = arithmetic_t<T>;
  const int64_t p = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / L) + threadIdx.x / L;
  const int64_t row = row_of_group<L>(m.crow, m.rows, min(p, m.nonzeros - 1));
  F sum = 0;
  if (p < m.nonzeros) {
    const T* const a = m.a + row * m.a_stride;
    const T* const b = m.b + m.col[p] * m.b_stride;
#pragma unroll 8
    for (int c = threadIdx.x % L; c < m.n; c += L)
      sum += static_cast<F>(a[c * m.a_step]) * static_cast<F>(b[c * m.b_step]);
  }
  sum = sum_of_group<L>(sum);
  if (p < m.nonzeros && threadIdx.x % L == 0) m.out[m.order ? static_cast<int64_t>(m.order[p]) : p] = T(m.alpha * sum);
}

template <class T, class I>
void launch_strided(const Args<T, I>& m) {
  constexpr int L = 8;
  const auto blocks = static_cast<unsigned>(ceil_of(m.nonzeros, kSparseThreads / L));
  strided_kernel<T, I, L><<<blocks, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <int V, int L, bool with_selected, class T, class I>
void launch(const Args<T, I>& m) {
  const int64_t blocks = ceil_of(ceil_of(m.nonzeros, kRun), kSparseThreads / L);
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, kSddmm, ": expected at most 2^31 blocks of nonzeros, got ", blocks);
  const dim3 grid(static_cast<unsigned>(blocks),
                  m.summed ? 1 : static_cast<unsigned>(std::min<int64_t>(m.batches, 65535)));
  sddmm_kernel<T, I, V, L, with_selected><<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void run_cuda(const SddmmCall& c) {
  const OperationGuard guard(kSddmm, c.a);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.a.scalar_type(), kSddmm, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kSddmm, [&] {
      Args<scalar_t, index_t> m{};
      m.crow = c.pattern.crow.const_data_ptr<index_t>();
      m.col = c.pattern.col.const_data_ptr<index_t>();
      m.order = indices_or_null<index_t>(c.pattern.order);
      m.a = c.a.const_data_ptr<scalar_t>(), m.b = c.b.const_data_ptr<scalar_t>();
      m.out = c.out.mutable_data_ptr<scalar_t>();
      m.rows = c.pattern.rows(), m.nonzeros = c.pattern.nonzeros(), m.batches = c.a.size(0);
      TORCH_CHECK_VALUE(c.a.size(2) <= kMostColumns, kSddmm, ": expected at most ", kMostColumns, " columns, got ",
                        c.a.size(2));
      m.n = static_cast<int>(c.a.size(2));
      m.a_stride = c.a.stride(1), m.b_stride = c.b.stride(1), m.a_batch = c.a.stride(0), m.b_batch = c.b.stride(0);
      m.alpha = static_cast<arithmetic_t<scalar_t>>(c.alpha);
      m.summed = c.summed;
      if (c.selected.defined()) {
        m.selected = c.selected.const_data_ptr<index_t>();
        m.selected_rows = c.selected.size(1), m.by_column = c.by_column;
        return launch<1, 32, true>(m);
      }
      m.a_step = c.a.stride(2), m.b_step = c.b.stride(2);
      if (m.n > 1 && (m.a_step != 1 || m.b_step != 1)) return launch_strided(m);
      constexpr int V = 16 / sizeof(scalar_t);
      if (!of_vectors(c.a) || !of_vectors(c.b)) return launch<1, 32, false>(m);
      // Few lanes, because the reduction over a product's lanes costs a warp as much as a load; but as many as keep a
      // row's vectors in flight. With 512 columns in float32, 32 lanes take .52 to .87 of the time of 8 (H100).
      const int64_t vectors = ceil_of(m.n, V);
      if (vectors <= 8) return launch<V, 4, false>(m);
      if (vectors <= 32) return launch<V, 8, false>(m);
      if (vectors <= 64) return launch<V, 16, false>(m);
      launch<V, 32, false>(m);
    });
  });
}

}  // namespace matmuls
#else

// ------------------------------------------------------------------------------------------------ CPU, operators

#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "cpu/threads.h"
#include "glue/autograd.h"
#include "sparse/cpu.h"
#include "sparse/dense_blocks.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"

namespace matmuls {
namespace {

c10::SymDimVector check(const Pattern& p, const Tensor& a, const Tensor& b, const c10::SymInt& columns,
                        const Tensor& selected, bool by_column, bool summed) {
  check_floating_or_complex(kSddmm, "a", a);
  check_like(kSddmm, "b", b, "a", a);
  check_pattern(kSddmm, p, a);
  TORCH_CHECK(a.dim() >= 2 && a.sym_size(-2) == p.sym_rows(), kSddmm, ": expected a of shape [..., ", p.sym_rows(),
              ", n] for a pattern of ", p.sym_rows(), " rows, got ", a.sym_sizes());
  TORCH_CHECK(b.dim() >= 2 && b.sym_size(-2) == columns && b.sym_size(-1) == a.sym_size(-1), kSddmm,
              ": expected b, transposed, of shape [..., ", columns, ", ", a.sym_size(-1), "] for a pattern of ",
              columns, " columns, got ", b.sym_sizes());
  const auto lead =
      at::infer_size_symdimvector(a.sym_sizes().slice(0, a.dim() - 2), b.sym_sizes().slice(0, b.dim() - 2));
  if (selected.defined()) {
    check_floating(kSddmm, "a, with selected,", a);
    auto expected = lead;
    expected.push_back(by_column ? columns : p.sym_rows());
    expected.push_back(a.sym_size(-1));
    TORCH_CHECK(selected.sym_sizes() == c10::SymIntArrayRef(expected) &&
                    selected.scalar_type() == p.crow.scalar_type() && selected.device() == a.device(),
                kSddmm, ": expected selected of shape ", c10::SymIntArrayRef(expected), " in ", p.crow.scalar_type(),
                ", got ", selected.sym_sizes(), " in ", selected.scalar_type());
  }
  auto shape = summed ? c10::SymDimVector() : c10::SymDimVector(lead);
  shape.push_back(p.col.sym_size(0));
  return shape;
}

template <class T, class I>
arithmetic_t<T> selected_dot(const SddmmCall& c, const I* selected, const T* a, const T* b, int64_t batches,
                             int64_t row, I place) {
  using A = arithmetic_t<T>;
  A sum = 0;
  const int64_t n = c.a.size(2);
  for (int64_t batch = 0; batch < batches; ++batch) {
    const I* const chosen = selected + batch * c.selected.stride(0) + row * n;
    for (int64_t i = 0; i < n; ++i)
      if (chosen[i] == place)
        sum += static_cast<A>(a[batch * c.a.stride(0) + i]) * static_cast<A>(b[batch * c.b.stride(0) + i]);
  }
  return sum;
}

void run_cpu(const SddmmCall& c) {
  if (c.a.size(0) == 1 && !c.selected.defined() && takes_dense_sddmm(c.pattern, c.a, c.b))
    return dense_sddmm(c.pattern, c.a[0], c.b[0], c.alpha, c.out[0]);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.a.scalar_type(), kSddmm, [&] {
    using A = arithmetic_t<scalar_t>;
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kSddmm, [&] {
      const index_t* const crow = c.pattern.crow.const_data_ptr<index_t>();
      const index_t* const col = c.pattern.col.const_data_ptr<index_t>();
      const index_t* const order = indices_or_null<index_t>(c.pattern.order);
      const int64_t rows = c.pattern.rows(), nonzeros = c.pattern.nonzeros(), n = c.a.size(2);
      const int64_t together = c.summed ? c.a.size(0) : 1;
      constexpr int64_t kCacheBytes = 256 << 10;  // a b this small is soon in the L2 cache
      const bool prefetch = c.b.size(1) * n * c.b.element_size() > kCacheBytes;
      const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(n * together, 1));
      for (int64_t batch = 0; batch < c.a.size(0); batch += together) {
        const Sddmm<scalar_t, index_t> m{crow,
                                         col,
                                         order,
                                         c.a.const_data_ptr<scalar_t>() + batch * c.a.stride(0),
                                         c.b.const_data_ptr<scalar_t>() + batch * c.b.stride(0),
                                         c.out.mutable_data_ptr<scalar_t>() + (c.summed ? 0 : batch * nonzeros),
                                         nonzeros,
                                         n,
                                         c.a.stride(1),
                                         c.b.stride(1),
                                         together,
                                         c.a.stride(0),
                                         c.b.stride(0),
                                         static_cast<A>(c.alpha),
                                         prefetch};
        const index_t* const selected =
            c.selected.defined() ? c.selected.const_data_ptr<index_t>() + batch * c.selected.stride(0) : nullptr;
        parallel_for(0, nonzeros, grain, [&](int64_t begin, int64_t end) {
          int64_t row = std::upper_bound(crow, crow + rows + 1, static_cast<index_t>(begin)) - crow - 1;
          if (selected == nullptr) return sddmm_nonzeros(m, row, begin, end);
          for (int64_t p = begin; p < end; ++p) {
            while (crow[row + 1] <= p) ++row;
            const index_t place = order != nullptr ? order[p] : static_cast<index_t>(p);
            const A sum = selected_dot(c, selected, m.a + row * m.a_stride, m.b + int64_t{col[p]} * m.b_stride,
                                       together, c.by_column ? int64_t{col[p]} : row, place);
            m.out[place] = static_cast<scalar_t>(m.alpha * sum);
          }
        });
      }
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

// Whether a launch takes longer than the arithmetic.
bool are_few(int64_t nonzeros, int64_t n) {
  constexpr int64_t kFew = 1 << 18, kColumns = 512;
  return n <= kColumns && nonzeros * n <= kFew;
}

template <void run(const SddmmCall&)>
Tensor sddmm(const Tensor& crow, const Tensor& col, const Tensor& a, const Tensor& b, c10::SymInt columns, double alpha,
             const OptionalTensor& order, const OptionalTensor& t_crow, const OptionalTensor& t_col,
             const OptionalTensor& t_order, const OptionalTensor& maybe_selected, bool by_column, bool summed) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  const Tensor selected = tensor_or_none(maybe_selected);
  Tensor out = at::empty_symint(check(p, a, b, columns, selected, by_column, summed), a.options());
  if (out.numel() == 0) return out;
  const auto lead = at::infer_size_dimvector(a.sizes().slice(0, a.dim() - 2), b.sizes().slice(0, b.dim() - 2));
  const int64_t batch = c10::multiply_integers(lead);
  if (batch == 0 || alpha == 0) return out.zero_();  // nothing is read then, NaN or not, as in BLAS
  // Few numbers are read where they lie.
  const bool few =
      a.is_cuda() && batch == 1 && !selected.defined() && !a.is_complex() && are_few(p.nonzeros(), a.size(-1));
  const auto by_rows = [&](const Tensor& t) { return as_batch(few ? t : with_contiguous_rows(t), lead, batch, 2); };
  const Pattern whole = readable(kSddmm, p, columns.expect_int());
  const auto sample = [&](const Tensor& x, const Tensor& y, const Tensor& into) {
    run({whole, by_rows(x), by_rows(y), into.view({summed ? 1 : batch, p.nonzeros()}), alpha,
         selected.defined() ? as_batch(selected, lead, batch, 2).contiguous() : selected, by_column, summed});
  };
  if (!a.is_complex()) {
    sample(a, b, out);
    return out;
  }
  // Columns as pairs of real ones: re(a b) = dot(a, conj(b)), im(a b) = dot(a, i conj(b)).
  const Tensor x = as_real_columns(with_contiguous_rows(a));
  const Tensor y = at::conj_physical(b).contiguous();
  const Tensor part = at::empty(out.sizes(), x.options()), parts = at::view_as_real(out);
  sample(x, as_real_columns(y), part);
  parts.select(-1, 0).copy_(part);
  sample(x, as_real_columns(y.mul_(c10::complex<double>(0, 1))), part);
  parts.select(-1, 1).copy_(part);
  return out;
}

Tensor sddmm_meta(const Tensor& crow, const Tensor& col, const Tensor& a, const Tensor& b, c10::SymInt columns, double,
                  const OptionalTensor& order, const OptionalTensor& t_crow, const OptionalTensor& t_col,
                  const OptionalTensor& t_order, const OptionalTensor& selected, bool by_column, bool summed) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  return at::empty_symint(check(p, a, b, columns, tensor_or_none(selected), by_column, summed), a.options());
}

// Gradients: for a, the product of grad (as a sparse matrix) and conj(b); for b, that of its transpose and conj(a).
struct SddmmFunction : KernelFunction<SddmmFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b, const Pattern& p,
                        const c10::SymInt& columns, double alpha, const OptionalTensor& selected, bool by_column,
                        bool summed) {
    ctx->save_for_backward({p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order, b.requires_grad() ? a : Tensor(),
                            a.requires_grad() ? b : Tensor(), tensor_or_none(selected)});
    ctx->saved_data["a_sizes"] = a.sym_sizes();
    ctx->saved_data["b_sizes"] = b.sym_sizes();
    ctx->saved_data["lead"] = c10::SymIntArrayRef(
        at::infer_size_symdimvector(a.sym_sizes().slice(0, a.dim() - 2), b.sym_sizes().slice(0, b.dim() - 2)));
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["by_column"] = by_column;
    return SddmmOp::below_autograd(p.crow, p.col, a, b, columns, alpha, none_or_tensor(p.order),
                                   none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order),
                                   selected, by_column, summed);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Pattern p{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
    const auto a_sizes = ctx->saved_data["a_sizes"].toSymIntVector();
    const auto b_sizes = ctx->saved_data["b_sizes"].toSymIntVector();
    const double alpha = ctx->saved_data["alpha"].toDouble();
    const bool by_column = ctx->saved_data["by_column"].toBool();
    const c10::SymInt columns = b_sizes[b_sizes.size() - 2];
    // Expanded to the whole batch: a summed gradient and one of the operands may lack batch dimensions.
    const auto product = [&](const Pattern& q, const Tensor& dense, const c10::SymInt& inner, bool selected_by_column) {
      const Tensor one = SpmmOp::call(q.crow, q.col, grads[0], dense.to(grads[0].scalar_type()).conj(), inner, "sum",
                                      alpha, none_or_tensor(q.order), none_or_tensor(q.t_crow), none_or_tensor(q.t_col),
                                      none_or_tensor(q.t_order), none_or_tensor(saved[8]), selected_by_column, -1, -1);
      auto shape = ctx->saved_data["lead"].toSymIntVector();
      shape.push_back(one.sym_size(-2));
      shape.push_back(one.sym_size(-1));
      return one.expand_symint(shape);
    };
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0)) grad_a = at::sum_to(product(p, saved[7], columns, by_column), a_sizes);
    if (ctx->needs_input_grad(1))
      grad_b = at::sum_to(product(p.transposed(columns), saved[6], p.sym_rows(), !by_column), b_sizes);
    return {grad_a, grad_b, {}, {}, {}, {}, {}, {}};
  }
};

Tensor sddmm_autograd(const Tensor& crow, const Tensor& col, const Tensor& a, const Tensor& b, c10::SymInt columns,
                      double alpha, const OptionalTensor& order, const OptionalTensor& t_crow,
                      const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& selected,
                      bool by_column, bool summed) {
  if (!needs_gradient(kSddmm, {a, b}))
    return SddmmOp::below_autograd(crow, col, a, b, columns, alpha, order, t_crow, t_col, t_order, selected, by_column,
                                   summed);
  return SddmmFunction::apply(a, b, pattern_of(crow, col, order, t_crow, t_col, t_order), columns, alpha, selected,
                              by_column, summed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "csr_sddmm(Tensor crow, Tensor col, Tensor a, Tensor b, SymInt columns, float alpha=1.0, Tensor? order=None, "
      "Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None, Tensor? selected=None, bool by_column=False, "
      "bool "
      "summed=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
MATMULS_KERNELS("csr_sddmm", sddmm<run_cpu>, sddmm<run_cuda>, sddmm_meta, sddmm_autograd)
MATMULS_AUTOCAST("csr_sddmm", SddmmOp)

}  // namespace matmuls
#endif
