// Shape and memory layout of out = op(a) @ op(b), op being the identity or the transpose of the last two dimensions.
// Shared by all dense products, so that cuBLAS, cuBLASLt and the CPU behave identically.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "glue/checks.h"

namespace matmuls {

// The product's shape by torch.matmul's rules, after the transposes: a vector is a row on the left and a column on the
// right (and is not transposed); batch dimensions broadcast. Int is int64_t, or c10::SymInt under tracing.
template <class Int>
struct ProductShape {
  bool a_vector, b_vector;
  Int m, n, k;
  std::vector<Int> batch;  // broadcast
  std::vector<Int> out() const {
    std::vector<Int> sizes = batch;
    if (!a_vector) sizes.push_back(m);
    if (!b_vector) sizes.push_back(n);
    return sizes;
  }
};

// Comparisons of sizes. Under tracing an unknown result stays symbolic: equality is asserted at run time.
inline bool equal(int64_t x, int64_t y) { return x == y; }
inline bool equal(const c10::SymInt& x, const c10::SymInt& y) { return x.sym_eq(y).expect_true(__FILE__, __LINE__); }
inline bool at_most(int64_t x, int64_t y) { return x <= y; }
inline bool at_most(const c10::SymInt& x, const c10::SymInt& y) { return x.sym_le(y).expect_true(__FILE__, __LINE__); }
inline bool is_one(int64_t x) { return x == 1; }
inline bool is_one(const c10::SymInt& x) { return x.sym_eq(1).guard_or_false(__FILE__, __LINE__); }

template <class Int>
ProductShape<Int> product_shape(const char* op, c10::ArrayRef<Int> a, c10::ArrayRef<Int> b, bool transa, bool transb) {
  const bool a_vector = a.size() == 1, b_vector = b.size() == 1;
  TORCH_CHECK(!a.empty() && !b.empty(), op, ": expected a and b of at least one dimension, got shapes ", a, " and ", b);
  const auto a_at = [&](int from_end) { return a[a.size() - from_end]; };
  const auto b_at = [&](int from_end) { return b[b.size() - from_end]; };
  ProductShape<Int> s{a_vector, b_vector, 1, 1, a_vector || !transa ? a_at(1) : a_at(2), {}};
  if (!a_vector) s.m = transa ? a_at(1) : a_at(2);
  if (!b_vector) s.n = transb ? b_at(2) : b_at(1);
  const Int k_b = b_vector || transb ? b_at(1) : b_at(2);
  TORCH_CHECK(equal(s.k, k_b), op, ": expected a and b with equal inner sizes, got ", s.k, " and ", k_b, " for a ", a,
              transa ? " transposed" : "", " and b ", b, transb ? " transposed" : "");
  const auto batch_a = a.slice(0, a_vector ? 0 : a.size() - 2), batch_b = b.slice(0, b_vector ? 0 : b.size() - 2);
  const size_t dims = std::max(batch_a.size(), batch_b.size());
  for (size_t i = 0; i < dims; ++i) {
    const bool only_b = i + batch_a.size() < dims, only_a = i + batch_b.size() < dims;
    if (only_a || only_b) {
      s.batch.push_back(only_a ? batch_a[i] : batch_b[i]);
      continue;
    }
    const Int x = batch_a[i + batch_a.size() - dims], y = batch_b[i + batch_b.size() - dims];
    const bool one_x = is_one(x), one_y = is_one(y);
    TORCH_CHECK(one_x || one_y || equal(x, y), op, ": expected batch dimensions that broadcast, got ", x, " and ", y,
                " for a ", a, " and b ", b);
    s.batch.push_back(one_x ? y : x);
  }
  return s;
}

// Raises unless `out` has exactly the product's shape and shares no memory with itself or an input.
void check_out(const char* op, const at::Tensor& out, c10::IntArrayRef shape, std::initializer_list<Named> inputs);

// bias: one value per column of the product.
template <class Int>
void check_bias(const char* op, c10::ArrayRef<Int> bias, const ProductShape<Int>& shape) {
  TORCH_CHECK(!shape.b_vector, op, ": expected b of at least two dimensions with a bias, got a vector");
  TORCH_CHECK(bias.size() == 1 && equal(bias[0], shape.n), op, ": expected bias of shape [", shape.n,
              "], one value per column of the product, got ", bias);
}

// The product in BLAS form, column-major: D[m,n] = op(X)[m,k] @ op(Y)[k,n] with leading dimensions, repeated over batch
// loops. A row-major out is a transposed column-major matrix, so X is b and Y is a then.
struct Gemm {
  struct Operand {
    const void* data;
    int64_t ld;
    bool transposed;
  };
  struct Loop {
    int64_t size, x, y, d;  // strides in elements
  };
  int64_t m, n, k;
  Operand x, y;
  void* d;
  int64_t ldd;
  Loop strided{1, 0, 0, 0};  // the library's strided batch
  std::vector<Loop> outer;   // outer loops, one library call per iteration
  // Owners of the pointers: the arguments, or copies of those that no leading dimension describes.
  at::Tensor a, b, out;
  bool out_is_copy = false;  // then `out` must be copied back
  bool d_row_major = true;   // rows of the product are contiguous in out

  // Calls f(x, y, d) for each strided batch.
  template <class F>
  void each(F f) const {
    const int64_t item = a.element_size();
    std::vector<int64_t> index(outer.size(), 0);
    const char *px = static_cast<const char*>(x.data), *py = static_cast<const char*>(y.data);
    char* pd = static_cast<char*>(d);
    for (;;) {
      f(px, py, pd);
      size_t i = outer.size();
      while (i-- > 0) {
        px += outer[i].x * item, py += outer[i].y * item, pd += outer[i].d * item;
        if (++index[i] < outer[i].size) break;
        px -= outer[i].size * outer[i].x * item, py -= outer[i].size * outer[i].y * item;
        pd -= outer[i].size * outer[i].d * item;
        index[i] = 0;
      }
      if (i == static_cast<size_t>(-1)) return;
    }
  }
};

// `row_major_out` requires contiguous rows of the product whatever out's layout (bias epilogues need them).
Gemm describe(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, const ProductShape<int64_t>& shape,
              bool transa, bool transb, bool row_major_out = false);

inline at::Tensor op_of(const at::Tensor& t, bool transposed) { return transposed && t.dim() > 1 ? t.mT() : t; }

}  // namespace matmuls
