// csr_spmm on a GPU: chooses between the row kernels (sparse/spmm/by_rows/by_rows.cuh) and the densified products
// (sparse/spmm/densified/densified.h), and how the row kernels split the work.
#ifdef __CUDACC__
#include "sparse/spmm/by_rows/by_rows.cuh"

#include <ATen/Dispatch.h>

#include "glue/checks.h"
#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {
namespace {

using at::Tensor;

// Tuning constants, chosen for an H200.
constexpr int64_t kWarpsAtOnce = 32;         // warps that a multiprocessor runs at once
constexpr int64_t kFullWarps = 14;           // warps that keep a multiprocessor's memory pipeline busy
constexpr int64_t kGroupNonzeros = 32;       // neighbouring rows with about this many nonzeros together go to one team
constexpr int64_t kMostRows = 8;             // of a team, and at most one for each of its lanes
constexpr int64_t kLongRows = 32;            // mean nonzeros per row from which a row occupies all lanes of a warp
constexpr int64_t kShortestOfParts = 4;      // mean nonzeros per row from which few rows are split over parts
constexpr int64_t kVeryLongRows = 64;        // 16-bit: mean nonzeros per row; more teams with less prefetch win
constexpr int64_t kSkewed = 8;               // ratio of the longest row to the mean from which rows are cut
constexpr int64_t kShortestPiece = 64;       // nonzeros of a piece; rows of up to twice as many are never cut
constexpr int64_t kPieceOfFour = 40;         // the same for teams of four lanes
constexpr int64_t kMostSlots = 16384;        // at most, where teams cut rows
constexpr int64_t kWorkspace = 32 << 20;     // bytes for the partial sums, about, or a quarter of the result
constexpr int64_t kShareSteps = 256;         // rows + nonzeros of a share; half as many where shares are few
constexpr int64_t kShareWarps = 24;          // warps of a multiprocessor that work on shares at once
constexpr int64_t kL2Bytes = 32 << 20;       // bytes of B that stay in the L2
constexpr int64_t kFilledBytes = 128 << 20;  // bytes of the largest A that is densified without a plan

template <class T, class I>
using Args = SpmmArgs<T, I>;

// max and min: a warp per row of A, a lane per column of B.
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

// Sum over the selected values: a warp per row of A, a lane per column of B.
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
  TORCH_CHECK_VALUE(blocks <= INT32_MAX && tiles <= 65535, kOp,
                    ": expected at most 2^31 - 1 blocks of rows and 65535 tiles of columns, got ", blocks, " and ",
                    tiles);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles),
              static_cast<unsigned>(std::min<int64_t>(batches, 65535)));
}

// How the row kernels divide a row of A: L lanes with R vectors of B's columns each, times P parts of the row's
// nonzeros; or merge-path shares, which have no parts. lean: prefetches fewer nonzeros and so needs fewer registers.
struct Split {
  int lanes, parts, vectors;
  bool shares = false, lean = false;
};

bool is_skewed(const Pattern& p, int64_t longest) {
  return longest < 0 || longest * p.rows() > kSkewed * std::max(p.nonzeros(), p.rows());
}

// As measured (matmuls spmm): a lane takes 32 bytes of a row of B rather than 16 if the row has as many, one team takes
// a whole slice of B's row, and a whole warp takes a row of A where rows are long and otherwise too few.
Split split_of(int64_t n, int64_t v, const Pattern& p, int64_t batches, int64_t longest, int64_t sms) {
  const int64_t vectors = ceil_of(n, v), mean = p.nonzeros() / std::max<int64_t>(p.rows(), 1);
  const bool long_rows = mean >= kLongRows;
  if (v == 1) return {n <= 4 ? 4 : n <= 8 ? 8 : 32, 1, 1};
  Split split{32, 1, 1};
  // Whether rows are too few to fill the GPU alone, and long enough that no part is empty.
  const auto few = [&](int64_t lanes) {
    return v >= 4 && mean >= kShortestOfParts && p.rows() * batches * lanes / 32 < kFullWarps * sms;
  };
  if (vectors <= 4)
    split = {4, long_rows && (v == 4 || few(12)) ? 8 : v == 8 && (long_rows || few(8)) ? 4 : 1, 1};
  else if (vectors <= 8)
    split = {8, long_rows || few(v == 4 ? 8 : 16) ? 4 : 1, 1};
  else if (vectors == 16 && mean < 8 && p.rows() * batches * 8 / 32 >= kFullWarps * sms)
    split = {8, 1, 2};
  else if (vectors <= 16)
    split = {16, 1, 1};
  else if (vectors % 64 == 0)
    split = {32, 1, 2};
  else if (vectors % 32 == 0 && (vectors > 32 || long_rows || v > 4 || !few(16)))
    split = {16, 1, 2};
  else if (vectors % 32 == 16)
    split = {16, 1, 1};
  const int64_t slices = ceil_of(vectors, split.lanes * split.vectors);
  const auto warps = [&](int64_t lanes) { return p.rows() * slices * batches * lanes / 32; };
  const bool narrow = v == 8 && split.vectors == 1 && slices == 1;
  if (split.lanes == 16 && (long_rows || (narrow && few(16))) && warps(16) < kFullWarps * sms)
    split.parts = 2;
  else if (split.lanes == 16 && narrow && mean >= kVeryLongRows)
    split.parts = 2, split.lean = true;
  const int64_t groups = (p.rows() + p.nonzeros()) / (kShareSteps / 2) * slices * batches;
  if (v >= 4 && is_skewed(p, longest) && groups * split.lanes / 32 >= 2 * kShareWarps * sms) {
    if (split.lanes == 8 && split.vectors == 2) split = {16, 1, 1, true};
    if (split.lanes == 16 && split.vectors == 2) split = {32, 1, 1, true};
    split.parts = 1, split.shares = true;
  }
  return split;
}

// Sets the grid of spmm_rows_kernel for slices of `columns` columns of B. A team takes several neighbouring rows as
// long as the GPU stays full.
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
  TORCH_CHECK_VALUE(blocks * slices <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of rows, got ",
                    blocks * slices);
  m.piece_blocks = static_cast<unsigned>(pieces), m.blocks = static_cast<unsigned>(blocks);
  m.slices = static_cast<unsigned>(slices);
}

// Sets the slots at which long rows are cut. A row is cut if it would take one team longer than all teams need for
// their equal share; pieces have the size of that share, but there are no more than the workspace holds. Rows of
// similar length are cut only if they are few.
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

// Sets the grid of spmm_shares_kernel.
template <class T, class I>
void set_shares(Args<T, I>& m, int64_t lanes, int64_t columns, int64_t sms) {
  const int64_t slices = ceil_of(m.n, columns), way = m.rows + m.nonzeros, in_block = kSparseThreads / lanes;
  const int64_t bytes = 2 * m.batches * m.n * static_cast<int64_t>(sizeof(arithmetic_t<T>));
  const int64_t room = std::max<int64_t>(kWorkspace, m.batches * m.rows * m.n * static_cast<int64_t>(sizeof(T)) / 4);
  const bool few = way / kShareSteps * slices * m.batches * lanes / 32 < 4 * kShareWarps * sms;
  m.slot = std::max(few ? kShareSteps / 2 : kShareSteps, ceil_of(way, std::max<int64_t>(room / bytes, 64)));
  TORCH_CHECK_VALUE(m.slot <= INT32_MAX / 4, kOp, ": expected fewer nonzeros, got ", m.nonzeros);
  m.slots = way / m.slot + 1;
  const int64_t blocks = ceil_of(m.slots, in_block);
  TORCH_CHECK_VALUE(blocks * slices <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of rows, got ",
                    blocks * slices);
  m.blocks = static_cast<unsigned>(blocks), m.slices = static_cast<unsigned>(slices);
}

template <int V, int L, int P, int R, int U, class T, class I>
void launch_rows(const Args<T, I>& m) {
  constexpr int kBlocks = U * R * Words<T, V>::kCount < 32 ? 4 : 3;  // 64 registers per thread, or 80
  const dim3 grid = grid_of(static_cast<int64_t>(m.blocks) * m.slices, 1, m.batches);
  launch_early(spmm_rows_kernel<T, I, V, L, P, R, U, kBlocks>, grid, kSparseThreads, m);
}

template <int L, int R, int U, int kBlocks, class T, class I>
void launch_shares(const Args<T, I>& m) {
  constexpr int V = 16 / sizeof(T);
  const dim3 grid = grid_of(static_cast<int64_t>(m.blocks) * m.slices, 1, m.batches);
  launch_early(spmm_shares_kernel<T, I, V, L, R, U, kBlocks>, grid, kSparseThreads, m);
}

template <class T, class I>
void launch_long_rows(const Args<T, I>& m, bool vectors, bool counts_rows) {
  constexpr int V = 16 / sizeof(arithmetic_t<T>);
  const int64_t tiles = ceil_of(m.n, 32 * (vectors ? V : 1));
  const dim3 grid = grid_of(ceil_of(m.slots, kSparseThreads / 32), std::min<int64_t>(tiles, 64), m.batches);
  launch_early(vectors ? spmm_long_rows_kernel<T, I, V> : spmm_long_rows_kernel<T, I, 1>, grid, kSparseThreads, m,
               counts_rows);
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
  if constexpr (sizeof(T) < 8) {  // not for 64-bit types, to compile fewer kernels
    if (split.shares) {
      if (split.lanes == 4) return launch_shares<4, 1, 4, 4>(m);
      if (split.lanes == 8) return launch_shares<8, 1, 8, 3>(m);
      if (split.lanes == 16) return launch_shares<16, 1, 4, 4>(m);
      if (split.vectors == 1) return launch_shares<32, 1, 4, 4>(m);
      return launch_shares<32, 2, sizeof(T) == 4 ? 2 : 4, sizeof(T) == 4 ? 4 : 3>(m);
    }
    if constexpr (sizeof(T) == 2) {
      if (is(4, 4, 1)) return launch_rows<V, 4, 4, 1, 4>(m);
      if (split.lean) return launch_rows<V, 16, 2, 1, 4>(m);
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
    TORCH_CHECK_VALUE(m.dense_stride * sizeof(T) <= UINT32_MAX, kOp, ": expected rows of dense below 4 GiB, got ", m.n,
                      " columns");
    return sum_cuda(packed, m);
  }
  TORCH_CHECK_VALUE(c.dense.size(1) <= UINT32_MAX, kOp, ": expected a sparse matrix of at most 2^32 - 1 columns, got ",
                    c.dense.size(1));
  m.dense_row_bytes = static_cast<uint32_t>(m.dense_stride * sizeof(T));
  const bool vectors = of_vectors(c.dense) && of_vectors(c.out);
  const int64_t v = vectors ? 16 / sizeof(T) : 1;
  const int64_t sms = device_limits().multiprocessors;
  Split split = split_of(m.n, v, c.pattern, m.batches, c.longest, sms);
  if (sizeof(T) == 8 && split.vectors * split.parts > 1) split = {std::min(32, split.lanes * split.vectors), 1, 1};
  const int64_t columns = split.lanes * split.vectors * v, team = split.lanes * split.parts;
  if (split.shares) {
    set_shares(m, split.lanes, columns, sms);
  } else {
    set_slots(m, c.pattern, columns, team, sms, c.longest);
    // Narrow slices of a B that fits into the L2 vary fastest, so that a multiprocessor meets the same slice again and
    // again. Wide slices of such a B run one after another, for the L1. If B does not fit into the L2, the reverse.
    const bool in_cache = c.dense.numel() * static_cast<int64_t>(sizeof(T)) <= kL2Bytes;
    set_grid(m, team, columns, sms * kWarpsAtOnce * 32 / team, in_cache == (split.lanes <= 8));
  }
  if (m.slots == 0) return launch_split(m, split, vectors);
  const Tensor partial =
      empty({m.batches, m.slots, 2, m.n}, c.dense.options().dtype(c10::CppTypeToScalarType<F>::value));
  const Tensor begins = empty({m.slots}, c.dense.options().dtype(at::kLong));
  m.partial = partial.template mutable_data_ptr<F>();
  m.begins = begins.mutable_data_ptr<int64_t>();
  launch_split(m, split, vectors);
  if (!split.shares || c.longest < 0 || c.longest > m.slot) launch_long_rows(m, vectors, split.shares);
}

// Whether A may be densified for this product alone. float32 takes three fp16 products, if the GPU has the kernels.
// 16-bit types use cuBLAS, which torch counts as nondeterministic.
bool may_fill(const Call& c) {
  const auto dtype = c.dense.scalar_type();
  return c.reduce == Reduce::sum && !c.selected.defined() && c.beta == 0 && c.out.size(0) == 1 &&
         (dtype == at::kFloat ? c.pattern.nonzeros() >= kFewestInHalves * c.out.size(1) && can_multiply_halves(c.dense)
          : dtype == at::kDouble ? false
                                 : c.alpha == 1 && !must_be_deterministic() && Borrowed::is_to_be_had(Library::cublas));
}

// Whether the densified kernels can read B and write out in place. Other operands go through copies of padded width.
bool is_aligned(const Call& c) { return c.out.size(2) % 8 == 0 && of_vectors(c.dense) && of_vectors(c.out); }

Call padded(const Call& c) {
  const int64_t n = c.out.size(2), width = ceil_of(n, 8) * 8;
  Call wide = c;
  wide.dense = zeros({1, c.dense.size(1), width}, c.dense.options());
  wide.dense.narrow(2, 0, n).copy_(c.dense);
  wide.out = empty({1, c.out.size(1), width}, c.out.options());
  return wide;
}

// Whether the 16-bit 2:4 kernel can run on these operands.
bool may_keep_two_of_four(const Call& c) {
  return is_aligned(c) && c.dense.numel() > 0 && c.dense.stride(1) >= c.dense.size(2) &&
         has_hopper_kernels(c.dense.get_device());
}

// Compares the estimated microseconds of both ways, as measured on an H200.
bool is_worth_filling(const Call& c) {
  const bool wide = c.dense.scalar_type() == at::kFloat;
  const double n = static_cast<double>(c.out.size(2)), nonzeros = static_cast<double>(c.pattern.nonzeros());
  const double by_rows = wide ? 4 + nonzeros * n / 3.5e6 : 3 + nonzeros * n / 5.8e6;
  if (by_rows < 20 || !may_fill(c)) return false;
  const double elements = static_cast<double>(c.out.size(1)) * static_cast<double>(c.dense.size(1));
  const double bytes = elements * (wide ? 4 : 2);
  const double filled = wide ? 26 + bytes / 2.6e6 + nonzeros / 5e5 + std::max(bytes / 2.8e6, elements * n / 1.23e8)
                             : 12 + bytes / 2.2e6 + nonzeros / 6.5e5 + std::max(5.0, elements * n / 3.5e8);
  const double moved = static_cast<double>(c.dense.numel() + c.out.numel()) * (wide ? 4 : 2);
  const double copies = is_aligned(c) ? 0 : 10 + 2 * moved / 2.2e6;
  return bytes <= static_cast<double>(kFilledBytes) && filled + copies < by_rows;
}

// The product with densified A; the row kernel recomputes what needs it.
template <class T, class I>
void sum_filled(const Call& c, Args<T, I>& m, const Filled& filled) {
  const Tensor dense = c.dense[0], out = c.out[0];
  if constexpr (sizeof(T) == 4) {
    multiply_halves(filled, c.pattern, c.values, dense, out, c.alpha);
  } else if constexpr (sizeof(T) == 2) {
    const Tensor facts = look_for_infinite(dense);
    multiply_filled(filled.parts.narrow(1, 0, dense.size(0)), dense, out);
    m.facts = static_cast<const FillFacts*>(filled.facts.const_data_ptr());
    m.dense_facts = static_cast<const FillFacts*>(facts.const_data_ptr());
    sum_cuda(c, m);
  }
}

template <class T, class I>
Args<T, I> args_of(const Call& c) {
  using F = arithmetic_t<T>;
  TORCH_CHECK_VALUE(c.out.size(2) <= INT32_MAX, kOp, ": expected at most 2^31 - 1 columns, got ", c.out.size(2));
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

// Densifies A for this product alone.
template <class T, class I>
void sum_filled(const Call& c) {
  const Filled filled = fill(c.pattern, c.values[0], c.dense.size(1));
  const Call aligned = is_aligned(c) ? c : padded(c);
  auto m = args_of<T, I>(aligned);
  sum_filled(aligned, m, filled);
  if (!aligned.out.is_same(c.out)) c.out.copy_(aligned.out.narrow(2, 0, c.out.size(2)));
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

}  // namespace

void run_cuda(const Call& c) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.dense.scalar_type(), kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
      auto m = args_of<scalar_t, index_t>(c);
      const bool extremum = c.reduce == Reduce::max || c.reduce == Reduce::min;
      if (!c.selected.defined() && !extremum)
        return is_worth_filling(c) ? sum_filled<scalar_t, index_t>(c) : sum_cuda(c, m);
      const dim3 warps =
          grid_of(ceil_of(m.rows, kSparseThreads / 32), std::min<int64_t>(ceil_of(m.n, 32), 1024), m.batches);
      c.selected.defined() ? launch_selected(m, c, warps) : launch_extremum(m, c, warps);
    });
  });
}

void run_halves(const Call& c, const Filled& kept) {
  const OperationGuard guard(kOp, c.dense);
  AT_DISPATCH_SWITCH(c.dense.scalar_type(), kOp, AT_DISPATCH_CASE(at::kFloat, [&] {
                       AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
                         auto m = args_of<float, index_t>(c);
                         may_fill(c) && is_aligned(c) ? sum_filled(c, m, kept) : sum_cuda(c, m);
                       });
                     }) AT_DISPATCH_CASE_REDUCED_FLOATING_TYPES([&] {
                       if (may_keep_two_of_four(c)) return multiply_two_of_four(kept, c.dense[0], c.out[0]);
                       AT_DISPATCH_INDEX_TYPES(c.pattern.crow.scalar_type(), kOp, [&] {
                         auto m = args_of<scalar_t, index_t>(c);
                         sum_cuda(c, m);
                       });
                     }));
}

Filled fill_on_gpu(const Pattern& p, const Tensor& values, int64_t columns, bool two_of_four, int64_t beyond) {
  const OperationGuard guard(kOp, values);
  return fill(p, values, columns, two_of_four, beyond);
}

}  // namespace matmuls::spmm
#endif
