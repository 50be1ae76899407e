// The rows of rows_cpu.h: the loops compiled for three instruction sets, and the choice among them at run time.
#include "rows_cpu.h"

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

// GCC's per-function targets; other compilers and other processors get the baseline only.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ROWS_X86_TARGETS 1
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed only to functions that are inlined

namespace matmuls {
namespace {

// This thread's buffers, which grow to the longest row met and are kept: the exponentials of a 16-bit row in float32,
// and a mask whose elements are not side by side.
enum class Scratch { row, mask };

void* scratch(Scratch which, size_t bytes) {
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  static thread_local std::vector<CacheLine> buffers[2];
  std::vector<CacheLine>& buffer = buffers[static_cast<int>(which)];
  const size_t lines = (bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine);
  if (buffer.size() < lines) buffer.resize(lines);
  return buffer.data();
}

// The functions for one type as one instruction set has them.
template <class T>
struct Rows {
  decltype(&softmax_row<T>) softmax;
  decltype(&softmax_backward_row<T>) softmax_backward;
  decltype(&norm_row<T>) norm;
  decltype(&norm_backward_row<T>) norm_backward;
};

#ifdef ROWS_X86_TARGETS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#define ROWS_VECTOR_BYTES 64
#include "rows_cpu_loops.h"
#undef ROWS_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define ROWS_VECTOR_BYTES 32
#include "rows_cpu_loops.h"
#undef ROWS_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options
#endif

namespace baseline {
#define ROWS_VECTOR_BYTES 16
#include "rows_cpu_loops.h"
#undef ROWS_VECTOR_BYTES
}  // namespace baseline

template <class T>
Rows<T> best_rows() {
#ifdef ROWS_X86_TARGETS
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) return avx512::kRows<T>;
  if (has_avx2) return avx2::kRows<T>;
#endif
  return baseline::kRows<T>;
}

template <class T>
const Rows<T>& rows() {
  static const Rows<T> best = best_rows<T>();
  return best;
}

}  // namespace

template <class T>
void softmax_row(const T* x, T* y, int64_t columns, int64_t visible, double scale, const MaskRow& mask) {
  rows<T>().softmax(x, y, columns, visible, scale, mask);
}

template <class T>
void softmax_backward_row(const T* y, const T* grad, T* dx, int64_t columns, int64_t visible, double scale) {
  rows<T>().softmax_backward(y, grad, dx, columns, visible, scale);
}

template <class T>
arithmetic_t<T> norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* xhat, int64_t columns,
                         double eps, bool rms) {
  return rows<T>().norm(x, residual, weight, bias, y, xhat, columns, eps, rms);
}

template <class T>
void norm_backward_row(const T* grad, const T* xhat, const T* weight, arithmetic_t<T> rstd, T* dx,
                       arithmetic_t<T>* dweight, arithmetic_t<T>* dbias, int64_t columns, bool rms) {
  rows<T>().norm_backward(grad, xhat, weight, rstd, dx, dweight, dbias, columns, rms);
}

#define ROWS_INSTANTIATE(T)                                                                                 \
  template void softmax_row(const T*, T*, int64_t, int64_t, double, const MaskRow&);                        \
  template void softmax_backward_row(const T*, const T*, T*, int64_t, int64_t, double);                     \
  template arithmetic_t<T> norm_row(const T*, const T*, const T*, const T*, T*, T*, int64_t, double, bool); \
  template void norm_backward_row(const T*, const T*, const T*, arithmetic_t<T>, T*, arithmetic_t<T>*,      \
                                  arithmetic_t<T>*, int64_t, bool);
ROWS_INSTANTIATE(double)
ROWS_INSTANTIATE(float)
ROWS_INSTANTIATE(c10::Half)
ROWS_INSTANTIATE(c10::BFloat16)
#undef ROWS_INSTANTIATE

}  // namespace matmuls
