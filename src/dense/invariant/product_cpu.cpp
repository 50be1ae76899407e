// batch_invariant_product_cpu: tiles of 6 rows and of some vectors of columns, for the machine's instruction set.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "cpu/instruction_sets.h"
#include "cpu/threads.h"
#include "dense/gemm.h"
#include "dense/invariant/cpu.h"
#include "glue/scalar_types.h"

namespace matmuls {
namespace {

using at::Tensor;

// The functions of one instruction set, for one type.
template <class T>
struct Kernels {
  using A = arithmetic_t<T>;
  int panel;  // columns
  void (*pack)(const A* b, int64_t step_k, int64_t step_n, int64_t k, int count, A* panel);
  void (*multiply)(const A* a, const A* panel, const T* bias, T* out, int64_t out_stride, int64_t begin, int64_t end,
                   int64_t k, int count);
};

#define LOOPS "dense/invariant/cpu_loops.h"
#include "cpu/each_instruction_set.h"

template <class T>
const Kernels<T>& kernels() {
  static const Kernels<T> best = for_this_machine(avx512::kKernels<T>, avx2::kKernels<T>, baseline::kKernels<T>);
  return best;
}

constexpr int64_t kRowsEach = 192;                // rows of a task: a panel is packed once for them
constexpr int64_t kConverted = int64_t{4} << 20;  // elements of b that are converted at a time

// a [M, K] contiguous and b [K, N] in the arithmetic type, with any strides.
template <class T, class A = arithmetic_t<T>>
void multiply(const Tensor& a, const Tensor& b, const T* bias, T* out, int64_t out_stride) {
  const Kernels<T>& loops = kernels<T>();
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1), heights = ceil_of(m, kRowsEach);
  const A *const from_a = a.const_data_ptr<A>(), *const from_b = b.const_data_ptr<A>();
  const int64_t work = std::max<int64_t>(1, std::min(m, kRowsEach) * k * loops.panel);
  parallel_for(0, ceil_of(n, loops.panel) * heights, ceil_of(kGrain, work), [&](int64_t begin, int64_t end) {
    std::vector<A> panel(static_cast<size_t>(k * loops.panel));
    for (int64_t task = begin, packed = -1; task < end; ++task) {
      const int64_t column = task / heights * loops.panel, row = task % heights * kRowsEach;
      const int count = static_cast<int>(std::min<int64_t>(loops.panel, n - column));
      if (packed != column) loops.pack(from_b + column * b.stride(1), b.stride(0), b.stride(1), k, count, panel.data());
      packed = column;
      loops.multiply(from_a, panel.data(), bias == nullptr ? nullptr : bias + column, out + column, out_stride, row,
                     std::min(row + kRowsEach, m), k, count);
    }
  });
}

// Two matrices. out [M, N]: contiguous columns.
void multiply(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& out) {
  if (out.numel() == 0) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "batch_invariant_product", [&] {
    using A = arithmetic_t<scalar_t>;
    const auto type = c10::CppTypeToScalarType<A>::value;
    const Tensor rows = a.to(type).contiguous();
    const scalar_t* const added = bias.defined() ? bias.const_data_ptr<scalar_t>() : nullptr;
    const int64_t n = out.size(1);
    const int64_t step =
        std::is_same_v<A, scalar_t>
            ? n
            : ceil_of(std::max<int64_t>(1, kConverted / std::max<int64_t>(1, a.size(1))), kernels<scalar_t>().panel) *
                  kernels<scalar_t>().panel;
    for (int64_t c = 0; c < n; c += step)
      multiply<scalar_t>(rows, b.narrow(1, c, std::min(step, n - c)).to(type), added == nullptr ? nullptr : added + c,
                         out.mutable_data_ptr<scalar_t>() + c, out.stride(0));
  });
}

// a [..., M, K], b [..., K, N], out [..., M, N]: leading dimensions broadcast.
void multiply_all(const Tensor& a, const Tensor& b, const Tensor& bias, const Tensor& out) {
  if (b.dim() > 2) {
    const auto at = [&](const Tensor& t, int64_t i) {
      return t.dim() < out.dim() ? t : t.select(0, t.size(0) == 1 ? 0 : i);
    };
    for (int64_t i = 0; i < out.size(0); ++i) multiply_all(at(a, i), at(b, i), bias, out.select(0, i));
    return;
  }
  const int64_t n = out.size(-1), m = n > 0 ? out.numel() / n : 0;
  const bool direct = out.dim() == 2 && (n == 1 || out.stride(1) == 1);
  const Tensor rows = direct ? out : at::empty({m, n}, out.options());
  multiply(a.reshape({m, a.size(-1)}), b, bias, rows);
  if (!direct) out.copy_(rows.view(out.sizes()));
}

}  // namespace

void batch_invariant_product_cpu(const char* op, const Tensor& a, const Tensor& b, const Tensor& bias,
                                 const Tensor& out, bool transa, bool transb) {
  TORCH_CHECK(!a.is_complex(), op,
              ": expected a floating-point dtype under handles(batch_invariant=True) on a CPU, got ", a.scalar_type());
  if (out.numel() == 0) return;
  Tensor x = op_of(a, transa), y = op_of(b, transb), d = out;
  if (y.dim() == 1) y = y.unsqueeze(1), d = d.unsqueeze(-1);
  if (x.dim() == 1) x = x.unsqueeze(0), d = d.unsqueeze(-2);
  multiply_all(x, y, bias.defined() ? bias.contiguous() : bias, d);
}

}  // namespace matmuls
