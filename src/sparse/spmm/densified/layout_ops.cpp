// Operators csr_filled, csr_halves and csr_spmm_halves: A densified (sparse/spmm/densified/densified.h) and the product
// with it.
#include "sparse/spmm/densified/densified.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "glue/autograd.h"
#include "glue/checks.h"
#include "sparse/index_checks.h"
#include "sparse/spmm/layout_ops.h"
#include "sparse/spmm/spmm.h"
#ifdef MATMULS_CUDA
#include "glue/handles.h"
#endif

namespace matmuls::spmm {
namespace {

using at::Tensor;

bool is_narrow(const Tensor& t) { return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16; }

void check_kept_values(const Pattern& p, const Tensor& values, bool wide, bool narrow) {
  check_pattern(kOp, p, values);
  const bool known = (wide && values.scalar_type() == at::kFloat) || (narrow && is_narrow(values));
  TORCH_CHECK_VALUE(known && values.dim() == 1 && values.sym_size(0) == p.col.sym_size(0), kOp,
                    ": expected values of shape [", p.col.sym_size(0), "] in ", wide ? "Float" : "16 bits",
                    wide && narrow ? " or 16 bits" : "", ", got ", values.sym_sizes(), " in ", values.scalar_type());
}

// --- csr_filled: A with explicit zeros in 16 bits, [rows, columns to a multiple of 8]. The columns of a row differ.

#ifdef MATMULS_CUDA
Tensor csr_filled(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                  const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, false, true);
  const OperationGuard guard(kOp, values);
  return densify(contiguous(p), values.contiguous(), columns.expect_int()).parts;
}
#endif
Tensor csr_filled_meta(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                       const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, false, true);
  return at::empty_symint({p.sym_rows(), ceil_of(columns, 8) * 8}, values.options());
}
MATMULS_OPERATOR(CsrFilledOp, "custom_mm::csr_filled", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&));

// --- csr_halves, csr_spmm_halves: what a plan keeps of A (sparse/spmm/densified/densified.h): float32 as fp16x2
// halves, or A in 2:4 form; and the product with it.

using Halves = std::tuple<Tensor, Tensor, Tensor, Tensor>;

#ifdef MATMULS_CUDA
Halves csr_halves(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                  const OptionalTensor& order, bool sparse24, int64_t beyond) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, true, sparse24);
  const DensifiedMatrix made =
      densify_on_gpu(contiguous(p), values.contiguous(), columns.expect_int(), sparse24, beyond);
  return {made.parts, made.exponents.defined() ? made.exponents : at::empty({0}, made.facts.options()), made.facts,
          made.rest};
}

Tensor csr_spmm_halves(const Tensor& parts, const Tensor& exponents, const Tensor& facts, const Tensor& rest,
                       const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                       c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  const Pattern p = pattern_of(crow, col, order);
  const bool narrow = is_narrow(values), pairs = rest.numel() > 0;
  check_kept_values(p, values, true, pairs);
  Tensor out = at::empty_symint(check_product(p, values, dense, columns, {}, false), dense.options());
  const int64_t inner = columns.expect_int();
  const auto whole = [&](const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
    return t.sizes() == sizes && t.scalar_type() == dtype && t.is_contiguous() && t.device() == dense.device();
  };
  using Sizes = std::array<int64_t, 3>;
  const Sizes sizes = pairs ? Sizes{ceil_of(p.rows(), kTileRows), ceil_of(inner, kStepColumns),
                                    narrow ? kNarrowStepElements : kStepElements}
                            : Sizes{2, p.rows(), ceil_of(inner, 8) * 8};
  const bool as_made = whole(parts, narrow ? values.scalar_type() : at::kHalf, sizes) &&
                       (!pairs || (rest.size(0) >= p.rows() && whole(rest, at::kInt, {rest.size(0), 2}))) &&
                       whole(exponents, at::kInt, {narrow ? 0 : p.rows()}) && whole(facts, at::kInt, {kFitFlags});
  TORCH_CHECK(as_made && dense.dim() == 2, kOp,
              ": expected what csr_halves made of this matrix, and dense of two dimensions, got parts of shape ",
              parts.sizes(), ", dense of shape ", dense.sizes());
  if (out.numel() == 0) return out;
  run_densified({contiguous(p),
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
                {parts, exponents, facts, rest});
  return out;
}
#endif

Halves csr_halves_meta(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                       const OptionalTensor& order, bool sparse24, int64_t beyond) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, true, sparse24);
  const bool narrow = is_narrow(values);
  const auto ints = values.options().dtype(at::kInt), halves = narrow ? values.options() : ints.dtype(at::kHalf);
  const Tensor facts = at::empty({kFitFlags}, ints);
  const Tensor exponents = narrow ? at::empty({0}, ints) : at::empty_symint({p.sym_rows()}, ints);
  if (!sparse24)
    return {at::empty_symint({2, p.sym_rows(), ceil_of(columns, 8) * 8}, halves), exponents, facts,
            at::empty({0, 2}, ints)};
  const c10::SymInt most = p.col.sym_size(0) / 2, room = beyond < 0 ? most : most.min(c10::SymInt(beyond));
  return {at::empty_symint({ceil_of(p.sym_rows(), kTileRows), ceil_of(columns, kStepColumns),
                            narrow ? kNarrowStepElements : kStepElements},
                           halves),
          exponents, facts, at::empty_symint({p.sym_rows() + room, 2}, ints)};
}
MATMULS_OPERATOR(CsrHalvesOp, "custom_mm::csr_halves", "",
                 Halves(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, bool,
                        int64_t));
MATMULS_OPERATOR(CsrSpmmHalvesOp, "custom_mm::csr_spmm_halves", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, int64_t));

using HalvesProduct = SpmmByLayout<CsrSpmmHalvesOp, 4, 9>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("csr_filled(Tensor crow, Tensor col, Tensor values, SymInt columns, Tensor? order=None) -> Tensor", tags);
  m.def(
      "csr_halves(Tensor crow, Tensor col, Tensor values, SymInt columns, Tensor? order=None, bool two_of_four=False, "
      "int beyond=-1) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "csr_spmm_halves(Tensor parts, Tensor exponents, Tensor facts, Tensor rest, Tensor crow, Tensor col, Tensor "
      "values, Tensor dense, SymInt columns, Tensor? order=None, int longest=-1) -> Tensor",
      tags);
}

MATMULS_KERNELS("csr_filled", CsrFilledOp::gpu_only, csr_filled, csr_filled_meta, CsrFilledOp::below_autograd)
MATMULS_KERNELS("csr_halves", CsrHalvesOp::gpu_only, csr_halves, csr_halves_meta, CsrHalvesOp::below_autograd)
MATMULS_KERNELS("csr_spmm_halves", CsrSpmmHalvesOp::gpu_only, csr_spmm_halves, HalvesProduct::by_rows,
                HalvesProduct::autograd)

}  // namespace matmuls::spmm
