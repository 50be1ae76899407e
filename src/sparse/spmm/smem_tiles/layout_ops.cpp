// Operators of the tile layout:
//   csr_tiles, csr_tile_entries: lay a matrix out by tiles (layout.h), its structure and its nonzeros
//   csr_spmm_tiles: A @ dense as csr_spmm, by tiles (kernel.h)
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "sparse/index_checks.h"
#include "sparse/spmm/layout_ops.h"
#include "sparse/spmm/smem_tiles/kernel.h"

namespace matmuls {
namespace {

using at::Tensor;

MATMULS_OPERATOR(SpmmTilesOp, "custom_mm::csr_spmm_tiles", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, c10::SymInt, int64_t, const OptionalTensor&, int64_t));
using ProductByTiles = SpmmByLayout<SpmmTilesOp, 4, 10>;
MATMULS_OPERATOR(CsrTilesOp, "custom_mm::csr_tiles", "",
                 Tiles(const Tensor&, const Tensor&, c10::SymInt, int64_t, int64_t, int64_t));
MATMULS_OPERATOR(CsrTileEntriesOp, "custom_mm::csr_tile_entries", "",
                 Tiles(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, int64_t,
                       int64_t, const OptionalTensor&));

void check_cut(const c10::SymInt& rows, const c10::SymInt& columns, int64_t tiles, int64_t panels, int64_t lanes) {
  TORCH_CHECK_VALUE(rows > 0 && columns > 0 && columns <= kMostTiles * kMostTileRows && tiles > 0 &&
                        tiles <= kMostTiles && panels > 0 && rows >= panels && lanes > 1 && lanes <= 16 &&
                        (lanes & (lanes - 1)) == 0,
                    kTilesOp, ": expected rows, columns, 1 to 8 tiles, panels and 2, 4, 8 or 16 lanes, got ", rows,
                    ", ", columns, ", ", tiles, ", ", panels, ", ", lanes);
}
void check_steps(int64_t steps) {
  TORCH_CHECK_VALUE(steps >= 0 && steps <= INT32_MAX / kStepNonzeros - 1, kTilesOp, ": expected steps from 0 to ",
                    INT32_MAX / kStepNonzeros - 1, ", got ", steps);
}

Tiles empty_tiles(const Tensor& crow, const c10::SymInt& rows, int64_t tiles, int64_t panels, int64_t lanes) {
  const c10::SymInt slices = ((rows + panels - 1) / panels + (32 / lanes - 1)) / (32 / lanes);
  const auto ints = crow.options().dtype(at::kInt);
  return {at::empty_symint({tiles, panels, slices, 4}, ints),
          at::empty_symint({tiles, panels, slices * (32 / lanes), 3}, ints)};
}

Tiles csr_tiles_meta(const Tensor& crow, const Tensor& col, c10::SymInt columns, int64_t tiles, int64_t panels,
                     int64_t lanes) {
  check_pattern(kTilesOp, pattern_of(crow, col, {}), crow);
  check_cut(crow.sym_size(0) - 1, columns, tiles, panels, lanes);
  return empty_tiles(crow, crow.sym_size(0) - 1, tiles, panels, lanes);
}

Tiles empty_entries(const Tensor& values, const c10::SymInt& steps) {
  const c10::SymInt size = (steps + 1) * kStepNonzeros;
  return {at::empty_symint({size}, values.options().dtype(at::kShort)), at::empty_symint({size}, values.options())};
}

Tiles csr_tile_entries_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor& values,
                            c10::SymInt, int64_t, int64_t steps, const OptionalTensor&) {
  check_steps(steps);
  return empty_entries(values, steps);
}

#ifdef MATMULS_CUDA
// The layout of an int32 matrix. Raises ValueError if there are so few tiles or panels that one is too large.
TileLayout layout_of(const Pattern& p, int64_t columns, int64_t tiles, int64_t panels, int64_t lanes) {
  check_pattern(kTilesOp, p, p.crow);
  TORCH_CHECK_VALUE(p.crow.scalar_type() == at::kInt && p.crow.is_contiguous() && p.col.is_contiguous(), kTilesOp,
                    ": expected crow and col in Int and contiguous, got crow in ", p.crow.scalar_type());
  check_cut(p.rows(), columns, tiles, panels, lanes);
  const TileLayout m(p.rows(), columns, tiles, panels, lanes);
  TORCH_CHECK_VALUE(m.tile_rows <= kMostTileRows && m.panel_rows <= kMostPanelRows, kTilesOp, ": expected tiles of ",
                    kMostTileRows, " columns and panels of ", kMostPanelRows, " rows at most, got ", m.tile_rows,
                    " and ", m.panel_rows);
  TORCH_CHECK_VALUE(int64_t{m.tiles} * m.panels * m.slices * (32 / m.lanes) <= INT32_MAX, kTilesOp,
                    ": expected fewer rows in all tiles, got ", p.rows(), " in each of ", tiles);
  return m;
}

TileLayout layout_of(const Pattern& p, int64_t columns, const Tensor& heads, int64_t lanes) {
  TORCH_CHECK_VALUE(heads.dim() == 4 && heads.numel() > 0 && heads.device() == p.crow.device(), kTilesOp,
                    ": expected heads as csr_tiles makes them, on ", p.crow.device(), ", got ", heads.sizes(), " on ",
                    heads.device());
  return layout_of(p, columns, heads.size(0), heads.size(1), lanes);
}

Tiles csr_tiles(const Tensor& crow, const Tensor& col, c10::SymInt columns, int64_t tiles, int64_t panels,
                int64_t lanes) {
  const Pattern p = pattern_of(crow, col, {});
  const TileLayout m = layout_of(p, columns.expect_int(), tiles, panels, lanes);
  auto made = empty_tiles(crow, p.rows(), tiles, panels, lanes);
  lay_out_on_gpu(p, m, std::get<0>(made), std::get<1>(made));
  return made;
}

Tiles csr_tile_entries(const Tensor& heads, const Tensor& slots, const Tensor& crow, const Tensor& col,
                       const Tensor& values, c10::SymInt columns, int64_t lanes, int64_t steps,
                       const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  const TileLayout m = layout_of(p, columns.expect_int(), heads, lanes);
  check_tiles(m, heads, slots);
  TORCH_CHECK_VALUE(values.dim() == 1 && values.size(0) == p.nonzeros() && values.scalar_type() == at::kFloat &&
                        values.device() == heads.device(),
                    kTilesOp, ": expected ", p.nonzeros(), " values in Float, got ", values.sizes(), " in ",
                    values.scalar_type());
  check_steps(steps);
  auto made = empty_entries(values, steps);
  fill_tiles_on_gpu(contiguous(p), values.contiguous(), m, heads, slots, std::get<0>(made), std::get<1>(made));
  return made;
}

Tensor spmm_on_gpu(const Tensor& heads, const Tensor& slots, const Tensor& places, const Tensor& packed,
                   const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                   c10::SymInt columns, int64_t lanes, const OptionalTensor& order, int64_t longest) {
  const Pattern p = pattern_of(crow, col, order);
  const spmm::TiledCall c{layout_of(p, columns.expect_int(), heads, lanes), heads, slots, places, packed, dense};
  if (!spmm::can_go_by_tiles(c))
    return ProductByTiles::by_rows(heads, slots, places, packed, crow, col, values, dense, columns, lanes, order,
                                   longest);
  return spmm::run_tiles(c);
}
#endif

}  // namespace

void check_tiles(const TileLayout& m, const Tensor& heads, const Tensor& slots) {
  const auto is = [&](const Tensor& t, at::IntArrayRef sizes) {
    return t.sizes() == sizes && t.scalar_type() == at::kInt && t.is_contiguous() && t.device() == heads.device();
  };
  TORCH_CHECK_VALUE(
      is(heads, {m.tiles, m.panels, m.slices, 4}) && is(slots, {m.tiles, m.panels, m.slices * (32 / m.lanes), 3}),
      kTilesOp, ": expected what csr_tiles made of this matrix, got heads ", heads.sizes(), " and slots ",
      slots.sizes());
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "csr_tiles(Tensor crow, Tensor col, SymInt columns, int tiles, int panels, int lanes) -> (Tensor, "
      "Tensor)",
      tags);
  m.def(
      "csr_tile_entries(Tensor heads, Tensor slots, Tensor crow, Tensor col, Tensor values, SymInt columns, int lanes, "
      "int steps, Tensor? order=None) -> (Tensor, Tensor)",
      tags);
  m.def(
      "csr_spmm_tiles(Tensor heads, Tensor slots, Tensor places, Tensor packed, Tensor crow, Tensor col, Tensor "
      "values, Tensor dense, SymInt columns, int lanes, Tensor? order=None, int longest=-1) -> Tensor",
      tags);
}
MATMULS_KERNELS("csr_tiles", CsrTilesOp::gpu_only, csr_tiles, csr_tiles_meta, CsrTilesOp::below_autograd)
MATMULS_KERNELS("csr_tile_entries", CsrTileEntriesOp::gpu_only, csr_tile_entries, csr_tile_entries_meta,
                CsrTileEntriesOp::below_autograd)
MATMULS_KERNELS("csr_spmm_tiles", SpmmTilesOp::gpu_only, spmm_on_gpu, ProductByTiles::by_rows, ProductByTiles::autograd)

}  // namespace matmuls
