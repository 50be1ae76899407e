#include "dense/gemm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "glue/batch_invariance.h"

namespace matmuls {

namespace {

// A batch that no strided call can express runs as many small calls or copies the operand that does not fit. On an H200
// two calls beat the copy of a [2,12,512,64] view (10 us; with copies 11 to 20), four do not (20 us; 17), and 64 at
// length 128 are three times slower. Calls of 34 GFLOP each beat the copy again (285 us; 306) and save its memory.
constexpr int64_t kMaxCalls = 2;
constexpr double kLargeCall = 5e9;  // multiply-adds

struct BlasLayout {
  int64_t ld;
  bool row_major;
};

// The stride of a dimension of size 1 is arbitrary and ignored.
std::optional<BlasLayout> layout_of(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  if ((col_stride == 1 || cols == 1) && (rows == 1 || row_stride >= std::max<int64_t>(cols, 1)))
    return BlasLayout{rows == 1 ? std::max<int64_t>(cols, 1) : row_stride, true};
  if ((row_stride == 1 || rows == 1) && (cols == 1 || col_stride >= std::max<int64_t>(rows, 1)))
    return BlasLayout{cols == 1 ? std::max<int64_t>(rows, 1) : col_stride, false};
  return std::nullopt;
}

// The matrices of a batched operand: rows x cols after the transpose, with batch strides expanded to the product's
// batch.
struct Matrices {
  at::Tensor t;
  int64_t rows, cols, row_stride, col_stride;
  std::vector<int64_t> batch_strides;
  std::optional<BlasLayout> layout;

  Matrices(const at::Tensor& tensor, int64_t rows, int64_t cols, bool vector, bool column, bool transposed,
           c10::IntArrayRef batch)
      : t(tensor), rows(rows), cols(cols), batch_strides(batch.size(), 0) {
    const auto sizes = t.sizes(), strides = t.strides();
    const int64_t matrix_dims = vector ? 1 : 2, batch_dims = t.dim() - matrix_dims;
    if (vector) {
      row_stride = column ? strides[batch_dims] : 1;
      col_stride = column ? 1 : strides[batch_dims];
    } else {
      row_stride = strides[t.dim() - (transposed ? 1 : 2)];
      col_stride = strides[t.dim() - (transposed ? 2 : 1)];
    }
    for (int64_t d = 0; d < batch_dims; ++d)
      batch_strides[batch.size() - batch_dims + d] = sizes[d] == 1 ? 0 : strides[d];
    layout = layout_of(rows, cols, row_stride, col_stride);
  }

  bool broadcasts(c10::IntArrayRef batch) const {
    for (size_t i = 0; i < batch.size(); ++i)
      if (batch[i] > 1 && batch_strides[i] == 0) return true;
    return false;
  }

  // True if one stride covers the whole batch.
  bool collapses(c10::IntArrayRef batch) const {
    int64_t expected = -1;
    for (size_t i = batch.size(); i-- > 0;) {
      if (batch[i] == 1) continue;
      if (expected >= 0 && batch_strides[i] != expected) return false;
      expected = batch_strides[i] * batch[i];
    }
    return true;
  }
};

struct BatchDim {
  int64_t size, a, b, out;
};

}  // namespace

void check_out(const char* op, const at::Tensor& out, c10::IntArrayRef shape, std::initializer_list<Named> inputs) {
  TORCH_CHECK(out.sizes() == shape, op, ": expected out of shape ", shape, ", got ", out.sizes());
  check_no_overlap(op, out, inputs);
}

Gemm describe(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, const ProductShape<int64_t>& shape,
              bool transa, bool transb, bool row_major_out) {
  const c10::IntArrayRef batch = shape.batch;
  const auto matrices_a = [&](const at::Tensor& t) {
    return Matrices(t, shape.m, shape.k, shape.a_vector, false, transa, batch);
  };
  const auto matrices_b = [&](const at::Tensor& t) {
    return Matrices(t, shape.k, shape.n, shape.b_vector, true, transb, batch);
  };
  // A result without its row or column dimension (vector operand) gets strides for both from tensor views.
  const auto matrices_out = [&](const at::Tensor& t) {
    at::Tensor full = shape.a_vector ? t.unsqueeze(shape.b_vector ? t.dim() : t.dim() - 1) : t;
    if (shape.b_vector) full = full.unsqueeze(-1);
    return Matrices(full, shape.m, shape.n, false, false, false, batch);
  };

  Matrices ma = matrices_a(a), mb = matrices_b(b), mo = matrices_out(out);
  if (!ma.layout) ma = matrices_a(a.contiguous());
  if (!mb.layout) mb = matrices_b(b.contiguous());
  bool out_is_copy = false;
  const auto copy_out = [&] {
    mo = matrices_out(at::empty(out.sizes(), out.options()));
    out_is_copy = true;
  };
  if (!mo.layout || (row_major_out && !mo.layout->row_major)) copy_out();

  int64_t m = shape.m;
  std::vector<BatchDim> dims;
  const auto merge_batch = [&] {
    m = shape.m;
    dims.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
      if (batch[i] == 1) continue;
      const BatchDim dim{batch[i], ma.batch_strides[i], mb.batch_strides[i], mo.batch_strides[i]};
      // Merge adjacent batch dimensions if the strides of all three tensors are compatible.
      if (!dims.empty()) {
        auto& last = dims.back();
        if (last.a == dim.size * dim.a && last.b == dim.size * dim.b && last.out == dim.size * dim.out) {
          last = {last.size * dim.size, dim.a, dim.b, dim.out};
          continue;
        }
      }
      dims.push_back(dim);
    }
    // If b has no batch, a's batch becomes more rows, provided its matrices are adjacent in memory.
    while (!dims.empty() && dims.back().b == 0 && ma.layout->row_major && mo.layout->row_major) {
      const auto& dim = dims.back();
      if (m == 1 && dim.a >= shape.k && dim.out >= shape.n) {
        ma.layout->ld = std::max<int64_t>(dim.a, 1);
        mo.layout->ld = std::max<int64_t>(dim.out, 1);
      } else if (dim.a != m * ma.layout->ld || dim.out != m * mo.layout->ld) {
        break;
      }
      m *= dim.size;
      dims.pop_back();
    }
  };
  merge_batch();
  int64_t calls = 1, largest = 1;
  for (const auto& dim : dims) calls *= dim.size, largest = std::max(largest, dim.size);
  calls /= largest;
  const double work = static_cast<double>(m) * shape.n * shape.k * largest;
  // A copy of b may change its layout, and with it the algorithm, which must not depend on the number of rows.
  if (calls > kMaxCalls && work < kLargeCall && !is_batch_invariant()) {
    // A broadcast operand is never copied: that would materialize its batch.
    const auto in_the_way = [&](const Matrices& mat) { return !mat.collapses(batch) && !mat.broadcasts(batch); };
    if (in_the_way(ma)) ma = matrices_a(ma.t.contiguous());
    if (in_the_way(mb)) mb = matrices_b(mb.t.contiguous());
    if (in_the_way(mo)) copy_out();
    merge_batch();
  }

  Gemm g{};
  g.a = ma.t, g.b = mb.t, g.out = mo.t;
  g.out_is_copy = out_is_copy;
  g.d_row_major = mo.layout->row_major;
  g.k = shape.k;
  const auto operand = [](const Matrices& mat, bool transposed) {
    return Gemm::Operand{mat.t.const_data_ptr(), mat.layout->ld, transposed};
  };
  // A row-major matrix is the transpose of the column-major matrix in the same memory.
  if (g.d_row_major) {
    g.m = shape.n, g.n = m;
    g.x = operand(mb, !mb.layout->row_major);
    g.y = operand(ma, !ma.layout->row_major);
  } else {
    g.m = m, g.n = shape.n;
    g.x = operand(ma, ma.layout->row_major);
    g.y = operand(mb, mb.layout->row_major);
  }
  g.d = mo.t.mutable_data_ptr();
  g.ldd = mo.layout->ld;
  for (const auto& dim : dims)
    g.outer.push_back(g.d_row_major ? Gemm::Loop{dim.size, dim.b, dim.a, dim.out}
                                    : Gemm::Loop{dim.size, dim.a, dim.b, dim.out});
  const auto widest = std::max_element(g.outer.begin(), g.outer.end(),
                                       [](const Gemm::Loop& l, const Gemm::Loop& r) { return l.size < r.size; });
  if (widest != g.outer.end()) {
    g.strided = *widest;
    g.outer.erase(widest);
  }
  return g;
}

}  // namespace matmuls

#ifdef MATMULS_CUDA
#include <ATen/Context.h>

#include "dense/gemm_types.h"

namespace matmuls {

bool allows_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

}  // namespace matmuls
#endif
