// scores_backward_: the gradient of attention's scores, written over the probabilities y = softmax(scores): y <- y *
// (dy - sum(y * dy)) with dy = grad @ values^T, grad being the gradient of y @ values.
//
// dy is computed and used in pieces of at most piece_bytes, or one row.
#include <torch/library.h>

#include "dense/ops.h"
#include "glue/checks.h"
#include "rows/ops.h"

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char* kScoresOp = "inplace_softmax_backward";

MATMULS_OPERATOR(ScoresBackwardOp, "custom_mm::scores_backward_", "",
                 void(Tensor, const Tensor&, const Tensor&, int64_t));

void check(const Tensor& y, const Tensor& grad, const Tensor& values, int64_t piece_bytes) {
  check_floating(kScoresOp, "output", y);
  check_operands(kScoresOp, grad, values);
  check_like(kScoresOp, "grad", grad, "output", y);
  TORCH_CHECK(piece_bytes > 0, kScoresOp, ": expected piece_bytes above 0, got ", piece_bytes);
  const int64_t dims = y.dim();
  bool fits = dims >= 2 && grad.dim() == dims && values.dim() == dims && grad.sym_size(-1) == values.sym_size(-1) &&
              grad.sym_size(-2) == y.sym_size(-2) && values.sym_size(-2) == y.sym_size(-1);
  for (int64_t d = 0; fits && d + 2 < dims; ++d)
    fits = grad.sym_size(d) == y.sym_size(d) && values.sym_size(d) == y.sym_size(d);
  TORCH_CHECK(fits, kScoresOp, ": expected output [..., Q, K], d_ov [..., Q, C] and values [..., K, C], got shapes ",
              y.sym_sizes(), ", ", grad.sym_sizes(), ", ", values.sym_sizes());
}

void scores_backward_(Tensor y, const Tensor& grad, const Tensor& values, int64_t piece_bytes) {
  check(y, grad, values, piece_bytes);
  check_no_overlap(kScoresOp, y, {{"values", values}, {"d_ov", grad}});
  TORCH_CHECK(y.is_contiguous(), kScoresOp, ": expected a contiguous output, got strides ", y.strides());
  if (y.numel() == 0) return;
  at::AutoDispatchBelowADInplaceOrView guard;
  // In-place operators keep the dtype under autocast.
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(c10::autocast_dispatch_keyset);
  const int64_t queries = y.size(-2), keys = y.size(-1), columns = grad.size(-1);
  if (columns == 0) {
    y.zero_();
    return;
  }
  const Tensor all_y = y.view({-1, queries, keys}), all_grad = grad.reshape({-1, queries, columns});
  const Tensor all_values = values.reshape({-1, keys, columns});
  const int64_t row_bytes = keys * y.element_size(), matrices = all_y.size(0);
  const int64_t matrices_a_piece = std::max<int64_t>(1, piece_bytes / (queries * row_bytes));
  const int64_t queries_a_piece = matrices_a_piece > 1 ? queries : std::max<int64_t>(1, piece_bytes / row_bytes);
  for (int64_t b = 0; b < matrices; b += matrices_a_piece) {
    const auto of = [&](const Tensor& t) { return t.narrow(0, b, std::min(matrices_a_piece, matrices - b)); };
    for (int64_t q = 0; q < queries; q += queries_a_piece) {
      const int64_t some = std::min(queries_a_piece, queries - q);
      const Tensor piece = of(all_y).narrow(1, q, some);
      const Tensor dy = MatmulOp::call(of(all_grad).narrow(1, q, some), of(all_values), false, true);
      SoftmaxBackwardOutOp::call(piece, dy, -1, 1, false, piece);
    }
  }
}

void scores_backward_meta(Tensor y, const Tensor& grad, const Tensor& values, int64_t piece_bytes) {
  check(y, grad, values, piece_bytes);
}

void scores_backward_autograd(Tensor y, const Tensor& grad, const Tensor& values, int64_t piece_bytes) {
  TORCH_CHECK(!needs_gradient(kScoresOp, {y, grad, values}), kScoresOp,
              ": expected no gradient to be recorded, since y, which the gradient needs, is written over");
  ScoresBackwardOp::below_autograd(y, grad, values, piece_bytes);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def("scores_backward_(Tensor(a!) y, Tensor grad, Tensor values, int piece_bytes=8388608) -> ()",
        {at::Tag::pt2_compliant_tag});
}
MATMULS_KERNELS("scores_backward_", scores_backward_, scores_backward_, scores_backward_meta, scores_backward_autograd)
MATMULS_WRITES("scores_backward_", ScoresBackwardOp, 0)

}  // namespace matmuls
