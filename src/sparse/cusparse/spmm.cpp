// Operators on cuSPARSE's SpMM, with A in a layout of descriptors.h:
//   cusparse_spmm: out = alpha * op(A) @ op(dense) + beta * out by cusparseSpMM; on the CPU by csr_spmm
//   cusparse_prepare: runs cusparseSpMM_preprocess on A's indices, for many products of one kind
//
// Source: cuSPARSE's generic API. It guarantees bitwise reproducible results only for csr_alg3, coo_alg2 and bsr_alg1,
// and for none of them if A is transposed.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <mutex>

#include "glue/autograd.h"
#include "sparse/cusparse/descriptors.h"
#include "sparse/ops.h"

#ifdef MATMULS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace matmuls::cusparse {
namespace {

using at::Tensor;

constexpr const char* kSpmmOp = "cusparse_spmm";

MATMULS_OPERATOR(CusparseSpmmOp, "custom_mm::cusparse_spmm", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                        std::string_view, std::string_view, bool, bool, double, const OptionalTensor&));
MATMULS_OPERATOR(CusparseSpmmOutOp, "custom_mm::cusparse_spmm", "out",
                 void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                      std::string_view, std::string_view, bool, bool, double, double, Tensor));
MATMULS_OPERATOR(CusparsePrepareOp, "custom_mm::cusparse_prepare", "",
                 Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                        std::string_view, std::string_view, bool, bool));

// In the order of kAlgorithms.
enum class Algorithm { standard, csr1, csr2, csr3, coo1, coo2, coo3, coo4, bsr1 };
constexpr const char* kAlgorithms[] = {"default",  "csr_alg1", "csr_alg2", "csr_alg3", "coo_alg1",
                                       "coo_alg2", "coo_alg3", "coo_alg4", "bsr_alg1"};

Algorithm algorithm_of(std::string_view name, Layout layout) {
  const auto found = std::find(std::begin(kAlgorithms), std::end(kAlgorithms), name);
  const std::string_view family = layout == Layout::csc   ? "csr"
                                  : layout == Layout::csr ? "csr"
                                  : layout == Layout::coo ? "coo"
                                                          : "bsr";
  TORCH_CHECK_VALUE(found != std::end(kAlgorithms) && (name == "default" || name.substr(0, 3) == family), kSpmmOp,
                    ": expected algorithm to be default or one of ", family, "_alg* for this layout, got ", name);
  return static_cast<Algorithm>(found - std::begin(kAlgorithms));
}

// A checked call. `dense` is op(dense): transposing only changes strides.
struct Call {
  SparseParts a;
  Tensor dense;
  Algorithm algorithm;
  bool transposed;  // whether A is

  const c10::SymInt& rows() const { return transposed ? a.columns : a.rows; }
  const c10::SymInt& columns() const { return transposed ? a.rows : a.columns; }
  c10::SymDimVector shape() const { return {rows(), dense.sym_size(1)}; }
};

Call check(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
           const c10::SymInt& rows, const c10::SymInt& columns, std::string_view layout, std::string_view algorithm,
           bool transa, bool transb) {
  const Layout how = layout_of_name(kSpmmOp, layout);
  check_floating(kSpmmOp, "dense", dense);
  TORCH_CHECK(dense.dim() == 2, kSpmmOp, ": expected dense to be a matrix, got shape ", dense.sym_sizes());
  Call call{{how, offsets, indices, values, rows, columns},
            transb ? dense.mT() : dense,
            algorithm_of(algorithm, how),
            transa};
  check_parts(kSpmmOp, call.a, dense);
  TORCH_CHECK(call.dense.sym_size(0) == call.columns(), kSpmmOp, ": expected dense of shape ", transb ? "[n, " : "[",
              call.columns(), transb ? "]" : ", n]", " for a sparse matrix of ", call.columns(), " columns, got ",
              dense.sym_sizes());
  return call;
}

void check_out(const Call& call, const Tensor& out) {
  check_like(kSpmmOp, "out", out, "dense", call.dense);
  const auto shape = call.shape();
  TORCH_CHECK(out.sym_sizes() == c10::SymIntArrayRef(shape), kSpmmOp, ": expected out of shape ",
              c10::SymIntArrayRef(shape), ", got ", out.sym_sizes());
}

Tensor empty_result(const Call& call) { return at::empty_symint(call.shape(), call.dense.options()); }

// ---------------------------------------------------------------------------------------------------------- CUDA

#ifdef MATMULS_CUDA

cusparseSpMMAlg_t as_cusparse(Algorithm algorithm) {
  constexpr cusparseSpMMAlg_t known[] = {CUSPARSE_SPMM_ALG_DEFAULT, CUSPARSE_SPMM_CSR_ALG1, CUSPARSE_SPMM_CSR_ALG2,
                                         CUSPARSE_SPMM_CSR_ALG3,    CUSPARSE_SPMM_COO_ALG1, CUSPARSE_SPMM_COO_ALG2,
                                         CUSPARSE_SPMM_COO_ALG3,    CUSPARSE_SPMM_COO_ALG4, CUSPARSE_SPMM_BSR_ALG1};
  return known[static_cast<int>(algorithm)];
}

// Describes the call in its error message.
std::string words_of(const Call& c) {
  constexpr const char* layouts[] = {"csr", "csc", "coo", "bsr"};
  return c10::str(" in ", kSpmmOp, " for ", layouts[static_cast<int>(c.a.layout)], " of ", c.a.rows, " x ", c.a.columns,
                  c.transposed ? " transposed" : "", " and dense ", c.dense.sizes(), " in ", c.dense.scalar_type(),
                  " with algorithm ", kAlgorithms[static_cast<int>(c.algorithm)]);
}

// The arguments of cusparseSpMM, cusparseSpMM_bufferSize and cusparseSpMM_preprocess, kept alive for a call.
class Arguments {
 public:
  Arguments(const Call& call, double alpha, double beta, cusparseSpMatDescr_t a, const Tensor& out)
      : call_(call),
        dtype_(call.dense.scalar_type()),
        alpha_(alpha, dtype_),
        beta_(beta, dtype_),
        a_(a),
        b_(describe(call.dense)),
        c_(describe(out)),
        handle_(Library::cusparse, kSpmmOp) {}

  Tensor buffer() const {
    size_t nbytes = 0;
    call(cusparseSpMM_bufferSize, &nbytes, "cusparseSpMM_bufferSize");
    return at::empty({static_cast<int64_t>(nbytes)}, call_.dense.options().dtype(at::kByte));
  }
  void preprocess(const Tensor& buffer) const {
    call(cusparseSpMM_preprocess, buffer.data_ptr(), "cusparseSpMM_preprocess");
  }
  void multiply(const Tensor& buffer) const { call(cusparseSpMM, buffer.data_ptr(), "cusparseSpMM"); }

 private:
  template <class F, class Last>
  void call(F function, Last last, const char* name) const {
    const auto op = call_.transposed ? CUSPARSE_OPERATION_TRANSPOSE : CUSPARSE_OPERATION_NON_TRANSPOSE;
    const auto status = function(handle_.cusparse(), op, CUSPARSE_OPERATION_NON_TRANSPOSE, alpha_.at(), a_, b_.get(),
                                 beta_.at(), c_.get(), compute_type(dtype_), as_cusparse(call_.algorithm), last);
    if (status != CUSPARSE_STATUS_SUCCESS) fail(name, status, words_of(call_));
  }

  const Call& call_;
  at::ScalarType dtype_;
  Scalar alpha_, beta_;
  cusparseSpMatDescr_t a_;
  DenseDescriptor b_, c_;
  Borrowed handle_;
};

// cuSPARSE ties the result of preprocessing to a descriptor and a buffer. The storage of the empty tensor that
// cusparse_prepare returns owns both: they live as long as it does, and no other tensor can be mistaken for it.
struct Prepared {
  SparseDescriptor descriptor;
  Tensor buffer, offsets, indices;
  Layout layout;
  c10::SymInt rows, columns;
  Algorithm algorithm;
  bool transposed;
  at::ScalarType dtype;
  int64_t n;
  Order dense, out;
  std::mutex mutex;  // each product replaces the values

  static void destroy(void* self) { delete static_cast<Prepared*>(self); }

  static Prepared& of(const Tensor& t, const Call& c, const Tensor& out) {
    auto* const self = t.storage().data_ptr().cast_context<Prepared>(&destroy);
    TORCH_CHECK_VALUE(self, kSpmmOp, ": expected prepared to be what cusparse_prepare returned, got another tensor");
    TORCH_CHECK_VALUE(
        self->offsets.const_data_ptr() == c.a.offsets.const_data_ptr() &&
            self->indices.const_data_ptr() == c.a.indices.const_data_ptr() && self->layout == c.a.layout &&
            self->rows == c.a.rows && self->columns == c.a.columns && self->algorithm == c.algorithm &&
            self->transposed == c.transposed && self->dtype == c.dense.scalar_type() && self->n == c.dense.size(1) &&
            self->dense.by_rows == order_of(c.dense)->by_rows && self->out.by_rows == order_of(out)->by_rows,
        kSpmmOp, ": expected prepared for this matrix, layout, algorithm, dtype, order and ", c.dense.size(1),
        " columns, got what was prepared for another product of ", self->n, " columns");
    return *self;
  }

  // The storage does not belong to the caching allocator, so that recording a stream on the tensor would not reach it.
  void record_stream() const {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    for (const Tensor& t : {buffer, offsets, indices})
      c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream);
  }
};

Call with_readable_operands(Call c) {
  c.a.offsets = c.a.offsets.contiguous(), c.a.indices = c.a.indices.contiguous();
  c.a.values = whole(c.a.values), c.dense = in_order(c.dense);
  return c;
}

void run_cuda(const Call& checked, double alpha, double beta, const OptionalTensor& prepared, const Tensor& out) {
  if (out.numel() == 0) return;
  const OperationGuard guard(kSpmmOp, out);
  if (alpha == 0 || checked.a.values.numel() == 0 || checked.dense.numel() == 0) {
    beta == 0 ? out.zero_() : out.mul_(beta);
    return;
  }
  const Call c = with_readable_operands(checked);
  const Tensor target = in_order(out);
  if (prepared && prepared->defined()) {
    Prepared& kept = Prepared::of(*prepared, c, target);
    const std::lock_guard lock(kept.mutex);
    MATMULS_CUSPARSE_CHECK(
        cusparseSpMatSetValues(kept.descriptor.get(), const_cast<void*>(c.a.values.const_data_ptr())));
    Arguments(c, alpha, beta, kept.descriptor.get(), target).multiply(kept.buffer);
    kept.record_stream();
  } else {
    const SparseDescriptor a = describe(c.a);
    const Arguments arguments(c, alpha, beta, a.get(), target);
    arguments.multiply(arguments.buffer());
  }
  if (!target.is_same(out)) out.copy_(target);
}

Tensor prepare_cuda(const Call& checked) {
  const OperationGuard guard(kSpmmOp, checked.dense);
  const auto bytes = checked.dense.options().dtype(at::kByte);
  const Tensor out = empty_result(checked);
  if (out.numel() == 0 || checked.a.values.numel() == 0) return at::empty({0}, bytes);
  const Call c = with_readable_operands(checked);
  TORCH_CHECK_VALUE(c.a.offsets.is_same(checked.a.offsets) && c.a.indices.is_same(checked.a.indices), kSpmmOp,
                    ": expected contiguous offsets and indices to prepare, got others");
  auto kept = std::make_unique<Prepared>();
  kept->descriptor = describe(c.a);
  kept->offsets = c.a.offsets, kept->indices = c.a.indices;
  kept->layout = c.a.layout, kept->rows = c.a.rows, kept->columns = c.a.columns;
  kept->algorithm = c.algorithm, kept->transposed = c.transposed;
  kept->dtype = c.dense.scalar_type(), kept->n = c.dense.size(1);
  kept->dense = *order_of(c.dense), kept->out = *order_of(out);
  const Arguments arguments(c, 1, 0, kept->descriptor.get(), out);
  kept->buffer = arguments.buffer();
  arguments.preprocess(kept->buffer);
  void* const data = kept->buffer.data_ptr();
  const size_t nbytes = kept->buffer.nbytes();
  c10::DataPtr owner(data, kept.release(), &Prepared::destroy, out.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(owner), nullptr, false);
  return at::empty({0}, bytes).set_(storage, 0, {0}, {1});
}

#endif

// ----------------------------------------------------------------------------------------------------------- CPU

void run_cpu(const Call& c, double alpha, double beta, const OptionalTensor&, const Tensor& out) {
  validate_parts(kSpmmOp, c.a);
  const Pattern p = by_rows(c.a, c.transposed);
  SpmmOutOp::call(p.crow, p.col, c.a.values.reshape(-1), c.dense, c.columns(), "sum", alpha, none_or_tensor(p.order),
                  beta, -1, out);
}

Tensor prepare_cpu(const Call& c) {
  validate_parts(kSpmmOp, c.a);
  return at::empty({0}, c.dense.options().dtype(at::kByte));
}

// -------------------------------------------------------------------------------------------------------- operators

template <void run(const Call&, double, double, const OptionalTensor&, const Tensor&)>
Tensor spmm(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense, c10::SymInt rows,
            c10::SymInt columns, std::string_view layout, std::string_view algorithm, bool transa, bool transb,
            double alpha, const OptionalTensor& prepared) {
  const Call call = check(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb);
  Tensor out = empty_result(call);
  run(call, alpha, 0, prepared, out);
  return out;
}

template <void run(const Call&, double, double, const OptionalTensor&, const Tensor&)>
void spmm_out(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense, c10::SymInt rows,
              c10::SymInt columns, std::string_view layout, std::string_view algorithm, bool transa, bool transb,
              double alpha, double beta, Tensor out) {
  const Call call = check(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb);
  check_out(call, out);
  check_no_overlap(kSpmmOp, out, {{"values", values}, {"dense", dense}});
  run(call, alpha, beta, {}, out);
}

template <Tensor run(const Call&)>
Tensor prepare(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
               c10::SymInt rows, c10::SymInt columns, std::string_view layout, std::string_view algorithm, bool transa,
               bool transb) {
  return run(check(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb));
}

Tensor spmm_meta(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
                 c10::SymInt rows, c10::SymInt columns, std::string_view layout, std::string_view algorithm,
                 bool transa, bool transb, double, const OptionalTensor&) {
  return empty_result(check(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb));
}
void spmm_out_meta(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
                   c10::SymInt rows, c10::SymInt columns, std::string_view layout, std::string_view algorithm,
                   bool transa, bool transb, double, double, Tensor out) {
  check_out(check(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb), out);
}

// Gradients by our kernels: for values, csr_sddmm at A's nonzeros; for dense, csr_spmm with A transposed.
struct CusparseFunction : KernelFunction<CusparseFunction> {
  using Context = torch::autograd::AutogradContext;

  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& dense, const Tensor& offsets,
                        const Tensor& indices, const c10::SymInt& rows, const c10::SymInt& columns,
                        std::string_view layout, std::string_view algorithm, bool transa, bool transb, double alpha,
                        const OptionalTensor& prepared) {
    ctx->save_for_backward({offsets, indices, values, dense});
    ctx->saved_data["rows"] = rows;
    ctx->saved_data["columns"] = columns;
    ctx->saved_data["layout"] = std::string(layout);
    ctx->saved_data["transa"] = transa;
    ctx->saved_data["transb"] = transb;
    ctx->saved_data["alpha"] = alpha;
    return CusparseSpmmOp::below_autograd(offsets, indices, values, dense, rows, columns, layout, algorithm, transa,
                                          transb, alpha, prepared);
  }

  static torch::autograd::variable_list backward(Context* ctx, const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const Call c = check(saved[0], saved[1], saved[2], saved[3], data["rows"].toSymInt(), data["columns"].toSymInt(),
                         data["layout"].toStringRef(), "default", data["transa"].toBool(), data["transb"].toBool());
    const double alpha = data["alpha"].toDouble();
    const Tensor& grad = grads[0];
    validate_parts(kSpmmOp, c.a);  // indices may have been written to since the forward
    const Pattern p = by_rows(c.a, c.transposed);
    Tensor grad_values, grad_dense;
    if (ctx->needs_input_grad(0))
      grad_values = SddmmOp::call(p.crow, p.col, grad, c.dense, c.columns(), alpha, none_or_tensor(p.order), {}, {}, {},
                                  {}, false, true)
                        .view_as(c.a.values);
    if (ctx->needs_input_grad(1)) {
      const Pattern t = p.transposed(c.columns());
      grad_dense =
          SpmmOp::call(t.crow, t.col, c.a.values.reshape(-1), grad, c.rows(), "sum", alpha, none_or_tensor(t.order),
                       t.t_crow, t.t_col, none_or_tensor(t.t_order), {}, false, -1, -1);
      if (data["transb"].toBool()) grad_dense = grad_dense.mT();
    }
    torch::autograd::variable_list all(12);
    all[0] = grad_values, all[1] = grad_dense;
    return all;
  }
};

Tensor spmm_autograd(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
                     c10::SymInt rows, c10::SymInt columns, std::string_view layout, std::string_view algorithm,
                     bool transa, bool transb, double alpha, const OptionalTensor& prepared) {
  if (needs_gradient(kSpmmOp, {values, dense}))
    return CusparseFunction::apply(values, dense, offsets, indices, rows, columns, layout, algorithm, transa, transb,
                                   alpha, prepared);
  return CusparseSpmmOp::below_autograd(offsets, indices, values, dense, rows, columns, layout, algorithm, transa,
                                        transb, alpha, prepared);
}

void spmm_out_autograd(const Tensor& offsets, const Tensor& indices, const Tensor& values, const Tensor& dense,
                       c10::SymInt rows, c10::SymInt columns, std::string_view layout, std::string_view algorithm,
                       bool transa, bool transb, double alpha, double beta, Tensor out) {
  check_no_gradient_into(kSpmmOp, "out", {values, dense, out});
  CusparseSpmmOutOp::below_autograd(offsets, indices, values, dense, rows, columns, layout, algorithm, transa, transb,
                                    alpha, beta, out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(custom_mm, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "cusparse_spmm(Tensor offsets, Tensor indices, Tensor values, Tensor dense, SymInt rows, SymInt columns, str "
      "layout=\"csr\", str algorithm=\"default\", bool transa=False, bool transb=False, float alpha=1.0, Tensor? "
      "prepared=None) -> Tensor",
      tags);
  m.def(
      "cusparse_spmm.out(Tensor offsets, Tensor indices, Tensor values, Tensor dense, SymInt rows, SymInt columns, str "
      "layout=\"csr\", str algorithm=\"default\", bool transa=False, bool transb=False, float alpha=1.0, float "
      "beta=0.0, *, Tensor(a!) out) -> ()",
      tags);
  m.def(
      "cusparse_prepare(Tensor offsets, Tensor indices, Tensor values, Tensor dense, SymInt rows, SymInt columns, str "
      "layout=\"csr\", str algorithm=\"default\", bool transa=False, bool transb=False) -> Tensor",
      tags);
}

MATMULS_KERNELS("cusparse_spmm", spmm<run_cpu>, spmm<run_cuda>, spmm_meta, spmm_autograd)
MATMULS_KERNELS("cusparse_spmm.out", spmm_out<run_cpu>, spmm_out<run_cuda>, spmm_out_meta, spmm_out_autograd)
MATMULS_KERNELS("cusparse_prepare", prepare<prepare_cpu>, prepare<prepare_cuda>, prepare<prepare_cpu>,
                CusparsePrepareOp::below_autograd)
MATMULS_WRITES("cusparse_spmm.out", CusparseSpmmOutOp, 12)
MATMULS_AUTOCAST("cusparse_spmm", CusparseSpmmOp)

}  // namespace matmuls::cusparse
