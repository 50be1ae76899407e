// Operators csr_filled, csr_halves and csr_spmm_halves: A densified (sparse/spmm/densified/densified.h) and the product
// with it: checks, the CPU, gradients.
#include "sparse/spmm/densified/densified.h"

#include <ATen/ops/_convert_indices_from_csr_to_coo.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>

#include "glue/autograd.h"
#include "glue/checks.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"
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

Tensor dense_on_cpu(const Pattern& p, const Tensor& values, int64_t columns) {
  const Tensor row = at::_convert_indices_from_csr_to_coo(p.crow, p.col).select(0, 0);
  const Tensor numbers = p.order.defined() ? values.index_select(0, p.order) : values;
  return at::zeros({p.rows(), ceil_of(columns, 8) * 8}, values.options()).index_put_({row, p.col}, numbers);
}
#ifdef MATMULS_CUDA
Tensor dense_on_gpu(const Pattern& p, const Tensor& values, int64_t columns) {
  const OperationGuard guard(kOp, values);
  return densify(p, values, columns).parts;
}
#endif

template <Tensor make(const Pattern&, const Tensor&, int64_t)>
Tensor csr_filled(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                  const OptionalTensor& order) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, false, true);
  return make(readable("csr_filled", p, columns.expect_int()), values.contiguous(), columns.expect_int());
}
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

using DensifyFunction = DensifiedMatrix(const Pattern& p, const Tensor& values, int64_t columns, bool sparse24,
                                        int64_t beyond);
using ProductFunction = void(const Call& c, const DensifiedMatrix& kept);

DensifiedMatrix densify_cpu(const Pattern& p, const Tensor& values, int64_t columns, bool sparse24, int64_t) {
  TORCH_CHECK(!sparse24, kOp, ": expected two_of_four, tensor cores' own layout, on a GPU only");
  const Tensor row = at::_convert_indices_from_csr_to_coo(p.crow, p.col).select(0, 0);
  Tensor full = at::zeros({p.rows(), ceil_of(columns, 8) * 8}, values.options());
  full.index_put_({row, p.col}, p.order.defined() ? values.index_select(0, p.order) : values, /*accumulate=*/true);
  const Tensor largest = full.size(1) > 0 ? full.abs().amax(1) : at::zeros({p.rows()}, values.options());
  const Tensor exponents = at::where(largest.gt(0).logical_and(largest.isfinite()),
                                     (15 - std::get<1>(at::frexp(largest))).clamp_max(126), 0);
  const Tensor scaled = at::ldexp(full, exponents.unsqueeze(1)), high = scaled.to(at::kHalf);
  return {at::stack({high, ((scaled - high.to(at::kFloat)) * kLowScale).to(at::kHalf)}), exponents.to(at::kInt),
          at::zeros({kFitFlags}, p.crow.options().dtype(at::kInt)),
          at::empty({0, 2}, p.crow.options().dtype(at::kInt))};
}
void run_densified_cpu(const Call& c, const DensifiedMatrix&) { run_cpu(c); }

using Halves = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <DensifyFunction densify>
Halves csr_halves(const Tensor& crow, const Tensor& col, const Tensor& values, c10::SymInt columns,
                  const OptionalTensor& order, bool sparse24, int64_t beyond) {
  const Pattern p = pattern_of(crow, col, order);
  check_kept_values(p, values, true, sparse24);
  const Pattern whole = readable("csr_halves", p, columns.expect_int());
  const DensifiedMatrix made = densify(whole, values.contiguous(), columns.expect_int(), sparse24, beyond);
  return {made.parts, made.exponents.defined() ? made.exponents : at::empty({0}, made.facts.options()), made.facts,
          made.rest};
}

template <ProductFunction run>
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
  run({readable(kOp, p, inner),
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
Tensor csr_spmm_halves_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor& crow,
                            const Tensor& col, const Tensor& values, const Tensor& dense, c10::SymInt columns,
                            const OptionalTensor& order, int64_t) {
  return at::empty_symint(check_product(pattern_of(crow, col, order), values, dense, columns, {}, false),
                          dense.options());
}

MATMULS_OPERATOR(CsrHalvesOp, "custom_mm::csr_halves", "",
                 Halves(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, bool,
                        int64_t));
MATMULS_OPERATOR(CsrSpmmHalvesOp, "custom_mm::csr_spmm_halves", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const Tensor&, c10::SymInt, const OptionalTensor&, int64_t));

// Products that record a gradient go to csr_spmm.
Tensor csr_spmm_halves_autograd(const Tensor& parts, const Tensor& exponents, const Tensor& facts, const Tensor& rest,
                                const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& dense,
                                c10::SymInt columns, const OptionalTensor& order, int64_t longest) {
  if (needs_gradient(kOp, {values, dense})) return product_by_rows(crow, col, values, dense, columns, order, longest);
  return CsrSpmmHalvesOp::below_autograd(parts, exponents, facts, rest, crow, col, values, dense, columns, order,
                                         longest);
}

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

TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("csr_filled", csr_filled<dense_on_cpu>);
  m.impl("csr_halves", csr_halves<densify_cpu>);
  m.impl("csr_spmm_halves", csr_spmm_halves<run_densified_cpu>);
}
#ifdef MATMULS_CUDA
TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_filled", csr_filled<dense_on_gpu>);
  m.impl("csr_halves", csr_halves<densify_on_gpu>);
  m.impl("csr_spmm_halves", csr_spmm_halves<run_densified>);
}
#endif
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("csr_filled", csr_filled_meta);
  m.impl("csr_halves", csr_halves_meta);
  m.impl("csr_spmm_halves", csr_spmm_halves_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("csr_filled", CsrFilledOp::below_autograd);
  m.impl("csr_halves", CsrHalvesOp::below_autograd);
  m.impl("csr_spmm_halves", csr_spmm_halves_autograd);
}

}  // namespace matmuls::spmm
