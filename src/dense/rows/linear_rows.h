// y = activation(x @ w^T + bias) in 16 bits by one kernel on Hopper: linear_rows for few rows (linear_rows_sm90.cu),
// linear_tiles for many (linear_tiles_sm90.cu).
//
// linear_rows: a cluster of blocks computes a tile of y. Each of its blocks sums a part of K.
#pragma once

#include <cstdint>
#include <string>

#include "dense/gemm.h"
#include "glue/activation.h"

namespace matmuls {

// The kernels of cublaslt_matmul, for kernel_switch.h. With cublaslt switched off, the others run wherever they
// can.
enum class ProductKernel { linear_rows, linear_tiles, cublaslt };
constexpr int kProductKernels = static_cast<int>(ProductKernel::cublaslt) + 1;
constexpr const char* kProductNames[kProductKernels] = {"linear_rows", "linear_tiles", "cublaslt"};

namespace dense_rows {

struct Configuration {
  int rows, columns;  // of a tile
  int parts;          // of K: blocks of a cluster
};
constexpr Configuration kConfigurations[] = {{64, 64, 1},  {64, 64, 2},  {64, 64, 4},  {64, 64, 8},  {128, 64, 1},
                                             {128, 64, 2}, {128, 64, 4}, {128, 96, 1}, {128, 96, 2}, {128, 128, 1}};
// "64x64 in 4": rows x columns in parts.
std::string name_of(const Configuration& c);
// The configuration that is estimated to be the fastest for x [rows, inner] and w [columns, inner].
Configuration choose(int64_t rows, int64_t columns, int64_t inner, int multiprocessors);
// The kernel that is expected to be the fastest: cuBLASLt's, with bias_act_ for gelu, or one of these. with_tiles:
// linear_tiles may be taken.
ProductKernel fastest(int64_t rows, int64_t columns, int64_t inner, Activation activation, int multiprocessors,
                      bool with_tiles = true);

#ifdef MATMULS_CUDA
// True if the kernels take the product: one matrix with contiguous rows in x, w and y that start at multiples of 16
// bytes, in 16 bits, and the current device is a Hopper GPU.
bool fits(const Gemm& g);
// Launches linear_rows on the current device and stream. Needs fits(g). bias: [columns], contiguous, or undefined.
void launch(const Gemm& g, const at::Tensor& bias, Activation activation, const Configuration& c);
// Launches linear_tiles likewise. False, launching nothing, if the GPU has no room for its clusters.
bool launch_tiles(const Gemm& g, const at::Tensor& bias, Activation activation);
#endif

}  // namespace dense_rows
}  // namespace matmuls
