// The CUDA kernel of csr_solve_triangular (sparse/solve.h), by cusparseSpSM. Values of 16 bits are solved in float32.
#ifdef MATMULS_CUDA
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "sparse/cusparse/descriptors.h"
#include "sparse/solve.h"

namespace matmuls::solve {
namespace {

using at::Tensor;
using SolveDescriptor = std::unique_ptr<cusparseSpSMDescr, DestroyedBy<cusparseSpSM_destroyDescr>>;

template <class T>
void set_attribute(const SparseDescriptor& a, cusparseSpMatAttribute_t which, T value) {
  MATMULS_CUSPARSE_CHECK(cusparseSpMatSetAttribute(a.get(), which, &value, sizeof(value)));
}

Tensor solve_cuda(const Tensor& crow, const Tensor& col, const Tensor& given_values, const Tensor& given_b, bool upper,
                  bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
                  const OptionalTensor& t_col, const OptionalTensor& t_order) {
  const Call c =
      checked(crow, col, given_values, given_b, upper, transpose, unit_diagonal, order, t_crow, t_col, t_order);
  const OperationGuard guard(kOp, given_b);
  const int64_t n = c.a.rows();
  const auto dtype = given_b.scalar_type();
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (given_b.numel() == 0) return at::empty_like(given_b);
  if (c.a.nonzeros() == 0) return given_b.clone();  // a unit diagonal alone
  const Tensor sorted = c.a.order.defined() ? c.values.index_select(0, c.a.order) : c.values;
  // Descriptors hold only addresses; these tensors must outlive them.
  const SparseParts parts{Layout::csr, crow.contiguous(), col.contiguous(), whole(sorted.to(type)), n, n};
  const Tensor b = whole(given_b.to(type)), x = at::empty_like(b);
  const SparseDescriptor a = describe(parts);
  set_attribute(a, CUSPARSE_SPMAT_FILL_MODE, upper ? CUSPARSE_FILL_MODE_UPPER : CUSPARSE_FILL_MODE_LOWER);
  set_attribute(a, CUSPARSE_SPMAT_DIAG_TYPE, unit_diagonal ? CUSPARSE_DIAG_TYPE_UNIT : CUSPARSE_DIAG_TYPE_NON_UNIT);
  const DenseDescriptor right = describe(b), result = describe(x);
  cusparseSpSMDescr_t made = nullptr;
  MATMULS_CUSPARSE_CHECK(cusparseSpSM_createDescr(&made));
  const SolveDescriptor descriptor(made);
  const Scalar one(1, type);
  const Borrowed handle(Library::cusparse, kOp);
  const auto run = [&](const char* name, auto function, auto... last) {
    const auto op = transpose ? CUSPARSE_OPERATION_TRANSPOSE : CUSPARSE_OPERATION_NON_TRANSPOSE;
    const auto status =
        function(handle.cusparse(), op, CUSPARSE_OPERATION_NON_TRANSPOSE, one.at(), a.get(), right.get(), result.get(),
                 cuda_type(type), CUSPARSE_SPSM_ALG_DEFAULT, descriptor.get(), last...);
    if (status != CUSPARSE_STATUS_SUCCESS)
      fail(name, status, c10::str(" in ", kOp, " for ", n, " x ", n, " and b ", b.sizes(), " in ", type));
  };
  size_t nbytes = 0;
  run("cusparseSpSM_bufferSize", cusparseSpSM_bufferSize, &nbytes);
  const Tensor buffer = at::empty({static_cast<int64_t>(std::max<size_t>(nbytes, 1))}, b.options().dtype(at::kByte));
  run("cusparseSpSM_analysis", cusparseSpSM_analysis, buffer.data_ptr());
  run("cusparseSpSM_solve", cusparseSpSM_solve);
  return x.to(dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) { m.impl("csr_solve_triangular", solve_cuda); }

}  // namespace matmuls::solve
#endif
