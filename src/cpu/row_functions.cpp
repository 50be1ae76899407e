// The functions of row_functions.h, compiled for three instruction sets and selected at run time.
#include "cpu/row_functions.h"

#include <climits>
#include <cmath>
#include <cstddef>
#include <vector>

#include "cpu/instruction_sets.h"

namespace matmuls {
namespace {

// Per-thread buffers that grow to the longest row seen and are kept: row holds the float32 exponentials of a 16-bit
// row, mask a contiguous copy of a strided mask row.
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

// The functions for one dtype, compiled for one instruction set.
template <class T>
struct Rows {
  decltype(&softmax_row<T>) softmax;
  decltype(&softmax_short_rows<T>) softmax_short_rows;
  decltype(&softmax_backward_row<T>) softmax_backward;
  decltype(&softmax_side_by_side<T>) softmax_side_by_side;
  decltype(&softmax_backward_side_by_side<T>) softmax_backward_side_by_side;
  decltype(&norm_row<T>) norm;
  decltype(&norm_short_rows<T>) norm_short_rows;
  decltype(&norm_backward_row<T>) norm_backward;
  decltype(&activation_row<T>) activation;
  decltype(&gelu_backward_row<T>) gelu_backward;
};

#define LOOPS "cpu/row_loops.h"
#include "cpu/each_instruction_set.h"

template <class T>
const Rows<T>& rows() {
  static const Rows<T> best = for_this_machine(avx512::kRows<T>, avx2::kRows<T>, baseline::kRows<T>);
  return best;
}

}  // namespace

template <class T>
void softmax_row(const T* x, T* y, int64_t columns, int64_t visible, double scale, const MaskRow& mask) {
  rows<T>().softmax(x, y, columns, visible, scale, mask);
}

template <class T>
bool softmax_short_rows(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t rows, int64_t columns, double scale) {
  return matmuls::rows<T>().softmax_short_rows(x, x_step, y, y_step, rows, columns, scale);
}

template <class T>
void softmax_backward_row(const T* y, const T* grad, T* dx, int64_t columns, int64_t visible, double scale) {
  rows<T>().softmax_backward(y, grad, dx, columns, visible, scale);
}

template <class T>
void softmax_side_by_side(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t columns, int64_t width,
                          double scale) {
  rows<T>().softmax_side_by_side(x, x_step, y, y_step, columns, width, scale);
}

template <class T>
void softmax_backward_side_by_side(const T* y, const T* grad, T* dx, const int64_t (&steps)[3], int64_t columns,
                                   int64_t width, double scale) {
  rows<T>().softmax_backward_side_by_side(y, grad, dx, steps, columns, width, scale);
}

template <class T>
arithmetic_t<T> norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* xhat, int64_t columns,
                         double eps, bool rms) {
  return rows<T>().norm(x, residual, weight, bias, y, xhat, columns, eps, rms);
}

template <class T>
bool norm_short_rows(const NormRows<T>& m, int64_t rows) {
  return matmuls::rows<T>().norm_short_rows(m, rows);
}

template <class T>
void norm_backward_row(const T* grad, const T* xhat, const T* weight, arithmetic_t<T> rstd, T* dx,
                       arithmetic_t<T>* dweight, arithmetic_t<T>* dbias, int64_t columns, bool rms) {
  rows<T>().norm_backward(grad, xhat, weight, rstd, dx, dweight, dbias, columns, rms);
}

template <class T>
void activation_row(const T* x, const T* bias, int64_t bias_step, T* y, int64_t columns, Activation activation) {
  rows<T>().activation(x, bias, bias_step, y, columns, activation);
}

template <class T>
void gelu_backward_row(const T* grad, const T* x, T* dx, int64_t columns, Activation activation) {
  rows<T>().gelu_backward(grad, x, dx, columns, activation);
}

#define ROWS_INSTANTIATE(T)                                                                                            \
  template bool softmax_short_rows(const T*, int64_t, T*, int64_t, int64_t, int64_t, double);                          \
  template void softmax_side_by_side(const T*, int64_t, T*, int64_t, int64_t, int64_t, double);                        \
  template void softmax_backward_side_by_side(const T*, const T*, T*, const int64_t (&)[3], int64_t, int64_t, double); \
  template void softmax_row(const T*, T*, int64_t, int64_t, double, const MaskRow&);                                   \
  template void softmax_backward_row(const T*, const T*, T*, int64_t, int64_t, double);                                \
  template arithmetic_t<T> norm_row(const T*, const T*, const T*, const T*, T*, T*, int64_t, double, bool);            \
  template bool norm_short_rows(const NormRows<T>&, int64_t);                                                          \
  template void norm_backward_row(const T*, const T*, const T*, arithmetic_t<T>, T*, arithmetic_t<T>*,                 \
                                  arithmetic_t<T>*, int64_t, bool);                                                    \
  template void activation_row(const T*, const T*, int64_t, T*, int64_t, Activation);                                  \
  template void gelu_backward_row(const T*, const T*, T*, int64_t, Activation);
ROWS_INSTANTIATE(double)
ROWS_INSTANTIATE(float)
ROWS_INSTANTIATE(c10::Half)
ROWS_INSTANTIATE(c10::BFloat16)
#undef ROWS_INSTANTIATE

}  // namespace matmuls
