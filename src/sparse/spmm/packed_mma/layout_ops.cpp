// Operators of the packed layout (layout.h):
//   csr_packed_units, csr_packed: measure and pack a matrix
//   csr_spmm_packed: A @ dense as csr_spmm, from the packed matrix
//   csr_linear_packed: x A^T + bias
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "sparse/index_checks.h"
#include "sparse/spmm/layout_ops.h"
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
using PackedProduct = SpmmByLayout<SpmmPackedOp, 1, 6>;
MATMULS_OPERATOR(LinearPackedOp, "custom_mm::csr_linear_packed", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                        const OptionalTensor&, int64_t, const OptionalTensor&));

Tensor csr_packed_units_meta(const Tensor& crow, const Tensor& col, c10::SymInt, bool) {
  check_pattern(kPackedOp, pattern_of(crow, col, {}), crow);
  return at::empty({1}, crow.options().dtype(at::kInt));
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
  const Tensor y = PackedProduct::by_rows(packed, crow, col, values, x.t(), std::move(columns), order, longest).t();
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
PackedLayout layout_of(const Pattern& p, int64_t columns, bool in_order) {
  check_pattern(kPackedOp, p, p.crow);
  const PackedLayout m(p.rows(), columns, in_order);
  TORCH_CHECK_VALUE(columns >= 0 && columns <= kMostPackedColumns && m.tiles() <= INT32_MAX / kMostPackedUnits,
                    kPackedOp, ": expected at most ", kMostPackedColumns, " columns and ", INT32_MAX / kMostPackedUnits,
                    " tiles of 64 x 64, got ", m.rows, " x ", columns);
  return m;
}

Tensor csr_packed_units(const Tensor& crow, const Tensor& col, c10::SymInt columns, bool in_order) {
  const Pattern p = pattern_of(crow, col, {});
  const PackedLayout m = layout_of(p, columns.expect_int(), in_order);
  Tensor least = at::empty({1}, crow.options().dtype(at::kInt));
  measure_packed_on_gpu(contiguous(p), m, least);
  return least;
}

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
  pack_on_gpu(contiguous(p), values.contiguous(), m, packed);
  return packed;
}

Tensor spmm_packed_on_gpu(const Tensor& packed, const Tensor& crow, const Tensor& col, const Tensor& values,
                          const Tensor& dense, c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  const PackedLayout m = layout_of(pattern_of(crow, col, order), columns.expect_int(), false);
  const spmm::PackedCall c{m, packed, with_contiguous_rows(dense), {}};
  if (!spmm::can_go_packed(c))
    return PackedProduct::by_rows(packed, crow, col, values, c.dense, columns, order, longest);
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
MATMULS_KERNELS("csr_packed_units", CsrPackedUnitsOp::gpu_only, csr_packed_units, csr_packed_units_meta,
                CsrPackedUnitsOp::below_autograd)
MATMULS_KERNELS("csr_packed", CsrPackedOp::gpu_only, csr_packed, csr_packed_meta, CsrPackedOp::below_autograd)
MATMULS_KERNELS("csr_spmm_packed", SpmmPackedOp::gpu_only, spmm_packed_on_gpu, PackedProduct::by_rows,
                PackedProduct::autograd)
MATMULS_KERNELS("csr_linear_packed", LinearPackedOp::gpu_only, linear_on_gpu, linear_by_rows, linear_autograd)

}  // namespace matmuls
