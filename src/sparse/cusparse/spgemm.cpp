// The CUDA kernels of csr_spgemm_size, csr_spgemm_pattern and csr_spgemm (sparse/spgemm.h), by cusparseSpGEMMreuse.
//
// Source: cuSPARSE's generic API. SpGEMMreuse takes int32 indices. Values of 16 bits are multiplied in float32.
#ifdef MATMULS_CUDA
#include <ATen/TensorOperators.h>
#include <ATen/ops/_convert_indices_from_csr_to_coo.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <mutex>

#include "sparse/cusparse/descriptors.h"
#include "sparse/owned.h"
#include "sparse/spgemm.h"

namespace matmuls::spgemm {
namespace {

using at::Tensor;
using at::TensorList;

using ProductDescriptor = std::unique_ptr<cusparseSpGEMMDescr, DestroyedBy<cusparseSpGEMM_destroyDescr>>;

// What cuSPARSE keeps between the steps: descriptors, which hold addresses of the tensors here, and its buffers. The
// storage of the empty tensor that csr_spgemm_size returns owns it. A product writes a_values, b_values and c_values,
// so that only one stream at a time may use a state.
struct State {
  Pattern a, b;  // of the call, whose addresses tell that a later call is of the same matrices
  int64_t columns, nonzeros = 0;
  SparseParts own_a, own_b;
  Tensor offsets, c_col, c_values, order;  // order: undefined if cuSPARSE's columns rise within each row
  SparseDescriptor a_descriptor, b_descriptor, c_descriptor;
  ProductDescriptor product;
  Tensor buffer3, buffer4, buffer5;
  std::mutex mutex;

  bool is_empty() const { return own_a.values.numel() == 0 || own_b.values.numel() == 0; }
  at::TensorOptions options(at::ScalarType dtype) const { return a.crow.options().dtype(dtype); }
};

Tensor bytes(const State& s, size_t count) {
  return at::empty({static_cast<int64_t>(std::max<size_t>(count, 1))}, s.options(at::kByte));
}

// Calls a function of SpGEMMreuse on the state's matrices.
template <class F, class... A>
void call(const Borrowed& handle, const State& s, const char* name, F function, A... arguments) {
  constexpr auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
  const auto status = function(handle.cusparse(), plain, plain, s.a_descriptor.get(), s.b_descriptor.get(),
                               s.c_descriptor.get(), CUSPARSE_SPGEMM_DEFAULT, s.product.get(), arguments...);
  if (status != CUSPARSE_STATUS_SUCCESS)
    fail(name, status,
         c10::str(" for ", s.own_a.rows, " x ", s.own_a.columns, " with ", s.own_a.indices.size(0), " nonzeros times ",
                  s.own_b.rows, " x ", s.columns, " with ", s.own_b.indices.size(0), " nonzeros"));
}

SparseParts in_int32(const Pattern& p, int64_t columns, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(std::max({p.rows(), p.nonzeros(), columns}) <= INT32_MAX, kSize,
                    ": expected matrices that int32 indices reach, as cuSPARSE's SpGEMM takes them, got ", p.rows(),
                    " x ", columns, " with ", p.nonzeros(), " nonzeros");
  return {Layout::csr,
          p.crow.to(at::kInt).contiguous(),
          p.col.to(at::kInt).contiguous(),
          at::zeros({p.nonzeros()}, p.crow.options().dtype(dtype)),
          p.rows(),
          columns};
}

// The first two steps: the number of nonzeros of C.
std::unique_ptr<State> made_state(const Product& given, at::ScalarType dtype) {
  auto state = std::make_unique<State>();
  State& s = *state;
  s.a = given.a, s.b = given.b, s.columns = given.columns.expect_int();
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  s.own_a = in_int32(given.a, given.b.rows(), type), s.own_b = in_int32(given.b, s.columns, type);
  s.offsets = at::zeros({given.a.rows() + 1}, s.options(at::kInt));
  if (s.is_empty()) return state;
  s.a_descriptor = describe(s.own_a), s.b_descriptor = describe(s.own_b);
  cusparseSpMatDescr_t c = nullptr;
  MATMULS_CUSPARSE_CHECK(cusparseCreateCsr(&c, given.a.rows(), s.columns, 0, s.offsets.mutable_data_ptr(), nullptr,
                                           nullptr, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO,
                                           cuda_type(type)));
  s.c_descriptor.reset(c);
  cusparseSpGEMMDescr_t product = nullptr;
  MATMULS_CUSPARSE_CHECK(cusparseSpGEMM_createDescr(&product));
  s.product.reset(product);
  const Borrowed handle(Library::cusparse, kSize);
  size_t first = 0, second = 0, third = 0, fourth = 0;
  const auto estimate = [&](void* buffer) {
    call(handle, s, "cusparseSpGEMMreuse_workEstimation", cusparseSpGEMMreuse_workEstimation, &first, buffer);
  };
  estimate(nullptr);
  const Tensor buffer1 = bytes(s, first);
  estimate(buffer1.data_ptr());
  const auto count = [&](void* buffer2, void* buffer3, void* buffer4) {
    call(handle, s, "cusparseSpGEMMreuse_nnz", cusparseSpGEMMreuse_nnz, &second, buffer2, &third, buffer3, &fourth,
         buffer4);
  };
  count(nullptr, nullptr, nullptr);
  const Tensor buffer2 = bytes(s, second);
  s.buffer3 = bytes(s, third), s.buffer4 = bytes(s, fourth);
  count(buffer2.data_ptr(), s.buffer3.data_ptr(), s.buffer4.data_ptr());
  int64_t rows = 0, columns = 0;
  MATMULS_CUSPARSE_CHECK(cusparseSpMatGetSize(s.c_descriptor.get(), &rows, &columns, &s.nonzeros));
  return state;
}

// The third step: the pattern of C. cuSPARSE does not promise columns that rise; `order` then sorts them.
void make_pattern(State& s) {
  if (s.c_col.defined()) return;
  const Tensor col = at::empty({s.nonzeros}, s.options(at::kInt));
  s.c_values = at::zeros({s.nonzeros}, s.own_a.values.options());
  if (s.nonzeros > 0) {
    MATMULS_CUSPARSE_CHECK(cusparseCsrSetPointers(s.c_descriptor.get(), s.offsets.mutable_data_ptr(),
                                                  col.mutable_data_ptr(), s.c_values.mutable_data_ptr()));
    const Borrowed handle(Library::cusparse, kPattern);
    size_t fifth = 0;
    const auto copy = [&](void* buffer) {
      call(handle, s, "cusparseSpGEMMreuse_copy", cusparseSpGEMMreuse_copy, &fifth, buffer);
    };
    copy(nullptr);
    s.buffer5 = bytes(s, fifth);
    copy(s.buffer5.data_ptr());
    const Tensor row = at::_convert_indices_from_csr_to_coo(s.offsets, col).select(0, 0);
    const Tensor place = row.to(at::kLong) * s.columns + col;
    const auto [sorted, order] = at::sort(place);
    if (!sorted.equal(place)) s.order = order;
  }
  s.buffer3 = Tensor();
  s.c_col = col;
}

// The state that a tensor owns; null if it owns none, as a clone of what csr_spgemm_size returned.
State* state_of(const char* op, const OptionalTensor& t, const Product& given) {
  State* const s = owned_by<State>(tensor_or_none(t));
  if (s == nullptr) return nullptr;
  const auto same = [](const Tensor& x, const Tensor& y) { return x.const_data_ptr() == y.const_data_ptr(); };
  TORCH_CHECK_VALUE(same(s->a.crow, given.a.crow) && same(s->a.col, given.a.col) && same(s->b.crow, given.b.crow) &&
                        same(s->b.col, given.b.col) && s->columns == given.columns,
                    op, ": expected state of these matrices, got that of others");
  return s;
}

std::tuple<Tensor, Tensor> size_cuda(TensorList a, TensorList b, c10::SymInt columns, at::ScalarType dtype) {
  const Product given = checked(kSize, a, b, columns);
  const OperationGuard guard(kSize, given.a.crow);
  auto state = made_state(given, dtype);
  const Tensor offsets = at::zeros({given.a.rows() + 1}, given.a.crow.options().dtype(at::kLong));
  offsets.select(0, given.a.rows()).fill_(state->nonzeros);
  return {offsets, tensor_with(std::move(state), offsets)};
}

std::tuple<Tensor, Tensor, Tensor> pattern_cuda(TensorList a, TensorList b, c10::SymInt columns, const Tensor& offsets,
                                                const Tensor& kept, c10::SymInt nonzeros,
                                                const OptionalTensor& a_values, const OptionalTensor& b_values) {
  const Product given = checked_pattern(a, b, columns, offsets, nonzeros, a_values, b_values);
  const OperationGuard guard(kPattern, offsets);
  State* s = state_of(kPattern, kept, given);
  std::unique_ptr<State> own;
  if (s == nullptr) s = (own = made_state(given, at::kFloat)).get();
  TORCH_CHECK_VALUE(nonzeros == s->nonzeros, kPattern, ": expected the ", s->nonzeros,
                    " nonzeros of the product's size, got ", nonzeros);
  const auto [crow, col] = [&] {
    const std::lock_guard lock(s->mutex);
    make_pattern(*s);
    const auto index = given.a.crow.scalar_type();
    const auto copied = [&](const Tensor& t) { return t.to(index, /*non_blocking=*/false, /*copy=*/true); };
    return std::pair(copied(s->offsets), copied(s->order.defined() ? s->c_col.index_select(0, s->order) : s->c_col));
  }();
  return {crow, col, values_of_pattern(given, crow, col, kept)};
}

Tensor in_order(const Tensor& values, const Tensor& order) {
  return order.defined() ? values.index_select(0, order) : values;
}

Tensor product_cuda(const Tensor& a_values, const Tensor& b_values, TensorList a, TensorList b, TensorList c,
                    c10::SymInt columns, const OptionalTensor& kept) {
  const Product given = checked(kProduct, a_values, b_values, a, b, c, columns);
  const OperationGuard guard(kProduct, a_values);
  const auto dtype = a_values.scalar_type();
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  State* s = state_of(kProduct, kept, given);
  std::unique_ptr<State> own;
  if (s == nullptr || s->own_a.values.scalar_type() != type) s = (own = made_state(given, dtype)).get();
  TORCH_CHECK_VALUE(given.c.nonzeros() == s->nonzeros, kProduct, ": expected c with the ", s->nonzeros,
                    " nonzeros of the product, got ", given.c.nonzeros());
  if (s->nonzeros == 0) return at::empty({0}, a_values.options());
  const std::lock_guard lock(s->mutex);
  make_pattern(*s);
  s->own_a.values.copy_(in_order(a_values, given.a.order));
  s->own_b.values.copy_(in_order(b_values, given.b.order));
  const Borrowed handle(Library::cusparse, kProduct);
  const Scalar one(1, type), zero(0, type);
  constexpr auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
  MATMULS_CUSPARSE_CHECK(cusparseSpGEMMreuse_compute(handle.cusparse(), plain, plain, one.at(), s->a_descriptor.get(),
                                                     s->b_descriptor.get(), zero.at(), s->c_descriptor.get(),
                                                     cuda_type(type), CUSPARSE_SPGEMM_DEFAULT, s->product.get()));
  const Tensor values = in_order(s->c_values, s->order);
  if (!given.c.order.defined()) return values.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  return at::zeros({s->nonzeros}, a_values.options()).index_copy_(0, given.c.order.to(at::kLong), values.to(dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_mm, CUDA, m) {
  m.impl("csr_spgemm_size", size_cuda);
  m.impl("csr_spgemm_pattern", pattern_cuda);
  m.impl("csr_spgemm", product_cuda);
}

}  // namespace matmuls::spgemm
#endif
