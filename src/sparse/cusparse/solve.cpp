// The CUDA kernel of csr_solve_triangular (sparse/solve.h), by cusparseSpSV for one column and cusparseSpSM for more.
// Values of 16 bits are solved in float32.
//
//   without a state   check of the diagonal -> analysis ----------------> solve -> was the diagonal good?
//   first with one    check of the diagonal -> analysis, kept ----------> solve -> was the diagonal good?
//   other values      check of the diagonal -> load of the values ------> solve -> was the diagonal good?
//   again                                      load of the values ------> solve
//   again, constant                                                       solve
//
// The check runs on the GPU while the host prepares the solve; the host reads its result after all launches.
#ifdef MATMULS_CUDA
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "sparse/cusparse/descriptors.h"
#include "sparse/diagonal.h"
#include "sparse/kept_solves.h"
#include "sparse/solve.h"

namespace matmuls::solve {
namespace {

using at::Tensor;
using VectorDescriptor = std::unique_ptr<cusparseDnVecDescr, DestroyedBy<cusparseDestroyDnVec>>;
using SpsvDescriptor = std::unique_ptr<cusparseSpSVDescr, DestroyedBy<cusparseSpSV_destroyDescr>>;
using SpsmDescriptor = std::unique_ptr<cusparseSpSMDescr, DestroyedBy<cusparseSpSM_destroyDescr>>;
using Event = std::unique_ptr<CUevent_st, DestroyedBy<cudaEventDestroy>>;

Event new_event() {
  cudaEvent_t made = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  return Event(made);
}

// Launches the check of the diagonal. `expect` waits for it, not for the solve that was launched after it.
class DiagonalCheck {
 public:
  explicit DiagonalCheck(const Call& c)
      : pattern_(contiguous(c.a)),
        values_(c.values.contiguous()),
        is_bad_(at::empty({1}, at::TensorOptions(at::kLong).pinned_memory(true))),
        done_(new_event()) {
    flag_bad_diagonal(pattern_, values_, is_bad_.mutable_data_ptr<int64_t>());
    C10_CUDA_CHECK(cudaEventRecord(done_.get(), c10::cuda::getCurrentCUDAStream()));
  }
  // is_bad_ must not be given away while the kernel may write to it.
  ~DiagonalCheck() { (void)cudaEventSynchronize(done_.get()); }
  DiagonalCheck(const DiagonalCheck&) = delete;
  DiagonalCheck& operator=(const DiagonalCheck&) = delete;

  void expect() const {
    C10_CUDA_CHECK(cudaEventSynchronize(done_.get()));
    if (*is_bad_.const_data_ptr<int64_t>() == 0) return;
    fail_diagonal(first_bad_diagonal(pattern_, values_).item<int64_t>());
  }

 private:
  Pattern pattern_;
  Tensor values_, is_bad_;
  Event done_;
};

// Tells when a graph that is being captured, and all that was instantiated from it, are gone. CUDA calls this on a
// thread of its own, where no CUDA call is allowed.
class GraphsEnd {
 public:
  explicit GraphsEnd(cudaGraph_t graph) {
    auto owned = std::make_unique<Flag>(flag_);
    cudaUserObject_t object = nullptr;
    C10_CUDA_CHECK(cudaUserObjectCreate(&object, owned.get(), &GraphsEnd::reached, 1, cudaUserObjectNoDestructorSync));
    (void)owned.release();
    C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }
  bool is_reached() const { return flag_->load(); }

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;

  static void CUDART_CB reached(void* owned) {
    const std::unique_ptr<Flag> flag(static_cast<Flag*>(owned));
    (*flag)->store(true);
  }

  Flag flag_ = std::make_shared<std::atomic<bool>>(false);
};

// Not at::copy_, which refuses to write outside inference mode what was made within it.
void copy_values(const Tensor& to, const Tensor& values) {
  C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), values.const_data_ptr(), values.nbytes(),
                                 cudaMemcpyDeviceToDevice, c10::cuda::getCurrentCUDAStream()));
}

// The properties of a solve that its analysis depends on, besides the matrix.
struct Kind {
  int64_t columns;
  at::ScalarType type;
  bool upper, transpose, unit_diagonal;

  bool operator==(const Kind&) const = default;
};

// A matrix with cuSPARSE's analysis of it. Descriptors hold only addresses: what they point to is here, but for b and
// x.
class Analysis {
 public:
  // b [n, columns] and x, both by rows. kept: outlives the call, so that its memory is not of torch's allocator.
  Analysis(const Borrowed& handle, const Kind& kind, SparseParts parts, const Tensor& b, const Tensor& x, bool kept)
      : kind(kind), parts_(std::move(parts)), matrix_(describe(parts_)) {
    set(CUSPARSE_SPMAT_FILL_MODE, kind.upper ? CUSPARSE_FILL_MODE_UPPER : CUSPARSE_FILL_MODE_LOWER);
    set(CUSPARSE_SPMAT_DIAG_TYPE, kind.unit_diagonal ? CUSPARSE_DIAG_TYPE_UNIT : CUSPARSE_DIAG_TYPE_NON_UNIT);
    if (kind.columns == 1) {
      cusparseSpSVDescr_t made = nullptr;
      MATMULS_CUSPARSE_CHECK(cusparseSpSV_createDescr(&made));
      spsv_.reset(made);
      b_vector_ = vector(b), x_vector_ = vector(x);
    } else {
      cusparseSpSMDescr_t made = nullptr;
      MATMULS_CUSPARSE_CHECK(cusparseSpSM_createDescr(&made));
      spsm_.reset(made);
      b_matrix_ = describe(b), x_matrix_ = describe(x);
    }
    size_t nbytes = 0;
    step(handle, "bufferSize", cusparseSpSV_bufferSize, cusparseSpSM_bufferSize, &nbytes);
    const auto count = static_cast<int64_t>(std::max<size_t>(nbytes, 1));
    buffer_ = kept ? own_memory(kOp, "an analysis", count) : at::empty({count}, b.options().dtype(at::kByte));
    step(handle, "analysis", cusparseSpSV_analysis, cusparseSpSM_analysis, buffer_.mutable_data_ptr());
  }
  ~Analysis() {
    if (is_forked()) {
      leak();
    } else {
      const RelaxedCapture relaxed;
      spsv_.reset(), spsm_.reset();
    }
  }
  Analysis(const Analysis&) = delete;
  Analysis& operator=(const Analysis&) = delete;

  // Other values for the same nonzeros.
  void update(const Borrowed& handle, const Tensor& values) {
    copy_values(parts_.values, values);
    void* const data = parts_.values.mutable_data_ptr();
    if (spsv_)
      MATMULS_CUSPARSE_CHECK(
          cusparseSpSV_updateMatrix(handle.cusparse(), spsv_.get(), data, CUSPARSE_SPSV_UPDATE_GENERAL));
    else
      MATMULS_CUSPARSE_CHECK(
          cusparseSpSM_updateMatrix(handle.cusparse(), spsm_.get(), data, CUSPARSE_SPSM_UPDATE_GENERAL));
  }

  void solve(const Borrowed& handle, const Tensor& b, const Tensor& x) {
    void *const from = const_cast<void*>(b.const_data_ptr()), *const to = x.mutable_data_ptr();
    if (spsv_) {
      MATMULS_CUSPARSE_CHECK(cusparseDnVecSetValues(b_vector_.get(), from));
      MATMULS_CUSPARSE_CHECK(cusparseDnVecSetValues(x_vector_.get(), to));
    } else {
      MATMULS_CUSPARSE_CHECK(cusparseDnMatSetValues(b_matrix_.get(), from));
      MATMULS_CUSPARSE_CHECK(cusparseDnMatSetValues(x_matrix_.get(), to));
    }
    step(handle, "solve", cusparseSpSV_solve, cusparseSpSM_solve);
  }

  int64_t nbytes() const { return static_cast<int64_t>(parts_.values.nbytes() + buffer_.nbytes()); }

  const Kind kind;
  // For a kept one: the number of its values, 0 for none known; the capture that has taken it, 0 for none; the end of
  // its last solve, which other streams wait for.
  int64_t version = 0;
  unsigned long long capture = 0;
  std::optional<GraphsEnd> end;  // of the graph of that capture
  Event used;
  bool is_idle = true;  // nobody needs to wait for `used`

 private:
  template <class T>
  void set(cusparseSpMatAttribute_t which, T value) {
    MATMULS_CUSPARSE_CHECK(cusparseSpMatSetAttribute(matrix_.get(), which, &value, sizeof(value)));
  }

  VectorDescriptor vector(const Tensor& t) const {
    cusparseDnVecDescr_t made = nullptr;
    MATMULS_CUSPARSE_CHECK(
        cusparseCreateDnVec(&made, t.size(0), const_cast<void*>(t.const_data_ptr()), cuda_type(kind.type)));
    return VectorDescriptor(made);
  }

  // A step of SpSV or of SpSM.
  template <class V, class M, class... A>
  void step(const Borrowed& handle, const char* name, V spsv, M spsm, A... last) const {
    constexpr auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
    const auto op = kind.transpose ? CUSPARSE_OPERATION_TRANSPOSE : plain;
    const auto type = cuda_type(kind.type);
    const Scalar one(1, kind.type);
    const auto status = spsv_ ? spsv(handle.cusparse(), op, one.at(), matrix_.get(), b_vector_.get(), x_vector_.get(),
                                     type, CUSPARSE_SPSV_ALG_DEFAULT, spsv_.get(), last...)
                              : spsm(handle.cusparse(), op, plain, one.at(), matrix_.get(), b_matrix_.get(),
                                     x_matrix_.get(), type, CUSPARSE_SPSM_ALG_DEFAULT, spsm_.get(), last...);
    if (status != CUSPARSE_STATUS_SUCCESS)
      fail(c10::str(spsv_ ? "cusparseSpSV_" : "cusparseSpSM_", name).c_str(), status,
           c10::str(" in ", kOp, " for ", parts_.rows, " x ", parts_.rows, " and ", kind.columns, " columns in ",
                    kind.type));
  }

  void leak() {
    (void)matrix_.release(), (void)b_vector_.release(), (void)x_vector_.release(), (void)b_matrix_.release();
    (void)x_matrix_.release(), (void)spsv_.release(), (void)spsm_.release(), (void)used.release();
  }

  SparseParts parts_;
  SparseDescriptor matrix_;
  VectorDescriptor b_vector_, x_vector_;
  DenseDescriptor b_matrix_, x_matrix_;
  Tensor buffer_;
  SpsvDescriptor spsv_;
  SpsmDescriptor spsm_;
};

constexpr size_t kMost = 8;  // analyses that a state keeps, but for those that captures have taken

// The analyses of one matrix. A capture takes one for its graph, whose replays load their values into it: solves that
// are not captured then make another.
struct State {
  Tensor crow, col;
  bool constant;                                     // values with the same number are loaded once
  std::mutex mutex;                                  // guards `kept` and what is in it
  std::vector<std::unique_ptr<Analysis>> kept = {};  // the last used at the end
  std::atomic<int64_t> checked{0};                   // the number of the values whose diagonal was good

  // Null if there is none. capture, graph: that of the current stream; 0 for none.
  Analysis* find(const Kind& kind, unsigned long long capture, cudaGraph_t graph) {
    if (capture == 0) std::erase_if(kept, [](const auto& one) { return one->end && one->end->is_reached(); });
    const auto of = [&](unsigned long long taken) {
      return std::find_if(kept.begin(), kept.end(),
                          [&](const auto& one) { return one->kind == kind && one->capture == taken; });
    };
    auto found = of(capture);
    if (found == kept.end() && capture != 0 && (found = of(0)) != kept.end()) {
      Analysis& taken = **found;
      const RelaxedCapture relaxed;
      C10_CUDA_CHECK(cudaEventSynchronize(taken.used.get()));  // a capture cannot wait for what was before it
      taken.end.emplace(graph);
      taken.capture = capture, taken.version = 0, taken.is_idle = true;
    }
    if (found == kept.end()) return nullptr;
    std::rotate(found, found + 1, kept.end());
    return kept.back().get();
  }

  void keep(std::unique_ptr<Analysis> made) {
    const auto is_free = [](const auto& one) { return one->capture == 0; };
    if (std::count_if(kept.begin(), kept.end(), is_free) >= static_cast<int64_t>(kMost))
      kept.erase(std::find_if(kept.begin(), kept.end(), is_free));
    kept.push_back(std::move(made));
  }
};

// The values in the order of the columns, in the dtype of the solve.
Tensor sorted_values(const Call& c, at::ScalarType type) {
  const Tensor sorted = c.a.order.defined() ? c.values.index_select(0, c.a.order) : c.values;
  return whole(sorted.to(type));
}

void solve_prepared(State& state, const Call& c, const Kind& kind, const Tensor& b, const Tensor& x, bool capturing) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  if (capturing) {
    cudaStreamCaptureStatus status;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
  }
  const Borrowed handle(Library::cusparse, kOp);
  const std::lock_guard lock(state.mutex);
  Analysis* kept = state.find(kind, capture, graph);
  TORCH_CHECK(kept != nullptr || !capturing, kOp, ": expected a solve for ", kind.columns, " columns in ", kind.type,
              " before each capture of a CUDA graph, got none; solve once more before the capture");
  if (kept != nullptr && !kept->is_idle) C10_CUDA_CHECK(cudaStreamWaitEvent(stream, kept->used.get(), 0));
  if (kept == nullptr) {
    const Tensor values = sorted_values(c, kind.type);
    const Tensor own = own_memory(kOp, "values", static_cast<int64_t>(values.nbytes())).view(kind.type);
    copy_values(own, values);
    const int64_t n = c.a.rows();
    const SparseParts parts{Layout::csr, c.a.crow.contiguous(), c.a.col.contiguous(), own, n, n};
    auto made = std::make_unique<Analysis>(handle, kind, parts, b, x, /*kept=*/true);
    made->used = new_event(), made->version = c.version;
    kept = made.get();
    state.keep(std::move(made));
  } else if (!state.constant || c.version <= 0 || kept->version != c.version) {
    kept->version = 0;  // if the update fails
    kept->update(handle, sorted_values(c, kind.type));
    kept->version = c.version;
  }
  kept->solve(handle, b, x);
  C10_CUDA_CHECK(cudaEventRecord(kept->used.get(), stream));
  kept->is_idle = false;
}

Tensor solve_checked(const Call& c, State* state, bool capturing) {
  if (c.b.numel() == 0) return at::empty_like(c.b);
  if (c.a.nonzeros() == 0) return c.b.clone();  // a unit diagonal alone
  const auto type = c.b.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t n = c.a.rows();
  const Tensor b = whole(c.b.to(type)), x = at::empty_like(b);
  const Kind kind{b.size(1), type, c.upper, c.transpose, c.unit_diagonal};
  if (state != nullptr) {
    solve_prepared(*state, c, kind, b, x, capturing);
  } else {
    const SparseParts parts{Layout::csr, c.a.crow.contiguous(), c.a.col.contiguous(), sorted_values(c, type), n, n};
    const Borrowed handle(Library::cusparse, kOp);
    Analysis(handle, kind, parts, b, x, /*kept=*/false).solve(handle, b, x);
  }
  return x.to(c.b.scalar_type());
}

Tensor solve_cuda(const Tensor& crow, const Tensor& col, const Tensor& values, const Tensor& b, bool upper,
                  bool transpose, bool unit_diagonal, const OptionalTensor& order, const OptionalTensor& t_crow,
                  const OptionalTensor& t_col, const OptionalTensor& t_order, const OptionalTensor& kept,
                  int64_t version) {
  const Call c =
      checked(crow, col, values, b, upper, transpose, unit_diagonal, order, t_crow, t_col, t_order, kept, version);
  const OperationGuard guard(kOp, b);
  State* const state = state_of<State>(c);
  const bool capturing = is_capturing(b.device());
  std::optional<RelaxedCapture> relaxed;  // another thread's capture forbids none of this
  if (!capturing) relaxed.emplace();
  if (capturing || unit_diagonal || version < 0 || (state != nullptr && version > 0 && state->checked == version))
    return solve_checked(c, state, capturing);
  const DiagonalCheck diagonal(c);
  const Tensor x = [&] {
    try {
      return solve_checked(c, state, capturing);
    } catch (const c10::Error&) {
      diagonal.expect();  // the error that says more
      throw;
    }
  }();
  diagonal.expect();
  if (state != nullptr && version > 0) state->checked = version;
  return x;
}

Tensor state_cuda(const Tensor& crow, const Tensor& col, bool constant) {
  check_pattern(kState, pattern_of(crow, col, {}), crow);
  const OperationGuard guard(kState, crow);
  const RelaxedCapture relaxed;  // another thread's capture forbids none of this
  return tensor_with(std::make_unique<State>(crow, col, constant), crow);
}

}  // namespace

std::vector<KeptSolve> kept_solves(const Tensor& t) {
  State* const state = owned_by<State>(t);
  if (state == nullptr) return {};
  const std::lock_guard lock(state->mutex);
  std::vector<KeptSolve> found;
  for (const auto& one : state->kept)
    found.push_back({one->kind.columns, one->kind.type, one->kind.transpose, one->capture != 0, one->nbytes()});
  return found;
}

TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_solve_triangular", solve_cuda);
  m.impl("csr_solve_state", state_cuda);
}

}  // namespace matmuls::solve
#endif
