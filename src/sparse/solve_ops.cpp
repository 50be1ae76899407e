// csr_solve_triangular (solve.h): checks, the CPU, tracing, gradients. Its CUDA kernel is that of cusparse/solve.cpp.
//
// With g the gradient of x, that of b is y of op(T)^T y = g, and that of T is -y x^T (-x y^T for a transpose) at A's
// nonzeros in the triangle.
#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <mutex>

#include "cpu/threads.h"
#include "sparse/index_checks.h"
#include "sparse/kept_solves.h"
#include "sparse/ops.h"
#include "sparse/solve.h"

namespace matmuls::solve {
namespace {

using at::Tensor;

MATMULS_OPERATOR(SolveOp, "custom_mm::csr_solve_triangular", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool, bool,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, int64_t));
MATMULS_OPERATOR(StateOp, "custom_mm::csr_solve_state", "", Tensor(const Tensor&, const Tensor&, bool));

Tensor call(const Call& c, const Tensor& values, const Tensor& b, bool transpose) {
  const Pattern& p = c.a;
  return SolveOp::call(p.crow, p.col, values, b, c.upper, transpose, c.unit_diagonal, none_or_tensor(p.order),
                       none_or_tensor(p.t_crow), none_or_tensor(p.t_col), none_or_tensor(p.t_order),
                       none_or_tensor(c.state), c.version);
}

// ---------------------------------------------------------------------------------------------------------------- CPU

template <class F, class I>
struct Triangle {
  const I *crow, *col, *order;
  const F* values;
  int64_t rows;
  bool upper;

  F value(int64_t p) const { return values[order == nullptr ? p : static_cast<int64_t>(order[p])]; }

  F sum_of_duplicates(int64_t r, bool& has) const {
    F sum = 0;
    for (int64_t p = crow[r]; p < crow[r + 1]; ++p)
      if (col[p] == r) has = true, sum += value(p);
    return sum;
  }

  // Raises unless no element of the diagonal is missing or 0. places: as `find_places` writes them, or null.
  std::vector<F> diagonal(const int64_t* places) const {
    std::vector<F> found(rows);
    for (int64_t r = 0; r < rows; ++r) {
      bool has = places != nullptr && places[r] >= 0;
      found[r] = has ? value(places[r]) : sum_of_duplicates(r, has);
      if (found[r] == F(0)) fail_diagonal(2 * r + has);
    }
    return found;
  }

  // Where each row's diagonal lies; -1 if it has none or duplicates.
  void find_places(int64_t* places) const {
    for (int64_t r = 0; r < rows; ++r) {
      int64_t count = 0;
      for (int64_t p = crow[r]; p < crow[r + 1]; ++p)
        if (col[p] == r) ++count, places[r] = p;
      if (count != 1) places[r] = -1;
    }
  }

  // x [rows, k] holds b before and x after, for columns [begin, end).
  void solve(const std::vector<F>& diagonal, F* x, int64_t k, int64_t begin, int64_t end) const {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = upper ? rows - 1 - i : i;
      F* const __restrict own = x + r * k;
      for (int64_t p = crow[r]; p < crow[r + 1]; ++p) {
        const int64_t c = col[p];
        if (upper ? c <= r : c >= r) continue;
        const F factor = value(p);
        const F* const __restrict other = x + c * k;
        for (int64_t j = begin; j < end; ++j) own[j] -= factor * other[j];
      }
      if (diagonal.empty()) continue;
      for (int64_t j = begin; j < end; ++j) own[j] /= diagonal[r];
    }
  }
};

// Where the diagonal lies in A and in its transpose.
struct CpuState {
  Tensor crow, col;
  std::mutex mutex = {};  // guards `places`
  std::array<Tensor, 2> places = {};

  template <class F, class I>
  Tensor places_of(const Triangle<F, I>& t, bool transpose) {
    const std::lock_guard lock(mutex);
    Tensor& found = places[transpose];
    if (!found.defined()) {
      const Tensor made = at::empty({t.rows}, at::kLong);
      t.find_places(made.mutable_data_ptr<int64_t>());
      found = made;
    }
    return found;
  }
};

Tensor state_cpu(const Tensor& crow, const Tensor& col, bool) {
  check_pattern(kState, pattern_of(crow, col, {}), crow);
  return tensor_with(std::make_unique<CpuState>(crow, col), crow);
}

// Rows one after the other; threads share the columns of b, so that the bits do not depend on their number.
Tensor solve_cpu(const Call& c) {
  const int64_t n = c.a.rows(), k = c.b.size(1);
  const Pattern whole = readable(kOp, c.a, n);
  const Pattern p = c.transpose ? readable(kOp, c.a.transposed(n), n) : whole;
  TORCH_CHECK_VALUE(p.rows() == n, kOp, ": expected t_crow of ", n, " rows, got ", p.rows());
  CpuState* const state = state_of<CpuState>(c);
  const auto dtype = c.b.scalar_type();
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor values = c.values.to(type).contiguous();
  const Tensor x =
      c.b.to(c.b.options().dtype(type), /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES(type, kOp, [&] {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), kOp, [&] {
      const Triangle<scalar_t, index_t> t{p.crow.const_data_ptr<index_t>(),
                                          p.col.const_data_ptr<index_t>(),
                                          indices_or_null<index_t>(p.order),
                                          values.const_data_ptr<scalar_t>(),
                                          n,
                                          c.upper != c.transpose};
      const bool is_kept = state != nullptr && !c.unit_diagonal;
      const Tensor places = is_kept ? state->places_of(t, c.transpose) : Tensor();
      const auto diagonal =
          c.unit_diagonal ? std::vector<scalar_t>() : t.diagonal(is_kept ? places.const_data_ptr<int64_t>() : nullptr);
      scalar_t* const data = x.mutable_data_ptr<scalar_t>();
      constexpr int64_t kColumns = 16;  // a cache line of float32
      const int64_t parts = (p.nonzeros() + n) * k < kGrain ? 1 : ceil_of(k, kColumns);
      parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
        t.solve(diagonal, data, k, first * kColumns, last == parts ? k : last * kColumns);
      });
    });
  });
  return x.to(dtype);
}

// ---------------------------------------------------------------------------------------------------------- operators

template <Tensor run(const Call&)>
Tensor solve_triangular(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& b, bool upper,
                        bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
                        const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& state,
                        int64_t version) {
  return run(
      checked(crow, col, values, b, upper, transpose, unit_diagonal, order, t_crow, t_col, t_order, state, version));
}

Tensor state_meta(const Tensor& crow, const Tensor&, bool) { return at::empty({0}, crow.options().dtype(at::kByte)); }

Tensor solve_meta(const Call& c) { return at::empty_symint(c.b.sym_sizes(), c.b.options()); }

struct SolveFunction : KernelFunction<SolveFunction> {
  using Context = torch::autograd::AutogradContext;
  using Gradients = torch::autograd::variable_list;

  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& b, const Call& c) {
    const Pattern& p = c.a;
    const Tensor x = [&] {
      at::AutoDispatchBelowAutograd guard;
      return call(c, values, b, c.transpose);
    }();
    ctx->save_for_backward({p.crow, p.col, p.order, p.t_crow, p.t_col, p.t_order, values, x, c.state});
    ctx->saved_data["upper"] = c.upper;
    ctx->saved_data["transpose"] = c.transpose;
    ctx->saved_data["unit_diagonal"] = c.unit_diagonal;
    ctx->saved_data["version"] = c.version;
    return x;
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const Call c{{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]},
                 saved[6],
                 saved[7],
                 data["upper"].toBool(),
                 data["transpose"].toBool(),
                 data["unit_diagonal"].toBool(),
                 saved[8],
                 data["version"].toInt()};
    const Tensor& x = saved[7];
    const Tensor y = call(c, c.values.to(grads[0].scalar_type()), grads[0], !c.transpose);
    Tensor grad_values;
    if (ctx->needs_input_grad(0)) {
      const Pattern& p = c.a;
      const Tensor &left = c.transpose ? x : y, &right = c.transpose ? y : x;
      const Tensor all = SddmmOp::call(p.crow, p.col, left, right.to(left.scalar_type()), p.sym_rows(), -1, {}, {}, {},
                                       {}, {}, false, false);
      const Tensor row = at::repeat_interleave_symint(p.crow.diff(), std::optional(p.col.sym_size(0)));
      const Tensor outside = c.upper ? (c.unit_diagonal ? p.col.le(row) : p.col.lt(row))
                                     : (c.unit_diagonal ? p.col.ge(row) : p.col.gt(row));
      grad_values = all.masked_fill(outside, 0);
      if (p.order.defined())
        grad_values = at::zeros_like(grad_values).index_copy(0, p.order.to(at::kLong), grad_values);
    }
    return {grad_values, y, {}};
  }
};

Tensor solve_autograd(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& b, bool upper,
                      bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
                      const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& state,
                      int64_t version) {
  if (!needs_gradient(kOp, {values, b}))
    return SolveOp::below_autograd(crow, col, values, b, upper, transpose, unit_diagonal, order, t_crow, t_col, t_order,
                                   state, version);
  return SolveFunction::apply(
      values, b,
      checked(crow, col, values, b, upper, transpose, unit_diagonal, order, t_crow, t_col, t_order, state, version));
}

}  // namespace

void fail_diagonal(int64_t row) {
  TORCH_CHECK_VALUE(false, kOp, ": expected a diagonal without zeros, got ", row % 2 ? "0" : "no nonzero", " in row ",
                    row / 2);
}

#ifndef MATMULS_CUDA
std::vector<KeptSolve> kept_solves(const Tensor&) { return {}; }
#endif

Call checked(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& b, bool upper, bool transpose,
             bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow, const OptionalTensor& t_col,
             const OptionalTensor& t_order, const OptionalTensor& state, int64_t version) {
  check_floating(kOp, "b", b);
  check_like(kOp, "values", values, "b", b);
  const Pattern p = pattern_of(crow, col, order, t_crow, t_col, t_order);
  check_pattern(kOp, p, b);
  TORCH_CHECK_VALUE(values.dim() == 1 && values.sym_size(0) == p.col.sym_size(0), kOp, ": expected values of shape [",
                    p.col.sym_size(0), "], one for each nonzero, got ", values.sym_sizes());
  TORCH_CHECK(b.dim() == 2 && b.sym_size(0) == p.sym_rows(), kOp, ": expected b of shape [", p.sym_rows(), ", k], got ",
              b.sym_sizes());
  return {p, values, b, upper, transpose, unit_diagonal, tensor_or_none(state), version};
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "csr_solve_triangular(Tensor crow, Tensor col, Tensor values, Tensor b, bool upper, bool transpose=False, bool "
      "unit_diagonal=False, Tensor? order=None, Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None, "
      "Tensor? state=None, int version=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("csr_solve_state(Tensor crow, Tensor col, bool constant=False) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(custom_mm, CPU, m) {
  m.impl("csr_solve_triangular", solve_triangular<solve_cpu>);
  m.impl("csr_solve_state", state_cpu);
}
TORCH_LIBRARY_IMPL(custom_mm, Meta, m) {
  m.impl("csr_solve_triangular", solve_triangular<solve_meta>);
  m.impl("csr_solve_state", state_meta);
}
TORCH_LIBRARY_IMPL(custom_mm, Autograd, m) {
  m.impl("csr_solve_triangular", solve_autograd);
  m.impl("csr_solve_state", StateOp::below_autograd);
}

}  // namespace matmuls::solve
