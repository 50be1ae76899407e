// Softmax, norms and activations on the CPU: one contiguous row per call, vectorized for the CPU at hand.
//
// Statistics are float32, or float64 for float64. Output may be the input (in place) but must not partly overlap it.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "glue/activation.h"
#include "glue/masks.h"
#include "glue/scalar_types.h"

namespace matmuls {

// One row of a mask. stride: elements between columns; 0: one value for all columns.
struct MaskRow {
  MaskKind kind = MaskKind::none;
  const void* data = nullptr;
  int64_t stride = 1;
};

// T: double, float, c10::Half or c10::BFloat16; all are instantiated.

// y <- softmax(scale * x + mask) over the first `visible` of the row's columns, 0 in the others (causal mask). A masked
// column gets 0, a row with all columns masked is 0, NaN propagates.
template <class T>
void softmax_row(const T* x, T* y, int64_t columns, int64_t visible, double scale, const MaskRow& mask);

// softmax_row for `rows` rows without a mask. x_step, y_step: elements between rows. Returns false, doing nothing, if
// the rows are longer than a few vectors.
template <class T>
bool softmax_short_rows(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t rows, int64_t columns, double scale);

// dx <- scale * y * (grad - sum(y * grad)) over the first `visible` columns, 0 in the others.
template <class T>
void softmax_backward_row(const T* y, const T* grad, T* dx, int64_t columns, int64_t visible, double scale);

// Softmax and its gradient for `width` adjacent rows without a mask: column c of row r is at c * step + r.
constexpr int64_t kMostSideBySide = 512;
template <class T>
void softmax_side_by_side(const T* x, int64_t x_step, T* y, int64_t y_step, int64_t columns, int64_t width,
                          double scale);
template <class T>
void softmax_backward_side_by_side(const T* y, const T* grad, T* dx, const int64_t (&steps)[3], int64_t columns,
                                   int64_t width, double scale);

// y <- xhat * weight + bias with xhat = (h - mean(h)) * rstd, h = x + residual, rstd = 1 / sqrt(var(h) + eps); with rms
// the mean is 0. Returns rstd. residual, weight, bias and xhat may be null; xhat is written only if given.
template <class T>
arithmetic_t<T> norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* xhat, int64_t columns,
                         double eps, bool rms);

// Rows of a norm in place, columns adjacent, rows *_step apart. residual, weight, bias, xhat and rstd may be null.
template <class T>
struct NormRows {
  T* x;
  int64_t x_step;
  const T* residual;
  int64_t residual_step;
  const T *weight, *bias;
  T* xhat;
  int64_t xhat_step;
  arithmetic_t<T>* rstd;
  int64_t columns;
  double eps;
  bool rms;
};

// norm_row for the first `rows` rows of m. Returns false, doing nothing, if the rows are longer than a few vectors.
template <class T>
bool norm_short_rows(const NormRows<T>& m, int64_t rows);

// dx <- rstd * (d - mean(d) - xhat * mean(d * xhat)), d = grad * weight; with rms without mean(d).
// dweight += grad * xhat and dbias += grad, column by column. weight, dx, dweight and dbias may be null.
template <class T>
void norm_backward_row(const T* grad, const T* xhat, const T* weight, arithmetic_t<T> rstd, T* dx,
                       arithmetic_t<T>* dweight, arithmetic_t<T>* dbias, int64_t columns, bool rms);

// y <- activation(x + bias), rounded once. bias: null, or elements `bias_step` apart (0: one value, or 1).
template <class T>
void activation_row(const T* x, const T* bias, int64_t bias_step, T* y, int64_t columns, Activation activation);

// dx <- grad * gelu'(x) for gelu or gelu_tanh.
template <class T>
void gelu_backward_row(const T* grad, const T* x, T* dx, int64_t columns, Activation activation);

}  // namespace matmuls
