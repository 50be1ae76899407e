#include <ATen/Dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "cpu/threads.h"
#include "glue/batch_invariance.h"
#include "glue/checks.h"
#include "sparse/cpu.h"
#include "sparse/dense_blocks.h"

namespace matmuls {
namespace {

using at::Tensor;

constexpr int64_t kBlockBytes = 2 << 20;  // of 256 KiB, 1, 4 and 16 MiB, 1 and 4 were the fastest on a Zen 3
// For matrices with at least a third of all nonzeros and as many rows of x, or columns of a and b. With half of them
// and 128 rows a layer took 0.84 of the time nonzero by nonzero, with 512 rows 0.48; with 64 rows, or a fifth of them,
// more.
constexpr int64_t kFill = 3, kLeast = 96;

bool is_worth(const Pattern& p, const Tensor& dense, int64_t columns, int64_t n) {
  return dense.is_cpu() && (dense.scalar_type() == at::kFloat || dense.scalar_type() == at::kDouble) && n >= kLeast &&
         p.rows() > 0 && p.rows() * columns <= kFill * p.nonzeros() && !is_batch_invariant();
}

// Calls f(block [rows of it, columns], first row) for blocks of A's rows, of which about as many fit kBlockBytes.
template <class F>
void for_blocks(const Pattern& p, const Tensor& like, int64_t columns, const F& f) {
  const int64_t row_bytes = columns * like.element_size();
  const int64_t fits = std::max<int64_t>(kBlockBytes / row_bytes, 16);
  const int64_t blocks = ceil_of(p.rows(), fits), height = ceil_of(ceil_of(p.rows(), blocks), 16) * 16;
  const Tensor buffer = at::empty({std::min(height, p.rows()), columns}, like.options());
  for (int64_t first = 0; first < p.rows(); first += height)
    f(buffer.narrow(0, 0, std::min(height, p.rows() - first)), first);
}

// Calls f(row of the block, col, order, begin, end) for each row of the block, with its nonzeros, on torch's threads.
template <class T, class I, class F>
void for_rows_of(const Pattern& p, const Tensor& block, int64_t first, const F& f) {
  const I* const crow = p.crow.const_data_ptr<I>();
  const I* const col = p.col.const_data_ptr<I>();
  const I* const order = indices_or_null<I>(p.order);
  T* const data = block.mutable_data_ptr<T>();
  const int64_t columns = block.size(1);
  parallel_for(0, block.size(0), std::max<int64_t>(1, kGrain / columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) f(data + r * columns, col, order, crow[first + r], crow[first + r + 1]);
  });
}

}  // namespace

bool takes_dense_linear(const Pattern& p, const Tensor& x) {
  const int64_t columns = x.size(-1), n = columns > 0 ? x.numel() / columns : 0;
  if (!is_worth(p, x, columns, n)) return false;
  const Tensor whole = x.contiguous();
  bool finite = true;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "csr_linear",
                             [&] { finite = are_finite(whole.const_data_ptr<scalar_t>(), whole.numel()); });
  return finite;
}

void dense_linear(const Pattern& p, const Tensor& values, const Tensor& x, const Tensor& bias, const Tensor& out) {
  for_blocks(p, x, x.size(1), [&](const Tensor& block, int64_t first) {
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "csr_linear", [&] {
      AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "csr_linear", [&] {
        const scalar_t* const v = values.const_data_ptr<scalar_t>();
        const int64_t columns = block.size(1);
        for_rows_of<scalar_t, index_t>(
            p, block, first, [=](scalar_t* row, const index_t* col, const index_t* order, int64_t begin, int64_t end) {
              std::fill(row, row + columns, scalar_t(0));
              if (order == nullptr)
                for (int64_t i = begin; i < end; ++i) row[col[i]] += v[i];  // duplicates are added
              else
                for (int64_t i = begin; i < end; ++i) row[col[i]] += v[order[i]];
            });
      });
    });
    Tensor part = out.narrow(1, first, block.size(0));
    if (bias.defined())
      at::addmm_out(part, bias.narrow(0, first, block.size(0)), x, block.t());
    else
      at::mm_out(part, x, block.t());
  });
}

bool takes_dense_sddmm(const Pattern& p, const Tensor& a, const Tensor& b) {
  return is_worth(p, a, b.size(-2), a.size(-1));
}

void dense_sddmm(const Pattern& p, const Tensor& a, const Tensor& b, double alpha, const Tensor& out) {
  for_blocks(p, a, b.size(0), [&](Tensor block, int64_t first) {
    at::mm_out(block, a.narrow(0, first, block.size(0)), b.t());
    AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "csr_sddmm", [&] {
      AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "csr_sddmm", [&] {
        scalar_t* const to = out.mutable_data_ptr<scalar_t>();
        const scalar_t factor = static_cast<scalar_t>(alpha);
        for_rows_of<scalar_t, index_t>(
            p, block, first,
            [=](const scalar_t* row, const index_t* col, const index_t* order, int64_t begin, int64_t end) {
              if (order == nullptr)
                for (int64_t i = begin; i < end; ++i) to[i] = factor * row[col[i]];
              else
                for (int64_t i = begin; i < end; ++i) to[order[i]] = factor * row[col[i]];
            });
      });
    });
  });
}

}  // namespace matmuls
