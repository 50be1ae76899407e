// cusparse_sddmm: alpha * (a @ b) at the nonzeros of a CSR matrix, by cusparseSDDMM; on the CPU by csr_sddmm.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "glue/autograd.h"
#include "sparse/cusparse/descriptors.h"
#include "sparse/index_checks.h"
#include "sparse/ops.h"

namespace matmuls::cusparse {
namespace {

using at::Tensor;

constexpr const char* kSddmmOp = "cusparse_sddmm";

MATMULS_OPERATOR(CusparseSddmmOp, "custom_mm::cusparse_sddmm", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double));

void check(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b) {
  check_floating(kSddmmOp, "a", a);
  check_like(kSddmmOp, "b", b, "a", a);
  check_pattern(kSddmmOp, pattern_of(offsets, indices, {}), a);
  TORCH_CHECK(a.dim() == 2 && a.sym_size(0) == offsets.sym_size(0) - 1, kSddmmOp, ": expected a of shape [",
              offsets.sym_size(0) - 1, ", n], got ", a.sym_sizes());
  TORCH_CHECK(b.dim() == 2 && b.sym_size(0) == a.sym_size(1), kSddmmOp, ": expected b of shape [", a.sym_size(1),
              ", columns], got ", b.sym_sizes());
}

#ifdef MATMULS_CUDA
Tensor sddmm_cuda(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b, double alpha) {
  check(offsets, indices, a, b);
  const OperationGuard guard(kSddmmOp, a);
  const Tensor result = at::zeros({indices.size(0)}, a.options());
  if (alpha == 0 || result.numel() == 0 || a.numel() == 0) return result;
  const auto dtype = a.scalar_type();
  const Tensor x = in_order(a), y = in_order(b);
  // A descriptor holds only addresses; these tensors must outlive it.
  const SparseParts parts{Layout::csr, offsets.contiguous(), indices.contiguous(), result, a.size(0), b.size(1)};
  const SparseDescriptor c = describe(parts);
  const DenseDescriptor left = describe(x), right = describe(y);
  const Scalar one(alpha, dtype), zero(0, dtype);
  const Borrowed handle(Library::cusparse, kSddmmOp);
  const auto run = [&](auto function, auto last, const char* name) {
    const auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
    const auto status = function(handle.cusparse(), plain, plain, one.at(), left.get(), right.get(), zero.at(), c.get(),
                                 compute_type(dtype), CUSPARSE_SDDMM_ALG_DEFAULT, last);
    if (status != CUSPARSE_STATUS_SUCCESS)
      fail(name, status, c10::str(" in ", kSddmmOp, " for a ", a.sizes(), " and b ", b.sizes(), " in ", dtype));
  };
  size_t nbytes = 0;
  run(cusparseSDDMM_bufferSize, &nbytes, "cusparseSDDMM_bufferSize");
  const Tensor buffer = at::empty({static_cast<int64_t>(nbytes)}, a.options().dtype(at::kByte));
  run(cusparseSDDMM, buffer.data_ptr(), "cusparseSDDMM");
  return result;
}
#endif

Tensor by_our_own(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b, double alpha) {
  return SddmmOp::call(offsets, indices, a, b.mT(), b.sym_size(1), alpha, {}, {}, {}, {}, {}, false, false);
}

Tensor sddmm_cpu(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b, double alpha) {
  check(offsets, indices, a, b);
  validate_offsets(kSddmmOp, offsets, indices.size(0));
  validate_indices(kSddmmOp, "columns", indices, b.size(1));
  return by_our_own(offsets, indices, a, b, alpha);
}

Tensor sddmm_meta(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b, double) {
  check(offsets, indices, a, b);
  return at::empty_symint({indices.sym_size(0)}, a.options());
}

// Gradients are products with the sparse matrix of the incoming gradient, by csr_spmm.
struct CusparseSddmmFunction : KernelFunction<CusparseSddmmFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& offsets,
                        const Tensor& indices, double alpha) {
    ctx->save_for_backward({offsets, indices, b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    ctx->saved_data["rows"] = a.sym_size(0);
    ctx->saved_data["columns"] = b.sym_size(1);
    ctx->saved_data["alpha"] = alpha;
    return CusparseSddmmOp::below_autograd(offsets, indices, a, b, alpha);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[2], &b = saved[3];
    const c10::SymInt rows = ctx->saved_data["rows"].toSymInt(), columns = ctx->saved_data["columns"].toSymInt();
    const Pattern p = pattern_of(saved[0], saved[1], {}), t = p.transposed(columns);
    const double alpha = ctx->saved_data["alpha"].toDouble();
    const auto product = [&](const Pattern& m, const Tensor& dense, const c10::SymInt& many) {
      return SpmmOp::call(m.crow, m.col, grads[0], dense, many, "sum", alpha, none_or_tensor(m.order), m.t_crow,
                          m.t_col, none_or_tensor(m.t_order), {}, false, -1, -1);
    };
    const Pattern both{p.crow, p.col, {}, t.crow, t.col, t.order};
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0)) grad_a = product(both, b.mT(), columns);
    if (ctx->needs_input_grad(1)) grad_b = product(t, a, rows).mT();
    return {grad_a, grad_b, {}, {}, {}};
  }
};

Tensor sddmm_autograd(const Tensor& offsets, const Tensor& indices, const Tensor& a, const Tensor& b, double alpha) {
  if (needs_gradient(kSddmmOp, {a, b})) return CusparseSddmmFunction::apply(a, b, offsets, indices, alpha);
  return CusparseSddmmOp::below_autograd(offsets, indices, a, b, alpha);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  m.def("cusparse_sddmm(Tensor offsets, Tensor indices, Tensor a, Tensor b, float alpha=1.0) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

MATMULS_KERNELS("cusparse_sddmm", sddmm_cpu, sddmm_cuda, sddmm_meta, sddmm_autograd)
MATMULS_AUTOCAST("cusparse_sddmm", CusparseSddmmOp)

}  // namespace matmuls::cusparse
