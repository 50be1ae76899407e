// csr_spmm: out = alpha * reduce(A @ dense) + beta * out, A sparse by rows (sparse.h), dense [..., columns, n].
//
// reduce: sum, mean (over a row's nonzeros), max or min; an empty row gives 0. With `selected`, [..., rows, n] indices
// of values, a nonzero counts only in the columns where its own row (or its column's, by_column) selected its value:
// the gradients of max and min. `longest`, where known, is that of the rows, t_longest of the columns: how work is
// shared. Accumulation in float32, float64 for float64, in an order that depends on the shapes alone.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "common.h"
#include "filled.h"
#include "sparse.h"
#include "sparse_cpu.h"

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char* kOp = "spmm";

enum class Reduce { sum, mean, max, min };

Reduce reduce_of(std::string_view name) {
  if (name == "sum") return Reduce::sum;
  if (name == "mean") return Reduce::mean;
  if (name == "max") return Reduce::max;
  TORCH_CHECK_VALUE(name == "min", kOp, ": expected reduce to be sum, mean, max or min, got ", name);
  return Reduce::min;
}

// Shapes as the kernels see them: values [batch, nonzeros], dense [batch, columns, n], out [batch, rows, n], elements
// of a row side by side.
struct Call {
  Pattern pattern;
  Tensor values, dense, out;
  Reduce reduce;
  double alpha, beta;
  Tensor arg;       // written where defined: max and min alone, [batch, rows, n]
  Tensor selected;  // read where defined, [batch, rows or columns, n]
  bool by_column;
  int64_t longest;  // row in nonzeros, a hint; -1: not known
};

c10::SymDimVector check(const Pattern& p, const Tensor& values, const Tensor& dense, const c10::SymInt& columns,
                        const Tensor& selected, bool by_column) {
  check_floating(kOp, "dense", dense);
  check_like(kOp, "values", values, "dense", dense);
  check_pattern(kOp, p, dense);
  TORCH_CHECK_VALUE(values.dim() >= 1 && values.sym_size(-1) == p.col.sym_size(0), kOp,
                    ": expected values of shape [..., ", p.col.sym_size(0), "], one for each nonzero, got ",
                    values.sym_sizes());
  TORCH_CHECK(dense.dim() >= 2 && dense.sym_size(-2) == columns, kOp, ": expected dense of shape [..., ", columns,
              ", n] beside a sparse matrix of ", columns, " columns, got ", dense.sym_sizes());
  TORCH_CHECK_VALUE(!p.t_crow.defined() || p.t_crow.sym_size(0) == columns + 1, kOp, ": expected t_crow of shape [",
                    columns + 1, "], got ", p.t_crow.defined() ? p.t_crow.sym_sizes() : c10::SymIntArrayRef{});
  const auto values_lead = values.sym_sizes().slice(0, values.dim() - 1);
  const auto dense_lead = dense.sym_sizes().slice(0, dense.dim() - 2);
  auto shape = c10::SymDimVector(at::infer_size_symdimvector(values_lead, dense_lead));
  if (selected.defined()) {
    auto expected = shape;
    expected.push_back(by_column ? columns : p.sym_rows());
    expected.push_back(dense.sym_size(-1));
    TORCH_CHECK(selected.sym_sizes() == c10::SymIntArrayRef(expected) &&
                    selected.scalar_type() == p.crow.scalar_type() && selected.device() == dense.device(),
                kOp, ": expected selected of shape ", c10::SymIntArrayRef(expected), " in ", p.crow.scalar_type(),
                ", got ", selected.sym_sizes(), " in ", selected.scalar_type());
  }
  shape.push_back(p.sym_rows());
  shape.push_back(dense.sym_size(-1));
  return shape;
}

void check_float_values(const Pattern& p, const Tensor& values) {
  check_pattern(kOp, p, values);
  TORCH_CHECK_VALUE(values.scalar_type() == at::kFloat && values.dim() == 1 && values.sym_size(0) == p.col.sym_size(0),
                    kOp, ": expected values of shape [", p.col.sym_size(0), "] in Float, got ", values.sym_sizes(),
                    " in ", values.scalar_type());
}

int64_t product_of(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (const int64_t s : sizes) product *= s;
  return product;
}

// Runs over `out`, or over a copy of it where its rows are not contiguous.
template <void run(const Call&)>
void run_batch(const Pattern& p, const Tensor& values, const Tensor& dense, Reduce reduce, double alpha, double beta,
               const Tensor& arg, const Tensor& selected, bool by_column, int64_t longest, const Tensor& out) {
  if (out.numel() == 0) return;
  const auto lead = out.sizes().slice(0, out.dim() - 2);
  const int64_t batch = product_of(lead), rows = out.size(-2), n = out.size(-1);
  const auto flat = [&](const Tensor& t) { return as_batch(t, lead, batch, 2); };
  Tensor target = with_contiguous_rows(out);
  if (target.dim() > 3 && !target.is_same(out)) target = target.contiguous();
  Tensor over = target.dim() == 2 ? target.unsqueeze(0) : target;
  if (over.dim() > 3) {  // leading dimensions that do not merge are written through a copy
    const auto strides = at::detail::computeStride(over.sizes(), over.strides(), at::IntArrayRef({batch, rows, n}));
    if (!strides) over = target = target.contiguous();
    over = over.view({batch, rows, n});
  }
  run({contiguous(p), with_contiguous_rows(as_batch(values, lead, batch, 1)), with_contiguous_rows(flat(dense)), over,
       reduce, alpha, beta, arg.defined() ? arg.view({batch, rows, n}) : arg,
       selected.defined() ? flat(selected).contiguous() : selected, by_column, longest});
  if (!target.is_same(out)) out.copy_(target);
}

}  // namespace
}  // namespace matmuls

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef MATMULS_CUDA
#include "handles.h"
#include "spmm.cuh"

namespace matmuls {
namespace {

// What a device is tuned by; an H200 in mind.
constexpr int64_t kWarpsAtOnce = 32;         // of a multiprocessor
constexpr int64_t kFullWarps = 14;           // of a multiprocessor, that keep its memory busy
constexpr int64_t kGroupNonzeros = 32;       // neighbouring rows of about so many together are one team's
constexpr int64_t kMostRows = 8;             // that a team has, at most as many as it has lanes
constexpr int64_t kLongRows = 32;            // nonzeros, on average, that are worth a whole warp's lanes
constexpr int64_t kSkewed = 8;               // times the average: the longest row of a matrix whose rows are cut
constexpr int64_t kShortestPiece = 64;       // nonzeros; rows of up to twice as many are never cut
constexpr int64_t kPieceOfFour = 40;         // the same by teams of four lanes
constexpr int64_t kMostSlots = 16384;        // that teams cut rows at
constexpr int64_t kWorkspace = 32 << 20;     // bytes that sums of pieces may take, about, or a quarter of the result's
constexpr int64_t kShareSteps = 256;         // rows and nonzeros of a share; half of it where there are few
constexpr int64_t kShareWarps = 24;          // of a multiprocessor, that work on shares at once
constexpr int64_t kL2Bytes = 32 << 20;       // of a dense side that stays in the L2
constexpr int64_t kFilledBytes = 128 << 20;  // of a matrix that is multiplied with its zeros

template <class T, class I>
using Args = SpmmArgs<T, I>;

// max and min: a warp a row, a lane a column.
template <class T, class I, bool largest>
__global__ void __launch_bounds__(kSparseThreads) extremum_kernel(const __grid_constant__ Args<T, I> m, I* arg) {
  using F = arithmetic_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (row >= m.rows) return;
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch;
    for (int64_t c = blockIdx.y * 32 + threadIdx.x % 32; c < m.n; c += gridDim.y * 32) {
      F best = 0;
      I from = -1;
#pragma unroll 4
      for (int64_t p = m.crow[row]; p < m.crow[row + 1]; ++p) {
        const I at = m.order ? m.order[p] : static_cast<I>(p);
        const F x = static_cast<F>(values[at]) * static_cast<F>(dense[m.col[p] * m.dense_stride + c]);
        if (from < 0 || (largest ? x > best : x < best) || (x != x && best == best)) best = x, from = at;
      }
      T* const out = m.out + batch * m.out_batch + row * m.out_stride + c;
      *out = T(m.beta != 0 ? m.alpha * best + m.beta * static_cast<F>(*out) : m.alpha * best);
      if (arg) arg[(batch * m.rows + row) * m.n + c] = from;
    }
  }
}

// The sum of what was selected: a warp a row, a lane a column.
template <class T, class I>
__global__ void __launch_bounds__(kSparseThreads)
    selected_kernel(const __grid_constant__ Args<T, I> m, const I* selected, int64_t selected_rows, bool by_column) {
  using F = arithmetic_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (row >= m.rows) return;
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch;
    const I* const chosen = selected + batch * selected_rows * m.n;
    for (int64_t c = blockIdx.y * 32 + threadIdx.x % 32; c < m.n; c += gridDim.y * 32) {
      F sum = 0;
      for (int64_t p = m.crow[row]; p < m.crow[row + 1]; ++p) {
        const I at = m.order ? m.order[p] : static_cast<I>(p);
        const int64_t column = m.col[p];
        if (chosen[(by_column ? column : row) * m.n + c] == at)
          sum += static_cast<F>(values[at]) * static_cast<F>(dense[column * m.dense_stride + c]);
      }
      T* const out = m.out + batch * m.out_batch + row * m.out_stride + c;
      *out = T(m.beta != 0 ? m.alpha * sum + m.beta * static_cast<F>(*out) : m.alpha * sum);
    }
  }
}

dim3 grid_of(int64_t blocks, int64_t tiles, int64_t batches) {
  TORCH_CHECK(blocks <= INT32_MAX && tiles <= 65535, kOp,
              ": expected at most 2^31 - 1 blocks of rows and 65535 tiles of columns, got ", blocks, " and ", tiles);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles),
              static_cast<unsigned>(std::min<int64_t>(batches, 65535)));
}

// How a row is worked on: L lanes with R vectors each, in P parts; or by equal shares, without parts.
struct Split {
  int lanes, parts, vectors;
  bool shares = false;
};

bool is_skewed(const Pattern& p, int64_t longest) {
  return longest < 0 || longest * p.rows() > kSkewed * std::max(p.nonzeros(), p.rows());
}

// As measured (matmuls spmm): 32 bytes a lane rather than 16 where a dense row has that many, a dense row's slice in
// one team, and a whole warp for a row where rows are long and else too few.
Split split_of(int64_t n, int64_t v, const Pattern& p, int64_t batches, int64_t longest, int64_t sms) {
  const int64_t vectors = ceil_of(n, v), mean = p.nonzeros() / std::max<int64_t>(p.rows(), 1);
  const bool long_rows = mean >= kLongRows;
  if (v == 1) return {n <= 4 ? 4 : n <= 8 ? 8 : 32, 1, 1};
  Split split{32, 1, 1};
  if (vectors <= 4)
    split = {4, long_rows ? 8 : 1, 1};
  else if (vectors <= 8)
    split = {8, long_rows ? 4 : 1, 1};
  else if (vectors == 16 && mean < 8 && p.rows() * batches * 8 / 32 >= kFullWarps * sms)
    split = {8, 1, 2};
  else if (vectors <= 16)
    split = {16, 1, 1};
  else if (vectors % 64 == 0)
    split = {32, 1, 2};
  else if (vectors % 32 == 0)
    split = {16, 1, 2};
  else if (vectors % 16 == 0)
    split = {16, 1, 1};
  const int64_t slices = ceil_of(vectors, split.lanes * split.vectors);
  const auto warps = [&](int64_t lanes) { return p.rows() * slices * batches * lanes / 32; };
  if (split.lanes == 16 && long_rows && warps(16) < kFullWarps * sms) split.parts = 2;
  const int64_t groups = (p.rows() + p.nonzeros()) / (kShareSteps / 2) * slices * batches;
  if (v >= 4 && is_skewed(p, longest) && groups * split.lanes / 32 >= 2 * kShareWarps * sms) {
    if (split.lanes == 8 && split.vectors == 2) split = {16, 1, 1, true};
    if (split.lanes == 16 && split.vectors == 2) split = {32, 1, 1, true};
    split.parts = 1, split.shares = true;
  }
  return split;
}

// The grid of spmm_rows_kernel with slices of `columns`; neighbouring rows for a team as long as the GPU stays full.
template <class T, class I>
void set_grid(Args<T, I>& m, int64_t lanes, int64_t columns, int64_t teams_at_once, bool slices_first) {
  const int64_t slices = ceil_of(m.n, columns), teams = m.rows * slices * m.batches;
  int64_t rows = 1;
  while (rows < std::min<int64_t>(kMostRows, lanes) && 2 * rows * m.nonzeros <= kGroupNonzeros * m.rows &&
         teams / (2 * rows) >= 2 * teams_at_once)
    rows *= 2;
  m.rows_each = static_cast<int>(rows);
  m.slices_first = slices_first;
  const int64_t in_block = kSparseThreads / lanes;
  const int64_t pieces = ceil_of(2 * m.slots, in_block), blocks = pieces + ceil_of(m.rows, in_block * rows);
  TORCH_CHECK(blocks * slices <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of rows, got ", blocks * slices);
  m.piece_blocks = static_cast<unsigned>(pieces), m.blocks = static_cast<unsigned>(blocks);
  m.slices = static_cast<unsigned>(slices);
}

// A row is cut where it would take one team longer than all teams take for the rest: pieces of that share, but not
// more of them than the workspace holds. Rows of about the same length are not, unless they are few.
template <class T, class I>
void set_slots(Args<T, I>& m, const Pattern& p, int64_t columns, int64_t lanes, int64_t sms, int64_t longest) {
  const int64_t slices = ceil_of(m.n, columns), teams_at_once = sms * kWarpsAtOnce * 32 / lanes;
  const bool few = m.rows * slices * m.batches * lanes / 32 < kFullWarps / 2 * sms;
  const int64_t share = ceil_of(m.nonzeros * m.batches * slices, teams_at_once);
  const int64_t bytes = 2 * m.batches * m.n * static_cast<int64_t>(sizeof(arithmetic_t<T>));
  const int64_t fit = std::clamp<int64_t>(kWorkspace / bytes, 64, kMostSlots);
  m.slot = std::min<int64_t>(std::max({lanes <= 4 ? kPieceOfFour : kShortestPiece, share, ceil_of(m.nonzeros, fit)}),
                             INT32_MAX / 2);
  const bool may_be_long =
      m.nonzeros > INT32_MAX || ((few || is_skewed(p, longest)) && (longest < 0 || longest > 2 * m.slot));
  m.slots = may_be_long && m.nonzeros > 2 * m.slot ? ceil_of(m.nonzeros, m.slot) : 0;
}

// The grid of spmm_shares_kernel.
template <class T, class I>
void set_shares(Args<T, I>& m, int64_t lanes, int64_t columns, int64_t sms) {
  const int64_t slices = ceil_of(m.n, columns), way = m.rows + m.nonzeros, in_block = kSparseThreads / lanes;
  const int64_t bytes = 2 * m.batches * m.n * static_cast<int64_t>(sizeof(arithmetic_t<T>));
  const int64_t room = std::max<int64_t>(kWorkspace, m.batches * m.rows * m.n * static_cast<int64_t>(sizeof(T)) / 4);
  const bool few = way / kShareSteps * slices * m.batches * lanes / 32 < 4 * kShareWarps * sms;
  m.slot = std::max(few ? kShareSteps / 2 : kShareSteps, ceil_of(way, std::max<int64_t>(room / bytes, 64)));
  TORCH_CHECK(m.slot <= INT32_MAX / 4, kOp, ": expected fewer nonzeros, got ", m.nonzeros);
  m.slots = way / m.slot + 1;
  const int64_t blocks = ceil_of(m.slots, in_block);
  TORCH_CHECK(blocks * slices <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of rows, got ", blocks * slices);
  m.blocks = static_cast<unsigned>(blocks), m.slices = static_cast<unsigned>(slices);
}

template <int V, int L, int P, int R, int U, class T, class I>
void launch_rows(const Args<T, I>& m) {
  constexpr int kBlocks = U * R * Words<T, V>::kCount < 32 ? 4 : 3;  // 64 registers, or 80
  const dim3 grid = grid_of(static_cast<int64_t>(m.blocks) * m.slices, 1, m.batches);
  spmm_rows_kernel<T, I, V, L, P, R, U, kBlocks><<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <int L, int R, int U, int kBlocks, class T, class I>
void launch_shares(const Args<T, I>& m) {
  constexpr int V = 16 / sizeof(T);
  const dim3 grid = grid_of(static_cast<int64_t>(m.blocks) * m.slices, 1, m.batches);
  spmm_shares_kernel<T, I, V, L, R, U, kBlocks><<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(m);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class I>
void launch_long_rows(const Args<T, I>& m, bool vectors, bool counts_rows) {
  constexpr int V = 16 / sizeof(arithmetic_t<T>);
  const int64_t tiles = ceil_of(m.n, 32 * (vectors ? V : 1));
  const dim3 grid = grid_of(ceil_of(m.slots, kSparseThreads / 32), std::min<int64_t>(tiles, 64), m.batches);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (vectors)
    spmm_long_rows_kernel<T, I, V><<<grid, kSparseThreads, 0, stream>>>(m, counts_rows);
  else
    spmm_long_rows_kernel<T, I, 1><<<grid, kSparseThreads, 0, stream>>>(m, counts_rows);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class I>
void launch_split(const Args<T, I>& m, const Split& split, bool vectors) {
  constexpr int V = 16 / sizeof(T);
  const auto is = [&](int lanes, int parts, int vectors_each) {
    return split.lanes == lanes && split.parts == parts && split.vectors == vectors_each;
  };
  if (!vectors) {
    if (split.lanes == 4) return launch_rows<1, 4, 1, 1, 4>(m);
    if (split.lanes == 8) return launch_rows<1, 8, 1, 1, 8>(m);
    return launch_rows<1, 32, 1, 1, 8>(m);
  }
  if constexpr (sizeof(T) < 8) {  // of 64 bits below: fewer kernels
    if (split.shares) {
      if (split.lanes == 4) return launch_shares<4, 1, 4, 4>(m);
      if (split.lanes == 8) return launch_shares<8, 1, 8, 3>(m);
      if (split.lanes == 16) return launch_shares<16, 1, 4, 4>(m);
      if (split.vectors == 1) return launch_shares<32, 1, 4, 4>(m);
      return launch_shares<32, 2, sizeof(T) == 4 ? 2 : 4, sizeof(T) == 4 ? 4 : 3>(m);
    }
    if (is(4, 8, 1)) return launch_rows<V, 4, 8, 1, 4>(m);
    if (is(8, 4, 1)) return launch_rows<V, 8, 4, 1, 4>(m);
    if (is(8, 1, 2)) return launch_rows<V, 8, 1, 2, 4>(m);
    if (is(16, 2, 1)) return launch_rows<V, 16, 2, 1, 8>(m);
    if (is(16, 2, 2)) return launch_rows<V, 16, 2, 2, 4>(m);
    if (is(16, 1, 2)) return launch_rows<V, 16, 1, 2, 4>(m);
    if (is(32, 1, 2)) return launch_rows<V, 32, 1, 2, 4>(m);
  }
  if (is(4, 1, 1)) return launch_rows<V, 4, 1, 1, 4>(m);
  if (is(8, 1, 1)) return launch_rows<V, 8, 1, 1, 8>(m);
  if (is(16, 1, 1)) return launch_rows<V, 16, 1, 1, 8>(m);
  TORCH_INTERNAL_ASSERT(is(32, 1, 1));
  launch_rows<V, 32, 1, 1, 8>(m);
}

template <class T, class I>
void sum_cuda(const Call& c, Args<T, I>& m) {
  using F = arithmetic_t<T>;
  if (m.dense_stride * sizeof(T) > UINT32_MAX) {
    Call packed = c;
    packed.dense = c.dense.contiguous();
    m.dense = packed.dense.template const_data_ptr<T>();
    m.dense_batch = packed.dense.stride(0), m.dense_stride = packed.dense.stride(1);
    TORCH_CHECK(m.dense_stride * sizeof(T) <= UINT32_MAX, kOp, ": expected rows of dense below 4 GiB, got ", m.n,
                " columns");
    return sum_cuda(packed, m);
  }
  TORCH_CHECK(c.dense.size(1) <= UINT32_MAX, kOp, ": expected a sparse matrix of at most 2^32 - 1 columns, got ",
              c.dense.size(1));
  m.dense_row_bytes = static_cast<uint32_t>(m.dense_stride * sizeof(T));
  const bool vectors = of_vectors(c.dense) && of_vectors(c.out);
  const int64_t v = vectors ? 16 / sizeof(T) : 1;
  const int64_t sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  Split split = split_of(m.n, v, c.pattern, m.batches, c.longest, sms);
  if (sizeof(T) == 8 && split.vectors * split.parts > 1) split = {std::min(32, split.lanes * split.vectors), 1, 1};
  const int64_t columns = split.lanes * split.vectors * v, team = split.lanes * split.parts;
  if (split.shares) {
    set_shares(m, split.lanes, columns, sms);
  } else {
    set_slots(m, c.pattern, columns, team, sms, c.longest);
    // Narrow slices of what the L2 holds: the same slice comes to a multiprocessor again and again. Wide ones are done
    // one after the other, which the L1 likes, unless the L2 does not hold them.
    const bool in_cache = c.dense.numel() * static_cast<int64_t>(sizeof(T)) <= kL2Bytes;
    set_grid(m, team, columns, sms * kWarpsAtOnce * 32 / team, in_cache == (split.lanes <= 8));
  }
  if (m.slots == 0) return launch_split(m, split, vectors);
  const Tensor partial =
      at::empty({m.batches, m.slots, 2, m.n}, c.dense.options().dtype(c10::CppTypeToScalarType<F>::value));
  const Tensor begins = at::empty({m.slots}, c.dense.options().dtype(at::kLong));
  m.partial = partial.template mutable_data_ptr<F>();
  m.begins = begins.mutable_data_ptr<int64_t>();
  launch_split(m, split, vectors);
  if (!split.shares || c.longest < 0 || c.longest > m.slot) launch_long_rows(m, vectors, split.shares);
}

// Without a plan a matrix is filled for each product: float32 in three products of halves, where the GPU has them, the
// others by cuBLAS, which torch holds for not deterministic.
bool may_fill(const Call& c) {
  const auto dtype = c.dense.scalar_type();
  return c.reduce == Reduce::sum && !c.selected.defined() && c.beta == 0 && c.out.size(0) == 1 &&
         c.out.size(2) % 8 == 0 && of_vectors(c.dense) && of_vectors(c.out) &&
         (dtype == at::kFloat    ? can_multiply_halves()
          : dtype == at::kDouble ? false
                                 : !at::globalContext().deterministicAlgorithms());
}

// Microseconds of both ways, about, as measured on an H200.
bool is_worth_filling(const Call& c) {
  const bool wide = c.dense.scalar_type() == at::kFloat;
  const double n = static_cast<double>(c.out.size(2)), nonzeros = static_cast<double>(c.pattern.nonzeros());
  const double by_rows = wide ? 4 + nonzeros * n / 3.5e6 : 3 + nonzeros * n / 5.8e6;
  if (by_rows < 20 || !may_fill(c)) return false;
  const double elements = static_cast<double>(c.out.size(1)) * static_cast<double>(c.dense.size(1));
  const double bytes = elements * (wide ? 4 : 2);
  const double filled = wide ? 26 + bytes / 2.6e6 + nonzeros / 5e5 + std::max(bytes / 2.8e6, elements * n / 1.23e8)
                             : 12 + bytes / 2.2e6 + nonzeros / 6.5e5 + std::max(5.0, elements * n / 3.5e8);
  return bytes <= static_cast<double>(kFilledBytes) && filled < by_rows;
}

// The product with A's zeros, and by rows again where they matter.
template <class T, class I>
void sum_filled(const Call& c, Args<T, I>& m, const Filled& filled) {
  if constexpr (sizeof(T) <= 4) {
    const Tensor dense = c.dense[0];
    Tensor out = c.out[0], facts;
    if constexpr (sizeof(T) == 4) {
      facts = multiply_halves(filled, dense, out, c.alpha);
    } else {
      facts = look_for_infinite(dense);
      at::addmm_out(out, out, filled.parts.narrow(1, 0, dense.size(0)), dense, 0, c.alpha);
    }
    m.facts = static_cast<const FillFacts*>(filled.facts.const_data_ptr());
    m.dense_facts = static_cast<const FillFacts*>(facts.const_data_ptr()), m.parts = facts.size(0) / kFactsOfPart;
    sum_cuda(c, m);
  }
}

template <class T, class I>
Args<T, I> args_of(const Call& c) {
  using F = arithmetic_t<T>;
  TORCH_CHECK(c.out.size(2) <= INT32_MAX, kOp, ": expected at most 2^31 - 1 columns, got ", c.out.size(2));
  Args<T, I> m{};
  m.crow = c.pattern.crow.const_data_ptr<I>();
  m.col = c.pattern.col.const_data_ptr<I>();
  m.order = indices_or_null<I>(c.pattern.order);
  m.values = c.values.const_data_ptr<T>();
  m.dense = c.dense.const_data_ptr<T>();
  m.out = c.out.mutable_data_ptr<T>();
  m.rows = c.pattern.rows(), m.nonzeros = c.pattern.nonzeros();
  m.n = static_cast<int>(c.out.size(2));
  m.values_batch = c.values.stride(0), m.dense_batch = c.dense.stride(0), m.out_batch = c.out.stride(0);
  m.dense_stride = c.dense.stride(1), m.out_stride = c.out.stride(1);
  m.batches = c.out.size(0);
  m.alpha = static_cast<F>(c.alpha), m.beta = static_cast<F>(c.beta);
  m.mean = c.reduce == Reduce::mean;
  return m;
}

template <class T, class I>
void launch_extremum(const Args<T, I>& m, const Call& c, const dim3& grid) {
  I* const arg = c.arg.defined() ? c.arg.mutable_data_ptr<I>() : nullptr;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (c.reduce == Reduce::max)
    extremum_kernel<T, I, true><<<grid, kSparseThreads, 0, stream>>>(m, arg);
  else
    extremum_kernel<T, I, false><<<grid, kSparseThreads, 0, stream>>>(m, arg);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, class I>
void launch_selected(const Args<T, I>& m, const Call& c, const dim3& grid) {
  selected_kernel<T, I><<<grid, kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      m, c.selected.const_data_ptr<I>(), c.selected.size(1), c.by_column);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void run_cuda(const Call& c) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.dense.scalar_type(), kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      auto m = args_of<scalar_t, index_t>(c);
      const bool extremum = c.reduce == Reduce::max || c.reduce == Reduce::min;
      if (!c.selected.defined() && !extremum)
        return is_worth_filling(c) ? sum_filled(c, m, fill(c.pattern, c.values[0], c.dense.size(1))) : sum_cuda(c, m);
      const dim3 warps =
          grid_of(ceil_of(m.rows, kSparseThreads / 32), std::min<int64_t>(ceil_of(m.n, 32), 1024), m.batches);
      c.selected.defined() ? launch_selected(m, c, warps) : launch_extremum(m, c, warps);
    });
  });
}

// With what a plan keeps; by rows where halves will not do.
void run_halves(const Call& c, const Filled& kept) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
    auto m = args_of<float, index_t>(c);
    may_fill(c) ? sum_filled(c, m, kept) : sum_cuda(c, m);
  });
}

Filled fill_guarded(const Pattern& p, const Tensor& values, int64_t columns) {
  const OperationGuard guard(kOp, values);
  return fill(p, values, columns);
}

}  // namespace
}  // namespace matmuls
#endif

// ----------------------------------------------------------------------------------------------------------- CPU

namespace matmuls {
namespace {

constexpr int64_t kShare = 8192;            // rows and nonzeros together: what a thread takes at a time
constexpr int64_t kCacheBytes = 256 << 10;  // a dense side this small is soon in the L2 cache
constexpr int64_t kLongestWhole = 4096;     // nonzeros of a row that is not cut

// Rows in shares of equal work. A long row is cut where shares end, always at the same places; its pieces are added in
// their order once all are there.
template <class T, class I>
void sum_cpu(const Spmm<T, I>& m, int64_t rows) {
  using A = arithmetic_t<T>;
  const int64_t shares = shares_of(rows, m.nonzeros, kShare);
  const auto place = [&](int64_t k) { return place_of(m.crow, rows, k, kShare, kLongestWhole); };
  if (shares == 1) return spmm_rows(m, 0, rows);
  // For share k the piece of a row that began before it, and the piece of the row that goes on after it.
  std::vector<A> sums;
  bool cut = false;
  for (int64_t k = 1; k < shares && !cut; ++k) {
    const Place at = place(k);
    cut = at.row < rows && at.at > m.crow[at.row];
  }
  if (cut) sums.resize(2 * shares * m.n);
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Place from = place(k), to = place(k + 1);
      A* const pieces = sums.data() + 2 * k * m.n;
      int64_t row = from.row;
      if (row < rows && from.at > m.crow[row]) {
        const int64_t end = to.row > row ? static_cast<int64_t>(m.crow[row + 1]) : to.at;
        spmm_piece(m, from.at, end, pieces);
        if (to.row == row) continue;
        ++row;
      }
      spmm_rows(m, row, to.row);
      if (to.row < rows && to.at > m.crow[to.row]) spmm_piece(m, m.crow[to.row], to.at, pieces + m.n);
    }
  });
  if (!cut) return;
  for (int64_t k = 0; k < shares; ++k) {
    const Place from = place(k), to = place(k + 1);
    const bool begins = to.row < rows && to.at > m.crow[to.row] && (from.row < to.row || from.at == m.crow[to.row]);
    if (!begins) continue;
    A* const total = sums.data() + (2 * k + 1) * m.n;
    for (int64_t next = k + 1; next < shares; ++next) {
      const A* const piece = sums.data() + 2 * next * m.n;
      for (int64_t c = 0; c < m.n; ++c) total[c] += piece[c];
      if (place(next + 1).row > to.row) break;
    }
    spmm_finish(m, to.row, total);
  }
}

// f(row begin, row end) over torch's threads, in shares of equal work.
template <class I, class F>
void for_rows_of_equal_work(const I* crow, int64_t rows, const F& f) {
  const int64_t shares = shares_of(rows, crow[rows], kShare);
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    f(place_of(crow, rows, first, kShare, INT64_MAX).row, place_of(crow, rows, last, kShare, INT64_MAX).row);
  });
}

template <class T, class I>
void selected_cpu(const Spmm<T, I>& m, const I* selected, bool by_column, int64_t begin, int64_t end) {
  using A = arithmetic_t<T>;
  std::vector<A> sums(m.n);
  for (int64_t r = begin; r < end; ++r) {
    std::fill(sums.begin(), sums.end(), A(0));
    for (int64_t p = m.crow[r]; p < m.crow[r + 1]; ++p) {
      const I at = static_cast<I>(m.value_at(p));
      const A value = static_cast<A>(m.values[at]);
      const int64_t column = m.col[p];
      const I* const chosen = selected + (by_column ? column : r) * m.n;
      const T* const row = m.dense + column * m.dense_stride;
      for (int64_t c = 0; c < m.n; ++c)
        if (chosen[c] == at) sums[c] += value * static_cast<A>(row[c]);
    }
    T* const out = m.out + r * m.out_stride;
    for (int64_t c = 0; c < m.n; ++c) {
      const A x = m.alpha * sums[c];
      out[c] = static_cast<T>(m.beta != 0 ? x + m.beta * static_cast<A>(out[c]) : x);
    }
  }
}

void run_cpu(const Call& c) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.dense.scalar_type(), kOp, [&] {
    using A = arithmetic_t<scalar_t>;
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      const int64_t rows = c.pattern.rows(), n = c.out.size(2);
      for (int64_t b = 0; b < c.out.size(0); ++b) {
        const Spmm<scalar_t, index_t> m{c.pattern.crow.const_data_ptr<index_t>(),
                                        c.pattern.col.const_data_ptr<index_t>(),
                                        indices_or_null<index_t>(c.pattern.order),
                                        c.values.const_data_ptr<scalar_t>() + b * c.values.stride(0),
                                        c.dense.const_data_ptr<scalar_t>() + b * c.dense.stride(0),
                                        c.out.mutable_data_ptr<scalar_t>() + b * c.out.stride(0),
                                        c.pattern.nonzeros(),
                                        n,
                                        c.dense.stride(1),
                                        c.out.stride(1),
                                        static_cast<A>(c.alpha),
                                        static_cast<A>(c.beta),
                                        c.reduce == Reduce::mean,
                                        c.dense.size(1) * n * c.dense.element_size() > kCacheBytes};
        if (c.selected.defined()) {
          const index_t* const selected = c.selected.const_data_ptr<index_t>() + b * c.selected.stride(0);
          for_rows_of_equal_work(
              m.crow, rows, [&](int64_t begin, int64_t end) { selected_cpu(m, selected, c.by_column, begin, end); });
        } else if (c.reduce == Reduce::max || c.reduce == Reduce::min) {
          index_t* const arg = c.arg.defined() ? c.arg.mutable_data_ptr<index_t>() + b * rows * n : nullptr;
          for_rows_of_equal_work(m.crow, rows, [&](int64_t begin, int64_t end) {
            extremum_rows(m, c.reduce == Reduce::max, begin, end, arg);
          });
        } else {
          sum_cpu(m, rows);
        }
      }
    });
  });
}

// -------------------------------------------------------------------------------------------------------- operators

MATMULS_OPERATOR(SpmmArgOp, "custom_mm::csr_spmm_arg", "",
                 std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                                            std::string_view, const OptionalTensor&, const OptionalTensor&,
                                            const OptionalTensor&, const OptionalTensor&));

template <void run(const Call&)>
Tensor spmm(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
            std::string_view reduce, double alpha, const OptionalTensor& order, const OptionalTensor& t_crow,
            const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& maybe_selected,
            bool by_column, int64_t longest, int64_t) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  const Tensor selected = tensor_or_none(maybe_selected);
  const Reduce how = reduce_of(reduce);
  TORCH_CHECK_VALUE(!selected.defined() || how == Reduce::sum, kOp, ": expected reduce sum beside selected, got ",
                    reduce);
  Tensor out = at::empty_symint(check(p, values, dense, columns, selected, by_column), dense.options());
  run_batch<run>(p, values, dense, how, alpha, 0, {}, selected, by_column, longest, out);
  return out;
}

void check_out(const Pattern& p, const Tensor& values, const Tensor& dense, const c10::SymInt& columns,
               const Tensor& out) {
  const auto shape = check(p, values, dense, columns, {}, false);
  check_like(kOp, "out", out, "dense", dense);
  TORCH_CHECK(out.sym_sizes() == c10::SymIntArrayRef(shape), kOp, ": expected out of shape ",
              c10::SymIntArrayRef(shape), ", got ", out.sym_sizes());
}

template <void run(const Call&)>
void spmm_out(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
              std::string_view reduce, double alpha, const OptionalTensor& order, double beta, int64_t longest,
              Tensor out) {
  const Pattern p = pattern_of(crow, col, order);
  const Reduce how = reduce_of(reduce);
  check_out(p, values, dense, columns, out);
  check_no_overlap(kOp, out, {{"values", values}, {"dense", dense}});
  run_batch<run>(p, values, dense, how, alpha, beta, {}, {}, false, longest, out);
}

template <void run(const Call&)>
std::tuple<Tensor, Tensor> spmm_arg(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                                    c10::SymInt columns, std::string_view reduce, const OptionalTensor& order,
                                    const OptionalTensor& t_crow, const OptionalTensor& t_col,
                                    const OptionalTensor& t_order) {
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  const Reduce how = reduce_of(reduce);
  TORCH_CHECK_VALUE(how == Reduce::max || how == Reduce::min, kOp, ": expected reduce to be max or min, got ", reduce);
  Tensor out = at::empty_symint(check(p, values, dense, columns, {}, false), dense.options());
  Tensor arg = at::empty(out.sizes(), crow.options());
  run_batch<run>(p, values, dense, how, 1, 0, arg, {}, false, -1, out);
  return {out, arg};
}

Tensor spmm_meta(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                 std::string_view reduce, double, const OptionalTensor& order, const OptionalTensor& t_crow,
                 const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& selected,
                 bool by_column, int64_t, int64_t) {
  reduce_of(reduce);
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  return at::empty_symint(check(p, values, dense, columns, tensor_or_none(selected), by_column), dense.options());
}
void spmm_out_meta(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                   c10::SymInt columns, std::string_view reduce, double, const OptionalTensor& order, double, int64_t,
                   Tensor out) {
  reduce_of(reduce);
  check_out(pattern_of(crow, col, order), values, dense, columns, out);
}
std::tuple<Tensor, Tensor> spmm_arg_meta(const Tensor& crow, const Tensor& col, const Tensor& values,
                                         const Tensor& dense, c10::SymInt columns, std::string_view reduce,
                                         const OptionalTensor& order, const OptionalTensor& t_crow,
                                         const OptionalTensor& t_col, const OptionalTensor& t_order) {
  reduce_of(reduce);
  const auto shape = check(pattern_of(crow, col, order, t_crow, t_col, t_order), values, dense, columns, {}, false);
  return {at::empty_symint(shape, dense.options()), at::empty_symint(shape, crow.options())};
}

// --- what a plan keeps of a float32 matrix with its zeros (filled.h), and the product with it

using FillFunction = Filled(const Pattern& p, const Tensor& values, int64_t columns);
using HalvesFunction = void(const Call& c, const Filled& kept);

Filled fill_cpu(const Pattern& p, const Tensor& values, int64_t columns) {
  const Tensor row = at::_convert_indices_from_csr_to_coo(p.crow, p.col).select(0, 0);
  Tensor full = at::zeros({p.rows(), (columns + 7) / 8 * 8}, values.options());
  full.index_put_({row, p.col}, p.order.defined() ? values.index_select(0, p.order) : values, /*accumulate=*/true);
  const Tensor largest = full.size(1) > 0 ? full.abs().amax(1) : at::zeros({p.rows()}, values.options());
  const Tensor exponents = at::where(largest.gt(0).logical_and(largest.isfinite()),
                                     (15 - std::get<1>(at::frexp(largest))).clamp_max(126), 0);
  const Tensor scaled = at::ldexp(full, exponents.unsqueeze(1)), high = scaled.to(at::kHalf);
  return {at::stack({high, ((scaled - high.to(at::kFloat)) * kLowScale).to(at::kHalf)}), exponents.to(at::kInt),
          at::zeros({kFillFacts}, p.crow.options().dtype(at::kInt))};
}
void run_halves_cpu(const Call& c, const Filled&) { run_cpu(c); }

template <FillFunction fill>
std::tuple<Tensor, Tensor, Tensor> csr_halves(const Tensor& crow, const Tensor& col, const Tensor& values,
                                              c10::SymInt columns, const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  check_float_values(p, values);
  const Filled made = fill(contiguous(p), values.contiguous(), columns.expect_int());
  return {made.parts, made.exponents, made.facts};
}

template <HalvesFunction run>
Tensor csr_spmm_halves(const Tensor& parts, const Tensor& exponents, const Tensor& facts, const Tensor& crow,
                       const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                       const OptionalTensor& order, int64_t longest) {
  const Pattern p = pattern_of(crow, col, order);
  check_float_values(p, values);
  Tensor out = at::empty_symint(check(p, values, dense, columns, {}, false), dense.options());
  const int64_t stride = (columns.expect_int() + 7) / 8 * 8;
  const auto whole = [&](const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
    return t.sizes() == sizes && t.scalar_type() == dtype && t.is_contiguous() && t.device() == dense.device();
  };
  TORCH_CHECK(whole(parts, at::kHalf, {2, p.rows(), stride}) && whole(exponents, at::kInt, {p.rows()}) &&
                  whole(facts, at::kInt, {kFillFacts}) && dense.dim() == 2,
              kOp, ": expected what csr_halves made of this matrix, and dense of two dimensions, got parts of shape ",
              parts.sizes(), ", dense of shape ", dense.sizes());
  if (out.numel() == 0) return out;
  run({contiguous(p),
       values.contiguous().unsqueeze(0),
       with_contiguous_rows(dense).unsqueeze(0),
       out.unsqueeze(0),
       Reduce::sum,
       1,
       0,
       {},
       {},
       false,
       longest},
      {parts, exponents, facts});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> csr_halves_meta(const Tensor& crow, const Tensor& col, const Tensor& values,
                                                   c10::SymInt columns, const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  check_float_values(p, values);
  const auto ints = values.options().dtype(at::kInt);
  return {at::empty_symint({2, p.sym_rows(), (columns + 7) / 8 * 8}, values.options().dtype(at::kHalf)),
          at::empty_symint({p.sym_rows()}, ints), at::empty({kFillFacts}, ints)};
}
Tensor csr_spmm_halves_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor& crow, const Tensor& col,
                            const Tensor& values, const Tensor& dense, c10::SymInt columns, const OptionalTensor& order,
                            int64_t) {
  return at::empty_symint(check(pattern_of(crow, col, order), values, dense, columns, {}, false), dense.options());
}

MATMULS_OPERATOR(CsrHalvesOp, "custom_mm::csr_halves", "",
                 std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                                                    const OptionalTensor&));
MATMULS_OPERATOR(CsrSpmmHalvesOp, "custom_mm::csr_spmm_halves", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, c10::SymInt, const OptionalTensor&, int64_t));

// A product that records a gradient is csr_spmm's.
Tensor csr_spmm_halves_autograd(const Tensor& parts, const Tensor& exponents, const Tensor& facts, const Tensor& crow,
                                const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                                const OptionalTensor& order, int64_t longest) {
  if (needs_gradient(kOp, {values, dense}))
    return SpmmOp::call(crow, col, values, dense, columns, "sum", 1, order, {}, {}, {}, {}, false, longest, -1);
  return CsrSpmmHalvesOp::below_autograd(parts, exponents, facts, crow, col, values, dense, columns, order, longest);
}

// --- gradients: to the values the product of G and dense where A has nonzeros, to dense the product of A^T and G. Both
// are operators with gradients of the same two kinds.

using Context = torch::autograd::AutogradContext;
using Gradients = torch::autograd::variable_list;

void save(Context* ctx, const Pattern& p, const Tensor& values, const Tensor& dense, const Tensor& selected) {
  const bool to_values = values.requires_grad(), to_dense = dense.requires_grad();
  ctx->save_for_backward({p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order, to_dense ? values : Tensor(),
                          to_values ? dense : Tensor(), selected});
  ctx->saved_data["values_sizes"] = values.sym_sizes();
  ctx->saved_data["dense_sizes"] = dense.sym_sizes();
}

// The gradients of sum(A @ dense); `selected`: of what was selected of it.
std::tuple<Tensor, Tensor> gradients(Context* ctx, const Tensor& grad, const Tensor& selected, bool by_column,
                                     int64_t longest, int64_t t_longest) {
  const auto saved = ctx->get_saved_variables();
  const Pattern p{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
  const Tensor &values = saved[6], &dense = saved[7];
  const auto values_sizes = ctx->saved_data["values_sizes"].toSymIntVector();
  const auto dense_sizes = ctx->saved_data["dense_sizes"].toSymIntVector();
  const c10::SymInt columns = dense_sizes[dense_sizes.size() - 2];
  const OptionalTensor chosen = none_or_tensor(selected);
  Tensor grad_values, grad_dense;
  if (ctx->needs_input_grad(0)) {
    const bool summed = values_sizes.size() == 1;  // one gradient for the whole batch: nothing larger than it is made
    grad_values = SddmmOp::call(p.crow, p.col, grad, dense.to(grad.scalar_type()), columns, 1, none_or_tensor(p.order),
                                none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order), chosen,
                                by_column, summed);
    grad_values = at::sum_to(grad_values, values_sizes);
  }
  if (ctx->needs_input_grad(1)) {
    const Pattern t = p.transposed(columns);
    grad_dense = SpmmOp::call(t.crow, t.col, values.to(grad.scalar_type()), grad, p.sym_rows(), "sum", 1,
                              none_or_tensor(t.order), t.t_crow, t.t_col, none_or_tensor(t.t_order), chosen, !by_column,
                              t_longest, longest);
    grad_dense = at::sum_to(grad_dense, dense_sizes);
  }
  return {grad_values, grad_dense};
}

struct SpmmFunction : torch::autograd::Function<SpmmFunction> {
  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& dense, const Pattern& p,
                        const c10::SymInt& columns, std::string_view reduce, double alpha,
                        const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
    save(ctx, p, values, dense, tensor_or_none(selected));
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["mean"] = reduce == "mean";
    ctx->saved_data["by_column"] = by_column;
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["t_longest"] = t_longest;
    return SpmmOp::below_autograd(p.crow, p.col, values, dense, columns, reduce, alpha, none_or_tensor(p.order),
                                  none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order),
                                  selected, by_column, longest, t_longest);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    const double alpha = ctx->saved_data["alpha"].toDouble();
    Tensor grad = alpha == 1 ? grads[0] : grads[0] * alpha;
    if (ctx->saved_data["mean"].toBool())
      grad = grad / saved[0].diff().clamp_min(1).to(grad.scalar_type()).unsqueeze(-1);
    auto [grad_values, grad_dense] =
        gradients(ctx, grad, saved[8], ctx->saved_data["by_column"].toBool(), ctx->saved_data["longest"].toInt(),
                  ctx->saved_data["t_longest"].toInt());
    return {grad_values, grad_dense, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

struct SpmmArgFunction : torch::autograd::Function<SpmmArgFunction> {
  static Gradients forward(Context* ctx, const Tensor& values, const Tensor& dense, const Pattern& p,
                           const c10::SymInt& columns, std::string_view reduce) {
    auto [out, arg] =
        SpmmArgOp::below_autograd(p.crow, p.col, values, dense, columns, reduce, none_or_tensor(p.order),
                                  none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order));
    save(ctx, p, values, dense, arg);
    ctx->mark_non_differentiable({arg});
    return {out, arg};
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    auto [grad_values, grad_dense] = gradients(ctx, grads[0], ctx->get_saved_variables()[8], false, -1, -1);
    return {grad_values, grad_dense, {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor> spmm_arg_autograd(const Tensor& crow, const Tensor& col, const Tensor& values,
                                             const Tensor& dense, c10::SymInt columns, std::string_view reduce,
                                             const OptionalTensor& order, const OptionalTensor& t_crow,
                                             const OptionalTensor& t_col, const OptionalTensor& t_order) {
  if (!needs_gradient(kOp, {values, dense}))
    return SpmmArgOp::below_autograd(crow, col, values, dense, columns, reduce, order, t_crow, t_col, t_order);
  const auto results =
      SpmmArgFunction::apply(values, dense, pattern_of(crow, col, order, t_crow, t_col, t_order), columns, reduce);
  return {results[0], results[1]};
}

Tensor spmm_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                     c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                     const OptionalTensor& t_crow, const OptionalTensor& t_col, const OptionalTensor& t_order,
                     const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
  if (!needs_gradient(kOp, {values, dense}))
    return SpmmOp::below_autograd(crow, col, values, dense, columns, reduce, alpha, order, t_crow, t_col, t_order,
                                  selected, by_column, longest, t_longest);
  if (reduce == "max" || reduce == "min") {
    const Tensor out =
        std::get<0>(spmm_arg_autograd(crow, col, values, dense, columns, reduce, order, t_crow, t_col, t_order));
    return alpha == 1 ? out : out * alpha;
  }
  return SpmmFunction::apply(values, dense, pattern_of(crow, col, order, t_crow, t_col, t_order), columns, reduce,
                             alpha, selected, by_column, longest, t_longest);
}

void spmm_out_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                       c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                       double beta, int64_t longest, Tensor out) {
  check_no_gradient_into(kOp, "out", {values, dense, out});
  SpmmOutOp::below_autograd(crow, col, values, dense, columns, reduce, alpha, order, beta, longest, out);
}

// Sums as torch.matmul; max and min in the wider of both dtypes.
template <c10::DeviceType device>
Tensor spmm_autocast(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                     c10::SymInt columns, std::string_view reduce, double alpha, const OptionalTensor& order,
                     const OptionalTensor& t_crow, const OptionalTensor& t_col, const OptionalTensor& t_order,
                     const OptionalTensor& selected, bool by_column, int64_t longest, int64_t t_longest) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = reduce == "max" || reduce == "min" ? at::promote_types(values.scalar_type(), dense.scalar_type())
                                                        : at::autocast::get_autocast_dtype(device);
  return SpmmOp::call(crow, col, at::autocast::cached_cast(dtype, values, device),
                      at::autocast::cached_cast(dtype, dense, device), columns, reduce, alpha, order, t_crow, t_col,
                      t_order, selected, by_column, longest, t_longest);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "csr_spmm(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce=\"sum\", float "
      "alpha=1.0, Tensor? order=None, Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None, Tensor? "
      "selected=None, bool by_column=False, int longest=-1, int t_longest=-1) -> Tensor",
      tags);
  m.def(
      "csr_spmm.out(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce=\"sum\", float "
      "alpha=1.0, Tensor? order=None, float beta=0.0, int longest=-1, *, Tensor(a!) out) -> ()",
      tags);
  m.def(
      "csr_spmm_arg(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, str reduce, Tensor? "
      "order=None, Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None) -> (Tensor, Tensor)",
      tags);
  m.def(
      "csr_halves(Tensor crow, Tensor col, Tensor values, SymInt columns, Tensor? order=None) -> (Tensor, Tensor, "
      "Tensor)",
      tags);
  m.def(
      "csr_spmm_halves(Tensor parts, Tensor exponents, Tensor facts, Tensor crow, Tensor col, Tensor values, Tensor "
      "dense, SymInt columns, Tensor? order=None, int longest=-1) -> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("csr_spmm", spmm<run_cpu>);
  m.impl("csr_spmm.out", spmm_out<run_cpu>);
  m.impl("csr_spmm_arg", spmm_arg<run_cpu>);
  m.impl("csr_halves", csr_halves<fill_cpu>);
  m.impl("csr_spmm_halves", csr_spmm_halves<run_halves_cpu>);
}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_spmm", spmm<run_cuda>);
  m.impl("csr_spmm.out", spmm_out<run_cuda>);
  m.impl("csr_spmm_arg", spmm_arg<run_cuda>);
  m.impl("csr_halves", csr_halves<fill_guarded>);
  m.impl("csr_spmm_halves", csr_spmm_halves<run_halves>);
}
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("csr_spmm", spmm_meta);
  m.impl("csr_spmm.out", spmm_out_meta);
  m.impl("csr_spmm_arg", spmm_arg_meta);
  m.impl("csr_halves", csr_halves_meta);
  m.impl("csr_spmm_halves", csr_spmm_halves_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("csr_spmm", spmm_autograd);
  m.impl("csr_spmm.out", spmm_out_autograd);
  m.impl("csr_spmm_arg", spmm_arg_autograd);
  m.impl("csr_halves", CsrHalvesOp::below_autograd);
  m.impl("csr_spmm_halves", csr_spmm_halves_autograd);
}
TORCH_LIBRARY_IMPL(custom_mm, ADInplaceOrView, m) { m.impl("csr_spmm.out", SpmmOutOp::inplace<10>); }
TORCH_LIBRARY_IMPL(custom_mm, Conjugate, m) { m.impl("csr_spmm.out", SpmmOutOp::lazy<10>); }
TORCH_LIBRARY_IMPL(custom_mm, Negative, m) { m.impl("csr_spmm.out", SpmmOutOp::lazy<10>); }
TORCH_LIBRARY_IMPL(custom_mm, AutocastCPU, m) { m.impl("csr_spmm", spmm_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(custom_mm, AutocastCUDA, m) { m.impl("csr_spmm", spmm_autocast<at::kCUDA>); }

}  // namespace matmuls
