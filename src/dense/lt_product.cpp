// Plans of cublasLtMatmul: descriptors and an algorithm for each shape.
//
// Source: cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulAlgoCheck, cublasLtMatmul.
#ifdef MATMULS_CUDA
#include "dense/lt_product.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dense/gemm_types.h"
#include "glue/handles.h"

namespace matmuls {
namespace {

using at::Tensor;

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* p) const {
    destroy(p);
  }
};
using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using MatrixLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

// Everything that the choice of an algorithm depends on. The product in BLAS form has the rows of a as its n.
struct PlanKey {
  int64_t device, dtype, compute, transx, transy, m, n, k, ldx, ldy, ldd, batch, stride_x, stride_y, stride_d;
  int64_t align_x, align_y, align_d, epilogue, workspace, batch_invariant;
  bool operator==(const PlanKey&) const = default;

  PlanKey with(int64_t rows, int64_t batches) const {
    PlanKey other = *this;
    other.n = rows, other.ldy = k, other.ldd = m, other.batch = batches;
    other.stride_x = other.stride_y = other.stride_d = 0;
    if (batches > 1) other.stride_y = rows * k, other.stride_d = rows * m;
    return other;
  }
  // The product whose algorithm all numbers of rows take.
  PlanKey reference() const { return with(kReferenceRows, 1); }

  static constexpr int64_t kReferenceRows = 256;
};
static_assert(sizeof(PlanKey) == 21 * sizeof(int64_t));

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    const auto words = std::bit_cast<std::array<uint64_t, sizeof(PlanKey) / 8>>(key);
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const uint64_t w : words) hash = (hash ^ w) * 0xff51afd7ed558ccd, hash ^= hash >> 32;
    return hash;
  }
};

struct Plan {
  Desc desc;
  MatrixLayout x, y, d;
  cublasLtMatmulAlgo_t algo;
  bool supported;
};

template <class T>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}
template <class T>
void set(const MatrixLayout& layout, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof(value)));
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  MATMULS_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

MatrixLayout matrix_layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int64_t stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&raw, type, rows, cols, ld));
  MatrixLayout layout(raw);
  set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
  set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  return layout;
}

Plan descriptors(const PlanKey& key, const GemmTypes& types, const void* bias = nullptr) {
  Plan plan{};
  cublasLtMatmulDesc_t raw = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatmulDescCreate(&raw, types.compute, types.scale));
  plan.desc.reset(raw);
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, key.transx ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, key.transy ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(key.epilogue));
  if (bias != nullptr) set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  const auto rows = [](bool transposed, int64_t r, int64_t c) { return transposed ? c : r; };
  plan.x = matrix_layout(types.data, rows(key.transx, key.m, key.k), rows(key.transx, key.k, key.m), key.ldx, key.batch,
                         key.stride_x);
  plan.y = matrix_layout(types.data, rows(key.transy, key.k, key.n), rows(key.transy, key.n, key.k), key.ldy, key.batch,
                         key.stride_y);
  plan.d = matrix_layout(types.data, key.m, key.n, key.ldd, key.batch, key.stride_d);
  return plan;
}

// Up to `most` algorithms for the plan, the one that cuBLASLt expects to be fastest first. reductions: of partial sums.
std::vector<cublasLtMatmulHeuristicResult_t> algorithms(const char* op, const Borrowed& handle, const PlanKey& key,
                                                        const Plan& plan, uint32_t reductions, int most) {
  cublasLtMatmulPreference_t raw_preference = nullptr;
  MATMULS_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&raw_preference));
  const Preference preference(raw_preference);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_x));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_y));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_d));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);

  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle.cublaslt(), plan.desc.get(), plan.x.get(), plan.y.get(), plan.d.get(),
                                     plan.d.get(), preference.get(), most, results.data(), &found);
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS || status == CUBLAS_STATUS_NOT_SUPPORTED,
              "cublasLtMatmulAlgoGetHeuristic failed with ", cublasGetStatusName(status), " in ", op);
  results.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(found) : 0);
  return results;
}

// True if blocks share a sum of the algorithm: K is cut into parts that are added up.
bool cuts_k(const cublasLtMatmulAlgo_t& algo) {
  int32_t parts = 1;
  uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  size_t written = 0;
  MATMULS_CUBLAS_CHECK(
      cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &written));
  MATMULS_CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                                            sizeof(scheme), &written));
  return (parts != 0 && parts != 1) || scheme != CUBLASLT_REDUCTION_SCHEME_NONE;
}

bool takes(const Borrowed& handle, const PlanKey& key, const Plan& plan, const cublasLtMatmulAlgo_t& algo) {
  cublasLtMatmulHeuristicResult_t result{};
  const auto status = cublasLtMatmulAlgoCheck(handle.cublaslt(), plan.desc.get(), plan.x.get(), plan.y.get(),
                                              plan.d.get(), plan.d.get(), &algo, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.state == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= static_cast<size_t>(key.workspace);
}

// The first algorithm for the reference that does not cut K and takes other numbers of rows too.
void fix_algorithm(const char* op, const Borrowed& handle, const PlanKey& key, const GemmTypes& types, const void* bias,
                   Plan& plan) {
  constexpr int kCandidates = 64;
  std::vector<std::pair<PlanKey, Plan>> others;
  for (const auto& [rows, batches] : {std::pair{1, 1}, {2, 1}, {5, 1}, {8, 1}, {4099, 1}, {1, 2}, {256, 2}}) {
    const PlanKey other = key.with(rows, batches);
    others.emplace_back(other, descriptors(other, types, bias));
  }
  for (const auto& candidate : algorithms(op, handle, key, plan, CUBLASLT_REDUCTION_SCHEME_NONE, kCandidates)) {
    const auto takes_it = [&](const auto& other) { return takes(handle, other.first, other.second, candidate.algo); };
    if (cuts_k(candidate.algo) || !std::all_of(others.begin(), others.end(), takes_it)) continue;
    plan.algo = candidate.algo, plan.supported = true;
    return;
  }
}

// The plans of one handle; bounded, for processes that never repeat a shape.
using Plans = std::unordered_map<PlanKey, Plan, PlanKeyHash>;
constexpr size_t kMaxPlans = 8192;

Plan& plan_for(const char* op, const Borrowed& handle, const PlanKey& key, const GemmTypes& types, const void* bias) {
  auto& attachment = handle.attachment();
  if (!attachment) attachment = std::make_shared<Plans>();
  auto& plans = *static_cast<Plans*>(attachment.get());
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  Plan plan = descriptors(key, types, key.batch_invariant ? bias : nullptr);
  if (!key.batch_invariant) {
    // Keep split-K partial sums in the compute type.
    constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const auto found = algorithms(op, handle, key, plan, kReductions, 1);
    plan.supported = !found.empty();
    if (plan.supported) plan.algo = found[0].algo;
  } else if (key == key.reference()) {
    fix_algorithm(op, handle, key, types, bias, plan);
  } else {
    const Plan& reference = plan_for(op, handle, key.reference(), types, bias);
    plan.algo = reference.algo;
    plan.supported = reference.supported && takes(handle, key, plan, plan.algo);
  }
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans.emplace(key, std::move(plan)).first->second;
}

// The widest access, in bytes and up to `most`, that all addresses data + i * stride allow.
int64_t alignment(const void* data, int64_t stride, int64_t item, int64_t most = 256) {
  const auto bits = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride * item | most);
  return static_cast<int64_t>(bits & -bits);
}

// invariant: alignments of x, y and d, which stand for the real ones; none: the real ones, and any algorithm.
struct Alignments {
  int64_t x, y, d;
};
bool run(const char* op, const Gemm& g, const Tensor& bias, cublasLtEpilogue_t epilogue,
         const std::optional<Alignments>& invariant) {
  if (g.strided.size > std::numeric_limits<int32_t>::max()) return false;  // cuBLASLt's batch count has 32 bits
  const GemmTypes types(g.out.scalar_type());
  const int64_t item = g.out.element_size();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Borrowed handle(Library::cublaslt, op);
  bool supported = true;
  g.each([&](const char* x, const char* y, char* d) {
    if (!supported) return;
    const Alignments to = invariant.value_or(
        Alignments{alignment(x, g.strided.x, item), alignment(y, g.strided.y, item), alignment(d, g.strided.d, item)});
    const PlanKey key{stream.device_index(),
                      types.data,
                      types.compute,
                      g.x.transposed,
                      g.y.transposed,
                      g.m,
                      g.n,
                      g.k,
                      g.x.ld,
                      g.y.ld,
                      g.ldd,
                      g.strided.size,
                      g.strided.x,
                      g.strided.y,
                      g.strided.d,
                      to.x,
                      to.y,
                      to.d,
                      epilogue,
                      static_cast<int64_t>(handle.workspace_nbytes()),
                      invariant.has_value()};
    auto& plan = plan_for(op, handle, key, types, bias.defined() ? bias.const_data_ptr() : nullptr);
    supported = plan.supported;
    if (!supported) return;
    if (bias.defined()) set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.const_data_ptr());
    MATMULS_CUBLAS_CHECK(cublasLtMatmul(handle.cublaslt(), plan.desc.get(), types.one(), x, plan.x.get(), y,
                                        plan.y.get(), types.zero(), d, plan.d.get(), d, plan.d.get(), &plan.algo,
                                        handle.workspace(), handle.workspace_nbytes(), stream),
                         " for a ", g.a.sizes(), " and b ", g.b.sizes(), " in ", g.out.scalar_type());
  });
  return supported;
}

constexpr int64_t kVector = 16;  // bytes of the widest access

// The widest access that all matrices of an operand allow at the start of each of their rows.
int64_t row_alignment(const void* data, int64_t ld, int64_t item, const Gemm& g, int64_t Gemm::Loop::* step) {
  int64_t least = std::min(alignment(data, ld, item, kVector), alignment(data, g.strided.*step, item, kVector));
  for (const auto& loop : g.outer) least = std::min(least, alignment(data, loop.*step, item, kVector));
  return least;
}

}  // namespace

bool product_by_lt(const char* op, const Gemm& g, const Tensor& bias, cublasLtEpilogue_t epilogue) {
  return run(op, g, bias, epilogue, std::nullopt);
}

void batch_invariant_product(const char* op, const Tensor& a, const Tensor& b, const Tensor& bias,
                             cublasLtEpilogue_t epilogue, const Tensor& out, const ProductShape<int64_t>& shape,
                             bool transa, bool transb) {
  const int64_t item = out.element_size();
  const Gemm g = describe(a, b, out, shape, transa, transb, /*row_major_out=*/true);
  // The alignment of rows that follow each other without a gap, as one row alone has. Rows that lie otherwise are
  // copied.
  const int64_t rows_of_a = alignment(nullptr, g.k, item, kVector),
                rows_of_out = alignment(nullptr, g.m, item, kVector);
  if (g.y.transposed || row_alignment(g.y.data, g.y.ld, item, g, &Gemm::Loop::y) < rows_of_a) {
    const Tensor rows = op_of(a, transa).clone(at::MemoryFormat::Contiguous);
    return batch_invariant_product(op, rows, b, bias, epilogue, out, shape, false, transb);
  }
  if (row_alignment(g.d, g.ldd, item, g, &Gemm::Loop::d) < rows_of_out) {
    const Tensor rows = at::empty(out.sizes(), out.options());
    batch_invariant_product(op, a, b, bias, epilogue, rows, shape, transa, transb);
    out.copy_(rows);
    return;
  }
  const int64_t x = row_alignment(g.x.data, g.x.ld, item, g, &Gemm::Loop::x);
  TORCH_CHECK(run(op, g, bias, epilogue, Alignments{x, rows_of_a, rows_of_out}), op,
              ": expected a product for which cuBLASLt has one algorithm for any number of rows, which "
              "handles(batch_invariant=True) needs, got a ",
              a.sizes(), " and b ", b.sizes(), " in ", a.scalar_type());
  if (g.out_is_copy) out.copy_(g.out.view(out.sizes()));
}

}  // namespace matmuls
#endif
