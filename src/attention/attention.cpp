// attention_forward: context = softmax(scale * q @ k^T + mask) @ v, and the probabilities on request.
//
// Hopper has one kernel for the common cases (kernel_sm90.cu). Elsewhere scores, softmax and context are computed piece
// by piece, a piece being whole batch elements or some heads, in the memory of the probabilities. attention_at_once
// tells which path is taken; the one kernel also returns the logarithm of each row's sum of exponentials, which torch's
// fused backward needs.
#include "attention/attention.h"
#include "attention/ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "dense/ops.h"
#include "glue/checks.h"

#ifdef MATMULS_CUDA
#include "glue/handles.h"
#endif

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char* kOp = "attention_forward";

struct Call {
  Tensor q, k, v, mask, probabilities, sums;  // the last three may be undefined
  double scale;
  bool causal;
  int64_t piece_bytes;
};

Call call_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, double scale, bool causal,
             int64_t piece_bytes, const OptionalTensor& probabilities, const OptionalTensor& sums) {
  return {.q = q,
          .k = k,
          .v = v,
          .mask = tensor_or_none(mask),
          .probabilities = tensor_or_none(probabilities),
          .sums = tensor_or_none(sums),
          .scale = scale,
          .causal = causal,
          .piece_bytes = piece_bytes};
}

// Checks up front what the operators below would detect only after something has been written.
void check(const Call& c) {
  check_operands(kOp, c.q, c.k, c.v);
  TORCH_CHECK(is_real(c.q.scalar_type()), kOp, ": expected q of a floating-point dtype, got ", c.q.scalar_type());
  TORCH_CHECK(c.q.dim() == 4 && c.k.dim() == 4 && c.v.dim() == 4, kOp,
              ": expected q, k and v of four dimensions, got shapes ", c.q.sym_sizes(), ", ", c.k.sym_sizes(), ", ",
              c.v.sym_sizes());
  const bool fit = c.k.sym_size(0) == c.q.sym_size(0) && c.k.sym_size(1) == c.q.sym_size(1) &&
                   c.k.sym_size(3) == c.q.sym_size(3) && c.v.sym_size(0) == c.k.sym_size(0) &&
                   c.v.sym_size(1) == c.k.sym_size(1) && c.v.sym_size(2) == c.k.sym_size(2);
  TORCH_CHECK(fit, kOp, ": expected q [B, H, Q, D], k [B, H, K, D] and v [B, H, K, E], got shapes ", c.q.sym_sizes(),
              ", ", c.k.sym_sizes(), ", ", c.v.sym_sizes());
  if (c.mask.defined()) {
    const auto type = c.mask.scalar_type(), own = c.q.scalar_type();
    TORCH_CHECK(c.mask.layout() == at::kStrided && (type == at::kBool || type == at::kByte || type == own ||
                                                    (type == at::kFloat && own != at::kDouble)),
                kOp, ": expected a strided mask in Bool, Byte, ", own, " or Float, got ", type);
    const c10::SymInt sizes[] = {c.q.sym_size(0), c.q.sym_size(1), c.q.sym_size(2), c.k.sym_size(2)};
    bool broadcasts = c.mask.dim() <= 4;
    for (int64_t d = 1; broadcasts && d <= c.mask.dim(); ++d)
      broadcasts = c.mask.sym_size(-d) == 1 || c.mask.sym_size(-d) == sizes[4 - d];
    TORCH_CHECK(broadcasts && c.mask.device() == c.q.device(), kOp, ": expected a mask on ", c.q.device(),
                " whose shape broadcasts to the scores' ", c10::SymIntArrayRef(sizes), ", got ", c.mask.sym_sizes(),
                " on ", c.mask.device());
  }
  if (c.probabilities.defined()) {
    const Tensor& p = c.probabilities;
    TORCH_CHECK(p.dim() == 4 && p.sym_size(0) == c.q.sym_size(0) && p.sym_size(1) == c.q.sym_size(1) &&
                    p.sym_size(2) == c.q.sym_size(2) && p.sym_size(3) == c.k.sym_size(2) &&
                    p.scalar_type() == c.q.scalar_type() && p.device() == c.q.device(),
                kOp, ": expected probabilities [B, H, Q, K] of q's dtype and device, got ", p.sym_sizes(), " in ",
                p.scalar_type(), " on ", p.device());
  }
  if (c.sums.defined()) {
    const Tensor& s = c.sums;
    TORCH_CHECK(s.dim() == 3 && s.sym_size(0) == c.q.sym_size(0) && s.sym_size(1) == c.q.sym_size(1) &&
                    s.sym_size(2) == c.q.sym_size(2) && s.scalar_type() == at::kFloat && s.device() == c.q.device() &&
                    s.is_contiguous(),
                kOp, ": expected contiguous sums [B, H, Q] in Float on q's device, got ", s.sym_sizes(), " in ",
                s.scalar_type(), " on ", s.device());
  }
}

bool fits_one_kernel(const Call& c) {
#ifdef MATMULS_CUDA
  return c.q.is_cuda() && fits_sm90(c.q, c.k, c.v, c.mask, c.scale);
#else
  return false;
#endif
}

Tensor in_pieces(Call c) {
  const int64_t batch = c.q.size(0), heads = c.q.size(1), queries = c.q.size(2), keys = c.k.size(2);
  // Fold once for all pieces: cuBLAS has one batch stride, and each piece's product would copy an operand with two.
  std::tie(c.q, c.scale) = folded(c.q, c.scale);
  c.q = c.q.contiguous(), c.k = c.k.contiguous(), c.v = c.v.contiguous();
  const Tensor context = at::empty({batch, heads, queries, c.v.size(3)}, c.q.options());
  for (const Piece& piece : pieces_of(c.q, c.k, c.piece_bytes)) {
    const Tensor scores = c.probabilities.defined()
                              ? piece.of(c.probabilities)
                              : at::empty({piece.batches, piece.heads, queries, keys}, c.q.options());
    MatmulOutOp::call(piece.of(c.q), piece.of(c.k), false, true, scores);
    MaskedSoftmaxOp::call(scores, piece.of_mask(c.mask), c.scale, c.causal);
    MatmulOutOp::call(scores, piece.of(c.v), false, false, piece.of(context));
  }
  return context.transpose(1, 2).contiguous();
}

bool can_be_walked(const Tensor& probabilities) {
  return probabilities.defined() && probabilities.is_contiguous() &&
         reinterpret_cast<uintptr_t>(probabilities.const_data_ptr()) % 16 == 0;
}

Tensor run(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, double scale, bool causal,
           int64_t piece_bytes, OptionalTensor probabilities, OptionalTensor sums) {
  const Call c = call_of(q, k, v, mask, scale, causal, piece_bytes, probabilities, sums);
  check(c);
  if (c.probabilities.defined())
    check_no_overlap(kOp, c.probabilities, {{"q", q}, {"k", k}, {"v", v}, {"mask", c.mask}, {"sums", c.sums}});
  if (c.sums.defined()) check_no_overlap(kOp, c.sums, {{"q", q}, {"k", k}, {"v", v}, {"mask", c.mask}});
  const bool whole = can_be_walked(c.probabilities) && fits_one_kernel(c);
  TORCH_CHECK(
      whole || !c.sums.defined(), kOp,
      ": expected sums only with contiguous probabilities and where attention_at_once is true, got them elsewhere");
  at::AutoDispatchBelowADInplaceOrView guard;
#ifdef MATMULS_CUDA
  if (whole) {
    const OperationGuard device(kOp, q);
    const Tensor context = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options());
    attend_sm90(q, k, v, c.mask, scale, causal, context, c.probabilities, c.sums);
    return context;
  }
#endif
  return in_pieces(c);
}

Tensor meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, double scale, bool causal,
            int64_t piece_bytes, OptionalTensor probabilities, OptionalTensor sums) {
  check(call_of(q, k, v, mask, scale, causal, piece_bytes, probabilities, sums));
  return at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1), v.sym_size(3)}, q.options());
}

// The version with a gradient is in backward.cpp, which decides what is kept.
Tensor without_gradient(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, double scale,
                        bool causal, int64_t piece_bytes, OptionalTensor probabilities, OptionalTensor sums) {
  TORCH_CHECK(
      !needs_gradient(kOp, {q, k, v, tensor_or_none(mask), tensor_or_none(probabilities)}), kOp,
      ": expected no gradient to be recorded, got an argument that requires grad; custom_mm::attention has one");
  return AttentionOp::below_autograd(q, k, v, mask, scale, causal, piece_bytes, probabilities, sums);
}

Tensor written(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
               double scale, bool causal, int64_t piece_bytes, OptionalTensor probabilities, OptionalTensor sums) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Tensor context = AttentionOp::handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, mask, scale,
                                                    causal, piece_bytes, probabilities, sums);
  for (const OptionalTensor& t : {probabilities, sums})
    if (t && t->defined()) mark_written(*t);
  return context;
}

}  // namespace

bool attends_at_once(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, double scale) {
  const Call c = call_of(q, k, v, mask, scale, false, 0, {}, {});
  check(c);
  return fits_one_kernel(c);
}

std::pair<Tensor, double> folded(const Tensor& q, double scale) {
  if (q.scalar_type() != at::kHalf) return {q, scale};
  int exponent = 0;
  if (std::isfinite(scale)) std::frexp(scale, &exponent);
  const double fold = std::ldexp(1.0, std::clamp(exponent - 5, -24, 0));
  return {at::mul(q, fold), scale / fold};
}

OptionalTensor Piece::of_mask(Tensor mask) const {
  if (!mask.defined()) return {};
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  if (mask.size(0) > 1) mask = mask.narrow(0, batch, batches);
  if (mask.size(1) > 1) mask = mask.narrow(1, head, heads);
  return mask;
}

std::vector<Piece> pieces_of(const Tensor& q, const Tensor& k, int64_t piece_bytes) {
  const int64_t batch = q.size(0), heads = q.size(1);
  const int64_t matrix = std::max<int64_t>(1, q.size(2) * k.size(2) * q.element_size());
  const bool whole = heads * matrix <= piece_bytes;
  const int64_t count = whole ? batch : heads;
  const int64_t most = std::max<int64_t>(1, piece_bytes / (whole ? std::max<int64_t>(1, heads) * matrix : matrix));
  const int64_t parts = ceil_of(count, most), step = parts ? ceil_of(count, parts) : 1;
  std::vector<Piece> found;
  for (int64_t b = 0; b < (whole ? 1 : batch); ++b)
    for (int64_t i = 0; i < count; i += step) {
      const int64_t n = std::min(step, count - i);
      found.push_back(whole ? Piece{i, n, 0, heads} : Piece{b, 1, i, n});
    }
  return found;
}

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int piece_bytes, "
      "Tensor(a!)? probabilities, Tensor(b!)? sums=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("attention_at_once(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> bool");
}

TORCH_LIBRARY_IMPL(custom_mm, CompositeImplicitAutograd, m) { m.impl("attention_at_once", attends_at_once); }

MATMULS_KERNELS("attention_forward", run, run, meta, without_gradient)
TORCH_LIBRARY_IMPL(custom_mm, ADInplaceOrView, m) { m.impl("attention_forward", written); }

}  // namespace matmuls
