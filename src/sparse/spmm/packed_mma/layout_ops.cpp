// Operators of the packed layout (layout.h):
//   csr_packed_units, csr_packed: measure and pack a matrix
//   csr_spmm_packed: A @ dense as csr_spmm, from the packed matrix
//   csr_linear_packed: x A^T + bias
#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>
#include <vector>

#include "sparse/index_checks.h"
#include "sparse/ops.h"
#include "sparse/spmm/packed_mma/kernel_sm90.h"

namespace matmuls {
namespace {

using at::Tensor;

MATMULS_OPERATOR(CsrPackedUnitsOp, "custom_mm::csr_packed_units", "",
                 Tensor(const Tensor&, const Tensor&, c10::SymInt, bool));
MATMULS_OPERATOR(CsrPackedOp, "custom_mm::csr_packed", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, const OptionalTensor&,
                        bool));
MATMULS_OPERATOR(SpmmPackedOp, "custom_mm::csr_spmm_packed", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                        const OptionalTensor&, int64_t));
MATMULS_OPERATOR(LinearPackedOp, "custom_mm::csr_linear_packed", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                        const OptionalTensor&, int64_t, const OptionalTensor&));

PackedLayout layout_of(const Pattern& p, int64_t columns, bool in_order) {
  check_pattern(kPackedOp, p, p.crow);
  const PackedLayout m(p.rows(), columns, in_order);
  TORCH_CHECK_VALUE(columns >= 0 && columns <= kMostPackedColumns && m.tiles() <= INT32_MAX / kMostPackedUnits,
                    kPackedOp, ": expected at most ", kMostPackedColumns, " columns and ", INT32_MAX / kMostPackedUnits,
                    " tiles of 64 x 64, got ", m.rows, " x ", columns);
  return m;
}

// For each tile of 64 rows, which pairs each lane holds.
using Lanes = std::array<uint16_t, kPackedLanes>;
template <class I, class F>
void for_each_nonzero(const Pattern& p, const PackedLayout& m, int64_t row_tile, const F& do_with) {
  const I *crow = p.crow.const_data_ptr<I>(), *col = p.col.const_data_ptr<I>();
  const int64_t first = row_tile * kPackedRows;
  for (int64_t r = first; r < std::min(first + kPackedRows, m.rows); ++r)
    for (int64_t q = crow[r]; q < crow[r + 1]; ++q) {
      const auto c = static_cast<int>(col[q]);
      do_with(c / kPackedColumns, PackedPlace(static_cast<int>(r - first), c % kPackedColumns, m.in_order), q);
    }
}
template <class I>
std::vector<Lanes> pairs_of(const Pattern& p, const PackedLayout& m, int64_t row_tile) {
  std::vector<Lanes> found(m.steps);
  for_each_nonzero<I>(p, m, row_tile, [&](int step, const PackedPlace& place, int64_t) {
    found[step][place.lane] = static_cast<uint16_t>(found[step][place.lane] | 1u << place.pair);
  });
  return found;
}

void measure_on_cpu(const Pattern& p, const PackedLayout& m, const Tensor& least) {
  int most = 0;
  AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kPackedOp, [&] {
    for (int64_t row_tile = 0; row_tile < m.down; ++row_tile)
      for (const Lanes& lanes : pairs_of<index_t>(p, m, row_tile)) {
        int pairs = 0;
        for (const uint16_t has : lanes) pairs += std::popcount(has);
        most = std::max(most, up(kPackedHeads + 4 * pairs, kPackedUnit));
      }
  });
  *least.mutable_data_ptr<int>() = most;
}

void pack_on_cpu(const Pattern& p, const Tensor& values, const PackedLayout& m, const Tensor& packed_) {
  auto* const packed = static_cast<unsigned char*>(packed_.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(packed_.size(1)) * 2;
  std::fill_n(packed, packed_.nbytes(), 0);
  AT_DISPATCH_REDUCED_FLOATING_TYPES(values.scalar_type(), kPackedOp, [&] {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kPackedOp, [&] {
      const index_t* const order = indices_or_null<index_t>(p.order);
      const scalar_t* const from = values.const_data_ptr<scalar_t>();
      for (int64_t row_tile = 0; row_tile < m.down; ++row_tile) {
        const auto heads_of = [&](int step) {
          return reinterpret_cast<uint32_t*>(packed + (row_tile * m.steps + step) * bytes);
        };
        const auto pairs = pairs_of<index_t>(p, m, row_tile);
        for (int step = 0; step < m.steps; ++step) {
          uint32_t begin = 0;
          for (int lane = 0; lane < kPackedLanes; ++lane) {
            const uint16_t has = pairs[step][lane];
            heads_of(step)[lane] = has | begin << 16;
            begin += 4 * std::popcount(has);
          }
        }
        for_each_nonzero<index_t>(p, m, row_tile, [&](int step, const PackedPlace& place, int64_t q) {
          uint32_t* const heads = heads_of(step);
          const uint32_t head = heads[place.lane];
          const uint32_t at = (head >> 16) / 4 + std::popcount(head & ((1u << place.pair) - 1));
          if (kPackedHeads + 4 * int64_t{at} < bytes)
            reinterpret_cast<scalar_t*>(heads + kPackedLanes + at)[place.side] =
                from[order ? static_cast<int64_t>(order[q]) : q];
        });
      }
    });
  });
}

template <void (*measure)(const Pattern&, const PackedLayout&, const Tensor&)>
Tensor csr_packed_units(const Tensor& crow, const Tensor& col, c10::SymInt columns, bool in_order) {
  const Pattern p = pattern_of(crow, col, {});
  const PackedLayout m = layout_of(p, columns.expect_int(), in_order);
  Tensor least = at::empty({1}, crow.options().dtype(at::kInt));
  measure(readable(kPackedOp, p, columns.expect_int()), m, least);
  return least;
}
Tensor csr_packed_units_meta(const Tensor& crow, const Tensor& col, c10::SymInt, bool) {
  check_pattern(kPackedOp, pattern_of(crow, col, {}), crow);
  return at::empty({1}, crow.options().dtype(at::kInt));
}

template <void (*pack)(const Pattern&, const Tensor&, const PackedLayout&, const Tensor&)>
Tensor csr_packed(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns, c10::SymInt units,
                  const OptionalTensor& order, bool in_order) {
  const Pattern p = pattern_of(crow, col, order);
  const PackedLayout m = layout_of(p, columns.expect_int(), in_order);
  const int64_t many = units.expect_int();
  TORCH_CHECK_VALUE(values.dim() == 1 && values.size(0) == p.nonzeros() &&
                        at::isReducedFloatingType(values.scalar_type()) && values.device() == crow.device(),
                    kPackedOp, ": expected ", p.nonzeros(), " values in Half or BFloat16 on ", crow.device(), ", got ",
                    values.sizes(), " in ", values.scalar_type(), " on ", values.device());
  TORCH_CHECK_VALUE(m.tiles() == 0 || (many >= kLeastPackedUnits && many <= kMostPackedUnits), kPackedOp,
                    ": expected tiles of ", kLeastPackedUnits, " to ", kMostPackedUnits, " units, got ", many);
  Tensor packed = at::empty({m.tiles(), many * (kPackedUnit / 2)}, values.options());
  pack(readable(kPackedOp, p, columns.expect_int()), values.contiguous(), m, packed);
  return packed;
}
Tensor csr_packed_meta(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                       c10::SymInt units, const OptionalTensor& order, bool) {
  check_pattern(kPackedOp, pattern_of(crow, col, order), crow);
  TORCH_CHECK_VALUE(columns >= 0 && units >= 0, kPackedOp, ": expected columns and units of 0 or more, got ", columns,
                    " and ", units);
  const auto tiles = [](const c10::SymInt& x) { return ceil_of(x, kPackedTiles * kPackedRows) * kPackedTiles; };
  static_assert(kPackedRows == kPackedColumns);
  return at::empty_symint({tiles(crow.sym_size(0) - 1) * tiles(columns), units * (kPackedUnit / 2)}, values.options());
}

Tensor packed_by_rows(const Tensor&, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                      c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  return product_by_rows(crow, col, values, dense, std::move(columns), order, longest);
}

// Products that record a gradient go to csr_spmm.
Tensor spmm_packed_autograd(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values,
                            const Tensor& dense, c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  const auto go = needs_gradient(spmm::kOp, {values, dense}) ? packed_by_rows : SpmmPackedOp::below_autograd;
  return go(packed, crow, col, values, dense, std::move(columns), order, longest);
}

void check_bias(const Tensor& crow, const Tensor& x, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->sym_size(0) == crow.sym_size(0) - 1 &&
                              bias->scalar_type() == x.scalar_type() && bias->device() == x.device()),
                    spmm::kOp, ": expected a bias of shape [", crow.sym_size(0) - 1, "] in ", x.scalar_type(), " on ",
                    x.device(), ", got ", bias->sym_sizes(), " in ", bias->scalar_type(), " on ", bias->device());
}

// x A^T + bias by the row kernel: [n, rows], contiguous.
Tensor linear_by_rows(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values,
                      const Tensor& x, c10::SymInt columns, const OptionalTensor& order, int64_t longest,
                      const OptionalTensor& bias) {
  TORCH_CHECK(x.dim() == 2, spmm::kOp, ": expected x of two dimensions, got ", x.sym_sizes());
  check_bias(crow, x, bias);
  const Tensor y = packed_by_rows(packed, crow, col, values, x.t(), std::move(columns), order, longest).t();
  return (bias ? at::add(y, *bias) : y).contiguous();
}

Tensor linear_autograd(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values,
                       const Tensor& x, c10::SymInt columns, const OptionalTensor& order, int64_t longest,
                       const OptionalTensor& bias) {
  const bool recording = needs_gradient(spmm::kOp, {values, x, tensor_or_none(bias)});
  const auto go = recording ? linear_by_rows : LinearPackedOp::below_autograd;
  return go(packed, crow, col, values, x, std::move(columns), order, longest, bias);
}

#ifdef MATMULS_CUDA
Tensor spmm_packed_on_gpu(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values,
                          const Tensor& dense, c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  const PackedLayout m = layout_of(pattern_of(crow, col, order), columns.expect_int(), false);
  const spmm::PackedCall c{m, packed, with_contiguous_rows(dense), {}};
  if (!spmm::can_go_packed(c)) return packed_by_rows(packed, crow, col, values, c.dense, columns, order, longest);
  return spmm::run_packed(c);
}
Tensor linear_on_gpu(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& x,
                     c10::SymInt columns, const OptionalTensor& order, int64_t longest, const OptionalTensor& bias) {
  check_bias(crow, x, bias);
  const PackedLayout m = layout_of(pattern_of(crow, col, order), columns.expect_int(), true);
  const spmm::PackedCall c{m, packed, with_contiguous_rows(x), bias ? bias->contiguous() : Tensor()};
  if (!spmm::can_go_packed(c)) return linear_by_rows(packed, crow, col, values, x, columns, order, longest, bias);
  return spmm::run_packed(c);
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_packed_units(Tensor crow, Tensor col, SymInt columns, bool in_order=False) -> Tensor", tags);
  m.def(
      "csr_packed(Tensor crow, Tensor col, Tensor values, SymInt columns, SymInt units, Tensor? order=None, bool "
      "in_order=False) -> Tensor",
      tags);
  m.def(
      "csr_spmm_packed(Tensor packed, Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, Tensor? "
      "order=None, int longest=-1) -> Tensor",
      tags);
  m.def(
      "csr_linear_packed(Tensor packed, Tensor crow, Tensor col, Tensor values, Tensor x, SymInt columns, Tensor? "
      "order=None, int longest=-1, Tensor? bias=None) -> Tensor",
      tags);
}
TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("csr_packed_units", csr_packed_units<measure_on_cpu>);
  m.impl("csr_packed", csr_packed<pack_on_cpu>);
  m.impl("csr_spmm_packed", packed_by_rows);
  m.impl("csr_linear_packed", linear_by_rows);
}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_packed_units", csr_packed_units<measure_packed_on_gpu>);
  m.impl("csr_packed", csr_packed<pack_on_gpu>);
  m.impl("csr_spmm_packed", spmm_packed_on_gpu);
  m.impl("csr_linear_packed", linear_on_gpu);
}
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("csr_packed_units", csr_packed_units_meta);
  m.impl("csr_packed", csr_packed_meta);
  m.impl("csr_spmm_packed", packed_by_rows);
  m.impl("csr_linear_packed", linear_by_rows);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("csr_packed_units", CsrPackedUnitsOp::below_autograd);
  m.impl("csr_packed", CsrPackedOp::below_autograd);
  m.impl("csr_spmm_packed", spmm_packed_autograd);
  m.impl("csr_linear_packed", linear_autograd);
}

}  // namespace matmuls
